"""What a config amounts to, computed without starting anything: batches, placement, memory.

The memory is what a process holds at its peak beyond Python, torch and Ray themselves. Weights, gradients and
optimizer state follow from the number of parameters. Activations and cache follow from the caps in the config: they
are what full micro-batches of the longest rows need. `benchmarks/memory.py` has the prediction beside runs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rallypoint.config.tree import CreateModelConfig, RoleName, RunConfig

_BYTES = {"float32": 4, "bfloat16": 2}
_WIDE = 4
"""Bytes of a number of the optimizer: gradients, two moments, and the masters of weights that are narrower."""
_DIGITS_VOCABULARY = 20
_LONGEST_WITH_SCORES = 512
_QUERIES_PER_BLOCK = 64
_HEAP = 1.35
"""What the C library's heap takes for a pass's tensors on CPUs, over their own size: 1.2 to 1.5 times, measured.

It keeps freed blocks in between. Giving every tensor its own pages would save that, and doubles the time of a step.
"""
_LOGITS = 5
"""Float32 tensors of [tokens, vocabulary] at the end of a forward pass: logits, scaled, log-softmax, exp, product."""


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

    @property
    def attention_cost(self) -> float:
        """Work of one pair of tokens in the attention, where the products with weights of one token are 1."""
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return 2 * query / (self.hidden_size * (2 * query + 2 * key_value + 3 * self.intermediate_size))

    def kept_bytes(self, size: int, num_scores: int) -> int:
        """Return what a layer keeps of a token for the backward pass.

        Norms keep their input and its normalized form, both in float32, and what they return; attention its queries,
        keys and values, the scores of earlier tokens, and its output; the MLP four tensors.

        Args:
            size: bytes of a number.
            num_scores: tokens that every head has a score for.
        """
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        norms = 2 * self.hidden_size * (4 + 2 * size) + (query + key_value) * (4 + size) * self.query_key_norm
        return norms + size * (2 * query + 2 * key_value + self.num_heads * num_scores + 4 * self.intermediate_size)

    def live_bytes(self, size: int, num_scores: int) -> int:
        """Return the most that exists of a token at one time while a layer runs, and keeps nothing."""
        query, key_value = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        attention = 3 * (query + 2 * key_value) + 2 * self.num_heads * num_scores
        return size * (2 * self.hidden_size + max(attention, 3 * self.intermediate_size))


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
    def held(self) -> int:
        """What stays while other roles have their turn."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it, while the role has its turn."""
        return self.held + self.activations + self.cache


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

    def process_memory(self, pool: str) -> int:
        """Return the bytes that a process of a pool holds at its peak: roles that share it take turns."""
        here = [memory for memory in self.memory if memory.pool == pool]
        return sum(memory.held for memory in here) + max((m.total - m.held for m in here), default=0)


def make_plan(config: RunConfig) -> Plan:
    """Compute the plan of a checked config."""
    learners = {"actor": config.actor, **({"critic": config.critic} if config.recipe == "ppo" else {})}
    cap, row = config.engine.max_tokens_per_micro_batch, config.max_row_tokens
    rows_per_micro_batch = max(1, cap // row)
    updates: dict[str, tuple[int, int, int]] = {}
    for role, learner in learners.items():
        rows = -(-config.num_rows // learner.num_mini_batches)
        rows_of_rank = -(-rows // config.num_parts(cast("RoleName", role)))
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


def attention_cost(config: RunConfig) -> float:
    """Return what rows are balanced by, see `ModelShape.attention_cost`; 0 while nothing is known of the model.

    The critic is taken to be of the actor's shape.
    """
    shape = shape_of(config)
    return shape.attention_cost if shape else 0.0


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
    size = _BYTES[config.model.dtype]
    learner = {"actor": config.actor, "critic": config.critic}.get(role)
    parameters = shape.num_critic_parameters if role == "critic" else shape.num_parameters
    weights = 0 if role == "rollout" and config.rollout_shares_actor else parameters * size
    activations = _sampling(config, shape) if role == "rollout" else _activations(config, shape, role, num_parts=None)
    if learner is not None:
        training = _activations(config, shape, role, num_parts=learner.num_mini_batches)
        # Ranks add up their gradients as one flat copy of them, when the activations are gone.
        copied = parameters * _WIDE if config.num_ranks(role) > 1 else 0
        activations = max(activations, training, copied)
    return RoleMemory(
        role=role,
        pool=config.roles[role].pool,
        num_ranks=config.num_ranks(role),
        weights=weights,
        gradients=parameters * _WIDE if learner else 0,
        optimizer=parameters * _WIDE * (2 if size == _WIDE else 3) if learner else 0,
        activations=activations,
        cache=_cache(config, shape, size) if role == "rollout" else 0,
    )


def _activations(config: RunConfig, shape: ModelShape, role: RoleName, *, num_parts: int | None) -> int:
    """Return the bytes of a full micro-batch's pass, forward only without `num_parts`, the mini-batches of an epoch.

    A backward pass begins with everything kept and the head's own, and adds what is alive in the last layer.
    """
    size, row = _BYTES[config.model.dtype], config.max_row_tokens
    rows_of_rank = -(-config.num_rows // (num_parts or 1) // config.num_parts(role))
    tokens = min(config.engine.max_tokens_per_micro_batch, rows_of_rank * row)
    # The longest rows go through the fused kernel, which keeps no scores, and on CUDA all do. Elsewhere a block of
    # queries has scores for itself and what is before it.
    longest = min(row, _LONGEST_WITH_SCORES) if config.cluster.device == "cpu" else 0
    num_scores = (longest + min(longest, _QUERIES_PER_BLOCK)) // 2
    kept = 0
    if num_parts:
        of_layer, inputs = shape.kept_bytes(size, num_scores), size * shape.hidden_size
        # Of layers that are computed again, all is kept for one at a time; offloaded inputs go and come one by one.
        num_inputs = {"keep": 0, "checkpoint": shape.num_layers, "offload": min(2, shape.num_layers)}
        num_whole = shape.num_layers if config.engine.activations == "keep" else 1
        kept = num_whole * of_layer + num_inputs[config.engine.activations] * inputs
    num_outputs = -(-tokens * config.rollout.max_response_tokens // row)
    logits = 0 if role == "critic" else _LOGITS * 4 * shape.vocab_size * num_outputs
    heap = _HEAP if config.cluster.device == "cpu" else 1.0
    return round(heap * (tokens * (kept + shape.live_bytes(size, num_scores)) + logits))


def _sampling(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of the logits from which all rows that are decoded together draw a token."""
    return _LOGITS * 4 * shape.vocab_size * _groups_together(config) * config.rollout.group_size


def _cache(config: RunConfig, shape: ModelShape, size: int) -> int:
    """Keys and values of the rows that a process decodes together: prompts once a group, responses once a row.

    Those of prompts exist twice, as the first pass left them and as rectangles.
    """
    rollout = config.rollout
    tokens = 2 * config.data.max_prompt_tokens + rollout.group_size * rollout.max_response_tokens
    per_token = 2 * size * shape.num_layers * shape.num_key_value_heads * shape.head_dim
    return per_token * _groups_together(config) * tokens


def _groups_together(config: RunConfig) -> int:
    """Return how many prompts a process of the rollout role decodes at a time."""
    rollout = config.rollout
    return min(
        -(-rollout.num_prompts // config.num_ranks("rollout")), max(1, rollout.max_batch_rows // rollout.group_size)
    )
