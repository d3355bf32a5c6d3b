"""The state of a run, into a checkpoint and out of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from rallypoint import checkpoint
from rallypoint.data import save_tokenizer
from rallypoint.run.folder import RunFolder
from rallypoint.run.resume import Record

if TYPE_CHECKING:
    from rallypoint.recipes.loop import Recipe


async def save(
    run: RunFolder, step: int, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, record: Record, *, keep: int
) -> None:
    """Write a checkpoint, which is visible when it is whole, and remove older ones.

    Raises:
        CheckpointError: the disk is full or not writable; no partial checkpoint stays behind.
    """
    with checkpoint.writing(run.checkpoints, step) as folder:
        (folder / "training").mkdir()
        for learner in recipe.learners:
            await learner.save(folder)
        save_tokenizer(tokenizer, folder)
        state = {"step": step, "num_admitted": recipe.source.num_admitted, "version": recipe.actor.version}
        (folder / "training" / "state.json").write_text(json.dumps(state))
        record.write(folder)
    checkpoint.prune(run.checkpoints, keep)


async def restore(run: RunFolder, step: int, recipe: Recipe) -> None:
    """Read a checkpoint back that was verified."""
    folder = run.checkpoints / checkpoint.checkpoint_name(step)
    state = json.loads((folder / "training" / "state.json").read_text())
    for learner in recipe.learners:
        await learner.restore(folder)
    recipe.actor.version = state["version"]
    recipe.source.num_admitted = state["num_admitted"]
