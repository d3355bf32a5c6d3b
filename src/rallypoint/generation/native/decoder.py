"""The model as the engine runs it: tokens to last hidden states, and states to logits.

Owns: which models are plain decoders, their arithmetic, and where their weights are. What stands around the matrix
products of decoding takes longer than they do. So models of plain families (Llama, Qwen) run in about half the
operations of their own code, with which they are compared when an engine begins. All others run their own.

TorchScript reads the functions of `Network` (see `rallypoint.cpu.script`), so annotations must be types.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional
from transformers import PreTrainedModel

from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES
from rallypoint.generation.native.kv_cache import LayerShapes, Probe
from rallypoint.generation.native.recurrent import ByKind, DeltaShapes, is_recurrent, kinds_of_layers
from rallypoint.models import AttentionRows, lm_head
from rallypoint.models.head import logit_softcap, soft_capped
from rallypoint.models.kinds.linear_attention import DeltaRows
from rallypoint.models.layers import joined
from rallypoint.models.norm import RMSNorm
from rallypoint.models.tensor_parallel import peers_of, whole_logits

_ROWS_BY_COLUMNS, _WIDTH_BY_COLUMNS = 32, 512
"""Least rows and width of states for products on a CPU in bfloat16 to be computed as weights times states. What stands
on the right is packed by oneDNN at every call: that should be the smaller one. For small ones it does not matter, and
results that lie column by column cost more than that saves."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Differences from a model's own code, as a part of the largest number."""


class DecoderRows(AttentionRows, DeltaRows, Protocol):
    """Rows with the place of each of their tokens; see `rallypoint.models.Rows`."""

    @property
    def tokens(self) -> Tensor:
        """[B] int64."""
        ...

    @property
    def position_ids(self) -> Tensor:
        """[1, B] int64."""
        ...


class Linear(NamedTuple):
    """Linear layers of one input."""

    weights: list[Tensor]
    """[outputs, inputs] each; one for all where they lie one after another."""
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
    """Epsilon of all norms."""
    num_heads: int
    """Number of query heads."""
    num_turned: int
    """Heads of queries and keys."""
    scaling: float


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
    """Add the output of attention, [B, H * D], to the states, and then that of the MLP: [B, E]."""
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
    if not is_scripting() and not computes_in_pieces(states.device):
        min_rows = states.shape[0] + 1  # accelerators need no such detour
    if states.dtype == torch.bfloat16 and states.shape[0] >= min_rows and states.shape[1] >= min_width:
        parts = [torch.mm(weight, states.t()) for weight in layers.weights]
        out = (parts[0] if len(parts) == 1 else torch.cat(parts)).t()
        return out if bias is None else out.add_(bias)
    if len(layers.weights) == 1:
        return functional.linear(states, layers.weights[0], bias)
    out = torch.cat([functional.linear(states, weight) for weight in layers.weights], -1)
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


def by_operators(network: Network, rows: DecoderRows) -> Tensor:
    """Return the last hidden state of each token: [B, E]."""
    states, cos, sin = enter(network, rows.tokens, rows.position_ids)
    for index, layer in enumerate(network.layers):
        turned, value = before_attention(network, layer, states, cos, sin)
        attended = rows.attend(index, *turned.tensor_split([network.num_heads], 1), value, network.scaling)
        states = after_attention(network, layer, states, attended.reshape(len(states), -1))
    return norm(states, network.norm, network.eps)


Arithmetic: TypeAlias = Callable[[Network, DecoderRows], Tensor]
"""Function of plain decoders: `by_operators`, or one that gives the same."""


class Decoder:
    """A model without a cache: through its own code, or by plain arithmetic where it is plain."""

    def __init__(self, model: PreTrainedModel, arithmetic: Arithmetic = by_operators) -> None:
        """Take a model whose weights may change, and move, but are parameters of the same modules for good."""
        self.model, self._arithmetic = model, arithmetic
        self._plain: PlainDecoder | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it runs on plain arithmetic; False before `probe`."""
        return self._plain is not None

    @property
    def is_recurrent(self) -> bool:
        """Whether it has layers of linear attention."""
        return is_recurrent(self.model)

    @property
    def may_be_captured(self) -> bool:
        """Whether a step of decoding is all that a pass does: nobody records it, and no state or rank waits for it.

        Code of a model that looks at numbers cannot be captured, which capturing finds out.
        """
        is_known = type(self.model).__module__.startswith("transformers.")
        return is_known and not self.is_recurrent and peers_of(self.model).size == 1

    @property
    def network(self) -> Network | None:
        """The weights of a plain decoder; None if it is not plain."""
        return None if self._plain is None else self._plain.network

    @property
    def plain_head(self) -> Linear | None:
        """The head, if it is a linear layer, whole and without adapters."""
        head = lm_head(self.model)
        return _linear(cast("nn.Linear", head)) if is_plain(head) else None

    @property
    def hidden_size(self) -> int:
        """E: width of the hidden states."""
        return int(self.model.config.get_text_config().hidden_size)

    def __call__(self, rows: DecoderRows) -> Tensor:
        """Return the last hidden state of each token: [B, E]."""
        return run_own_code(self.model, rows) if self._plain is None else self._plain(rows)

    def logits(self, states: Tensor) -> Tensor:
        """[B, E] -> [B, V]."""
        return soft_capped(whole_logits(self.model, states), logit_softcap(self.model.config))

    def probe(self) -> LayerShapes:
        """Find out whether the model is plain, and the shapes of its layers.

        Raises:
            ModelError: see `check_decoder`.
        """
        if self._plain is None and PlainDecoder.fits(self.model):
            plain = PlainDecoder(self.model, self._arithmetic)
            check_decoder(self.model, plain)
            self._plain = plain
        probe = Probe(self.model)
        run_own_code(self.model, probe)
        assert len(set(probe.layers)) == 1, "layers are alike"
        delta = None
        if probe.states is not None:
            delta = DeltaShapes(len(kinds_of_layers(self.model)) - len(probe.layers), *probe.states)
        return LayerShapes(len(probe.layers), *probe.layers[0], probe.like, delta)


def run_own_code(model: PreTrainedModel, rows: DecoderRows) -> Tensor:
    """Send tokens through a model by its own code: [B] -> [B, E]."""
    tokens, places = rows.tokens.unsqueeze(0), rows.position_ids
    seen = ByKind(rows, kinds_of_layers(model)) if is_recurrent(model) else rows
    return model.base_model(input_ids=tokens, position_ids=places, use_cache=False, rows=seen).last_hidden_state[0]


class PlainDecoder:
    """Passes of a plain decoder, in fewer operations."""

    def __init__(self, model: PreTrainedModel, arithmetic: Arithmetic = by_operators) -> None:
        """Take a model that `fits`, and what computes it."""
        self._base: Any = model.base_model
        self._arithmetic = arithmetic
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
            and cast("Any", model.base_model).rotary_emb.rope_type not in ("dynamic", "longrope")
            and all(map(is_plain, linears))
            and all(isinstance(part, RMSNorm) and part.offset == 0 for part in norms)
            and not any(map(_has_hooks, model.base_model.modules()))
        )

    def __call__(self, rows: DecoderRows) -> Tensor:
        """Return the last hidden state of each token."""
        return self._arithmetic(self.network, rows)

    @property
    def network(self) -> Network:
        """The weights where they are, also of a parameter whose `data` is another tensor now."""
        addresses, network = self._found
        if addresses != (addresses := self._addresses()):
            network = _network(self._base)
            self._found = addresses, network  # at once, as lanes ask side by side
        return network

    def _addresses(self) -> list[int]:
        """Return the addresses of weights, which may lie one after another so that `network` has one view of all."""
        addresses: list[int] = []
        for layer in self._base.layers:
            attention, mlp = layer.self_attn, layer.mlp
            linears = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
            addresses += [linear.weight.data_ptr() for linear in linears]
        return addresses


def _network(base: Any) -> Network:
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


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = {name: part.weight for name, part in attention.named_children() if isinstance(part, RMSNorm)}
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
    """Return whether a part of a model is a linear layer, whole and without adapters."""
    return type(part) is nn.Linear and type(part.weight) is nn.Parameter and not _has_hooks(part)


def _has_hooks(part: nn.Module) -> bool:
    """Say whether a part does more than its class says, as what is cut over ranks."""
    return bool(part._forward_hooks or part._forward_pre_hooks)


@torch.no_grad()
def check_decoder(model: PreTrainedModel, decoder: PlainDecoder) -> None:
    """Compare plain arithmetic with the model's own code on a few tokens.

    Raises:
        ModelError: they differ.
    """
    ours, theirs = decoder(Probe(model)), run_own_code(model, Probe(model))
    difference, scale = float((ours - theirs).abs().max()), float(theirs.abs().max())
    if not difference <= _TOLERANCES[model.dtype] * scale and bool(theirs.isfinite().all()):
        raise ModelError(
            f"{type(model).__name__} decoded token by token differs from its own code by {difference:.2g} in states "
            f"of up to {scale:.2g}; this is a mistake in rallypoint, please report it with config.json"
        )
