"""How much memory a role takes in each of its processes, predicted from the config.

Counted is what a process holds at its peak beyond Python, torch and Ray themselves. Weights, gradients and what the
optimizer remembers follow from the number of parameters. Activations and cache follow from the caps in the config: they
are what full micro-batches of the longest rows need. `benchmarks/memory.py` has the prediction beside runs, and every
run measures its own (`observability/memory.py`).
"""

from __future__ import annotations

import dataclasses

from rallypoint.config.lanes import max_lanes
from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.config.shape import ModelShape
from rallypoint.config.tree import RoleName, RunConfig

_BYTES = {"float32": 4, "bfloat16": 2}
_WIDE = 4
"""Bytes of a number of the optimizer: gradients, two moments, and the masters of weights that are narrower."""
_HEAP, _HEAP_OF_LANES, _CHECKPOINTED_HEAP = 1.4, 1.5, 2.0
"""What the C library's heap takes for a pass's tensors on CPUs, over their own size; measured. Threads have heaps of
their own, whose holes are of no use to the others; that was fitted to passes that keep activations.

It aligns tensors in a way that leaves holes which the next tensor of the same size does not fit into, and the more so
the more often layers are computed. Giving every tensor pages of its own would save that for 1.3 to 1.7 times the time.
"""
_LIBRARY_BYTES = 8 * 2**20
"""What a process on CPUs has once it has trained, beside all this: room that MKL works in, code, Python's objects.

Between turns 6.5 to 7 MiB were left over in float32 with models of 0.08M, 1M and 10M parameters alike; 8 fits the
demo's peaks better.
"""
_DECODER_BYTES = 15 * 2**20
"""What TorchScript keeps in a process on CPUs that samples, once it has compiled the decoder; fitted to the demo."""
_BFLOAT16_KERNEL_BYTES, _ADAPTER_KERNEL_BYTES = 85 * 2**20, 25 * 2**20
"""What oneDNN keeps on CPUs when a run has had two steps, and of the narrow products of adapters besides; measured.

It compiles a kernel for every shape of a product, and two lanes keep half as many each. Which shapes a run meets in its
first fifty steps makes some 40 to 80 MiB of difference, which are not predicted.
"""
_SERVER_BYTES = 930 * 2**20
"""What vLLM's own processes take on CPUs, beside weights and cache; measured. What a run measures is without them."""
_LONGEST_WITH_SCORES = 512
_QUERIES_PER_BLOCK, _QUERIES_PER_BLOCK_IN_HALF = 64, 192
_ALIGNMENT = 32
_PREFILL_TOKENS = 8192
"""Of prompts that go through the model at once."""
_CHUNK_BYTES, _KEPT_LOGITS_BYTES = 64 * 2**20, 256 * 2**20
"""Of the logits that the head makes in one product, and of those that it keeps for the backward pass."""
_CHUNK_BYTES_ON_ACCELERATORS, _KEPT_LOGITS_BYTES_ON_ACCELERATORS = 256 * 2**20, 2**30
"""Likewise, where not a strip of a chunk has room for a softmax in float32, forth and back, but all of it."""
_SAMPLED_LOGITS, _SAMPLED_BLOCK = 6, 256
"""Numbers of four bytes for every token of the vocabulary, filled up to blocks, that a token is drawn with: shares, and
sums of them in float64."""

CACHE_MARGIN = 0.1
"""Of what a process may have of an accelerator, left free by a cache that is sized by free memory: for holes between
tensors, libraries, captured steps."""


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
    least_cache: int = 0
    """What the cache shrinks to where the device has no more memory for it."""
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
    """Predict the memory of a role, whose model has a shape."""
    size = _BYTES[config.model.dtype]
    learner = {"actor": config.actor, "critic": config.critic}.get(role)
    sizes = config.mesh(role)
    # Every rank has its part of the matrices, and of what is remembered of them.
    cut = sizes["dp_shard"] * sizes["tp"]
    own_heads = {"critic": shape.num_critic_parameters, "reward": shape.num_reward_parameters}
    whole = own_heads.get(role, shape.num_parameters)
    parameters = trained = whole // cut
    if (lora := config.model.lora) is not None and role != "reward":
        adapters = shape.num_adapter_parameters(lora)
        parameters = (whole + adapters) // cut
        trained = (adapters + (shape.hidden_size + 1 if role == "critic" else 0)) // cut
    own = trained if role == "reference" and config.reference_shares_actor else parameters
    shares_actor = role == "rollout" and config.rollout_shares_actor
    computed = shape.part(sizes["tp"])
    activations = sampling_bytes(config, shape) if role == "rollout" else _forward_bytes(config, computed, role)
    if learner is not None:
        num_lanes = _num_lanes(config, role, gradient_bytes=trained * _WIDE)
        training = _training_bytes(config, computed, role, num_parts=learner.num_mini_batches, num_lanes=num_lanes)
        if num_lanes > 1:  # each adds up gradients by itself, and at the end of a pass has all that it gave besides
            training = max(training, num_lanes * trained * size) + (num_lanes - 1) * trained * _WIDE
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
        cache=_cache_bytes(config, shape) if role == "rollout" else 0,
        least_cache=least_tokens(config) * cache_bytes_per_token(config, shape) if role == "rollout" else 0,
        sleeps=role in config.sleeping,
        borrowed=parameters * size if shares_actor and "actor" in config.sleeping else 0,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """The largest micro-batch of a role when all rows are as long as they may be."""

    num_rows: int
    num_prompts: int
    """Each is computed once for its rows."""
    num_outputs: int
    """Tokens that the head is asked about."""
    row_tokens: int
    """Of a row, those that go through the layers: all but its last."""
    prompt_tokens: int
    num_scores: int
    """Of a slot, on average over its row."""
    num_block_scores: int
    """Likewise, of the largest block of queries."""

    @property
    def num_computed(self) -> int:
        """Tokens that go through the layers."""
        return self.num_rows * (self.row_tokens - self.prompt_tokens) + self.num_prompts * self.prompt_tokens

    @property
    def num_attended(self) -> int:
        """Slots of all rows."""
        return self.num_rows * _num_slots(self.row_tokens)

    def live_bytes(self, shape: ModelShape, size: int) -> int:
        """Return the most that a layer needs when it keeps nothing."""
        folded = self.num_attended * shape.folded_bytes(size, self.num_scores, self.num_block_scores)
        attending = folded + self.num_computed * shape.attending_bytes(size)
        return max(attending, self.num_computed * shape.live_bytes(size))

    def kept_bytes(self, shape: ModelShape, size: int) -> int:
        """Return what a layer keeps for its backward pass."""
        attended = self.num_attended * shape.attended_bytes(size, self.num_scores)
        return attended + self.num_computed * shape.kept_bytes(size)


def _forward_bytes(config: RunConfig, shape: ModelShape, role: RoleName) -> int:
    """Return the most that full micro-batches need in passes without gradients: in a layer, or in the head."""
    size, num_lanes = _BYTES[config.model.dtype], _num_lanes(config, role, gradient_bytes=0)
    full = _full_pass(config, shape, role, num_parts=1, num_lanes=num_lanes)
    states = 2 * full.num_outputs * shape.hidden_size * size
    has_logits = role not in ("critic", "reward")
    logits = _logits_bytes(config, full.num_outputs * shape.vocab_size, num_lanes, kept=False) if has_logits else 0
    return _on_heap(config, role, max(full.live_bytes(shape, size), states + logits), num_lanes=num_lanes)


def _num_lanes(config: RunConfig, role: RoleName, gradient_bytes: int) -> int:
    """Return the most lanes that passes may have, which the engine knows of rows only when they are there."""
    sizes = config.mesh(role)
    if config.cluster.device != "cpu" or sizes["dp_shard"] * sizes["sp"] * sizes["tp"] > 1:
        return 1
    room = config.engine.max_tokens_per_micro_batch // config.max_row_tokens
    return max(1, min(max_lanes(config.cluster.num_cpus_per_process, gradient_bytes), room))


def _training_bytes(config: RunConfig, shape: ModelShape, role: RoleName, *, num_parts: int, num_lanes: int) -> int:
    """Return the most that full micro-batches need, forward and backward; `num_parts` is of mini-batches an epoch.

    The peak is where the backward pass begins, in the head, or in a layer: what is kept, and what is alive besides.
    """
    size, full = _BYTES[config.model.dtype], _full_pass(config, shape, role, num_parts=num_parts, num_lanes=num_lanes)
    of_layer = full.kept_bytes(shape, size)
    of_input = full.num_computed * size * shape.hidden_size
    kept, in_layer = {
        "keep": (shape.num_layers * of_layer, 0),
        # One layer at a time is computed again from its input.
        "checkpoint": (shape.num_layers * of_input, of_layer),
        # Inputs go and come one at a time, beside the layer that is at work.
        "offload": (min(2, shape.num_layers) * of_input, of_layer),
    }[config.engine.activations]
    # Input and output of the last norm, the states that the head sees and their gradient, and the head itself.
    at_head = 2 * size * shape.hidden_size * (full.num_computed + full.num_outputs)
    if role != "critic":
        at_head += _logits_bytes(config, full.num_outputs * shape.vocab_size, num_lanes, kept=True)
        if config.model.lora is None:  # the gradient of its weight, and a part of that
            at_head += num_lanes * shape.vocab_size * shape.hidden_size * (4 + size)
    # Gradients of the MLP's two halves and of the residual stream.
    at_layer = in_layer + full.num_computed * size * (2 * shape.mlp_size + 3 * shape.hidden_size)
    is_checkpointed = config.engine.activations != "keep"
    return _on_heap(config, role, kept + max(at_head, at_layer), checkpointed=is_checkpointed, num_lanes=num_lanes)


def _logits_bytes(config: RunConfig, num_logits: int, num_lanes: int, *, kept: bool) -> int:
    """Return what the head's logits take at most: a chunk, what is kept for the backward pass, and of softmaxes."""
    size = _BYTES[config.model.dtype]
    if config.cluster.device == "cpu":
        return min(num_logits * size, num_lanes * (_CHUNK_BYTES + _KEPT_LOGITS_BYTES * kept))
    chunk, most = _CHUNK_BYTES_ON_ACCELERATORS, _CHUNK_BYTES_ON_ACCELERATORS + _KEPT_LOGITS_BYTES_ON_ACCELERATORS * kept
    return min(num_logits * size, most) + 2 * _WIDE * min(num_logits, chunk // size)


def sampling_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the most that sampling needs besides its cache: for prompts, and to draw a token for every row.

    These are not there at the same time, but on a CPU the heap keeps what the first had until the turn is over, and the
    others, which are smaller, lie scattered over it and beside.
    """
    size, prompt = _BYTES[config.model.dtype], config.data.max_prompt_tokens
    num_prompts = max(1, min(_prompts_together(config), _PREFILL_TOKENS // prompt))
    prompts = _Pass(num_prompts, num_prompts, num_prompts, prompt, prompt, *_blocks_of_row(config, shape, prompt))
    vocabulary = -(-shape.vocab_size // _SAMPLED_BLOCK) * _SAMPLED_BLOCK
    num_rows = _groups_together(config) * config.rollout.group_size
    drawing = num_rows * (_SAMPLED_LOGITS * 4 * vocabulary + _row_bytes(config, shape, size))
    server = _SERVER_BYTES if config.rollout.engine == "vllm" and config.cluster.device == "cpu" else 0
    prefilling = prompts.live_bytes(shape, size)
    most = drawing + prefilling if config.cluster.device == "cpu" else max(drawing, prefilling)
    return server + _on_heap(config, "rollout", most)


def _row_bytes(config: RunConfig, shape: ModelShape, size: int) -> int:
    """Return what a row that is decoded on a CPU has for its blocks: where their keys and values are, and scores."""
    if config.cluster.device != "cpu":
        return 0
    parts = (config.data.max_prompt_tokens, config.rollout.max_response_tokens)
    num_blocks = sum(-(-longest // BLOCK_TOKENS) for longest in parts)
    of_block = 4 * (shape.head_dim + BLOCK_TOKENS) + size * (shape.head_dim + 3 * BLOCK_TOKENS)
    return shape.num_heads * num_blocks * of_block


def _full_pass(config: RunConfig, shape: ModelShape, role: RoleName, *, num_parts: int, num_lanes: int) -> _Pass:
    """Return the largest micro-batches of all lanes; `num_parts` is of mini-batches an epoch.

    Whole groups hardly ever fill the share of the cap that a lane has: 2 lanes of 8 rows may be where one had 24.
    """
    row, num_ranks = config.max_row_tokens, config.num_parts(role)
    is_reward = role == "reward"  # it reads rows to their end, and is asked about that alone
    num_rows = -(-config.num_rows // num_parts // num_ranks // num_lanes)
    most = max(1, config.engine.max_tokens_per_micro_batch // num_lanes // row)
    # Rows of a prompt stay together where there are prompts enough for all mini-batches and ranks.
    together = min(config.rollout.group_size, num_rows, most)
    num_units = -(-num_rows // together)
    units = num_lanes * -(-num_units // -(-num_units // (most // together)))
    sp, row_tokens = config.mesh(role)["sp"], row if is_reward else row - 1
    num_rows, num_prompts = -(-units * together // sp), -(-units // sp)
    num_outputs = num_rows * (1 if is_reward else row - config.data.max_prompt_tokens)
    blocks = _blocks_of_row(config, shape, row_tokens)
    return _Pass(num_rows, num_prompts, num_outputs, row_tokens, config.data.max_prompt_tokens, *blocks)


def _blocks_of_row(config: RunConfig, shape: ModelShape, num_tokens: int) -> tuple[int, int]:
    """Return `num_scores` and `num_block_scores` of a pass over rows of so many tokens.

    The longest rows go through the fused kernel, which keeps no scores, and on accelerators all do, unless scores are
    capped. Elsewhere a block of queries has scores for itself and what is before it.
    """
    longest = _num_slots(num_tokens)
    if not shape.caps_scores:
        if config.cluster.device != "cpu":
            return 0, 0
        longest = min(longest, _LONGEST_WITH_SCORES)
    block = _QUERIES_PER_BLOCK
    if config.model.dtype != "float32":
        half = -(-longest // (2 * _ALIGNMENT)) * _ALIGNMENT
        block = min(max(half, block), _QUERIES_PER_BLOCK_IN_HALF)
    stops = [*range(block, longest, block), longest]
    of_blocks = [stop * (stop - start) for start, stop in zip([0, *stops], stops, strict=False)]
    return sum(of_blocks) // longest, max(of_blocks) // longest


def _num_slots(num_tokens: int) -> int:
    """Return the slots that a row has in attention: what vectors of numbers fill."""
    return num_tokens if num_tokens <= _ALIGNMENT else -(-num_tokens // _ALIGNMENT) * _ALIGNMENT


def _cache_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the blocks of keys and values of a process.

    An accelerator reserves all that there are. On a CPU what is never written takes no memory: what is counted are
    prompts once a group, which stay when their rollouts are gone, and responses once a row of those that run together.
    """
    rollout = config.rollout
    num_rows, tokens = _groups_together(config) * rollout.group_size, reserved_tokens(config)
    if config.cluster.device == "cpu":
        prompt, response = (
            -(-longest // BLOCK_TOKENS) * BLOCK_TOKENS
            for longest in (config.data.max_prompt_tokens, rollout.max_response_tokens)
        )
        num_ranks, num_validated = config.num_ranks("rollout"), _num_validation_prompts(config)
        trained = -(-rollout.num_prompts // num_ranks) * prompt + num_rows * response
        validated = tokens
        if num_validated is not None:
            num_validated = -(-num_validated // num_ranks)
            validated = num_validated * prompt + min(num_validated, rollout.max_batch_rows) * response
        tokens = min(tokens, max(trained, validated))
    return cache_bytes_per_token(config, shape) * tokens


def cache_bytes_per_token(config: RunConfig, shape: ModelShape) -> int:
    """Return what the key and the value of a token take in all layers."""
    return 2 * _BYTES[config.model.dtype] * shape.num_layers * shape.num_key_value_heads * shape.head_dim


def reserved_tokens(config: RunConfig) -> int:
    """Return how many tokens there are blocks for in a process of the rollout role, where there is memory for them."""
    num_rows = _groups_together(config) * config.rollout.group_size
    return config.rollout.cache_tokens or num_rows * (config.max_row_tokens + 2 * BLOCK_TOKENS)


def least_tokens(config: RunConfig) -> int:
    """Return how many tokens there are blocks for even where memory is short: those of one row, unless it was said."""
    if config.cluster.device == "cpu" or config.rollout.cache_tokens is not None:
        return reserved_tokens(config)
    return config.max_row_tokens + 2 * BLOCK_TOKENS


def _num_validation_prompts(config: RunConfig) -> int | None:
    """Return how many prompts are validated on, each with one response; None if only their files know."""
    made, most = config.data.generate, config.validation.max_prompts
    if made is not None:
        return min(made.num_validation_prompts, most or made.num_validation_prompts)
    return most if config.data.validation else 0


def _groups_together(config: RunConfig) -> int:
    """Return how many prompts a process of the rollout role decodes at a time."""
    rollout = config.rollout
    return min(
        -(-rollout.num_prompts // config.num_ranks("rollout")), max(1, rollout.max_batch_rows // rollout.group_size)
    )


def _prompts_together(config: RunConfig) -> int:
    """Return how many prompts a process of the rollout role begins with at a time, in training or in validation."""
    most, num_validated = config.rollout.max_batch_rows, _num_validation_prompts(config)
    validated = most if num_validated is None else min(most, -(-num_validated // config.num_ranks("rollout")))
    return max(_groups_together(config), validated)


def _on_heap(
    config: RunConfig, role: RoleName, num_bytes: int, *, checkpointed: bool = False, num_lanes: int = 1
) -> int:
    """Return what tensors of a pass take of a process that has the role; on CPUs more than they have."""
    if config.cluster.device != "cpu":
        return num_bytes
    rollout = config.roles.get("rollout")
    samples = rollout is not None and config.rollout.engine == "native" and config.roles[role].pool == rollout.pool
    kernels = _LIBRARY_BYTES + (_DECODER_BYTES if samples else 0)
    if config.model.dtype == "bfloat16":
        kernels += _BFLOAT16_KERNEL_BYTES * max(2, num_lanes) // 2
        kernels += 0 if config.model.lora is None else _ADAPTER_KERNEL_BYTES
    heap = _HEAP if num_lanes == 1 else _HEAP_OF_LANES
    return round(num_bytes * (_CHECKPOINTED_HEAP if checkpointed else heap)) + kernels
