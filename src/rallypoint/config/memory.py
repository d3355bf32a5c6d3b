"""How much memory a role takes in each of its processes, predicted from the config.

Counted is what a process holds at its peak beyond Python, torch and Ray themselves. Weights, gradients and what the
optimizer remembers follow from the number of parameters. Activations and cache follow from the caps in the config: they
are what full micro-batches of the longest rows need. `benchmarks/memory.py` has the prediction beside runs, and every
run measures its own (`observability/memory.py`).
"""

from __future__ import annotations

import dataclasses

from rallypoint.config.shape import ModelShape
from rallypoint.config.tree import RoleName, RunConfig

_BYTES = {"float32": 4, "bfloat16": 2}
_WIDE = 4
"""Bytes of a number of the optimizer: gradients, two moments, and the masters of weights that are narrower."""
_LONGEST_WITH_SCORES = 512
_QUERIES_PER_BLOCK = 64
_CHUNK_BYTES = 32 * 2**20
"""Of the float32 logits that exist at once in a forward or backward pass."""
_SAMPLED_LOGITS = 5
"""Float32 tensors of [rows, vocabulary] that a token is drawn with: logits, scaled, log-softmax, exp, product."""


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
    sleeps: bool
    """Whether nothing of it stays while other roles have their turn."""
    borrowed: int = 0
    """What another role holds, and wakes for this one's turn."""

    @property
    def held(self) -> int:
        """What stays while other roles have their turn."""
        return 0 if self.sleeps else self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it, while the role has its turn."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


def role_memory(config: RunConfig, role: RoleName, shape: ModelShape) -> RoleMemory:
    """Predict the memory of a role."""
    size = _BYTES[config.model.dtype]
    learner = {"actor": config.actor, "critic": config.critic}.get(role)
    sizes = config.mesh(role)
    # Every rank has its part of the matrices, and of what is remembered of them.
    cut = sizes["dp_shard"] * sizes["tp"]
    whole = shape.num_critic_parameters if role == "critic" else shape.num_parameters
    parameters = trained = whole // cut
    if (lora := config.model.lora) is not None:
        adapters = shape.num_adapter_parameters(lora)
        parameters = (whole + adapters) // cut
        trained = (adapters + (shape.hidden_size + 1 if role == "critic" else 0)) // cut
    own = trained if role == "reference" and config.reference_shares_actor else parameters
    shares_actor = role == "rollout" and config.rollout_shares_actor
    if role == "rollout":
        activations = _SAMPLED_LOGITS * 4 * shape.vocab_size * _groups_together(config) * config.rollout.group_size
    else:
        activations = _forward_bytes(config, shape, role)
    if learner is not None:
        training = _training_bytes(config, shape, role, num_parts=learner.num_mini_batches)
        # Copies of a model add up their gradients as one flat copy of them, when the activations are gone.
        flat = trained * _WIDE if sizes["dp_replicate"] > 1 else 0
        activations = max(activations, training, flat)
    return RoleMemory(
        role=role,
        pool=config.roles[role].pool,
        num_ranks=config.num_ranks(role),
        weights=0 if shares_actor else own * size,
        gradients=trained * _WIDE if learner else 0,
        optimizer=trained * _WIDE * (2 if size == _WIDE else 3) if learner else 0,
        activations=activations,
        cache=_cache_bytes(config, shape, size) if role == "rollout" else 0,
        sleeps=role in config.sleeping,
        borrowed=parameters * size if shares_actor and "actor" in config.sleeping else 0,
    )


def _forward_bytes(config: RunConfig, shape: ModelShape, role: RoleName) -> int:
    """Return the most that a full micro-batch needs in a pass without gradients: in a layer, or in the head."""
    size, tokens = _BYTES[config.model.dtype], _micro_batch_tokens(config, role, num_parts=1)
    in_layer = tokens * shape.live_bytes(size, _scores_per_token(config))
    return _on_heap(config, max(in_layer, 0 if role == "critic" else _head_bytes(config, shape, tokens)))


def _training_bytes(config: RunConfig, shape: ModelShape, role: RoleName, *, num_parts: int) -> int:
    """Return the most that a full micro-batch needs, forward and backward; `num_parts` is of mini-batches an epoch.

    The peak is where the backward pass begins, in the head, or in a layer: what is kept, and what is alive besides.
    """
    size, tokens = _BYTES[config.model.dtype], _micro_batch_tokens(config, role, num_parts=num_parts)
    of_layer = tokens * shape.kept_bytes(size, _scores_per_token(config))
    of_input = tokens * size * shape.hidden_size
    kept, in_layer = {
        "keep": (shape.num_layers * of_layer, 0),
        # One layer at a time is computed again from its input.
        "checkpoint": (shape.num_layers * of_input, of_layer),
        # Inputs go and come one at a time, beside the layer that is at work.
        "offload": (min(2, shape.num_layers) * of_input, of_layer),
    }[config.engine.activations]
    final_norm = tokens * shape.hidden_size * (4 + 4 + size)
    at_head = final_norm + (0 if role == "critic" else _head_bytes(config, shape, tokens))
    # Gradients of the MLP's two halves and of the residual stream.
    at_layer = in_layer + tokens * size * (2 * shape.mlp_size + 3 * shape.hidden_size)
    return _on_heap(config, kept + max(at_head, at_layer))


def _head_bytes(config: RunConfig, shape: ModelShape, tokens: int) -> int:
    """Return what logprobs of the responses need: a chunk of logits, states and gradients of the head's weight."""
    size = _BYTES[config.model.dtype]
    num_outputs = tokens * config.rollout.max_response_tokens // config.max_row_tokens
    # Logits as they are multiplied, in float32, and their softmax.
    of_row = shape.vocab_size * (8 + (size if size < 4 else 0))
    chunk = min(num_outputs, max(1, _CHUNK_BYTES // (4 * shape.vocab_size))) * of_row
    weight = shape.vocab_size * shape.hidden_size * (4 + 2 * size)
    return chunk + weight + 2 * num_outputs * shape.hidden_size * size


def _micro_batch_tokens(config: RunConfig, role: RoleName, *, num_parts: int) -> int:
    """Return the tokens of the largest micro-batch when all rows are as long as they may be."""
    row = config.max_row_tokens
    num_rows = -(-config.num_rows // num_parts // config.num_parts(role))
    most_together = max(1, config.engine.max_tokens_per_micro_batch // row)
    num_micro_batches = -(-num_rows // most_together)
    return -(-num_rows // num_micro_batches) * row // config.mesh(role)["sp"]


def _scores_per_token(config: RunConfig) -> int:
    """Return how many tokens every head has scores for, on average over a row.

    The longest rows go through the fused kernel, which keeps none, and on accelerators all do. Elsewhere a block of
    queries has scores for itself and what is before it.
    """
    if config.cluster.device != "cpu":
        return 0
    longest = min(config.max_row_tokens, _LONGEST_WITH_SCORES)
    stops = [*range(_QUERIES_PER_BLOCK, longest, _QUERIES_PER_BLOCK), longest]
    return sum(stop * (stop - start) for start, stop in zip([0, *stops], stops, strict=False)) // longest


def _cache_bytes(config: RunConfig, shape: ModelShape, size: int) -> int:
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


def _on_heap(config: RunConfig, num_bytes: int) -> int:
    """Return what tensors of a pass take of a process: on CPUs more than they have, because freed blocks stay."""
    return round(num_bytes * (_HEAP if config.cluster.device == "cpu" else 1.0))


_HEAP = 1.2
