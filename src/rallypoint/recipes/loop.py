"""The frame of every recipe: start, resume, step after step, validate, checkpoint, stop.

Owns: what happens between steps. Must not know: which algorithm it runs; the recipe's own page says what a step does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import shutil
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint import checkpoint
from rallypoint.cluster import Runtime, at_step, open_runtime
from rallypoint.config import LoadedConfig, RoleName, RunConfig, TrackingConfig
from rallypoint.cpu.threads import few_threads
from rallypoint.data import save_tokenizer
from rallypoint.display import Progress
from rallypoint.engine.determinism import process_as_found
from rallypoint.environments.agents import is_agent
from rallypoint.environments.grader import open_grader
from rallypoint.journal import (
    CheckpointSaved,
    InputsRead,
    Journal,
    RolesStarted,
    RunEnded,
    Said,
    Shown,
    StepDone,
    Validated,
)
from rallypoint.observability import collect_spans, span
from rallypoint.observability.spans import START, TIME_PREFIX
from rallypoint.prepare.data_notes import FirstScores
from rallypoint.prepare.machine import pools_of
from rallypoint.prepare.material import Found, Material, prepare, read_material
from rallypoint.recipes.ending import Endings, began_of, draw, open_readers, recorded_end
from rallypoint.recipes.interruption import Observer, acknowledging, interruptible
from rallypoint.recipes.recipe import Recipe, Setup, page_of
from rallypoint.roles.actor import Actor
from rallypoint.roles.placement import Placement, SharedFolder, rendezvous_of
from rallypoint.run.agreement import Agreement
from rallypoint.run.comparison import digests_of
from rallypoint.run.folder import RunFolder, anchored, launched, write_config
from rallypoint.run.metrics_log import STEP
from rallypoint.run.record import Record
from rallypoint.run.reports import VALIDATION
from rallypoint.run.resume import Beginning
from rallypoint.run.rollouts import RolloutFiles
from rallypoint.sampling.group import AbandonedError
from rallypoint.types import merge

if TYPE_CHECKING:
    from rallypoint.recipes.agents import Agents
    from rallypoint.recipes.endpoint import Endpoint

_NUM_SHOWN = 8
"""Rollouts of a step, of which a display shows one."""
_STATE = Path("training") / "state.json"
"""In a checkpoint: what is not a role's."""


def train(
    loaded: LoadedConfig,
    folder: RunFolder,
    progress: Progress,
    *,
    resume: bool,
    from_step: int | None = None,
    found: Found | None = None,
    observer: Observer | None = None,
) -> bool:
    """Run a recipe to its end, or until it is interrupted.

    Args:
        loaded: the checked config.
        folder: of the run.
        progress: display, entered already.
        resume: whether to continue from the newest checkpoint, if there is one.
        from_step: step of the checkpoint to continue from with `resume`; 0 starts anew, None takes the newest.
        found: prompts, tokenizer and limits of the models; None reads them before anything is started.
        observer: hears of each step, and may end the run.

    Returns:
        True when all steps are done, False when the run was interrupted (its state is saved).
    """
    with folder.locked(), process_as_found(), few_threads(), Journal(folder.journal) as journal:
        journal.subscribe(progress.take)
        config = anchored(loaded.config)
        if config.trainer.num_epochs is not None:
            found = found or read_material(config)
            config = found.settled(config)
            write_config(folder, config)
        beginning = Beginning(0, config)
        if resume:
            journal.say("comparing the checkpoint with its manifest", level="wait")
            beginning = Beginning.resumed(folder, config, from_step)
            write_config(folder, config)
            journal.append(launched(loaded, folder.state().launched.overrides))
        began = began_of(beginning, folder)
        if beginning.first == config.trainer.num_steps:
            journal.tell(began)
            done = f"all {beginning.first} steps are done; for more of them raise trainer.num_steps"
            journal.tell(Said(text=done))
            return True
        with recorded_end(journal), open_readers(beginning, folder, journal) as trackers:
            journal.append(began)
            is_done = asyncio.run(_train(beginning, folder, journal, progress, found, observer or Observer()))
            journal.append(RunEnded(how="finished" if is_done else "stopped"))
            if trackers.are_any and (drawn := draw(folder)[0]):
                trackers.picture(folder.state().step, drawn)
            return is_done


async def _train(
    beginning: Beginning,
    folder: RunFolder,
    journal: Journal,
    progress: Progress,
    found: Found | None,
    observer: Observer,
) -> bool:
    config, first, say = beginning.config, beginning.first, journal.say
    began_s, rollouts_gib = time.monotonic(), (config.tracking or TrackingConfig()).rollouts_gib
    async with Endings(say) as at_end:
        files = RolloutFiles(folder.path, max_gib=rollouts_gib, first=first, journal=journal)
        at_end.add(files.close)
        grader = open_grader(config.reward, folder.logs / "reward.log")
        at_end.add(grader.close)
        if (endpoint := _endpoint(config, folder, journal)) is not None:
            at_end.add(endpoint.close)
        for note in beginning.notes:
            say(note)
        if found is None:
            say("reading model and data", level="wait")
            found = await asyncio.to_thread(read_material, config)
        say(f"starting {config.cluster.runtime}", level="wait")
        # Two things that take seconds each and do not need each other.
        preparing = asyncio.create_task(asyncio.to_thread(prepare, config, folder, found, say))
        preparing.add_done_callback(_take_note)
        await asyncio.sleep(0)
        with acknowledging(say):
            runtime = _open_runtime(config, folder, say)
            at_end.add(runtime.shutdown, after=endpoint and endpoint.close)
            shutil.rmtree(folder.published, ignore_errors=True)  # of a run that was killed
            at_end.add(lambda: shutil.rmtree(folder.published, ignore_errors=True), after=runtime.shutdown)
            pools = pools_of(config)
            material = await _open_and_prepare(pools.open(runtime), preparing)
            recording = asyncio.create_task(asyncio.to_thread(beginning.record, folder))
            recording.add_done_callback(_take_note)
            say("starting the roles", level="wait")
            rendezvous = rendezvous_of(config, runtime)
            if rendezvous is not None:
                at_end.add(rendezvous.close, after=runtime.shutdown)  # workers renew their leases there
            shared = SharedFolder.marked(folder.path)
            placement = Placement(config, runtime, pools, material.model_path, shared, rendezvous)
            agents = _agents(config, folder, material)
            if agents is not None:
                at_end.add(agents.close)
                await agents.open()
            setup = Setup(placement, material, grader, journal, agents)
            recipe = await page_of(config).create(setup)
            record = await recording
            journal.append(InputsRead(files=record.inputs))
            run = _Run(setup, recipe, record, endpoint, journal, folder, progress, files, observer, began_s)
            if first:
                await run.restore(first)
        return await run.steps(first)


def _open_runtime(config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> Runtime:
    return open_runtime(
        config.cluster.runtime,
        log_folder=folder.logs,
        address=config.cluster.address,
        namespace=f"rallypoint-{folder.path.name}-{uuid.uuid4().hex[:8]}",
        object_store_gib=config.cluster.object_store_gib,
        placement_timeout_s=config.cluster.placement_timeout_s,
        silence_s=config.cluster.heartbeat_timeout_s,
        preload=tuple(map(module_of, config.roles)),
        say=say,
    )


def module_of(role: RoleName) -> str:
    """Return the module of a role's workers.

    >>> module_of("actor"), module_of("reward")
    ('rallypoint.roles.actor', 'rallypoint.roles.frozen')
    """
    return f"rallypoint.roles.{'frozen' if role == 'reward' else role}"


def _endpoint(config: RunConfig, folder: RunFolder, journal: Journal) -> Endpoint | None:
    """Take the port of the run's endpoint, if it has one; only then the server is imported."""
    if config.rollout.serve is None:
        return None
    from rallypoint.recipes.endpoint import Endpoint

    return Endpoint(config.rollout.serve, folder, journal)


def _agents(config: RunConfig, folder: RunFolder, material: Material) -> Agents | None:
    """Take what the run's agents need, if it has some; only then the server is imported."""
    if config.rollout.own_episode is None or not is_agent(config.rollout.own_episode):
        return None
    from rallypoint.recipes.agents import Agents

    return Agents(config, folder, material)


async def _open_and_prepare(opening: Coroutine[None, None, None], preparing: asyncio.Task[Material]) -> Material:
    """Wait for both; bad data is reported before the cluster has a place for the run."""
    opened = asyncio.create_task(opening)
    try:
        return (await asyncio.gather(preparing, opened))[0]
    finally:
        opened.cancel()
        await asyncio.gather(opened, return_exceptions=True)


def _take_note(prepared: asyncio.Task[Any]) -> None:
    """Mark an error as seen, so that asyncio does not log one that came after another."""
    if not prepared.cancelled():
        prepared.exception()


@dataclasses.dataclass(slots=True)
class _Run:
    """One start of a run: the steps that are still to do."""

    setup: Setup
    recipe: Recipe
    record: Record
    endpoint: Endpoint | None
    journal: Journal
    folder: RunFolder
    progress: Progress
    rollouts: RolloutFiles
    observer: Observer
    began_s: float
    """When it began, by the clock that only goes forward."""
    first_scores: FirstScores = dataclasses.field(default_factory=FirstScores)
    saved: int = 0
    """Step of the newest checkpoint."""
    largest_gap: float = 0.0
    """Nats between sampler and trainer, of any step so far."""
    newest: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    """Metrics of the newest step."""
    best: tuple[int, float] = (0, -math.inf)
    """Step and score of the best validation after a step, whose checkpoint stays; step 0 for none."""

    async def restore(self, step: int) -> None:
        """Read the roles' state back from the checkpoint of a step, which was verified."""
        folder = self.folder.checkpoints / checkpoint.checkpoint_name(step)
        state = json.loads((folder / _STATE).read_text())
        await self.recipe.restore(folder)
        self.recipe.go_on(step, state)

    async def steps(self, first: int) -> bool:
        """Do the steps after step `first`; return whether all were done."""
        async with Endings(self.journal.say) as at_end:
            at_end.add(self.recipe.close)
            hurry = self.setup.placement.runtime.hurry
            with interruptible(self._promise, self._lost, hurry, self.observer) as interrupted:
                await self._begin(first)
                return await self._steps(first, interrupted)

    async def _begin(self, first: int) -> None:
        actor, source = self.recipe.actor, self.recipe.sampling
        self.saved = first
        for step, validated in self.folder.state().validations.items():
            self._note_best(step, validated.metrics)
        if source is not None:
            assert isinstance(actor, Actor), "rollouts are sampled from a policy"
            await actor.publish(source)
            if self.endpoint is not None:
                await self.endpoint.open(self.setup.material, source.mailbox, actor.is_published)
        counts = {} if first else self.setup.material.counts()
        metrics = {**counts, TIME_PREFIX + START: time.monotonic() - self.began_s}
        self.journal.append(RolesStarted(step=first, metrics=metrics))
        if first == 0:
            await self._validate(0)

    async def _steps(self, first: int, interrupted: asyncio.Event) -> bool:
        config = self.setup.config
        num_steps, every = config.trainer.num_steps, config.checkpoint_every_steps
        for step in range(first + 1, num_steps + 1):
            if interrupted.is_set():
                self.journal.say(f"interrupted after step {step - 1}", level="log")
                return False
            try:
                await self._step(step)
            except AbandonedError as error:
                self.journal.say(f"step {step} is given up, and repeated by --resume: {error}")
                if self.saved < step - 1:
                    await self._save(step - 1)
                return False
            if step % config.validation.every_steps == 0 or step == num_steps:
                await self._validate(step)
            if self.observer.after_step(step, self.newest):
                interrupted.set()
            if interrupted.is_set() or step in (self.best[0], num_steps) or step % every == 0:
                await self._save(step)
        return True

    def _promise(self, signal: str) -> None:
        message = f"{signal}: what is under way is finished and saved, then the run ends; once more ends it at once"
        self.journal.say(message, level="end")
        self.recipe.hurry()

    def _lost(self) -> str:
        self.progress.give_back()
        lost = f"the steps after {self.saved} are lost" if self.saved else "all steps are lost"
        return f"ended at once: {lost}, and are done again with: rally train {self.folder.path} --resume"

    async def _step(self, step: int) -> None:
        with collect_spans() as spans, at_step(step):
            metrics = await self.recipe.train_step(step)
        scalars = merge(metrics, await self.setup.placement.memory()).scalars()
        self._log_agreement(step, scalars)
        self.newest = {**scalars, **spans.scalars()}
        rollouts = self.recipe.newest
        digests = digests_of(rollouts, self.recipe.actor.learned)
        if rollouts is not None:
            rows = [{STEP: step, **dataclasses.asdict(one)} for one in rollouts.records(_NUM_SHOWN)]
            self.journal.tell(Shown(step=step, rows=rows))
            self.rollouts.put(step, rollouts)
        self.journal.append(StepDone(step=step, metrics=self.newest, digests=digests, seconds=spans.elapsed_s))
        told = rollouts and self.first_scores.add(rollouts, self.setup.config, str(self.folder.path))
        if told:
            self.journal.say(told)

    def _log_agreement(self, step: int, scalars: dict[str, float]) -> None:
        """Log the token on which sampler and trainer differ most, when they differ more than ever before."""
        found = Agreement.of([{STEP: step, **scalars}], self.setup.material.token_text)
        if found is not None and not found.largest <= self.largest_gap:
            self.largest_gap = found.largest
            self.journal.say(f"rollout and old logprobs: {found}", level="log")

    async def _validate(self, step: int) -> None:
        measured = None
        with collect_spans() as spans, span("validate"):
            try:
                measured = await self.recipe.validate()
            except AbandonedError as error:
                self.journal.say(f"the validation after step {step} is left out: {error}")
        if measured is not None:
            scalars = measured.prefixed("validation").scalars()
            self.newest |= scalars
            self.journal.append(Validated(step=step, metrics={**scalars, **spans.scalars()}))
            self._note_best(step, scalars)
            if self.recipe.validated is not None:
                self.rollouts.put(step, self.recipe.validated, "validation")

    def _note_best(self, step: int, scalars: Mapping[str, float]) -> None:
        score = scalars.get(VALIDATION, math.nan)
        if self.setup.config.checkpoint.keep_best and step and score > self.best[1]:
            self.best = step, score

    async def _save(self, step: int) -> None:
        """Write a checkpoint, which is visible when it is whole, and remove older ones.

        Raises:
            CheckpointError: the disk is full or not writable; no partial checkpoint stays behind.
        """
        recipe = self.recipe
        with collect_spans() as spans, span("checkpoint"):
            self.journal.sync()
            await asyncio.to_thread(self.rollouts.flush)
            with checkpoint.writing(self.folder.checkpoints, step) as folder:
                (folder / "training").mkdir()
                await recipe.save(folder)
                save_tokenizer(self.setup.material.tokenizer, folder)
                state = {"step": step, **recipe.state}
                (folder / _STATE).write_text(json.dumps(state))
                self.record.write(folder)
            checkpoint.prune(self.folder.checkpoints, self.setup.config.checkpoint.keep, best=self.best[0])
        self.saved = step
        weights = checkpoint.weights_digest(self.folder.checkpoints / checkpoint.checkpoint_name(step))
        self.journal.append(CheckpointSaved(step=step, weights=weights, metrics=spans.scalars()))
