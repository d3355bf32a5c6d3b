"""The ways of tokens through the backbone of a model: its own code, or the plain arithmetic of a Llama or Qwen.

Owns: which models of a family that says so are plain, and where their weights are. The plain way is compared with the
model's own code whenever it is made, and whatever is not exactly of transformers' classes goes through its own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES
from rallypoint.generation.native.cpu.bags import Bags
from rallypoint.generation.native.plain import (
    Layer,
    Linear,
    Network,
    after_attention,
    before_attention,
    decode,
    enter,
    norm,
)
from rallypoint.generation.script import without_python
from rallypoint.models import Rows
from rallypoint.models.attention import NO_LIMITS, Limits
from rallypoint.models.layers import joined
from rallypoint.models.norm import RMSNorm

_MOVING_ROTATIONS = ("dynamic", "longrope")
"""Whose frequencies depend on the length of what is computed."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""As a part of the largest number."""


class RowsWithIds(Rows, Protocol):
    """Rows that say which tokens they are at; see `rallypoint.models.Rows`."""

    @property
    def tokens(self) -> Tensor:
        """[B] int64."""
        ...

    @property
    def position_ids(self) -> Tensor:
        """[1, B] int64."""
        ...

    @property
    def bags(self) -> Bags | None:
        """What they look at, where that is all that attention needs: then `attend` need not be called."""
        ...


class _Rotary(Protocol):
    rope_type: str
    inv_freq: Tensor
    attention_scaling: float


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
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm


class _Decoder(Protocol):
    """What the models of families that are plain have in common."""

    embed_tokens: nn.Embedding
    rotary_emb: _Rotary
    layers: Sequence[_DecoderLayer]
    norm: RMSNorm


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
    """The same for plain decoders, in fewer operations; see `rallypoint.generation.native.plain`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a model that `fits`."""
        self._base = cast("_Decoder", model.base_model)
        self._found = self._addresses(), _network(self._base)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Say whether a model is of a class whose arithmetic this is, whole and without adapters."""
        family, kind = FAMILIES.get(str(model.config.model_type)), type(model)
        linears = [part for name, part in model.named_modules() if name.endswith("_proj")]
        norms = [part for name, part in model.base_model.named_modules() if name.endswith("norm")]
        kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
        return (
            family is not None
            and family.is_plain
            and kind.__module__.startswith("transformers.")
            and kind.__name__.endswith("ForCausalLM")
            and kinds == {"full_attention"}
            and model.config.hidden_act == "silu"
            and cast("_Decoder", model.base_model).rotary_emb.rope_type not in _MOVING_ROTATIONS
            and all(map(is_plain, linears))
            and all(isinstance(part, RMSNorm) and part.offset == 0 for part in norms)
            and not any(map(_has_hooks, model.base_model.modules()))
        )

    def __call__(self, rows: RowsWithIds) -> Tensor:
        """Return the last hidden state of each token."""
        network = self.network
        if rows.bags is not None:
            return without_python(decode, rows.tokens.device)(network, rows.bags)
        states, cos, sin = enter(network, rows.tokens, rows.position_ids)
        for index, layer in enumerate(network.layers):
            turned, value = before_attention(network, layer, states, cos, sin)
            query, key = turned[:, : network.num_heads], turned[:, network.num_heads :]
            attended = rows.attend(index, query, key, value, network.scaling)
            states = after_attention(network, layer, states, attended.reshape(len(states), -1))
        return norm(states, network.norm, network.eps)

    @property
    def network(self) -> Network:
        """The weights where they are, also of a parameter whose `data` is another tensor now."""
        addresses, network = self._found
        if addresses != (addresses := self._addresses()):
            network = _network(self._base)
            self._found = addresses, network  # at once, as lanes ask side by side
        return network

    def _addresses(self) -> list[int]:
        """Return where weights are that may lie behind one another, and so be in `network` by a view of them all."""
        linears = (
            linear
            for layer in self._base.layers
            for linear in (
                *(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
                *(layer.mlp.gate_proj, layer.mlp.up_proj),
            )
        )
        return [linear.weight.data_ptr() for linear in linears]


def _network(base: _Decoder) -> Network:
    attention = base.layers[0].self_attn  # as in all layers
    num_heads, num_kv_heads = (part.out_features // attention.head_dim for part in (attention.q_proj, attention.k_proj))
    frequencies = base.rotary_emb.inv_freq.float()
    return Network(
        embeddings=base.embed_tokens.weight,
        frequencies=torch.cat((-frequencies, frequencies)),
        wave_height=base.rotary_emb.attention_scaling,
        layers=[_layer(layer) for layer in base.layers],
        norm=base.norm.weight,
        eps=base.norm.eps,
        num_heads=num_heads,
        num_turned=num_heads + num_kv_heads,
        scaling=attention.scaling,
    )


def _layer(layer: _DecoderLayer) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = {
        name: part.weight for name, part in cast("nn.Module", attention).named_children() if isinstance(part, RMSNorm)
    }
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        query_key_value=_linear(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=head_norms.get("q_norm"),
        key_norm=head_norms.get("k_norm"),
        out=_linear(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_linear(mlp.gate_proj, mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _linear(*linears: nn.Linear) -> Linear:
    weights: list[Tensor] = [linear.weight for linear in linears]
    together = joined(weights)
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(weights if together is None else [together], biases)


def is_plain(part: nn.Module) -> bool:
    """Say whether a part of a model is a linear layer, whole and without adapters."""
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter and not _has_hooks(part)


def _has_hooks(part: nn.Module) -> bool:
    """Say whether a part does more than its class says, as what is cut over ranks."""
    return bool(part._forward_hooks or part._forward_pre_hooks)


@torch.no_grad()
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


class _NoCache:
    """A stand-in for attention that needs all of query, key and value."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens, self.position_ids, self.bags = tokens, 3 * tokens.unsqueeze(0), None

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
