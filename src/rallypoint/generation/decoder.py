"""One token of each row through the backbone of a Llama or Qwen, in about half the operations of its own code.

Decoding is so many small operations that what stands around the matrix products takes longer than they do. This is
the same arithmetic on the same weights, without modules in between. It is compared with the model's own code whenever
it is made, and whatever is not exactly of these classes goes through its own code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from rallypoint.errors import ModelError
from rallypoint.models import Rows
from rallypoint.models.attention import NO_LIMITS, Limits
from rallypoint.models.norm import RMSNorm

_CLASSES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""As a part of the largest number."""


class RowsWithIds(Rows, Protocol):
    """Rows that say which tokens they are at; see `rallypoint.models.Rows`."""

    tokens: Tensor
    """[B] int64."""
    position_ids: Tensor
    """[1, B] int64."""


class _Attention(Protocol):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear
    scaling: float
    head_dim: int


class _MLP(Protocol):
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear


class _DecoderLayer(Protocol):
    self_attn: _Attention
    mlp: _MLP
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module


class _Decoder(Protocol):
    """What the models of `_CLASSES` have in common."""

    embed_tokens: nn.Module
    rotary_emb: nn.Module
    layers: Sequence[_DecoderLayer]
    norm: nn.Module


class Backbone:
    """Sends tokens through a model by its own code: [B] -> [B, E]."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.base_model

    def __call__(self, rows: RowsWithIds) -> Tensor:
        """Return the last hidden state of each token."""
        output = self._model(
            input_ids=rows.tokens.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows
        )
        return output.last_hidden_state.squeeze(0)


class PlainDecoder:
    """The same for plain decoders, in fewer operations."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a model that `fits`."""
        base = cast("_Decoder", model.base_model)
        self._embed, self._rotate, self._norm = base.embed_tokens, base.rotary_emb, _norm(base.norm)
        self._layers = [_Layer(index, layer) for index, layer in enumerate(base.layers)]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Say whether a model is of a class whose arithmetic this is, whole and without adapters."""
        linears = [part for name, part in model.named_modules() if name.endswith("_proj")]
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        return (
            type(model) in _CLASSES
            and kinds == {"full_attention"}
            and model.config.hidden_act == "silu"
            and all(type(part) is nn.Linear and type(part.weight) is nn.Parameter for part in linears)
            # What is cut over ranks computes with hooks.
            and not any(part._forward_hooks or part._forward_pre_hooks for part in model.base_model.modules())
        )

    def __call__(self, rows: RowsWithIds) -> Tensor:
        """Return the last hidden state of each token."""
        states = self._embed(rows.tokens)
        cos, sin = (part.transpose(0, 1) for part in self._rotate(states, rows.position_ids))
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for layer in self._layers:
            states = layer(states, cos, sin, rows)
        return self._norm(states)


class _Layer:
    """One layer: attention, then the MLP."""

    def __init__(self, index: int, layer: _DecoderLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._index, self._scaling, self._head_dim = index, attention.scaling, attention.head_dim
        self._norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self._query, self._key, self._value, self._out = (
            (part.weight, part.bias)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        )
        self._gate, self._up, self._down = (
            (part.weight, part.bias) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        parts = dict(cast("nn.Module", attention).named_children())
        self._head_norms = (_norm(parts["q_norm"]), _norm(parts["k_norm"])) if "q_norm" in parts else None

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor, rows: RowsWithIds) -> Tensor:
        """[B, E], [B, 1, D] twice -> [B, E]."""
        linear, shape = functional.linear, (len(states), -1, self._head_dim)
        hidden = self._norms[0](states)
        query, key = linear(hidden, *self._query).view(shape), linear(hidden, *self._key).view(shape)
        if self._head_norms is not None:
            query, key = self._head_norms[0](query), self._head_norms[1](key)
        value = linear(hidden, *self._value).view(shape)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        attended = rows.attend(self._index, query, key, value, self._scaling)
        states = linear(attended.view(len(states), -1), *self._out).add_(states)
        hidden = self._norms[1](states)
        inner = functional.silu(linear(hidden, *self._gate), inplace=True).mul_(linear(hidden, *self._up))
        return linear(inner, *self._down).add_(states)


def check_decoder(model: PreTrainedModel, decoder: PlainDecoder) -> None:
    """Compare the two ways through a model on a few tokens.

    Raises:
        ModelError: they differ.
    """
    tokens = torch.arange(5, device=model.device) % model.config.vocab_size
    ours, theirs = (way(_NoCache(tokens)) for way in (decoder, Backbone(model)))
    difference, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= _TOLERANCES[model.dtype] * scale and bool(theirs.isfinite().all()):
        raise ModelError(
            f"{type(model).__name__} decoded token by token differs from its own code by {difference:.2g} in states "
            f"of up to {scale:.2g}; this is a mistake in rallypoint, please report it with config.json"
        )


class _NoCache(RowsWithIds):
    """A stand-in for attention that needs all of query, key and value."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.position_ids = tokens, 3 * tokens.unsqueeze(0)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        del limits
        share = query.shape[1] // key.shape[1]
        seen = (key * scaling + value / (layer + 1)).repeat_interleave(share, 1)
        return query + seen


class ShapeProbe(Rows):
    """See `Rows`; asks a model for the shapes of its layers."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, int, int, Tensor]] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, limits: Limits = NO_LIMITS
    ) -> Tensor:
        """See `Rows.attend`."""
        del layer, value, scaling, limits
        self.layers.append((query.shape[1], key.shape[1], key.shape[2], key))
        return query


def _norm(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return what a norm does, without what its backward pass would need."""
    if not isinstance(norm, RMSNorm):
        return norm
    weight, eps = norm.weight, norm.eps
    return lambda states: functional.rms_norm(states, weight.shape, weight, eps)


def _rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn halves against each other; the first half of `sin` is negative already."""
    return (states * cos).addcmul_(states.roll(states.shape[-1] // 2, -1), sin)
