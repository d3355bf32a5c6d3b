"""The starts of a run and its steps, with what happens between these: validation, checkpoints, a request to end.

Owns: what happens between steps, and when a run starts its roles again, from the newest state, ends, or goes on with
fewer processes after a loss that no role can make good alone. Must not know: which algorithm it runs, or how a role is
made.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint import checkpoint
from rallypoint.cluster import ResourcePoolManager, Runtime, at_step
from rallypoint.display import Progress
from rallypoint.environments.failures import TooManyFailuresError
from rallypoint.environments.grader import Grader, open_grader
from rallypoint.errors import AbandonedError, DivergedError, NoPlaceError, RallyError, WorkerDiedError, first_line
from rallypoint.journal import STEP, InputsRead, Journal, PoolShrunk, RolesStarted, Shown, StepDone, Validated
from rallypoint.observability import collect_spans, span
from rallypoint.observability.spans import START, TIME_PREFIX
from rallypoint.prepare.data_notes import FirstScores
from rallypoint.prepare.machine import planned_gib
from rallypoint.prepare.material import Material
from rallypoint.prepare.pools import pools_of, shrunk
from rallypoint.recipes.blocking import PlainEpisodes
from rallypoint.recipes.ending import Endings, began_of
from rallypoint.recipes.interruption import NOTICE, Observer, interruptible
from rallypoint.recipes.recipe import Recipe, Setup, page_of
from rallypoint.recipes.saving import Saver, newest_state
from rallypoint.roles.actor import Actor
from rallypoint.roles.learner import NOT_FINITE
from rallypoint.roles.placement import Placement, SharedFolder, rendezvous_of
from rallypoint.roles.supervisor import Supervisor
from rallypoint.run.agreement import Agreement
from rallypoint.run.comparison import digests_of
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import Record
from rallypoint.run.resume import Beginning
from rallypoint.run.rollouts import RolloutFiles
from rallypoint.sampling.kept import KeptGroups
from rallypoint.sampling.recorded import Recorded
from rallypoint.sampling.source import RolloutSource
from rallypoint.types import merge

if TYPE_CHECKING:
    from rallypoint.recipes.agents import Agents
    from rallypoint.recipes.endpoint import Endpoint

_MOST_NOT_FINITE = 3
"""Steps in a row of which an update may be left out; with as many the run goes back to a checkpoint, once."""
_SAVING, _SHARE_OF_GRACE = 2.0, 0.1
"""Part of a grace period that is kept for saving: twice what the newest checkpoint took, at least a tenth."""
_NUM_SHOWN = 8
"""Rollouts of a step, of which a display shows one."""


@dataclasses.dataclass(slots=True)
class RemainingSteps:
    """One start of a run: the steps that are still to do."""

    setup: Setup
    recipe: Recipe
    saver: Saver
    endpoint: Endpoint | None
    progress: Progress
    observer: Observer
    began_s: float
    """When it began, by the clock that only goes forward."""
    deadline: float | None = None
    """Time at which work under way is given up, by the event loop's clock; None without a grace period."""
    timer: asyncio.Timeout | None = None
    """Timer of the work under way, which ends it at the deadline."""
    is_ending: bool = False
    """Whether somebody has asked it to end."""
    first_scores: FirstScores = dataclasses.field(default_factory=FirstScores)
    largest_gap: float = 0.0
    """Nats between sampler and trainer, of any step so far."""
    newest: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Metrics of the newest step."""
    num_not_finite: int = 0
    """Newest steps in a row that left an update out, as its numbers were not finite."""

    @property
    def journal(self) -> Journal:
        """The journal of the run."""
        return self.setup.journal

    async def take(self, first: int) -> bool:
        """Do the steps after step `first`; return whether all were done."""
        async with Endings(self.journal.say) as at_end:
            at_end.add(self.recipe.close)
            at_end.add(self.saver.finish)
            hurry = self.setup.placement.runtime.hurry
            with interruptible(self._promise, self._lost, hurry, self.observer) as interrupted:
                await self._begin(first)
                is_done = await self._steps(first, interrupted)
                await self.saver.finish()  # while signals are still heard
                return is_done

    async def _begin(self, first: int) -> None:
        actor, source = self.recipe.actor, self.recipe.sampling
        saved = checkpoint.steps(self.saver.folder.checkpoints)
        self.saver.saved = max((step for step in saved if step <= first), default=0)  # `first` may be a snapshot's
        for step, validated in self.saver.folder.state().validations.items():
            self.saver.validated(step, validated.metrics)
        if source is not None:
            assert isinstance(actor, Actor), "rollouts are sampled from a policy"
            await actor.publish(source)
            if self.endpoint is not None:
                assert isinstance(source, RolloutSource), "nobody is served by a record"
                await self.endpoint.open(self.setup.material, source.mailbox, actor.is_published)
        counts = {} if first else self.setup.material.counts()
        metrics = {**counts, TIME_PREFIX + START: time.monotonic() - self.began_s}
        placement = self.setup.placement
        planned, processes = planned_gib(self.setup.config), placement.processes
        self.journal.append(RolesStarted(step=first, metrics=metrics, processes=processes, planned_gib=planned))
        placement.supervisor.restarted(placement.processes, first)
        if first == 0:
            await self._validate(0)

    async def _steps(self, first: int, interrupted: asyncio.Event) -> bool:
        config = self.setup.config
        num_steps = config.trainer.num_steps
        for step in range(first + 1, num_steps + 1):
            if interrupted.is_set():
                self.journal.say(f"interrupted after step {step - 1}", level="log")
                await self.saver.save_last(step - 1, interrupted)
                return False
            try:
                if not await self._in_time(self._step(step)):
                    self.journal.say(f"step {step} is given up, and repeated by --resume: trainer.grace_s is over")
                    await self.saver.rescue()
                    return False
            except AbandonedError as error:
                self.journal.say(f"step {step} is given up, and repeated by --resume: {error}")
                await self.saver.save_last(step - 1, interrupted)
                return False
            is_validated = step % config.validation.every_steps == 0 or step == num_steps
            if is_validated and not await self._in_time(self._validate(step)):
                self.journal.say(f"the validation after step {step} is left out: trainer.grace_s is over")
            if self.observer.after_step(step, self.newest):
                interrupted.set()
            is_last = interrupted.is_set() or step == num_steps
            with at_step(step):
                await self.saver.after(step, is_last=is_last, interrupted=interrupted)
        return True

    async def _in_time(self, work: Awaitable[None]) -> bool:
        """Return whether something ended before what is left of a grace period is needed for saving."""
        timer = asyncio.timeout_at(self.deadline)
        try:
            async with timer:
                self.timer = timer
                await work
        except (TimeoutError, RallyError):
            if not timer.expired():
                raise
            return False
        finally:
            self.timer = None
        return True

    def _promise(self, signal: str) -> None:
        message = f"{signal}: what is under way is finished and saved, then the run ends; once more ends it at once"
        grace_s = self.setup.config.trainer.grace_s
        if grace_s is not None and signal == NOTICE:
            left_s = max(0.0, grace_s - max(_SAVING * self.saver.took_s, _SHARE_OF_GRACE * grace_s))
            message += f"; what takes longer than {left_s:.0f} s is given up"
            self.deadline = asyncio.get_running_loop().time() + left_s
            if self.timer is not None:
                self.timer.reschedule(self.deadline)
        self.is_ending = True
        self.journal.say(message, level="end")
        self.recipe.hurry()

    def _lost(self) -> str:
        self.progress.give_back()
        saved, path = self.saver.saved, self.saver.folder.path
        lost = f"the steps after {saved} are lost" if saved else "all steps are lost"
        return f"ended at once: {lost}, and are done again with: rally train {path} --resume"

    async def _step(self, step: int) -> None:
        if step in self.setup.config.trainer.profiled:
            await self.setup.placement.profile(step)
        began_s = time.time()
        with _blaming_weights(step), collect_spans() as spans, at_step(step):
            metrics = await self.recipe.train_step(step)
        memory, work = await self.setup.placement.measured()
        scalars = merge(metrics, memory).scalars()
        self._log_agreement(step, scalars)
        self.newest = {**scalars, **spans.scalars()}
        rollouts = self.recipe.newest
        digests = digests_of(rollouts, self.recipe.actor.learned)
        if rollouts is not None:
            rows = [{STEP: step, **dataclasses.asdict(one)} for one in rollouts.records(_NUM_SHOWN)]
            self.journal.tell(Shown(step=step, rows=rows))
            self.saver.rollouts.put(step, rollouts)
        times = {path: round(begin, 4) for path, begin in spans.begins.items()}
        self.journal.append(
            StepDone(
                step=step,
                metrics=self.newest,
                digests=digests,
                seconds=spans.elapsed_s,
                began_s=round(began_s, 4),
                begins=times,
                work=work,
            )
        )
        told = rollouts and self.first_scores.add(rollouts, self.setup.config, str(self.saver.folder.path))
        if told:
            self.journal.say(told)
        self._check_finite(step)

    def _check_finite(self, step: int) -> None:
        """Say that an update, or rollouts, were left out.

        Raises:
            DivergedError: that has happened in several steps in a row.
        """
        roles = [name.partition("/")[0] for name in self.newest if name.endswith(f"/{NOT_FINITE}")]
        self.num_not_finite = self.num_not_finite + 1 if roles else 0
        if not roles:
            return
        path, learners = self.saver.folder.path, [role for role in roles if role != "rollout"]
        what = f"step {step}: a loss or gradient of the {' and the '.join(learners)} was not finite"
        left_out = f"its update was left out (rally replay {path} --step {step} computes it again)"
        if not learners:
            what = f"step {step}: logits were not finite while rollouts were sampled"
            left_out = f"{self.newest[f'rollout/{NOT_FINITE}']:.0f} of them were left out"
        self.journal.say(f"{what}; {left_out}")
        if self.num_not_finite == _MOST_NOT_FINITE:
            raise DivergedError(
                f"{what}, for the {_MOST_NOT_FINITE}rd time in a row: lower {[*learners, 'actor'][0]}.optimizer.lr or "
                f"its max_grad_norm, and go back with: rally train {path} --resume --from-step N",
                step - _MOST_NOT_FINITE,
            )

    def _log_agreement(self, step: int, scalars: dict[str, float]) -> None:
        """Log the token on which sampler and trainer differ most, when they differ more than ever before."""
        found = Agreement.of([{STEP: step, **scalars}], self.setup.material.token_text)
        if found is not None and not found.largest <= self.largest_gap:
            self.largest_gap = found.largest
            self.journal.say(f"rollout and old logprobs: {found}", level="log")

    async def _validate(self, step: int) -> None:
        measured = None
        with _blaming_weights(step), collect_spans() as spans, span("validate"):
            try:
                measured = await self.recipe.validate()
            except AbandonedError as error:
                self.journal.say(f"the validation after step {step} is left out: {error}")
        if measured is not None:
            scalars = measured.prefixed("validation").scalars()
            self.newest |= scalars
            self.journal.append(Validated(step=step, metrics={**scalars, **spans.scalars()}))
            self.saver.validated(step, scalars)
            if self.recipe.validated is not None:
                self.saver.rollouts.put(step, self.recipe.validated, "validation")


@contextlib.contextmanager
def _blaming_weights(step: int) -> Iterator[None]:
    """Have the run go back before a step in which the logits of too many rollouts were not finite."""
    try:
        yield
    except TooManyFailuresError as error:
        if not error.is_not_finite:
            raise
        raise DivergedError(f"step {step}: {error}", max(0, step - 1)) from error


@dataclasses.dataclass(slots=True)
class Starts:
    """The starts of a run, each with all of its steps that are still to do."""

    beginning: Beginning
    folder: RunFolder
    journal: Journal
    progress: Progress
    files: RolloutFiles
    observer: Observer
    endpoint: Endpoint | None
    grader: Grader
    agents: Agents | PlainEpisodes | None
    recorded: Recorded | None
    runtime: Runtime
    pools: ResourcePoolManager
    material: Material
    recording: asyncio.Task[Record]
    began_s: float
    shared: SharedFolder
    _placement: Placement | None = None
    _is_smaller: bool = False
    """Whether the pools are no longer those that have places."""
    _kept: KeptGroups = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._kept = KeptGroups.of(self.beginning.config, self.files)

    async def run(self) -> bool:
        """Do all steps; return whether they were done.

        Raises:
            WorkerDiedError: a process was lost once too often.
            DivergedError: numbers were not finite, again.
            NoPlaceError: there is no place for the pools, and none for fewer processes.
        """
        first, supervisor, steps = self.beginning.first, Supervisor(self.journal), None
        saved = self.folder.checkpoints / checkpoint.checkpoint_name(first) if first else None
        shutil.rmtree(self.folder.snapshots, ignore_errors=True)  # of a run that was killed
        await asyncio.to_thread(self._kept.read)
        while True:
            last = None
            try:
                steps = await self._begin(supervisor, saved)
                return await steps.take(first)
            except WorkerDiedError as error:
                if error.is_final:
                    raise
                if steps is not None and steps.is_ending:
                    self.journal.say(f"{first_line(error)}; what is not saved is repeated by --resume")
                    await steps.saver.rescue()
                    return False
                supervisor.lost(error)
            except DivergedError as error:
                last = supervisor.diverged(error)
                self._kept.only(())
            except NoPlaceError as error:
                if steps is None:  # nothing was lost: it never had one
                    raise
                await self._shrink(error)
            await self._end()
            first, saved = await asyncio.to_thread(newest_state, self.folder, self.journal.say, last)
            self.journal.append(began_of(dataclasses.replace(self.beginning, first=first), self.folder))

    async def _shrink(self, error: NoPlaceError) -> None:
        """Go on with fewer processes, as nodes were lost and none came in their place.

        Raises:
            NoPlaceError: the given one, if the roles cannot do with fewer.
        """
        was, smaller = self.beginning.config, shrunk(self.beginning.config, await self.runtime.nodes())
        if smaller is None:
            raise error
        for pool, now in smaller.cluster.pools.items():
            if (before := was.cluster.pools[pool]) != now:
                self.journal.append(PoolShrunk(pool=pool, was=before, now=now))
                self.journal.say(
                    f"{first_line(error)}; pool {pool!r} goes on with {list(now)} of {list(before)} processes"
                )
        self.beginning = dataclasses.replace(self.beginning, config=smaller)
        self._is_smaller = True

    async def _begin(self, supervisor: Supervisor, saved: Path | None) -> RemainingSteps:
        self.journal.say("starting the roles", level="wait")
        config, material = self.beginning.config, self.material
        opening = asyncio.create_task(self.pools.start(self.runtime))
        where = await asyncio.to_thread(rendezvous_of, config, self.runtime)
        self._placement = Placement(
            config, self.runtime, self.pools, material.model_path, self.shared, where, supervisor
        )
        await opening
        if saved is None and config.rollout.max_staleness:  # on other weights, and no `Resumed` would say so
            self._kept.only(())
        setup = Setup(self._placement, material, self.grader, self.journal, self.agents, self.recorded, self._kept)
        recipe = await page_of(config).create(setup)
        record = await self.recording
        self.journal.append(InputsRead(files=record.inputs))
        saver = Saver(setup, recipe, record, self.folder, self.files)
        if saved is not None:
            await saver.restore(saved)
        return RemainingSteps(setup, recipe, saver, self.endpoint, self.progress, self.observer, self.began_s)

    async def _end(self) -> None:
        """End all roles, whatever they do."""
        if self.endpoint is not None:
            await self.endpoint.reopen()
        assert self._placement is not None, "it began"
        await self._placement.close()
        if self._is_smaller:
            self.pools, self._is_smaller = pools_of(self.beginning.config), False
            await self.runtime.give_back_places()
        self.close()
        self.grader = open_grader(self.beginning.config.reward, self.folder.logs / "reward.log")
        self.began_s = time.monotonic()

    def close(self) -> None:
        """End the reward functions of the newest start, and its rendezvous."""
        self.grader.close()
        if self._placement is not None and self._placement.rendezvous is not None:
            self._placement.rendezvous.close()
