"""What a run goes on from: checkpoints, and between them snapshots, for worker processes that are lost.

Owns: what is saved when, and what of it is kept. Must not know: what a recipe's roles save, or why it is restored.

A snapshot is a checkpoint that is not flushed to the disk: it outlives every process of the run, but no power cut.
There is one at most, in `snapshots/`. What it costs is measured, and the next one waits for 33 times as long; or, where
losses are so frequent that this would lose more, for the square root of twice that cost and the time between losses
(J. W. Young, 1974).

A checkpoint that cannot be written ends no run: the next steps try again, until more than two intervals would be lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rallypoint import checkpoint
from rallypoint.data import save_tokenizer
from rallypoint.disk import Outage, naming
from rallypoint.errors import CheckpointError, DiskError
from rallypoint.journal import CheckpointSaved
from rallypoint.observability import collect_spans, span
from rallypoint.observability.spans import Spans
from rallypoint.recipes.recipe import Recipe, Setup
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import Record
from rallypoint.run.reports import VALIDATION
from rallypoint.run.rollouts import RolloutFiles

STATE = Path("training") / "state.json"
"""In a checkpoint: what is not a role's."""
_MOST_OF_A_STEP = 0.03
"""Share of the time of steps that snapshots may take."""
_MOST_LOST = 2
"""Intervals of checkpoints that may be lost if a run ends while none can be written."""
_LAST_S, _AGAIN_S = 600.0, 5.0
"""Seconds that the end of a run waits for a disk, and from one try to the next."""


def newest_state(folder: RunFolder, say: Callable[[str], None], last: int | None = None) -> tuple[int, Path | None]:
    """Return the newest step that a run can be restored to, and where from; 0 and None if nothing whole was saved.

    Args:
        folder: of the run.
        say: called, from this thread, with a line about what is damaged.
        last: the last step to go back to: later checkpoints are set aside, and snapshots removed; None for any.
    """
    if last is not None:
        checkpoint.set_aside(folder.checkpoints, last)
        shutil.rmtree(folder.snapshots, ignore_errors=True)
    found = [(checkpoint.newest_whole(each, say), each) for each in (folder.checkpoints, folder.snapshots)]
    step, where = max(found, key=lambda pair: pair[0])
    return step, where / checkpoint.checkpoint_name(step) if step else None


@dataclasses.dataclass(slots=True)
class Saver:
    """Saves one start of a run."""

    setup: Setup
    recipe: Recipe
    record: Record
    folder: RunFolder
    rollouts: RolloutFiles
    saved: int = 0
    """Step of the newest checkpoint."""
    scores: dict[int, float] = dataclasses.field(default_factory=dict[int, float])
    """Score of each validation after a step; the best one's checkpoint stays, and until it is whole the best before."""
    in_background: Callable[[Callable[[], None]], Awaitable[None]] = asyncio.to_thread
    """Does what training need not wait for."""
    clock: Callable[[], float] = time.monotonic
    """Seconds that never go back."""
    took_s: float = 0.0
    """Seconds from the beginning of the newest checkpoint until it was whole; or of a snapshot that took longer."""
    _is_owed: bool = False
    """Whether a checkpoint was due and could not be written."""
    _outage: Outage = dataclasses.field(init=False)
    _no_snapshot: Outage = dataclasses.field(init=False)
    _finishing: asyncio.Task[None] | None = None
    """Makes the newest checkpoint whole."""
    _snapshot_took_s: float = 0.0
    """Seconds that the newest snapshot took."""
    _since: float = dataclasses.field(init=False)
    """When the newest of checkpoints and snapshots was saved."""
    _saved_at: float = dataclasses.field(init=False)
    """When the newest checkpoint was begun."""

    def __post_init__(self) -> None:
        self._since = self._saved_at = self.clock()
        say = self.setup.journal.say
        self._outage = Outage(say, "training goes on, and each step tries again", self.clock)
        further = "a run that loses a process goes back further"
        self._no_snapshot = Outage(functools.partial(say, level="log"), further, self.clock)

    def validated(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note how a validation went."""
        score = scalars.get(VALIDATION, math.nan)
        if self.setup.config.checkpoint.keep_best and step and not math.isnan(score):
            self.scores[step] = score

    async def restore(self, saved: Path) -> None:
        """Read the state of the run back from a checkpoint or a snapshot, which was verified."""
        state = json.loads((saved / STATE).read_text())
        await self.recipe.restore(saved)
        self.recipe.go_on(state["step"], state)

    async def after(self, step: int, *, is_last: bool, interrupted: asyncio.Event) -> None:
        """Save what is due after a step: a checkpoint, or else a snapshot.

        Args:
            step: that is done.
            is_last: whether none comes after it.
            interrupted: set when somebody asks the run to end.

        Raises:
            CheckpointError: no checkpoint could be written for so long that the run should not go on.
            DiskError: the same of the journal, which comes before its checkpoint.
        """
        if is_last:
            await self.save_last(step, interrupted)
            return
        if self._finishing is not None and self._finishing.done():
            await self._try(self.finish(), step)
        if not self._is_due(step) or not await self._try(self.save(step), step):
            await self._snapshot(step)

    def _is_due(self, step: int) -> bool:
        config = self.setup.config.checkpoint
        return (
            self._is_owed
            or step == checkpoint.best_of(self.scores, self.scores)
            or step % self.setup.config.checkpoint_every_steps == 0
            or (config.keep_every is not None and step % config.keep_every == 0)
            or (config.every_s is not None and self.clock() - self._saved_at >= config.every_s)
        )

    async def _try(self, saving: Awaitable[None], step: int) -> bool:
        """Save and return True, or say why not and remember that it is owed.

        Raises:
            CheckpointError, DiskError: too much would be lost by now; the newest snapshot is a checkpoint then.
        """
        try:
            await saving
        except (CheckpointError, DiskError) as error:
            self._is_owed = True
            if step - self.saved > _MOST_LOST * self.setup.config.checkpoint_every_steps:
                await self.rescue()
                raise
            self._outage.lasts(error)
            return False
        return True

    async def save_last(self, step: int, interrupted: asyncio.Event) -> None:
        """Write the last checkpoint, unless there is one; wait for a disk that does not take it, but not for ever.

        Args:
            step: the last one that is done.
            interrupted: set when somebody asks the run to end, which ends the waiting, too.

        Raises:
            CheckpointError, DiskError: it could not be written; the newest snapshot is a checkpoint then.
        """
        deadline = self.clock() + _LAST_S
        while True:
            try:
                await self.finish()
                if self.saved < step:
                    await self.save(step)
                    await self.finish()
            except (CheckpointError, DiskError) as error:
                if interrupted.is_set() or self.clock() > deadline:
                    await self.rescue()
                    raise
                self._outage.lasts(error)
            else:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), _AGAIN_S)

    async def save(self, step: int) -> None:
        """Write a checkpoint; `finish` returns once it is whole, and so visible.

        What the roles have written is in memory then, and digests of it were taken. The flush to the disk and the
        removal of older checkpoints overlap with the steps that follow.

        Raises:
            CheckpointError: the disk is full or not writable, for this one or the one before; nothing partial stays.
            DiskError: the same of the journal.
        """
        await self.finish()
        began = self.clock()
        with collect_spans() as spans, span("checkpoint"), contextlib.ExitStack() as stack:
            self.setup.journal.sync()
            await asyncio.to_thread(self.rollouts.flush)
            folder = stack.enter_context(checkpoint.writing(self.folder.checkpoints, step))
            await self._write(folder, step)
            rest = stack.pop_all()
        self._is_owed, self._saved_at = False, began
        self._finishing = asyncio.create_task(self._finish(step, rest, spans, began))

    async def finish(self) -> None:
        """Wait until the newest checkpoint is whole.

        Raises:
            CheckpointError: see `save`.
        """
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            await finishing

    async def _finish(self, step: int, rest: contextlib.ExitStack, spans: Spans, began: float) -> None:
        await self.in_background(rest.close)
        self.took_s = self.clock() - began
        self._saved(step, spans.scalars())
        config, there = self.setup.config.checkpoint, checkpoint.steps(self.folder.checkpoints)
        best = checkpoint.best_of(self.scores, there)
        prune = functools.partial(
            checkpoint.prune, self.folder.checkpoints, config.keep, best=best, every=config.keep_every
        )
        try:
            await self.in_background(prune)
        except OSError as error:
            self.setup.journal.say(f"old checkpoints stay: {error}", level="log")

    def _saved(self, step: int, measured: Mapping[str, float]) -> None:
        """Note that there is a checkpoint of a step.

        Raises:
            DiskError: the checkpoint or the journal is gone, or on a disk that fails.
        """
        saved = self.folder.checkpoints / checkpoint.checkpoint_name(step)
        with naming(saved):
            weights = checkpoint.digested(saved)
        self.saved, self._since = step, self.clock()
        for older in checkpoint.steps(self.folder.snapshots):
            if older <= step:
                shutil.rmtree(self.folder.snapshots / checkpoint.checkpoint_name(older), ignore_errors=True)
        with contextlib.suppress(OSError):  # unless there is a newer one
            self.folder.snapshots.rmdir()
        self.setup.journal.append(CheckpointSaved(step=step, weights=weights, metrics=measured))
        self.setup.kept.saved(step)
        self._outage.ends(f"the checkpoint of step {step} is saved")

    async def _snapshot(self, step: int) -> None:
        """Write a snapshot after a step, if it costs little.

        One that cannot be written is left out: a run that loses a process goes back further then.
        """
        config, began = self.setup.config, self.clock()
        took_s, between_s = self._snapshot_took_s, self.setup.placement.supervisor.between_losses_s
        pause_s = min(took_s / _MOST_OF_A_STEP, math.sqrt(2 * took_s * between_s)) if took_s else 0.0
        is_cheap = began - self._since >= pause_s
        if not config.checkpoint.snapshots or config.cluster.runtime == "inline" or not is_cheap:
            return
        try:
            with span("snapshot"), contextlib.ExitStack() as stack:
                folder = stack.enter_context(checkpoint.writing(self.folder.snapshots, step, durable=False))
                # A kill leaves the snapshot, from which a run goes on only with all that came before.
                await asyncio.gather(self._write(folder, step), asyncio.to_thread(self.rollouts.flush))
                await self.in_background(stack.pop_all().close)
            await self.in_background(functools.partial(checkpoint.prune, self.folder.snapshots, 1))
        except (CheckpointError, OSError) as error:
            self._no_snapshot.lasts(error)
        else:
            self.setup.kept.saved(step)
            self._no_snapshot.ends(f"the snapshot of step {step} is saved")
        self._since = self.clock()
        self._snapshot_took_s = self._since - began
        self.took_s = max(self.took_s, self._snapshot_took_s)

    async def rescue(self) -> None:
        """Make the newest snapshot a checkpoint, if it is newer: what can be saved without the roles."""
        with contextlib.suppress(CheckpointError, DiskError):
            await self.finish()
        step = await asyncio.to_thread(checkpoint.newest_whole, self.folder.snapshots)
        if step <= self.saved:
            return
        try:
            self.setup.journal.sync()
            whole = self.folder.snapshots / checkpoint.checkpoint_name(step)
            await self.in_background(functools.partial(checkpoint.adopt, whole, self.folder.checkpoints))
        except (CheckpointError, DiskError) as error:
            self.setup.journal.say(f"the snapshot of step {step} could not be saved either: {error}")
        else:
            self._saved(step, {})

    async def _write(self, folder: Path, step: int) -> None:
        (folder / "training").mkdir()
        await self.recipe.save(folder)
        save_tokenizer(self.setup.material.tokenizer, folder)
        self.record.write(folder)
        (folder / STATE).write_text(json.dumps({"step": step, **self.recipe.state}))
