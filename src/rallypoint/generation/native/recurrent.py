"""What layers of linear attention remember of sequences, beside the cache of keys and values.

Owns: the states of running sequences, one for each line of the block tables, and the snapshots from which they begin.
Must not know: which sequences run, or why.

A state has a fixed size and says nothing of earlier tokens, so it cannot be shared in blocks as keys and values are. A
prefill leaves a snapshot with the last block that it wrote; a sequence that joins a batch copies it to its line, and
decoding changes the line in place. The rollouts of a prompt begin with one snapshot. It lives as long as somebody uses
its block; without it a prompt is computed again.
"""

from __future__ import annotations

from collections import abc
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rallypoint.cpu.pages import reserve
from rallypoint.generation.native.sequence import PrefillChunk
from rallypoint.models.kinds.linear_attention import DeltaInputs, DeltaStates, Recurrence, delta_step
from rallypoint.models.products import NO_LIMITS, Limits


class DeltaShapes(NamedTuple):
    """What a cache knows of a model's layers of linear attention; all are alike."""

    num_layers: int
    recent: Tensor
    """[1, W - 1, C], of the type and on the device of one layer's states; see `DeltaStates`."""
    memory: Tensor
    """[1, Hv, Dk, Dv], likewise."""


class RecurrentStates:
    """The states of an engine's sequences."""

    def __init__(self, num_lines: int, shapes: DeltaShapes) -> None:
        self.recent, self.memory = (
            reserve(shapes.num_layers, num_lines, *like.shape[1:], like=like) for like in (shapes.recent, shapes.memory)
        )
        """[layers, lines, ...] both."""

    def settle(self, line: int, snapshot: DeltaStates) -> None:
        """Begin a line with a snapshot."""
        self.recent[:, line], self.memory[:, line] = snapshot

    def decode(self, layer: int, lines: Tensor, inputs: DeltaInputs) -> Tensor:
        """Return what one token of each of B lines reads, and move their states on: [B, Hv, Dv]; lines are [B]."""
        states = DeltaStates(self.recent[layer].index_select(0, lines), self.memory[layer].index_select(0, lines))
        out, states = delta_step(inputs, states)
        self.recent[layer].index_copy_(0, lines, states.recent)
        self.memory[layer].index_copy_(0, lines, states.memory)
        return out

    def prefill(self, chunks: abc.Sequence[PrefillChunk], offsets: Tensor) -> RecurrentPrefill:
        """Lay out the scan of chunks that lie in a stream, given its [N+1] offsets."""
        return RecurrentPrefill(self, chunks, Recurrence(offsets, self.memory.device))


class RecurrentPrefill:
    """One pass of chunks through the layers of linear attention."""

    def __init__(self, states: RecurrentStates, chunks: abc.Sequence[PrefillChunk], recurrence: Recurrence) -> None:
        self._chunks, self._recurrence = chunks, recurrence
        self._blank = DeltaStates(torch.zeros_like(states.recent[:, 0]), torch.zeros_like(states.memory[:, 0]))
        self._ends: list[DeltaStates] = []

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`. The layers come in order; the last one leaves the snapshots."""
        assert layer == len(self._ends), "layers run in order"
        before = [chunk.past[-1].snapshot if chunk.past else self._blank for chunk in self._chunks]
        states = DeltaStates(*(torch.stack([one[layer] for one in each]) for each in zip(*before, strict=True)))
        out, end = self._recurrence.run(inputs, states)
        self._ends.append(end)
        if len(self._ends) == len(self._blank.recent):
            recent, memory = (torch.stack(each, 1) for each in zip(*self._ends, strict=True))
            for chunk, *snapshot in zip(self._chunks, recent, memory, strict=True):
                chunk.slots[-1][0].snapshot = DeltaStates(*(each.clone() for each in snapshot))
        return out


def in_turns(chunks: abc.Sequence[PrefillChunk]) -> list[abc.Sequence[PrefillChunk]]:
    """Cut chunks into passes, so that each finds the snapshot from which it begins."""
    ready = [chunk for chunk in chunks if not chunk.past or chunk.past[-1].snapshot is not None]
    late = [chunk for chunk in chunks if chunk.past and chunk.past[-1].snapshot is None]
    return [part for part in (ready, late) if part]


def kinds_of_layers(model: PreTrainedModel) -> abc.Sequence[str]:
    """Return the kind of each layer."""
    config = model.config.get_text_config()
    return getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers)


def is_recurrent(model: PreTrainedModel) -> bool:
    """Say whether a model has layers of linear attention."""
    return "linear_attention" in kinds_of_layers(model)


class ByKind:
    """Rows whose layers are counted among those of their kind, which have memory of their own."""

    def __init__(self, rows: Any, kinds: abc.Sequence[str]) -> None:
        """Take the rows of a decoder, `DecoderRows`, and the kind of each layer."""
        self._rows = rows
        linear = [kind == "linear_attention" for kind in kinds]
        self._numbers = [linear[:layer].count(is_linear) for layer, is_linear in enumerate(linear)]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `AttentionRows.attend`."""
        return self._rows.attend(self._numbers[layer], query, key, value, scaling, limits)

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`."""
        return self._rows.recall(self._numbers[layer], inputs)
