"""What a config amounts to, computed without starting anything: batches, placement, memory.

The memory is an estimate of what a process holds at its peak beyond Python and torch themselves. Weights,
gradients and optimizer state follow from the number of parameters. Activations and cache follow from the
caps in the config, so they are upper bounds.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rallypoint.config.tree import CreateModelConfig, RoleName, RunConfig

_BYTES = {"float32": 4, "bfloat16": 2}
_DIGITS_VOCABULARY = 20


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

    @property
    def num_backbone_parameters(self) -> int:
        """Weights of the layers and norms, as in Llama and Qwen3."""
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value) + (2 * self.head_dim if self.query_key_norm else 0)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights of the causal language model."""
        embeddings = self.vocab_size * self.hidden_size
        return self.num_backbone_parameters + embeddings * (1 if self.tie_embeddings else 2)

    @property
    def num_critic_parameters(self) -> int:
        """Weights of a token classifier with one label on the same backbone."""
        return self.num_backbone_parameters + self.vocab_size * self.hidden_size + self.hidden_size + 1


@dataclasses.dataclass(frozen=True, slots=True)
class RoleMemory:
    """Bytes that one process holds for a role."""

    role: RoleName
    pool: str
    num_ranks: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    cache: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do in a step, where, and with how much memory."""

    num_prompts: int
    group_size: int
    num_rows: int
    max_tokens: int
    """Most tokens that a step can have, prompts included."""
    updates: Mapping[str, tuple[int, int, int]]
    """Learner -> (optimizer steps a training step, rows of a mini-batch, most micro-batches of one on a rank)."""
    num_parameters: int | None
    """None when nothing is known of the model yet, as it is on the hub."""
    memory: tuple[RoleMemory, ...]
    """Empty when the model is not known."""


def make_plan(config: RunConfig) -> Plan:
    """Compute the plan of a checked config."""
    learners = {"actor": config.actor, **({"critic": config.critic} if config.recipe == "ppo" else {})}
    cap, row = config.engine.max_tokens_per_micro_batch, config.max_row_tokens
    rows_per_micro_batch = max(1, cap // row)
    updates: dict[str, tuple[int, int, int]] = {}
    for role, learner in learners.items():
        rows = -(-config.num_rows // learner.num_mini_batches)
        rows_of_rank = -(-rows // config.num_ranks(cast("RoleName", role)))
        num_micro_batches = -(-rows_of_rank // rows_per_micro_batch)
        updates[role] = (learner.num_epochs * learner.num_mini_batches, rows, num_micro_batches)
    shape = shape_of(config)
    return Plan(
        num_prompts=config.rollout.num_prompts,
        group_size=config.rollout.group_size,
        num_rows=config.num_rows,
        max_tokens=config.num_rows * row,
        updates=updates,
        num_parameters=shape.num_parameters if shape else None,
        memory=tuple(_memory(config, role, shape) for role in config.roles) if shape else (),
    )


def shape_of(config: RunConfig) -> ModelShape | None:
    """Return the model's shape from the config or from its folder; None when that cannot be known yet."""
    made = config.model.create
    if made is not None:
        return _created_shape(made)
    return read_shape(Path(config.model.path).expanduser()) if config.model.path is not None else None


def read_shape(folder: Path) -> ModelShape | None:
    """Read a shape from config.json; None when it is not there, or not that of a plain decoder."""
    try:
        values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
        return ModelShape(
            num_layers=int(values["num_hidden_layers"]),
            hidden_size=hidden,
            num_heads=heads,
            num_key_value_heads=int(values.get("num_key_value_heads") or heads),
            head_dim=int(values.get("head_dim") or hidden // heads),
            intermediate_size=int(values["intermediate_size"]),
            vocab_size=int(values["vocab_size"]),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            query_key_norm="qwen3" in str(values.get("model_type", "")),
        )
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError):
        return None


def _created_shape(made: CreateModelConfig) -> ModelShape:
    return ModelShape(
        num_layers=made.num_layers,
        hidden_size=made.hidden_size,
        num_heads=made.num_heads,
        num_key_value_heads=made.num_key_value_heads,
        head_dim=made.hidden_size // made.num_heads,
        intermediate_size=made.intermediate_size,
        vocab_size=_DIGITS_VOCABULARY,
        tie_embeddings=made.tie_embeddings,
        query_key_norm=made.architecture == "qwen3",
    )


def _memory(config: RunConfig, role: RoleName, shape: ModelShape) -> RoleMemory:
    size, trained = _BYTES[config.model.dtype], role in {"actor", "critic"}
    parameters = shape.num_critic_parameters if role == "critic" else shape.num_parameters
    weights = 0 if role == "rollout" and config.rollout_shares_actor else parameters * size
    return RoleMemory(
        role=role,
        pool=config.roles[role].pool,
        num_ranks=config.num_ranks(role),
        weights=weights,
        gradients=parameters * size if trained else 0,
        optimizer=2 * parameters * size if trained else 0,
        activations=0 if role == "rollout" else _activations(config, shape, size, trained=trained, role=role),
        cache=_cache(config, shape, size) if role == "rollout" else 0,
    )


def _activations(config: RunConfig, shape: ModelShape, size: int, *, trained: bool, role: RoleName) -> int:
    """Estimate the activations of a full micro-batch: kept in all layers for a backward pass, in one without."""
    tokens = min(config.engine.max_tokens_per_micro_batch, config.num_rows * config.max_row_tokens)
    query, key_value = shape.num_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    scores = shape.num_heads * min(config.max_row_tokens, 512)
    layer = 8 * shape.hidden_size + 4 * shape.intermediate_size + 4 * query + 6 * key_value + 2 * scores
    logits = 0 if role == "critic" else 4 * shape.vocab_size * 4
    return tokens * (layer * size * (shape.num_layers if trained else 1) + logits)


def _cache(config: RunConfig, shape: ModelShape, size: int) -> int:
    """Keys and values of the rows that a process decodes together: prompts once a group, responses once a row."""
    rollout = config.rollout
    groups = min(-(-rollout.num_prompts // config.num_ranks("rollout")), rollout.max_batch_rows // rollout.group_size)
    tokens = groups * (config.data.max_prompt_tokens + rollout.group_size * rollout.max_response_tokens)
    return 2 * size * shape.num_layers * shape.num_key_value_heads * shape.head_dim * tokens
