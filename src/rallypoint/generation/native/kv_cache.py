"""The keys and values of all layers, in blocks, and how much of a device's memory they take.

Owns: the tensors and their size. Must not know: which block is whose (`block_manager`), or sequences.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rallypoint.cluster.capacity import memory_bytes
from rallypoint.config.limits import BLOCK_TOKENS, CACHE_MARGIN
from rallypoint.cpu.pages import reserve
from rallypoint.errors import CacheError
from rallypoint.generation.native.recurrent import DeltaShapes, RecurrentStates
from rallypoint.generation.requests import vocabulary_size
from rallypoint.models.kinds.linear_attention import DeltaInputs, DeltaStates, Recurrence
from rallypoint.models.products import NO_LIMITS, Limits

_MIB = 2**20


class LayerShapes(NamedTuple):
    """What the cache and the backends know of a model; all layers with keys and values are alike."""

    num_layers: int
    heads: int
    """Query heads of a layer."""
    kv_heads: int
    head_dim: int
    like: Tensor
    """A tensor of the type and on the device of keys and values."""
    delta: DeltaShapes | None = None
    """Its layers of linear attention, if it has any."""


class KVCache:
    """Keys and values of an engine."""

    def __init__(
        self,
        num_blocks: int,
        shapes: LayerShapes,
        block_tokens: int = BLOCK_TOKENS,
        recurrent: RecurrentStates | None = None,
    ) -> None:
        """Reserve memory; on a CPU, pages that were never written to take none.

        Args:
            num_blocks: of all sequences.
            shapes: of the layers.
            block_tokens: tokens of a block.
            recurrent: states of layers of linear attention, if the model has any.

        Raises:
            CacheError: there is too little.
        """
        self.num_blocks, self.block_tokens, self.shapes = num_blocks, block_tokens, shapes
        self.recurrent = recurrent
        layers, _, kv_heads, head_dim, like, _ = shapes
        num_bytes = 2 * layers * kv_heads * head_dim * num_blocks * block_tokens * like.element_size()
        with _explained(num_bytes, num_blocks * block_tokens, like.device):
            self.keys = reserve(layers, num_blocks, kv_heads, head_dim, block_tokens, like=like)
            """[layers, blocks, K, D, tokens]: one number of all tokens of a block side by side."""
            self.values = reserve(layers, num_blocks, kv_heads, block_tokens, head_dim, like=like)
            """[layers, blocks, K, tokens, D]."""
        self.key_numbers = self.keys.view(torch.int16) if like.dtype.itemsize == 2 else self.keys
        """The keys as `Bags` writes them."""

    def zero(self, blocks: Sequence[int]) -> None:
        """Clear new blocks: numbers beyond the end of a sequence are multiplied by 0, so they must be finite."""
        if blocks:
            index = torch.tensor(blocks, device=self.keys.device)
            self.keys.index_fill_(1, index, 0.0)
            self.values.index_fill_(1, index, 0.0)

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values of T tokens, [T, K, D] both; each has a block and an offset in it, [T] int64 both."""
        self.keys[layer].permute(0, 3, 1, 2).index_put_((blocks, offsets), key)
        self.values[layer].transpose(1, 2).index_put_((blocks, offsets), value)

    def read_slots(self, layer: int, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of some tokens, [T, K, D] both, as `write` takes them."""
        slots = blocks, offsets
        return self.keys[layer].permute(0, 3, 1, 2)[slots], self.values[layer].transpose(1, 2)[slots]

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of some blocks, end to end: [tokens, K, D] both."""
        keys, values = self.keys[layer].index_select(0, blocks), self.values[layer].index_select(0, blocks)
        return keys.permute(0, 3, 1, 2).flatten(0, 1), values.transpose(1, 2).flatten(0, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class CacheSize:
    """Sizes that a cache may have; the choice is made when it is reserved, and again after every sleep."""

    most_tokens: int
    """Tokens beyond which more memory would be of no use."""
    least_tokens: int
    """Tokens of the longest request."""
    spared_bytes: int = 0
    """Memory left free for allocations other than the cache."""
    share: float = 1.0
    """Part of the device's memory that belongs to this process."""

    @classmethod
    def of(cls, size: int | CacheSize) -> CacheSize:
        """Return a size as it is, and a number of tokens as one without choice."""
        return size if isinstance(size, CacheSize) else cls(size, size)

    def num_tokens(self, token_bytes: int, device: torch.device | None) -> int:
        """Return how many tokens to reserve memory for now.

        Args:
            token_bytes: size of the keys and values of one token.
            device: where they will lie, the current one if None; not a CPU if there is a choice.

        Raises:
            CacheError: the longest request does not fit, even if nothing is spared.
        """
        if self.least_tokens >= self.most_tokens:
            return self.most_tokens
        if self._free(device) - self.spared_bytes < self.most_tokens * token_bytes:
            torch.accelerator.empty_cache()  # what torch has freed itself
        free = self._free(device)
        if free < self.least_tokens * token_bytes:
            raise CacheError(
                f"the keys and values of one row at its longest, {self.least_tokens:,} tokens, take "
                f"{self.least_tokens * token_bytes / _MIB:,.0f} MiB, but the device has {max(0, free) / _MIB:,.0f} "
                "MiB for them when rollouts begin; have other roles sleep (engine.sleep=true), divide the model "
                "(actor.mesh.dp_shard, rollout.placement), or lower rollout.max_response_tokens or "
                "data.max_prompt_tokens"
            )
        return max(self.least_tokens, min(self.most_tokens, (free - self.spared_bytes) // token_bytes))

    def _free(self, device: torch.device | None) -> int:
        """Return the bytes of the device that this process may still take, less a margin."""
        free, total = torch.accelerator.get_memory_info(device)
        mine = self.share * total - torch.accelerator.memory_reserved(device)
        return int(min(free, mine) - CACHE_MARGIN * self.share * total)


@contextlib.contextmanager
def _explained(num_bytes: int, num_tokens: int, device: torch.device) -> Iterator[None]:
    """Name what was asked for, and what there is, when memory cannot be reserved."""
    try:
        yield
    except (RuntimeError, OSError, OverflowError) as error:  # of torch; of the system; a size beyond any address
        if device.type != "cpu" and not isinstance(error, torch.OutOfMemoryError):
            raise  # an earlier kernel failed
        if device.type == "cpu":
            there = f"this machine has {memory_bytes() / _MIB:,.0f} MiB"
        else:
            free, total = torch.accelerator.get_memory_info(device)
            there = f"{device} has {free / _MIB:,.0f} of its {total / _MIB:,.0f} MiB left"
        raise CacheError(
            f"the keys and values of {num_tokens:,} tokens take {num_bytes / _MIB:,.0f} MiB, but {there}; ask for "
            "fewer tokens with rollout.cache_tokens (rally serve: --cache-tokens), which may be much fewer than all "
            "rows have: those that find no memory wait"
        ) from error


class Probe:
    """Rows without a cache: attention that needs all of query, key and value, and remembers their shapes."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tokens = torch.arange(5, device=model.device) % vocabulary_size(model)
        self.position_ids = 3 * self.tokens.unsqueeze(0)
        self.layers: list[tuple[int, int, int]] = []
        self.states: DeltaStates | None = None
        self.like = self.tokens

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `AttentionRows.attend`."""
        del limits
        self.layers.append((query.shape[1], key.shape[1], key.shape[2]))
        self.like = key
        return query + (key * scaling + value / (layer + 1)).repeat_interleave(query.shape[1] // key.shape[1], 1)

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """See `DeltaRows.recall`."""
        del layer
        recurrence = Recurrence(torch.tensor([0, len(inputs.mixed)]), inputs.mixed.device)
        out, self.states = recurrence.run(inputs, recurrence.blank(inputs))
        return out
