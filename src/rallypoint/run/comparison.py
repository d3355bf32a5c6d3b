"""Two runs compared: what differs in config and packages, and the first place in which they part.

Owns: the digests of what a step trained on, and finding the rollout and the token behind a difference, in `rollouts/`.
Must not know: how it is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from rallypoint.errors import RunFolderError
from rallypoint.journal import Change, Difference, RunState, changes, first_difference
from rallypoint.run.folder import RunFolder
from rallypoint.run.resume import is_free
from rallypoint.run.rollouts import read_rollouts
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.types import ActorBatch, Sequences

_COLUMNS: Mapping[str, Sequence[str]] = {
    "prompts": ("prompt_ids",),
    "tokens": ("response_ids",),
    "logprobs": ("rollout_logprobs",),
    "scores": ("score", "token_rewards"),
    "advantages": ("advantages",),
}
"""Part of a batch -> columns of the rollouts that show where it differs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs differ in."""

    config: Sequence[Change]
    """Keys that some bit of the weights may depend on."""
    free: Sequence[Change]
    """Other keys."""
    files: Sequence[Change]
    """Digests of files that decide the weights."""
    around: Sequence[Change]
    """Packages and machine."""
    first: Difference | None
    """None: the steps that both have done are equal."""
    num_compared: int
    """Steps that both have done."""
    where: Sequence[str] = ()
    """Lines about the rollout in which they part, if its files are there."""


def compare_runs(a: Path, b: Path, states: tuple[RunState, RunState] | None = None) -> Comparison:
    """Compare the folders of two runs.

    Args:
        a: folder of one.
        b: folder of the other.
        states: theirs, if they were read already.

    Raises:
        RunFolderError: one has no journal, or a damaged one.
    """
    ours, theirs = states or (_state(a), _state(b))
    keys, files, around = changes(ours, theirs)
    first = first_difference(ours, theirs)
    return Comparison(
        config=[one for one in keys if not is_free(one.key)],
        free=[one for one in keys if is_free(one.key)],
        files=files,
        around=around,
        first=first,
        num_compared=len(ours.steps.keys() & theirs.steps.keys()),
        where=[] if first is None else list(_where(a, b, first)),
    )


def _state(run: Path) -> RunState:
    if (state := RunFolder(run).state()).began is None:
        raise RunFolderError(f"{run} has not begun, by its journal: expected the folder of a run that has")
    return state


def _where(a: Path, b: Path, first: Difference) -> Iterator[str]:
    """Yield in which rollout, and at which token, the batches of a step part."""
    if first.what not in _COLUMNS:
        return
    try:
        ours, theirs = read_rollouts(a, first.step), read_rollouts(b, first.step)
    except RunFolderError as error:
        yield f"the rollout cannot be named: {error}"
        return
    if len(ours) != len(theirs):
        yield f"{len(ours)} rollouts, and {len(theirs)}"
    for one, other in zip(ours, theirs, strict=False):
        for column in _COLUMNS[first.what]:
            if one[column] != other[column]:
                yield from _described(one, other, column)
                return


def _described(one: Mapping[str, Any], other: Mapping[str, Any], column: str) -> Iterator[str]:
    yield f"prompt {one['name']} ({one['prompt_index']}), sample {one['sample_index']}, {column}"
    if column == "score":
        yield f"{one[column]}  |  {other[column]}"
        return
    place = _first_place(one[column] or (), other[column] or ())
    yield f"token {place}: {_token(one, column, place)}  |  {_token(other, column, place)}"
    text = "prompt" if column == "prompt_ids" else "response"
    yield f"{one[text]!r}  |  {'the same' if other[text] == one[text] else repr(other[text])}"


def _first_place(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the first place in which two rows differ; the end of the shorter if that is where the longer goes on.

    >>> _first_place([5, 6, 7], [5, 6, 8]), _first_place([5], [5, 6])
    (2, 1)
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (x, y) in pairs if x != y), min(len(one), len(other)))


def _token(row: Mapping[str, Any], column: str, place: int) -> str:
    """Return what a row has at a place; of a sampled token also its logprobs."""
    values = row[column] or ()
    if place >= len(values):
        return "none, the row has ended"
    if column != "response_ids":
        return f"{values[place]!r}"
    trained = row.get("old_logprobs") or ()
    beside = f", {trained[place]:.4f} by the trainer" if place < len(trained) else ""
    return f"id {values[place]} with logprob {row['rollout_logprobs'][place]:.4f}{beside}"


def digests_of(rollouts: StepRollouts | None, learned: Sequences | None) -> dict[str, str]:
    """Return a digest of each part of a step's batch, in the order in which the parts come to be.

    Args:
        rollouts: what was sampled; None in a step that trains on files.
        learned: what the actor learned from.
    """
    parts: dict[str, tuple[Tensor, ...]] = {}
    rows = learned if rollouts is None else rollouts.rows
    if rows is not None:
        place = torch.arange(rows.num_tokens) - rows.offsets[:-1][rows.row_of_token]
        is_prompt = place < rows.num_prompt_tokens[rows.row_of_token]
        parts["prompts"] = (rows.prompt_index, rows.tokens[is_prompt])
        starts = () if rows.sequence_starts is None else (rows.sequence_starts,)
        parts["tokens"] = (rows.tokens, rows.loss_mask, *starts)
    if rollouts is not None:
        parts["logprobs"] = (rollouts.rows.rollout_logprobs,)
        parts["scores"] = (rollouts.scored.batch.token_rewards,)
    if isinstance(learned, ActorBatch):
        parts["advantages"] = (learned.advantages,)
    return {name: _digest(tensors) for name, tensors in parts.items()}


def _digest(tensors: tuple[Tensor, ...]) -> str:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
