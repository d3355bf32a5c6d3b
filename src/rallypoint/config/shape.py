"""The sizes of a decoder, as far as they are known before it is loaded: from the config, or from config.json."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.config.recipes import RoleName
from rallypoint.config.sections.material import CreateModelConfig, LoRAConfig
from rallypoint.config.tree import RunConfig
from rallypoint.families import FAMILIES, small_experts, small_linear_attention

_DIGITS_VOCABULARY = 20

_PUBLISHED = Path(__file__).parent / "models"
"""config.json of models that shipped recipes name, so that their plans are known before anything is downloaded."""

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
"""Fields of config.json that every plain decoder has."""


@dataclasses.dataclass(frozen=True, slots=True)
class LinearAttentionShape:
    """The sizes of a hybrid's layers of linear attention (`models/linear_attention.py`)."""

    num_layers: int
    num_keys: int
    """Heads of queries and keys."""
    num_values: int
    key_dim: int
    value_dim: int
    width: int
    """Tokens that the convolution sees."""

    @property
    def num_channels(self) -> int:
        """Channels of queries, keys and values: of the convolution."""
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    @property
    def widths(self) -> dict[str, int]:
        """Products of a layer -> their width beside that of the residual stream."""
        values = self.num_values * self.value_dim
        gates = {"in_proj_b": self.num_values, "in_proj_a": self.num_values}
        return {"in_proj_qkv": self.num_channels, "in_proj_z": values, "out_proj": values, **gates}

    def num_parameters(self, hidden_size: int) -> int:
        """Weights of a layer, without the norm before it."""
        products = hidden_size * sum(self.widths.values())
        return products + self.num_channels * self.width + 2 * self.num_values + self.value_dim

    def state_bytes(self, size: int) -> int:
        """Return what a sequence remembers in a layer; `size` is the bytes of a number of the model."""
        return 4 * self.num_values * self.key_dim * self.value_dim + size * (self.width - 1) * self.num_channels

    def kept_bytes(self, size: int) -> int:
        """Return what a layer keeps of a token for its backward pass, in chunks of 64 tokens.

        Taps and sum of the convolution; then, in float32, channels twice, eight tensors of the size of value heads'
        keys, five of values, and five of a chunk's scores.
        """
        of_heads = self.num_values * (8 * self.key_dim + 5 * self.value_dim + 5 * 64)
        return size * (self.width + 1) * self.num_channels + 4 * (2 * self.num_channels + of_heads)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder that memory follows from."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_embeddings: bool
    query_key_norm: bool
    model_type: str = "llama"
    """The family, as in config.json."""
    num_sparse_layers: int = 0
    """Layers with a mixture of experts in place of the MLP."""
    num_experts: int = 0
    """Experts of a sparse layer."""
    num_chosen_experts: int = 0
    """Experts that a token is sent to."""
    expert_size: int = 0
    """The width inside an expert."""
    linear: LinearAttentionShape | None = None
    """Layers of linear attention in place of some with attention, whose queries then have a gate each."""
    caps_scores: bool = False
    """Whether scores of attention are bent to stay below a bound, which no fused kernel knows."""

    @property
    def num_attentions(self) -> int:
        """Layers with attention that is not linear."""
        return self.num_layers - (0 if self.linear is None else self.linear.num_layers)

    @property
    def num_uncut_parameters(self) -> int:
        """Weights that every rank of `tp` has whole, beside small ones."""
        return 0 if self.linear is None else self.linear.num_layers * self.linear.num_parameters(self.hidden_size)

    def state_bytes(self, size: int) -> int:
        """Return what a sequence remembers in all layers of linear attention; `size` is the bytes of a number."""
        return 0 if self.linear is None else self.linear.num_layers * self.linear.state_bytes(size)

    @property
    def mlp_size(self) -> int:
        """Width that a token passes inside the MLP, or inside all of its experts; the mean over the layers."""
        dense = (self.num_layers - self.num_sparse_layers) * self.intermediate_size
        return (dense + self.num_sparse_layers * self.num_chosen_experts * self.expert_size) // self.num_layers

    @property
    def shared_by_tensor_parallel_ranks(self) -> dict[str, int]:
        """Parts that tensor-parallel ranks share equally -> how many there are."""
        shared = {"attention heads": self.num_heads, "key/value heads": self.num_key_value_heads}
        if self.num_sparse_layers:
            shared["experts"] = self.num_experts
        if self.num_sparse_layers < self.num_layers:
            shared["columns of the MLP"] = self.intermediate_size
        return shared

    def part(self, tp: int) -> ModelShape:
        """Return the sizes of what a rank of `tp` computes: some of the heads, columns, experts' work, and tokens."""
        return dataclasses.replace(
            self,
            num_heads=-(-self.num_heads // tp),
            num_key_value_heads=-(-self.num_key_value_heads // tp),
            intermediate_size=-(-self.intermediate_size // tp),
            expert_size=-(-self.expert_size // tp),
            vocab_size=-(-self.vocab_size // tp),
        )

    @property
    def num_backbone_parameters(self) -> int:
        """Weights of the layers and norms, as in Llama, Qwen3, Qwen3-MoE and Qwen3.5."""
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value) + (2 * self.head_dim if self.query_key_norm else 0)
        attention += 0 if self.linear is None else self.hidden_size * query  # gates
        attentions = self.num_attentions * attention + self.num_uncut_parameters
        mlp = 3 * self.hidden_size * self.intermediate_size
        experts = self.num_experts * self.hidden_size * (3 * self.expert_size + 1)  # with the router
        mlps = (self.num_layers - self.num_sparse_layers) * mlp + self.num_sparse_layers * experts
        return attentions + self.num_layers * 2 * self.hidden_size + mlps + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights of the causal language model."""
        embeddings = self.vocab_size * self.hidden_size
        return self.num_backbone_parameters + embeddings * (1 if self.tie_embeddings else 2)

    @property
    def num_critic_parameters(self) -> int:
        """Weights of a token classifier with one label on the same backbone."""
        return self.num_backbone_parameters + self.vocab_size * self.hidden_size + self.hidden_size + 1

    @property
    def num_reward_parameters(self) -> int:
        """Weights of a sequence classifier with one label, which has no bias."""
        return self.num_critic_parameters - 1

    def num_adapter_parameters(self, lora: LoRAConfig) -> int:
        """Weights of A and B of the adapted layers; of an adapter in a folder, of its rank and all layers."""
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        gated = query * (1 if self.linear is None else 2)
        widths = {"q_proj": gated, "k_proj": key_value, "v_proj": key_value, "o_proj": query}
        layers = dict.fromkeys(widths, self.num_attentions)
        widths |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.intermediate_size)
        if (linear := self.linear) is not None:
            layers |= dict.fromkeys(linear.widths, linear.num_layers)
            widths |= linear.widths
        adapted = [
            layers.get(name, self.num_layers - self.num_sparse_layers) * (self.hidden_size + width)  # but for experts
            for name, width in widths.items()
            if any(target in (name, "all-linear") or target.endswith(f".{name}") for target in lora.target_modules)
        ]
        return _rank_of(lora) * sum(adapted)

    @property
    def attention_cost(self) -> float:
        """Work of one pair of tokens in the attention, where the products with weights of one token are 1."""
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attending = self.num_attentions / self.num_layers
        return 2 * query * attending / (self.hidden_size * (2 * query + 2 * key_value + 3 * self.mlp_size))

    def kept_bytes(self, size: int) -> int:
        """Return what a layer keeps of a token for the backward pass, outside its attention.

        Norms keep their input, a float32 for each, and what they return; attention what it returns; the MLP four
        tensors. `size` is the bytes of a number.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norms = 2 * (2 * self.hidden_size * size + 4)
        if self.query_key_norm:  # what these return is not kept
            norms += (query + key_value) * size + (self.num_heads + self.num_key_value_heads) * 4
        most = query if self.linear is None else max(2 * query, self.linear.kept_bytes(size) // size)
        return norms + size * (most + 4 * self.mlp_size)

    def attended_bytes(self, size: int, num_scores: int) -> int:
        """Return what the attention of a layer keeps of a token of a row: query, key, value, and scores.

        Tokens that rows share are computed once, and attended to in every row.

        Args:
            size: bytes of a number.
            num_scores: tokens that every head has a score for.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return size * (query + 2 * key_value + self.num_heads * num_scores)

    def live_bytes(self, size: int) -> int:
        """Return the most that exists of a token in an MLP that keeps nothing, and of its residual stream and angles.

        The MLP has what goes in, gate, up, silu of the gate, and its product with up.
        """
        return size * (2 * self.hidden_size + 4 * self.mlp_size + 2 * self.head_dim)

    def attending_bytes(self, size: int) -> int:
        """Return what exists of a token while attention runs and keeps nothing, outside the rows.

        Residual stream and what its norm returns; query, key and value; the cosines and sines of its position.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return size * (2 * self.hidden_size + query + 2 * key_value + 2 * self.head_dim)

    def folded_bytes(self, size: int, num_scores: int, num_block_scores: int) -> int:
        """Return the most that exists of a token of a row meanwhile: query, key, value, the output, and shares.

        Args:
            size: bytes of a number.
            num_scores: tokens that every head has a share for.
            num_block_scores: likewise, of the largest block, which also has scores.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return size * (2 * query + 2 * key_value + self.num_heads * (num_scores + num_block_scores))


def shape_of(config: RunConfig) -> ModelShape | None:
    """Return the model's shape from the config or from its folder; None when that cannot be known yet."""
    made = config.model.create
    if made is not None:
        return _created_shape(made)
    return read_shape(config.model.path) if config.model.path is not None else None


def role_shapes(config: RunConfig, role: RoleName) -> tuple[ModelShape | None, ...]:
    """Return the shapes of a role's models; the critic's is taken to be the actor's."""
    if role in ("teacher", "reward"):
        return tuple(map(read_shape, config.own_models[role]))
    return (shape_of(config),)


def read_shape(path: str | Path) -> ModelShape | None:
    """Read a shape from a folder's config.json, or a published model's by its name on the hub; None if it has none.

    >>> shape = read_shape("Qwen/Qwen3-0.6B")
    >>> shape.num_parameters
    596049920
    """
    return _read(Path(path).expanduser() / "config.json") or _read(_PUBLISHED / f"{str(path).replace('/', '--')}.json")


def _read(file: Path) -> ModelShape | None:
    try:
        if not file.is_file():  # a pipe would be waited for
            return None
        return parse_shape(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def parse_shape(values: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape that the fields of a config.json tell of; None when it is not that of a plain decoder."""
    try:
        values = values.get("text_config", values)  # of a model that sees, too
        heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
        model_type = str(values.get("model_type", ""))
        family = FAMILIES.get(model_type)
        if not all(int(values[name]) >= 1 for name in SIZES):
            return None
        return ModelShape(
            num_layers=int(values["num_hidden_layers"]),
            hidden_size=hidden,
            num_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            intermediate_size=int(values["intermediate_size"]),
            vocab_size=int(values["vocab_size"]),
            tie_embeddings=bool(values.get("tie_word_embeddings", family is not None and family.ties_embeddings)),
            query_key_norm=family is not None and family.norms_heads,
            model_type=model_type,
            caps_scores=bool(values.get("attn_logit_softcapping")),
            linear=_read_linear_attention(values),
            **_read_experts(values),
        )
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return None


def _rank_of(lora: LoRAConfig) -> int:
    """Return the rank, which a folder knows of its adapter."""
    try:
        return int(json.loads((Path(lora.path or "") / "adapter_config.json").read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, TypeError, KeyError):
        return lora.rank


def _read_experts(values: Mapping[str, Any]) -> dict[str, int]:
    """Read the fields of a mixture of experts as Qwen and transformers name them; nothing for a dense model."""
    num_experts = values.get("num_experts") or values.get("num_local_experts")
    if not num_experts:
        return {}
    dense, every = values.get("mlp_only_layers") or (), int(values.get("decoder_sparse_step") or 1)
    layers = range(int(values["num_hidden_layers"]))
    return {
        "num_sparse_layers": sum(layer not in dense and (layer + 1) % every == 0 for layer in layers),
        "num_experts": int(num_experts),
        "num_chosen_experts": int(values["num_experts_per_tok"]),
        "expert_size": int(values["moe_intermediate_size"]),
    }


def _read_linear_attention(values: Mapping[str, Any]) -> LinearAttentionShape | None:
    """Read the fields of a hybrid as Qwen3.5 and transformers name them; None if all layers have attention."""
    if "linear_num_key_heads" not in values:
        return None
    num_layers, every = int(values["num_hidden_layers"]), int(values.get("full_attention_interval") or 4)
    kinds = values.get("layer_types")
    num_linear = num_layers - num_layers // every if kinds is None else list(kinds).count("linear_attention")
    fields = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    return LinearAttentionShape(num_linear, *(int(values[f"linear_{field}"]) for field in fields))


def _created_shape(made: CreateModelConfig) -> ModelShape:
    return ModelShape(
        num_layers=made.num_layers,
        hidden_size=made.hidden_size,
        num_heads=made.num_heads,
        num_key_value_heads=made.num_key_value_heads,
        head_dim=made.hidden_size // made.num_heads,
        intermediate_size=made.intermediate_size,
        vocab_size=_DIGITS_VOCABULARY,
        tie_embeddings=False,
        query_key_norm=FAMILIES[made.architecture].norms_heads,
        model_type=made.architecture,
        caps_scores=False,
        linear=_read_linear_attention(
            {"num_hidden_layers": made.num_layers}
            | small_linear_attention(made.architecture, made.num_heads, made.hidden_size // made.num_heads)
        ),
        **_read_experts(
            {"num_hidden_layers": made.num_layers, **small_experts(made.architecture, made.intermediate_size)}
        ),
    )


def misfit_of(num_ranks: int, sizes: Mapping[str, int]) -> str | None:
    """Return why some ranks cannot share a model, and how many could; None when they can.

    >>> misfit_of(3, {"attention heads": 18, "key/value heads": 8})
    '3 does not divide 8 key/value heads; choose 1 or 2'

    Args:
        num_ranks: ranks that share the model, along tp or sp.
        sizes: parts that they share equally -> how many there are.
    """
    left_over = [f"{size} {what}" for what, size in sizes.items() if size % num_ranks]
    if not left_over:
        return None
    common = math.gcd(*sizes.values())
    choices = [str(size) for size in range(1, common + 1) if common % size == 0]
    return f"{num_ranks} does not divide {_listed(left_over, 'and')}; choose {_listed(choices, 'or')}"


def _listed(items: Sequence[str], word: str) -> str:
    return f" {word} ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)
