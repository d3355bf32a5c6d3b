"""Linear attention by the gated delta rule, over rows packed end to end in one stream.

Owns: the layer of Qwen3-Next and Qwen3.5 (Yang et al., 2024, arXiv 2412.06464), the order of its channels, its scan
over chunks, and the state of a row between two passes. Must not know: which passes a state lasts for. A row's tokens
and its state are all that its output depends on: convolution and state begin anew with every row, wherever it lies in
the stream.

Files have the queries of all heads, then their keys, then their values; in memory, weights and activations have what
belongs to a key head together, so that a rank of `tp` or `sp` has a range. Two key heads, with channels of two:

    files     q0 q0 q1 q1 | k0 k0 k1 k1 | v0 v0 v1 v1        memory    q0 q0 k0 k0 v0 v0 | q1 q1 k1 k1 v1 v1

Per head, with a state S [Dk, Dv] that is zero where a row begins, decay a <= 0 and strength b in (0, 1):

    S <- exp(a) S + k (b (v - k^T exp(a) S))^T        out = S^T q / sqrt(Dk)

Rows are cut into chunks, each computed at once. The tokens of a chunk correct each other, which a triangular system
solves; then a scan goes over the chunks of all rows side by side, the longest rows first:

    rows      a a a a a | b b | c c c        chunks of two tokens
    chunks    aa cc bb  | aa c0 | a0         three steps of the scan, over three, two and one row
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from rallypoint.families import FAMILIES
from rallypoint.models.prefix import Copies, SharedPrefixes
from rallypoint.parallel import Collective, exchange_for_columns, exchange_for_rows
from rallypoint.parallel.transfer import sent

_LAYERS = frozenset(name for family in FAMILIES.values() for name in family.linear_attentions)
_CHUNK_TOKENS, _LEAST_CHUNK_TOKENS = 64, 16
_EPS = 1e-6
"""Epsilon of the lengths of queries and keys."""


class DeltaHeads(NamedTuple):
    """Numbers and sizes of the heads of a layer; a key head serves consecutive value heads."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of the queries, keys and values of a key head."""
        return self.key_dim, self.key_dim, self.num_values // self.num_keys * self.value_dim

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, [..., Hk, D], and values, [..., Hv, D], of channels, [..., C]."""
        query, key, value = mixed.unflatten(-1, (self.num_keys, -1)).split(self.widths, -1)
        return query, key, value.unflatten(-1, (-1, self.value_dim)).flatten(-3, -2)

    def shared_by(self, num_ranks: int) -> DeltaHeads:
        """Return the heads of one of some ranks."""
        return self._replace(num_keys=self.num_keys // num_ranks, num_values=self.num_values // num_ranks)


class DeltaInputs(NamedTuple):
    """What a layer computes of each of T tokens before tokens see each other."""

    mixed: Tensor
    """[T, C]: queries, keys and values before the convolution, by key heads."""
    kernel: Tensor
    """[C, W]: the convolution over the last W tokens of each channel, a token's own last."""
    decay: Tensor
    """[T, Hv], in float32 at least."""
    strength: Tensor
    """[T, Hv], likewise."""
    heads: DeltaHeads


class DeltaStates(NamedTuple):
    """What one layer remembers of each of B rows."""

    recent: Tensor
    """[B, W - 1, C]: what went into the convolution last, the newest last."""
    memory: Tensor
    """[B, Hv, Dk, Dv], in float32 at least."""


class DeltaRows(Protocol):
    """The rows of a stream, as layers of linear attention see them."""

    def recall(self, layer: int, inputs: DeltaInputs) -> Tensor:
        """Return what the tokens of a layer read from the states of their rows: [T, Hv, Dv]."""
        ...


class _OnRows:
    """Mixed in before a layer of transformers: computes over `rows`, if there are any."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, rows: DeltaRows | None = None, **more: Any) -> Any:
        """[1, T, E] -> [1, T, E]."""
        if rows is None:
            with _in_order_of_files(self):
                return super().forward(hidden_states, *args, **more)  # pyright: ignore[reportAttributeAccessIssue] - of the other base
        states = hidden_states.squeeze(0)
        exact = torch.promote_types(states.dtype, torch.float32)
        mixed, gate, strength, step = _projected(self, states)
        step = functional.softplus(step.to(exact) + self.dt_bias.to(exact))
        inputs = DeltaInputs(
            mixed,
            self.conv1d.weight.squeeze(1),
            -self.A_log.to(exact).exp() * step,
            strength.sigmoid().to(exact),
            DeltaHeads(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim),
        )
        out = rows.recall(self.layer_idx, inputs)
        scale = (out.square().mean(-1, keepdim=True) + self.norm.variance_epsilon).rsqrt()
        out = self.norm.weight * (out * scale).to(states.dtype)
        out = (out * functional.silu(gate.view(out.shape).to(exact))).to(states.dtype)
        return self.out_proj(out.flatten(1)).unsqueeze(0)


def _projected(layer: Any, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return inputs of the convolution, [T, C], gates, [T, V], and what strengths and decays are of, [T, Hv] both."""
    parts = dict(layer.named_children())
    if "in_proj_qkv" in parts:
        mixed, gate, strength, step = (parts[f"in_proj_{name}"](states) for name in ("qkv", "z", "b", "a"))
        return mixed, gate, strength, step
    # Of Qwen3-Next, where what belongs to a key head is together.
    by_head = (parts[f"in_proj_{name}"](states).unflatten(1, (layer.num_k_heads, -1)) for name in ("qkvz", "ba"))
    both, small = by_head
    values = layer.num_v_heads // layer.num_k_heads * layer.head_v_dim
    mixed, gate = (part.flatten(1) for part in both.split([2 * layer.head_k_dim + values, values], 2))
    strength, step = (part.flatten(1) for part in small.chunk(2, 2))
    return mixed, gate, strength, step


@contextlib.contextmanager
def _in_order_of_files(layer: Any) -> Iterator[None]:
    """Have a layer's weights as transformers' own code expects them; nothing is trained meanwhile."""
    heads = DeltaHeads(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    order = torch.cat([part.flatten() for part in heads.split(torch.arange(layer.conv1d.weight.shape[0]))])
    inputs = dict(layer.named_children()).get("in_proj_qkv", nn.Identity())
    weights = [layer.conv1d.weight, *(w for name, w in inputs.named_parameters() if not name.startswith("lora_A."))]
    before = [weight.data for weight in weights]
    try:
        for weight in weights:
            weight.data = weight.data[order.to(weight.device)]
        yield
    finally:
        for weight, data in zip(weights, before, strict=True):
            weight.data = data


def keep_heads(layer: nn.Module, num_ranks: int) -> None:
    """Tell a layer, if it is one of linear attention, that it has the heads of one of some ranks."""
    if isinstance(layer, _OnRows):
        for name in ("num_k_heads", "num_v_heads", "key_dim", "value_dim"):
            setattr(layer, name, getattr(layer, name) // num_ranks)


def replace_linear_attentions(model: nn.Module) -> None:
    """Have the linear attentions of a transformers model compute over packed rows; weights and names stay."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _LAYERS and kind.__module__.startswith("transformers."):
            module.__class__ = _class_on_rows(kind)


@functools.cache
def _class_on_rows(layer: type[nn.Module]) -> type[nn.Module]:
    return type(f"{layer.__name__}OnRows", (_OnRows, layer), {})


class Recurrence:
    """The chunks of some rows in a stream, and the order in which they are scanned."""

    def __init__(self, offsets: Tensor, device: torch.device, shared: SharedPrefixes | None = None) -> None:
        """Lay rows out; the arguments are those of `PackedRows`.

        Tokens that rows share go through the layer's products once, and through the scan once for each row.
        """
        shared = shared or SharedPrefixes.none(offsets)
        self._layout = offsets, shared
        lengths = offsets.diff()
        self._device, self._num_rows = device, len(lengths)
        longest = int(lengths.max()) if len(lengths) else 0
        size = self.chunk = min(_CHUNK_TOKENS, max(_LEAST_CHUNK_TOKENS, 1 << max(0, longest - 1).bit_length()))
        num_tokens, num_chunks = int(offsets[-1]), -(-lengths // size)
        ordered = torch.argsort(-num_chunks, stable=True)
        self._of_row = sent(ordered.argsort(), device)
        self._ordered = sent(ordered, device)
        self.counts = [int((num_chunks > step).sum()) for step in range(int(num_chunks.max()) if longest else 0)]
        rows = [ordered[:count] for count in self.counts]
        begins = [offsets[row] + step * size for step, row in enumerate(rows)]
        row, begin = (torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]) for parts in (rows, begins))
        token = begin.unsqueeze(1) + torch.arange(size)
        is_token = token < offsets[1:][row].unsqueeze(1)
        slot = torch.empty(num_tokens, dtype=torch.int64)
        slot[token[is_token]] = torch.nonzero(is_token.flatten()).flatten()
        kept, place = shared.kept, shared.place
        self._num_stream = len(kept)
        # One row of zeros stands after those of the stream, for what fills a row's last chunk.
        padded = functional.pad(place, (0, 1), value=len(kept))
        self._in_chunks = Copies.of(padded[token.where(is_token, num_tokens)].flatten(), len(kept) + 1, device)
        self._in_stream = Copies.of(slot[kept], len(row) * size, device)
        self._convolved: dict[int, tuple[Copies, Tensor]] = {}

    def run(self, inputs: DeltaInputs, states: DeltaStates) -> tuple[Tensor, DeltaStates]:
        """Return what tokens read, [T, Hv, Dv] with zeros for filler, and the states after the rows.

        Args:
            inputs: of the stream, filler included.
            states: before the rows; see `blank`.
        """
        heads = inputs.heads
        num_channels, num_filler = inputs.mixed.shape[1], len(inputs.mixed) - self._num_stream
        tokens, recent = self.convolved(inputs, states)
        chunks = self._in_chunks.of_rows(functional.pad(tokens, (0, 0, 0, 1)))
        chunks = chunks.view(-1, self.chunk, chunks.shape[1])
        mixed, decay, strength = chunks.split([num_channels, heads.num_values, heads.num_values], 2)
        memory = states.memory.index_select(0, self._ordered)
        out, memory = chunked_delta_rule(*heads.split(mixed), decay, strength, self.counts, memory)
        out = self._in_stream.of_rows(out.flatten(0, 1).flatten(1))
        out = functional.pad(out, (0, 0, 0, num_filler)).view(-1, heads.num_values, heads.value_dim)
        return out, DeltaStates(recent, memory.index_select(0, self._of_row))

    def convolved(self, inputs: DeltaInputs, states: DeltaStates) -> tuple[Tensor, Tensor]:
        """Return channels after the convolution, decays and strengths of the stream, [S, C + 2 Hv]; and `recent`."""
        width = inputs.kernel.shape[1]
        mixed, (taps, last) = inputs.mixed[: self._num_stream], self._taps(width)
        history = torch.cat([mixed, states.recent.flatten(0, 1)])
        read = taps.of_rows(history).view(width, *mixed.shape)
        mixed = functional.silu((read * inputs.kernel.t().unsqueeze(1)).sum(0)).to(inputs.decay.dtype)
        tokens = torch.cat([mixed, *(x[: self._num_stream] for x in (inputs.decay, inputs.strength))], 1)
        return tokens, history[last]

    def blank(self, inputs: DeltaInputs) -> DeltaStates:
        """Return the states of rows that begin."""
        rows, heads = self._num_rows, inputs.heads
        recent = inputs.mixed.new_zeros(rows, inputs.kernel.shape[1] - 1, inputs.mixed.shape[1])
        return DeltaStates(recent, inputs.decay.new_zeros(rows, heads.num_values, heads.key_dim, heads.value_dim))

    def _taps(self, width: int) -> tuple[Copies, Tensor]:
        """Return where a convolution reads, [W * S], in the stream or in a state after it; and each row's end there.

        That is [B, W - 1].
        """
        if width not in self._convolved:
            offsets, shared = self._layout
            row = torch.repeat_interleave(torch.arange(self._num_rows), offsets.diff())[shared.kept]
            index = torch.stack([self._before(row, shared.kept - back, width) for back in reversed(range(width))])
            taps = Copies.of(index.flatten(), self._num_stream + self._num_rows * (width - 1), self._device)
            ends = offsets[1:].unsqueeze(1) - torch.arange(width - 1, 0, -1)
            last = self._before(torch.arange(self._num_rows).unsqueeze(1).expand_as(ends), ends, width)
            self._convolved[width] = taps, sent(last, self._device)
        return self._convolved[width]

    def _before(self, row: Tensor, token: Tensor, width: int) -> Tensor:
        """Return the places of tokens of rows, which may be up to `width - 1` before the first of their row."""
        offsets, shared = self._layout
        missing = offsets[row] - token  # 1 for the newest one before the row
        inside = shared.place[token.clamp(min=0)]
        return torch.where(missing > 0, self._num_stream + (row + 1) * (width - 1) - missing, inside)


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    strength: Tensor,
    counts: Sequence[int],
    memory: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scan N chunks of C tokens: what each token reads, [N, C, Hv, Dv], and the states after the rows.

    Within a chunk, with g the sum of decays up to a token, tokens correct each other by a triangular system:

        (1 + tril(b k k'^T exp(g - g'), -1)) u = b (v - exp(g) k^T S)        S is the state before the chunk

    Args:
        query: [N, C, Hk, Dk]; of length 1 after this function has scaled it, as keys.
        key: likewise.
        value: [N, C, Hv, Dv].
        decay: [N, C, Hv].
        strength: [N, C, Hv]; 0 for what is not a token.
        counts: number of chunks of each step of the scan: the first ones of all rows, then the second ones.
        memory: [B, Hv, Dk, Dv]: states before the rows, those with the most chunks first.
    """
    share = value.shape[2] // key.shape[2]
    query, key = (normed(x, share).transpose(1, 2) for x in (query, key))
    query, value = query * query.shape[-1] ** -0.5, value.transpose(1, 2)
    strength = strength.transpose(1, 2).unsqueeze(-1)
    ones = decay.new_ones(decay.shape[1], decay.shape[1])
    total = decay.transpose(1, 2) @ ones.triu()  # a product, as torch's running sums vary on accelerators
    later = ones.bool().triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    grown = total.exp().unsqueeze(-1)
    system = (key * strength) @ key.transpose(-1, -2) * between
    right = torch.cat([value, key * grown], -1) * strength
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, seen = solved.split([value.shape[-1], key.shape[-1]], -1)
    within = query @ key.transpose(-1, -2) * between
    query = query * grown
    key = (key * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    whole = grown[:, :, -1:]
    outs: list[Tensor] = []
    ended: list[Tensor] = [memory[counts[0] if counts else 0 :]]
    for start, count, following in zip(itertools.accumulate([0, *counts]), counts, [*counts[1:], 0], strict=False):
        step, memory = slice(start, start + count), memory[:count]
        written = new[step] - seen[step] @ memory
        outs.append(query[step] @ memory + within[step] @ written)
        memory = memory * whole[step] + key[step] @ written
        ended.append(memory[following:])
    out = torch.cat(outs) if outs else value
    return out.transpose(1, 2), torch.cat(ended[::-1])


def delta_step(inputs: DeltaInputs, states: DeltaStates) -> tuple[Tensor, DeltaStates]:
    """Return what one token of each of B rows reads, [B, Hv, Dv], and the states after it; see the module."""
    heads, exact = inputs.heads, inputs.decay.dtype
    recent = torch.cat([states.recent, inputs.mixed.unsqueeze(1)], 1)
    mixed = functional.silu((recent * inputs.kernel.t()).sum(1)).to(exact)
    query, key, value = heads.split(mixed)
    query, key = (normed(x, heads.num_values // heads.num_keys) for x in (query, key))
    memory = states.memory * inputs.decay.exp()[:, :, None, None]
    wrong = value - (key.unsqueeze(2) @ memory).squeeze(2)
    memory = memory + key.unsqueeze(3) * (inputs.strength.unsqueeze(2) * wrong).unsqueeze(2)
    out = (query * heads.key_dim**-0.5).unsqueeze(2) @ memory
    return out.squeeze(2), DeltaStates(recent[:, 1:], memory)


def normed(states: Tensor, share: int) -> Tensor:
    """Return queries or keys of length 1, one for each value head: [..., Hk, Dk] -> [..., Hv, Dk]."""
    return (states * (states.square().sum(-1, keepdim=True) + _EPS).rsqrt()).repeat_interleave(share, -2)


def recall_over_ranks(rows: DeltaRows, layer: int, inputs: DeltaInputs, sp: Collective, sizes: Sequence[int]) -> Tensor:
    """Return what this rank's tokens read where ranks share a stream: each rank scans some of the heads of all tokens.

    Args:
        rows: of the whole stream.
        layer: index of the layer.
        inputs: of this rank's tokens.
        sp: the ranks.
        sizes: number of tokens of each.

    Raises:
        ValueError: the heads do not divide by the number of ranks.
    """
    if inputs.heads.num_keys % sp.size:
        raise ValueError(f"sp={sp.size} does not divide {inputs.heads.num_keys} key heads of linear attention")
    heads = inputs.heads.shared_by(sp.size)
    mixed, small = (
        exchange_for_columns(torch.cat([part.unflatten(1, (sp.size, -1)) for part in parts], 2), sp, sizes)
        for parts in ((inputs.mixed,), (inputs.decay, inputs.strength))
    )
    kernel = inputs.kernel.chunk(sp.size)[sp.rank]
    decay, strength = small.chunk(2, 1)
    out = rows.recall(layer, DeltaInputs(mixed, kernel, decay, strength, heads))
    return exchange_for_rows(out, sp, sizes).flatten(1, 2)
