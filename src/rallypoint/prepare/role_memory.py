"""How much memory a role takes in each of its processes, predicted from the config.

Owns: what a process holds at its peak beyond Python, torch and Ray. Weights, gradients, optimizer follow from sizes;
activations, logits, cache from caps: full micro-batches of the longest rows. Measured: what CPUs take beside passes.
"""

from __future__ import annotations

import dataclasses

from rallypoint.config import limits
from rallypoint.config.recipes import RECIPES, RoleName
from rallypoint.config.shape import ModelShape
from rallypoint.config.transport import transport_kind
from rallypoint.config.tree import RunConfig
from rallypoint.transport_kinds import BROADCAST, NUM_SLOTS

_BYTES = {"float32": 4, "bfloat16": 2}
_WIDE = 4
"""Bytes of a number of the optimizer: gradients, two moments, and the masters of weights that are narrower."""
_SERVER_BYTES = 930 * 2**20
"""Memory of vLLM's processes on CPUs, without weights and cache; measured. A run's own measurement leaves them out."""
_SAMPLED_LOGITS = 6
"""Numbers of four bytes for every token of the vocabulary that a token is drawn with: shares, and float64 sums."""


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
    """Whether nothing of it stays while other roles are awake."""
    least_cache: int = 0
    """Size that the cache shrinks to where the device has no more memory for it."""
    borrowed: int = 0
    """Weights of another role, which wakes with this one."""
    may_keep_cache: bool = False
    """Whether the cache stays while other roles are awake, if there is memory for it; see `RunPlan.within`."""
    kept_cache: int = 0
    """What stays of the cache while other roles are awake."""
    gradients_away: int = 0
    """Gradients in CPU memory."""
    in_cpu: int = 0
    """Page-locked CPU memory for these and an offloaded optimizer."""

    @property
    def held(self) -> int:
        """Bytes that stay while other roles are awake."""
        return self.kept_cache + (0 if self.sleeps else self.weights + self.gradients + self.optimizer)

    @property
    def total(self) -> int:
        """Bytes while the role is awake."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


def may_keep_cache(config: RunConfig) -> bool:
    """Whether rollouts may keep their cache while they sleep: on whole devices, with weights that stay where they are.

    Steps that were captured use the cache and weights of their first time. They are worth keeping, with the cache,
    unless another process may want the memory, or the weights come back to other addresses.
    """
    if config.cluster.device == "cpu" or config.rollout.engine != "native" or config.rollout.serve is not None:
        return False
    moves = config.rollout_shares_actor and "actor" in config.sleeping
    return config.cluster.num_gpus_per_process >= 1 and not moves


def role_memory(config: RunConfig, role: RoleName, *shapes: ModelShape) -> RoleMemory:
    """Predict the memory of a role, whose model has a shape; all teachers are there at once, and one is at work."""
    each = [_model_memory(config, role, shape) for shape in shapes]
    return dataclasses.replace(max(each, key=lambda m: m.activations), weights=sum(m.weights for m in each))


def _model_memory(config: RunConfig, role: RoleName, shape: ModelShape) -> RoleMemory:
    size = _BYTES[config.model.dtype]
    learner = {"actor": config.actor, "critic": config.critic}.get(role)
    sizes = config.mesh(role) | ({"tp": config.rollout.mesh.tp} if role == "rollout" else {})
    shape = shape.of_ep_rank(sizes["ep"])
    cut = sizes["dp_shard"] * sizes["tp"]
    own_heads = {"critic": shape.num_critic_parameters, "reward": shape.num_reward_parameters}
    if RECIPES[config.recipe].trains == "scores":
        own_heads["actor"] = shape.num_reward_parameters
    whole = own_heads.get(role, shape.num_parameters)
    uncut = shape.num_uncut_parameters // sizes["dp_shard"] - shape.num_uncut_parameters // cut
    parameters = trained = whole // cut + uncut
    if (lora := config.model.lora) is not None and role not in ("reward", "teacher"):
        adapters = shape.num_adapter_parameters(lora)
        parameters = (whole + adapters) // cut + uncut
        trained = (adapters + (shape.hidden_size + 1 if role == "critic" else 0)) // cut
    own = trained if role == "reference" and config.reference_shares_actor else parameters
    shares_actor = role == "rollout" and config.rollout_shares_actor
    halved = shape.num_backbone_parameters // cut if role == "rollout" and config.rollout.quantization else 0
    weights = own * size - halved * (size - 1)  # a server has layers in 8 bits
    optimizer = trained * _WIDE * (2 if size == _WIDE else 3) if learner else 0
    if learner is not None and sizes["dp_shard"] > 1 and size < _WIDE:  # the shards are the masters
        weights, optimizer = weights + trained * (_WIDE - size), 2 * trained * _WIDE
    # Every rank draws from the logits of all tokens.
    sampled = dataclasses.replace(shape.part(sizes["tp"], None), vocab_size=shape.vocab_size)
    activations = sampling_bytes(config, sampled) if role == "rollout" else _activation_bytes(config, shape, role)
    gradients = trained * _WIDE if learner else 0
    in_cpu, gone = 0, gradients if config.engine.offload == "optimizer_and_gradients" else 0
    if sizes["dp_replicate"] > 1 and not gone:  # gradients are added up in one flat copy, when activations are gone
        activations = max(activations, gradients)
    if config.engine.offload != "nothing" and optimizer:  # likewise the part that is stepped
        in_cpu = round((optimizer + gone) * (shape.rounded_up(cut) if lora is None else 1))
        away, optimizer = optimizer + (1 + (sizes["dp_replicate"] > 1)) * gone, 0
        part = away // gradients * max(limits.OPTIMIZER_BYTES, shape.most_of_a_weight // cut * _WIDE)
        activations = max(activations + limits.OPTIMIZER_BYTES * bool(gone), min(away, part))
    return RoleMemory(
        role=role,
        pool=config.roles[role].pool,
        num_ranks=config.num_ranks(role),
        weights=(0 if shares_actor else weights) + _bucket_bytes(config, role),
        gradients=gradients - gone,
        gradients_away=gone,
        in_cpu=in_cpu,
        optimizer=optimizer,
        activations=activations,
        cache=_cache_bytes(config, sampled) if role == "rollout" else 0,
        least_cache=_cache_bytes(config, sampled, least_tokens(config)) if role == "rollout" else 0,
        sleeps=role in config.sleeping,
        borrowed=parameters * size if shares_actor and "actor" in config.sleeping else 0,
        may_keep_cache=role == "rollout" and may_keep_cache(config),
    )


def _bucket_bytes(config: RunConfig, role: RoleName) -> int:
    """Return what weights go through on an accelerator: two buckets in flight, and those of a rank that relays them."""
    if role not in ("actor", "rollout") or config.cluster.device == "cpu" or transport_kind(config) != BROADCAST:
        return 0
    is_relay = role == "rollout" and config.rollout.engine == "vllm"
    return (2 + NUM_SLOTS * is_relay) * BROADCAST.bucket_mib[1] * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """The largest micro-batch of a role when all rows are at their longest."""

    num_rows: int
    num_prompts: int
    """Prompts of these rows; each is computed once."""
    num_outputs: int
    """Tokens that the head of a rank is asked about."""
    row_tokens: int
    """Tokens of a row that go through the layers: all but its last."""
    prompt_tokens: int
    num_scores: int
    """Scores of a token that are kept, on average over its row; 0 where a fused kernel makes none."""
    num_block_scores: int
    """Scores of a token within the largest block of queries; 0 where a fused kernel makes none."""
    cp: int = 1
    sp: int = 1
    """Ranks that share these tokens along each axis."""

    @property
    def num_computed(self) -> int:
        """Tokens that go through the layers of a rank."""
        tokens = self.num_rows * (self.row_tokens - self.prompt_tokens) + self.num_prompts * self.prompt_tokens
        return -(-tokens // (self.cp * self.sp))

    @property
    def num_attended(self) -> int:
        """A rank's part of the tokens of all rows."""
        return -(-self.num_rows * self.row_tokens // (self.cp * self.sp))

    @property
    def num_borrowed(self) -> int:
        """Tokens of ranks along `cp` whose keys and values come to this one, at most."""
        return (self.cp - 1) * self.num_attended

    def live_bytes(self, shape: ModelShape, size: int) -> int:
        """Return the most that a layer needs when it keeps nothing."""
        folded = self.num_attended * shape.folded_bytes(size, self.num_scores, self.num_block_scores)
        borrowed = 2 * self.num_borrowed * shape.borrowed_bytes(size)  # as they come, and in the order of rows
        attending = folded + borrowed + self.num_computed * shape.attending_bytes(size)
        return max(attending, self.num_computed * shape.live_bytes(size))

    def kept_bytes(self, shape: ModelShape, size: int) -> int:
        """Return what a layer keeps for its backward pass."""
        attended = self.num_attended * shape.attended_bytes(size, self.num_scores)
        attended += self.num_borrowed * shape.borrowed_bytes(size)
        return attended + self.num_computed * shape.kept_bytes(size)


def _activation_bytes(config: RunConfig, shape: ModelShape, role: RoleName) -> int:
    """Return the most that full micro-batches of a role need, forward, and backward if it learns."""
    size, part = _BYTES[config.model.dtype], _computed(config, shape, role)
    gathered = _gathered_bytes(config, shape, role)
    full = _full_pass(config, shape, role, num_parts=1)
    at_head = 2 * full.num_outputs * shape.hidden_size * size
    if role not in ("critic", "reward"):
        at_head += _logits_bytes(config, full.num_outputs * part.vocab_size, kept=False)
    most = _on_device(config, role, max(full.live_bytes(part, size), at_head) + gathered)
    if role in ("actor", "critic"):
        learner = config.actor if role == "actor" else config.critic
        training = _training_bytes(config, part, role, num_parts=learner.num_mini_batches)
        checkpointed = config.engine.activations != "keep"
        most = max(most, _on_device(config, role, training + gathered, checkpointed=checkpointed))
    return most


def _computed(config: RunConfig, shape: ModelShape, role: RoleName) -> ModelShape:
    """Return the sizes of what a rank computes; on accelerators it has room for all tokens that may be sent to it."""
    sizes = config.mesh(role)
    return shape.part(sizes["tp"], None if config.cluster.device == "cpu" else sizes["ep"])


def _training_bytes(config: RunConfig, shape: ModelShape, role: RoleName, *, num_parts: int) -> int:
    """Return the most that full micro-batches need, forward and backward, with `num_parts` mini-batches per epoch.

    The peak is where the backward pass begins, in the head, or in a layer: what is kept, and what else is alive.
    """
    size, full = _BYTES[config.model.dtype], _full_pass(config, shape, role, num_parts=num_parts)
    of_layer = full.kept_bytes(shape, size)
    of_input = full.num_computed * size * shape.hidden_size
    kept, in_layer = {
        "keep": (shape.num_layers * of_layer, 0),
        # One layer at a time is computed again from its input.
        "checkpoint": (shape.num_layers * of_input, of_layer),
        # Inputs are copied one at a time, while a layer computes.
        "offload": (min(2, shape.num_layers) * of_input, of_layer),
    }[config.engine.activations]
    # Input and output of the last norm, the states that the head sees and their gradient, and the head itself.
    at_head = 2 * size * shape.hidden_size * (full.num_computed + full.num_outputs)
    if role != "critic":
        at_head += _logits_bytes(config, full.num_outputs * shape.vocab_size, kept=True)
        if config.model.lora is None:  # the gradient of its weight, and a part of that
            at_head += shape.vocab_size * shape.hidden_size * (_WIDE + size)
    # Gradients of the MLP's two halves and of the residual stream.
    at_layer = in_layer + full.num_computed * size * (2 * shape.inner_size + 3 * shape.hidden_size)
    return kept + max(at_head, at_layer)


def _gathered_bytes(config: RunConfig, shape: ModelShape, role: RoleName) -> int:
    """Return the bytes of other ranks' weights that a rank of `dp_shard` holds during a pass (`parallel/fsdp.py`).

    Embeddings and head are there for the whole pass, and two layers: the current one and the next, being gathered.
    """
    sizes = config.mesh(role)
    if sizes["dp_shard"] == 1:
        return 0
    outside = shape.num_parameters - shape.num_backbone_parameters
    layers = min(2, shape.num_layers) * shape.num_backbone_parameters // shape.num_layers
    return (outside + layers) // sizes["tp"] * _BYTES[config.model.dtype]


def _logits_bytes(config: RunConfig, num_logits: int, *, kept: bool) -> int:
    """Return what the head's logits take at most: a chunk, what is kept for the backward pass, and of softmaxes."""
    size = _BYTES[config.model.dtype]
    if config.cluster.device == "cpu":  # where a softmax has a strip of a chunk
        return min(num_logits * size, limits.CHUNK_BYTES + limits.KEPT_BYTES * kept)
    most = limits.CHUNK_BYTES_ON_ACCELERATORS + limits.KEPT_BYTES_ON_ACCELERATORS * kept
    return min(num_logits * size, most) + 2 * _WIDE * min(num_logits, limits.CHUNK_BYTES_ON_ACCELERATORS // size)


def sampling_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the most that sampling needs in addition to its cache: for prompts, and to draw a token for every row.

    These are not there at the same time, but on a CPU the heap keeps what the first had until the role sleeps.
    """
    size, prompt = _BYTES[config.model.dtype], config.data.max_prompt_tokens
    num_prompts = max(1, min(_prompts_together(config), limits.PREFILL_TOKENS // prompt))
    prompts = _Pass(num_prompts, num_prompts, num_prompts, prompt, prompt, *_scores(config, shape, prompt))
    vocabulary = -(-shape.vocab_size // limits.SAMPLED_BLOCK) * limits.SAMPLED_BLOCK
    drawing = _groups_together(config) * config.rollout.group_size * _SAMPLED_LOGITS * 4 * vocabulary
    prefilling = prompts.live_bytes(shape, size)
    if config.cluster.device != "cpu":
        return max(drawing, prefilling)
    server = _SERVER_BYTES if config.rollout.engine == "vllm" else 0
    return server + _on_device(config, "rollout", drawing + prefilling)


def _full_pass(config: RunConfig, shape: ModelShape, role: RoleName, *, num_parts: int) -> _Pass:
    """Return the largest micro-batch; `num_parts` is the number of mini-batches per epoch."""
    row, num_ranks = config.max_row_tokens, config.num_parts(role)
    is_reward = role == "reward"  # a reward model reads whole rows, and its head is needed only at their end
    num_rows = -(-config.num_rows // num_parts // num_ranks)
    most = max(1, config.engine.max_tokens_per_micro_batch // row)
    # Rows of a prompt stay together where there are prompts enough for all mini-batches and ranks.
    together = min(config.group_size, num_rows, most)
    num_units = -(-num_rows // together)
    units = -(-num_units // -(-num_units // (most // together)))
    cp, sp, row_tokens = config.mesh(role)["cp"], config.mesh(role)["sp"], row if is_reward else row - 1
    num_rows = units * together
    num_outputs = -(-num_rows * (1 if is_reward else row - config.max_prompt_tokens) // (cp * sp))
    scores = _scores(config, shape, row_tokens)
    return _Pass(num_rows, units, num_outputs, row_tokens, config.max_prompt_tokens, *scores, cp, sp)


def _scores(config: RunConfig, shape: ModelShape, num_tokens: int) -> tuple[int, int]:
    """Return `num_scores` and `num_block_scores` of a pass over rows of so many tokens.

    A fused kernel keeps no scores. It takes all rows on accelerators and the longest on CPUs. Elsewhere a block of
    queries has scores for itself and for what is before it.
    """
    longest = num_tokens
    has_flash = config.cluster.device != "cpu" and config.model.dtype != "float32"
    if all(mixer.has_fused_kernel(has_flash=has_flash) for mixer in shape.mixers):
        if config.cluster.device != "cpu":
            return 0, 0
        longest = min(num_tokens, limits.LONGEST_FOR_PRODUCTS)
    block = limits.QUERIES_PER_BLOCK
    if config.model.dtype != "float32":
        block = min(max(longest // 2, block), limits.QUERIES_PER_BLOCK_IN_HALF)
    block = min(block, longest)
    return (longest + block) // 2, block


def _cache_bytes(config: RunConfig, shape: ModelShape, tokens: int | None = None) -> int:
    """Return the blocks of a process's cache, of so many tokens or all, and the states of its rows.

    An accelerator reserves all. On a CPU what is never written takes no memory: prompts count once a group, which stay
    when their rollouts are gone, and responses once a row of those that run together.
    """
    rollout, together = config.rollout, _groups_together(config)
    num_rows = together * rollout.group_size if config.cluster.device == "cpu" else rollout.max_batch_rows
    most = tokens or reserved_tokens(config)
    if config.cluster.device == "cpu" and tokens is None:
        longest = (config.data.max_prompt_tokens, rollout.max_response_tokens)
        prompt, response = (-(-one // limits.BLOCK_TOKENS) * limits.BLOCK_TOKENS for one in longest)
        num_prompts = -(-config.max_groups // config.num_parts("rollout"))
        trained = num_prompts * prompt + together * rollout.group_size * response
        num_validated = _num_validated(config)
        validated = num_validated * prompt + min(num_validated, rollout.max_batch_rows) * response
        most = min(most, max(trained, validated))
    states = (num_rows + together) * shape.state_bytes(_BYTES[config.model.dtype])  # a snapshot of each prompt
    return cache_bytes_per_token(config, shape) * most + states


def cache_bytes_per_token(config: RunConfig, shape: ModelShape) -> int:
    """Return what the key and the value of a token, or their latent, take in all layers."""
    return shape.cached_bytes(_BYTES[config.model.dtype], by_server=config.rollout.engine == "vllm")


def reserved_tokens(config: RunConfig) -> int:
    """Return how many tokens there are blocks for in a process of the rollout role, where there is memory for them."""
    num_rows = _groups_together(config) * config.rollout.group_size
    return config.rollout.cache_tokens or num_rows * (config.max_row_tokens + 2 * limits.BLOCK_TOKENS)


def least_tokens(config: RunConfig) -> int:
    """Return the fewest tokens that the cache has blocks for if memory is short: one row's, unless the config says."""
    if config.cluster.device == "cpu" or config.rollout.cache_tokens is not None:
        return reserved_tokens(config)
    return config.max_row_tokens + 2 * limits.BLOCK_TOKENS


def _num_validated(config: RunConfig) -> int:
    """Return how many prompts a process validates on, each with one response; as many as it can if files know it."""
    made, most = config.data.generate, config.validation.max_prompts
    if made is not None:
        num = min(made.num_validation_prompts, most or made.num_validation_prompts)
    else:
        num = (most or config.rollout.max_batch_rows * config.num_parts("rollout")) if config.data.validation else 0
    return -(-num // config.num_parts("rollout"))


def _groups_together(config: RunConfig) -> int:
    """Return how many prompts a process of the rollout role decodes at a time."""
    rollout, num_groups = config.rollout, -(-config.max_groups // config.num_parts("rollout"))
    return min(num_groups, max(1, rollout.max_batch_rows // rollout.group_size))


def _prompts_together(config: RunConfig) -> int:
    """Return how many prompts a process of the rollout role begins with at a time, in training or in validation."""
    return max(_groups_together(config), min(config.rollout.max_batch_rows, _num_validated(config)))


_HEAP, _HEAP_OF_CHECKPOINTS = 1.4, 2.0
"""Heap of the C library over the size of a pass's tensors. It aligns tensors in a way that leaves holes, the more of
them the more often layers are computed. Tensors in pages of their own would avoid that in 1.3 to 1.7 times the time."""
_LIBRARY_BYTES = 8 * 2**20
"""Room that MKL works in, code, Python's objects, once a process has trained: 6.5 to 7 MiB from 0.08M to 10M."""
_DECODER_BYTES = 15 * 2**20
"""TorchScript's, once it has compiled the decoder; fitted to the demo."""
_KERNEL_BYTES, _ADAPTER_KERNEL_BYTES = 85 * 2**20, 25 * 2**20
"""Kernels that oneDNN compiles for bfloat16, one for every shape of a product; and for the narrow ones of adapters."""


def _on_device(config: RunConfig, role: RoleName, num_bytes: int, *, checkpointed: bool = False) -> int:
    """Return what a process takes for tensors of a pass, perhaps of layers computed twice; on CPUs more than that."""
    if config.cluster.device != "cpu":
        return num_bytes
    roles, native = config.roles, config.rollout.engine == "native"
    decodes = native and "rollout" in roles and roles[role].pool == roles["rollout"].pool
    kernels = _LIBRARY_BYTES + _DECODER_BYTES * decodes
    has_adapters = config.model.lora is not None
    kernels += (_KERNEL_BYTES + _ADAPTER_KERNEL_BYTES * has_adapters) * (config.model.dtype == "bfloat16")
    return round(num_bytes * (_HEAP_OF_CHECKPOINTS if checkpointed else _HEAP)) + kernels
