"""What a run goes on from: checkpoints, and between them snapshots, for worker processes that are lost.

Owns: what is saved when, and what of it is kept. Must not know: what a recipe's roles save, or why it is restored.

A snapshot is a checkpoint that is not flushed to the disk: it outlives every process of the run, but no power cut.
There is one at most, in `snapshots/`. What it costs is measured, and the next one waits for 33 times as long.
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
from rallypoint.errors import CheckpointError
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


def newest_state(folder: RunFolder) -> tuple[int, Path | None]:
    """Return the newest step that a run can be restored to, and where from; 0 and None if nothing whole was saved."""
    found = [(checkpoint.newest_whole(each), each) for each in (folder.checkpoints, folder.snapshots)]
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
    best: tuple[int, float] = (0, -math.inf)
    """Step and score of the best validation after a step, whose checkpoint stays; step 0 for none."""
    in_background: Callable[[Callable[[], None]], Awaitable[None]] = asyncio.to_thread
    """Does what training need not wait for."""
    _finishing: asyncio.Task[None] | None = None
    """Makes the newest checkpoint whole."""
    _took_s: float = 0.0
    """Seconds that the newest snapshot took."""
    _since: float = dataclasses.field(default_factory=time.monotonic)
    """When the newest of checkpoints and snapshots was saved."""

    def validated(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note how a validation went."""
        score = scalars.get(VALIDATION, math.nan)
        if self.setup.config.checkpoint.keep_best and step and score > self.best[1]:
            self.best = step, score

    async def restore(self, saved: Path) -> None:
        """Read the state of the run back from a checkpoint or a snapshot, which was verified."""
        state = json.loads((saved / STATE).read_text())
        await self.recipe.restore(saved)
        self.recipe.go_on(state["step"], state)

    async def save(self, step: int) -> None:
        """Write a checkpoint; `finish` returns once it is whole, and so visible.

        What the roles have written is in memory then. Digests, the flush to the disk and the removal of older
        checkpoints overlap with the steps that follow.

        Raises:
            CheckpointError: the disk is full or not writable, for this one or the one before; nothing partial stays.
        """
        await self.finish()
        with collect_spans() as spans, span("checkpoint"), contextlib.ExitStack() as stack:
            self.setup.journal.sync()
            await asyncio.to_thread(self.rollouts.flush)
            folder = stack.enter_context(checkpoint.writing(self.folder.checkpoints, step))
            await self._write(folder, step)
            save_tokenizer(self.setup.material.tokenizer, folder)
            self.record.write(folder)
            rest = stack.pop_all()
        self._finishing = asyncio.create_task(self._finish(step, rest, spans))

    async def finish(self) -> None:
        """Wait until the newest checkpoint is whole.

        Raises:
            CheckpointError: see `save`.
        """
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            await finishing

    async def _finish(self, step: int, rest: contextlib.ExitStack, spans: Spans) -> None:
        keep, folder = self.setup.config.checkpoint.keep, self.folder.checkpoints
        await self.in_background(rest.close)
        await self.in_background(functools.partial(checkpoint.prune, folder, keep, best=self.best[0]))
        self.saved, self._since = step, time.monotonic()
        for older in checkpoint.steps(self.folder.snapshots):
            if older <= step:
                shutil.rmtree(self.folder.snapshots / checkpoint.checkpoint_name(older), ignore_errors=True)
        with contextlib.suppress(OSError):  # unless there is a newer one
            self.folder.snapshots.rmdir()
        weights = checkpoint.weights_digest(folder / checkpoint.checkpoint_name(step))
        self.setup.journal.append(CheckpointSaved(step=step, weights=weights, metrics=spans.scalars()))

    async def snapshot(self, step: int) -> None:
        """Write a snapshot after a step, if one is due and no checkpoint is.

        One that cannot be written is left out: a run that loses a process goes back further then.
        """
        if self._finishing is not None and self._finishing.done():
            await self.finish()  # which says now that the newest checkpoint could not be made whole
        config, began = self.setup.config, time.monotonic()
        is_saved = step % config.checkpoint_every_steps == 0 or step == config.trainer.num_steps
        is_cheap = (began - self._since) * _MOST_OF_A_STEP >= self._took_s
        if not config.checkpoint.snapshots or config.cluster.runtime == "inline" or is_saved or not is_cheap:
            return
        try:
            with span("snapshot"), checkpoint.writing(self.folder.snapshots, step, durable=False) as folder:
                await self._write(folder, step)
            checkpoint.prune(self.folder.snapshots, 1)
        except (CheckpointError, OSError) as error:
            self.setup.journal.say(f"no snapshot: {error}", level="log")
        self._since = time.monotonic()
        self._took_s = self._since - began

    async def _write(self, folder: Path, step: int) -> None:
        (folder / "training").mkdir()
        await self.recipe.save(folder)
        (folder / STATE).write_text(json.dumps({"step": step, **self.recipe.state}))
