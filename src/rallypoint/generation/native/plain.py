"""The arithmetic of a plain decoder, one token of each row: Llama and Qwen, in about half the operations of their code.

Decoding is so many small operations that what stands around the matrix products takes longer than they do. On a CPU a
whole step is computed without Python, see `rallypoint.generation.script`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._jit_internal import is_scripting
from torch.nn import functional

from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.generation.native.cpu.bags import Bags, attend

_ROWS_BY_COLUMNS, _WIDTH_BY_COLUMNS = 32, 512
"""Of states, at least, for products on a CPU in bfloat16 to be computed as weights times states. What stands on the
right is packed by oneDNN at every call: that should be the smaller one. For small ones it does not matter, and results
that lie column by column cost more than that saves."""


class Linear(NamedTuple):
    """Linear layers of one input."""

    weights: list[Tensor]
    """[outputs, inputs] each; one for all where they lie behind one another."""
    biases: list[Tensor]
    """[outputs] each; none, or one for each layer."""


class Layer(NamedTuple):
    """The weights of one layer; a norm's are [E], those of a head [D]."""

    attention_norm: Tensor
    query_key_value: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Network(NamedTuple):
    """A model without its head."""

    embeddings: Tensor
    """[V, E]."""
    frequencies: Tensor
    """[D] float32; those of the first half of a head are negative: it is turned against the second."""
    wave_height: float
    layers: list[Layer]
    norm: Tensor
    """[E]."""
    eps: float
    """Of all norms."""
    num_heads: int
    """Of queries."""
    num_turned: int
    """Heads of queries and keys."""
    scaling: float


def decode(network: Network, bags: Bags) -> Tensor:
    """Send one token of each row through a network: its last hidden states, [B, E]."""
    states, cos, sin = enter(network, bags.tokens, bags.position_ids)
    for index, layer in enumerate(network.layers):
        turned, value = before_attention(network, layer, states, cos, sin)
        query, key = turned[:, : network.num_heads], turned[:, network.num_heads :]
        attended = attend(bags, index, query, key, value, network.scaling, None, bags.bias)
        states = after_attention(network, layer, states, attended)
    return norm(states, network.norm, network.eps)


def enter(network: Network, tokens: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return states, [B, E], and how heads are turned at their places: cosines and sines, [B, turned heads * D]."""
    states = functional.embedding(tokens, network.embeddings)
    angles = position_ids.view(-1, 1) * network.frequencies
    cos, sin = angles.cos(), angles.sin()  # cos(-a) = cos(a), sin(-a) = -sin(a)
    if network.wave_height != 1.0:
        cos, sin = cos * network.wave_height, sin * network.wave_height
    heads = (1, network.num_turned)
    return states, cos.to(states.dtype).repeat(heads), sin.to(states.dtype).repeat(heads)


def before_attention(network: Network, layer: Layer, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, [B, H + K, D], turned, and values, [B, K, D]."""
    dim = network.frequencies.shape[0]
    heads = linear(layer.query_key_value, norm(states, layer.attention_norm, network.eps))
    heads = heads.contiguous().view(states.shape[0], -1, dim)
    turned, value = heads[:, : network.num_turned], heads[:, network.num_turned :]
    query_norm, key_norm = layer.query_norm, layer.key_norm
    if query_norm is not None and key_norm is not None:
        query = norm(turned[:, : network.num_heads], query_norm, network.eps)
        turned = torch.cat([query, norm(turned[:, network.num_heads :], key_norm, network.eps)], 1)
    swapped = turned.roll(dim // 2, -1)
    turned = (turned.reshape(cos.shape) * cos).addcmul_(swapped.view(sin.shape), sin)
    return turned.view(states.shape[0], -1, dim), value


def after_attention(network: Network, layer: Layer, states: Tensor, attended: Tensor) -> Tensor:
    """Add to states what attention has found, [B, H * D], and what the MLP makes of both: [B, E]."""
    states = linear(layer.out, attended).add_(states)
    gate_up = linear(layer.gate_up, norm(states, layer.mlp_norm, network.eps))
    gate, up = gate_up.chunk(2, -1)
    return linear(layer.down, functional.silu(gate).mul_(up)).add_(states)


def linear(
    layers: Linear, states: Tensor, min_rows: int = _ROWS_BY_COLUMNS, min_width: int = _WIDTH_BY_COLUMNS
) -> Tensor:
    """[B, E] -> [B, outputs of all], which may lie in memory column by column."""
    bias: Tensor | None = None
    if len(layers.biases) > 0:
        bias = layers.biases[0] if len(layers.biases) == 1 else torch.cat(layers.biases)
    parts: list[Tensor] = []
    if not is_scripting() and not computes_in_pieces(states.device):
        min_rows = states.shape[0] + 1  # accelerators need no such detour
    if states.dtype == torch.bfloat16 and states.shape[0] >= min_rows and states.shape[1] >= min_width:
        for weight in layers.weights:
            parts.append(torch.mm(weight, states.t()))
        out = (parts[0] if len(parts) == 1 else torch.cat(parts)).t()
        return out if bias is None else out.add_(bias)
    if len(layers.weights) == 1:
        return functional.linear(states, layers.weights[0], bias)
    for weight in layers.weights:
        parts.append(functional.linear(states, weight))
    out = torch.cat(parts, -1)
    return out if bias is None else out.add_(bias)


def norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rallypoint.models.norm.RMSNorm`, whose bits these are: [..., E] -> [..., E]."""
    # Accelerators have a kernel of their own.
    if not is_scripting() and not computes_in_pieces(states.device):
        return functional.rms_norm(states, weight.shape, weight, eps)
    wide = states if states.dtype == torch.float64 else states.float().contiguous()
    length = torch.linalg.vector_norm(wide, 2.0, [-1], True)
    length = length.square_().mul_(1 / states.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(wide, length).mul_(weight).to(states.dtype)
