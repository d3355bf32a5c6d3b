"""The whole config: every key there is, with its meaning, unit, range and default.

Imports neither torch nor ray. `None` is off, an object is on. What follows from several keys is a
property here or a line of `plan.py`, never a key of its own.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Strict

from rallypoint.config.fields import Section, key, section

RoleName = Literal["actor", "rollout", "reference", "critic"]
Activations = Literal["keep", "checkpoint", "offload"]

# YAML has lists only: a tuple is made from one, though all other types are taken strictly.
ProcessesPerNode = Annotated[tuple[int, ...], Strict(False)]
Names = Annotated[
    tuple[str, ...], Strict(False), BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]


class PlacementConfig(Section):
    """Where a role runs."""

    pool: str = key("main", help="Name of the pool in cluster.pools; roles on one pool share its processes.")
    num_ranks: int | None = key(
        None, at_least=1, help="How many of the pool's processes the role uses; null uses all of them."
    )


class MeshConfig(Section):
    """How the ranks of a role divide its model and its rows; ranks that these leave hold copies (dp_replicate)."""

    dp_shard: int = key(1, at_least=1, help="Ranks that share one copy (FSDP2), each with rows of its own.")
    sp: int = key(1, at_least=1, help="Ranks that share the tokens of the same rows (Ulysses).")
    tp: int = key(1, at_least=1, help="Ranks that share the matrices, for the same tokens (Megatron).")


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, above=0, at_most=1, help="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = key("constant", help="Decay after the warmup.")
    warmup_ratio: float = key(0.0, at_least=0, at_most=0.9, help="Part of the run that lr rises in, linearly from 0.")
    min_lr_ratio: float = key(0.0, at_least=0, at_most=1, help="Where the decay ends, as a part of lr.")
    beta1: float = key(0.9, at_least=0, at_most=0.9999, help="Decay of the gradient's running mean.")
    beta2: float = key(0.95, at_least=0, at_most=0.99999, help="Decay of its running square.")
    eps: float = key(1e-8, above=0, at_most=1e-2, help="Added to the denominator.")
    weight_decay: float = key(0.0, at_least=0, at_most=1, help="Decoupled weight decay, on matrices only.")
    max_grad_norm: float = key(1.0, above=0, help="Global gradient norm above which gradients are scaled down.")


class CriticOptimizerConfig(OptimizerConfig):
    """The same keys; a critic wants a higher rate."""

    lr: float = key(1e-5, above=0, at_most=1, help="Peak learning rate.")


class ActorConfig(Section):
    """The policy being trained."""

    num_epochs: int = key(1, at_least=1, at_most=100, help="Passes over the rollouts of a step.")
    num_mini_batches: int = key(1, at_least=1, help="Optimizer steps per pass.")
    clip_low: float = key(0.2, above=0, at_most=1, help="The ratio is clipped below 1 - clip_low.")
    clip_high: float = key(0.2, above=0, at_most=10, help="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = key(
        None, above=1, help="Bound of the ratio for negative advantages (arXiv 1912.09729); null for none."
    )
    entropy_coef: float = key(0.0, at_least=-1, at_most=1, help="Weight of the entropy bonus in the loss.")
    optimizer: OptimizerConfig = section(OptimizerConfig, help="AdamW of the actor.")
    placement: PlacementConfig = section(PlacementConfig, help="Where the actor runs.")
    mesh: MeshConfig = section(MeshConfig, help="How its ranks divide model and rows.")


class CriticConfig(Section):
    """The value function; used by recipe ppo."""

    path: str | None = key(
        None, help="Hugging Face folder of a token classifier with one label, or of any model; null: the actor's."
    )
    num_epochs: int = key(1, at_least=1, at_most=100, help="Passes over the rollouts of a step.")
    num_mini_batches: int = key(1, at_least=1, help="Optimizer steps per pass.")
    clip: float | None = key(
        0.2,
        above=0,
        help="How far a value may move from its old one before the loss is clipped; null for no bound.",
    )
    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig, help="AdamW of the critic.")
    placement: PlacementConfig = section(PlacementConfig, help="Where the critic runs.")
    mesh: MeshConfig = section(MeshConfig, help="How its ranks divide model and rows.")


class ReferenceConfig(Section):
    """The frozen copy that the KL is measured to; present when kl is on."""

    placement: PlacementConfig = section(PlacementConfig, help="Where the reference runs.")
    mesh: MeshConfig = section(MeshConfig, help="How its ranks divide model and rows.")


class RolloutConfig(Section):
    """What is sampled in a step."""

    num_prompts: int = key(64, at_least=1, unit="prompts", help="P: prompts per training step.")
    group_size: int = key(8, at_least=1, unit="rollouts", help="G: rollouts per prompt.")
    max_response_tokens: int = key(256, at_least=1, unit="tokens", help="A rollout ends here at the latest.")
    temperature: float = key(
        1.0, above=0, at_most=10, help="Sampling temperature; the policy that is trained is the one at it."
    )
    engine: Literal["native", "hf"] = key(
        "native", help="What samples: our own engine, or transformers' generate, which is slow and plainly right."
    )
    exact: bool = key(
        False, help="Whether logits are the same bits in any company (docs/rollouts.md); several times slower."
    )
    max_batch_rows: int = key(
        1024, at_least=1, unit="rows", help="Rows that one process decodes together; bounds the KV cache."
    )
    cache_tokens: int | None = key(
        None, at_least=64, unit="tokens", help="Size of the KV cache of a process; null: all rows at their longest."
    )
    placement: PlacementConfig = section(PlacementConfig, help="Where rollouts are sampled.")


class CreateModelConfig(Section):
    """A small model with random weights and a tokenizer for digits, made when the run starts."""

    architecture: Literal["llama", "qwen3"] = key("llama", help="Family, as in transformers.")
    hidden_size: int = key(64, at_least=8, at_most=1024, help="Width.")
    num_layers: int = key(2, at_least=1, at_most=32, help="Decoder layers.")
    num_heads: int = key(4, at_least=1, at_most=64, help="Attention heads.")
    num_key_value_heads: int = key(4, at_least=1, at_most=64, help="Key/value heads; must divide num_heads.")
    intermediate_size: int = key(256, at_least=8, at_most=8192, help="Width inside the MLP.")
    tie_embeddings: bool = key(False, help="Whether input and output embeddings are one matrix.")
    initializer_range: float = key(0.02, above=0, at_most=1, help="Standard deviation of the initial weights.")


class LoRAConfig(Section):
    """Low-rank updates of linear layers (arXiv 2106.09685), in PEFT's format; everything else is frozen."""

    rank: int = key(32, at_least=1, help="Rows of A and columns of B.")
    alpha: float = key(32.0, above=0, help="The update is scaled by alpha / rank.")
    rslora: bool = key(False, help="Scale by alpha / sqrt(rank) instead (arXiv 2312.03732).")
    target_modules: Names = key(("all-linear",), help="Layers of the decoder, by the ends of their names.")
    path: str | None = key(None, help="Adapter to start the actor from; its folder has the other keys.")


class ModelConfig(Section):
    """Which model is trained: exactly one of path and create."""

    path: str | None = key(None, help="Hugging Face folder (or hub name) of a causal language model.")
    create: CreateModelConfig | None = section(None, help="Make a small random model instead of loading one.")
    dtype: Literal["float32", "bfloat16"] = key("float32", help="Type of weights and computation.")
    trust_remote_code: bool = key(False, help="Run Python code that the model folder brings along.")
    lora: LoRAConfig | None = section(None, help="Train adapters of actor and critic instead of all weights.")


class GenerateDataConfig(Section):
    """A data set of digit tasks, made when the run starts."""

    task: Literal["sort", "sequence", "sum"] = key("sort", help="What is to be done with the digits.")
    num_digits: int = key(6, at_least=2, at_most=12, help="Length of an answer.")
    num_train_prompts: int = key(20_000, at_least=1, unit="prompts", help="Rows of train.parquet.")
    num_validation_prompts: int = key(512, at_least=1, unit="prompts", help="Rows of validation.parquet.")
    seed: int = key(0, at_least=0, help="Seed of the generator; the run's own seed leaves the data as they are.")


class DataConfig(Section):
    """Prompts: exactly one of train and generate."""

    train: Names = key((), help="Parquet or jsonl files, or one such file.")
    validation: Names = key((), help="The same for validation; empty for none.")
    generate: GenerateDataConfig | None = section(None, help="Make a data set instead of reading one.")
    max_prompt_tokens: int = key(512, at_least=1, unit="tokens", help="Longest prompt, chat template included.")
    on_too_long: Literal["error", "drop"] = key("error", help="What happens to a longer prompt; drops are counted.")
    shuffle: bool = key(True, help="A new order in every epoch, from the seed; false keeps the file's order.")


class RewardConfig(Section):
    """How rollouts are scored."""

    function: str = key(help="`file.py:compute_score`, or `digits` for the one that ships.")


class PPOConfig(Section):
    """Generalised advantage estimation; used by recipe ppo."""

    discount: float = key(1.0, at_least=0, at_most=1, help="Discount of later rewards (gamma).")
    gae_lambda: float = key(1.0, at_least=0, at_most=1, help="Between one-step (0) and whole-return (1) estimates.")
    whiten_advantages: bool = key(True, help="Scale the advantages of a step to mean 0 and deviation 1.")


class GRPOConfig(Section):
    """Group-relative advantages; used by recipe grpo."""

    normalize_std: bool = key(True, help="Divide by the group's deviation; false is Dr. GRPO (arXiv 2503.20783).")
    token_discount: float | None = key(
        None,
        at_least=0,
        at_most=1,
        help="Compare rewards token by token, and discount those after a token by this; null compares their sums.",
    )


class KLConfig(Section):
    """Penalty for leaving the reference."""

    coef: float = key(1e-3, above=0, at_most=100, help="Weight of the penalty.")
    estimator: Literal["k1", "k2", "k3"] = key("k3", help="Schulman's estimators of the KL per token.")
    placement: Literal["reward", "loss"] = key("loss", help="Subtracted from the rewards or added to the loss.")


class EngineConfig(Section):
    """The training engine of actor, critic and reference."""

    max_tokens_per_micro_batch: int = key(
        16_384, at_least=1, unit="tokens", help="Hard cap of one forward pass; bounds the activations."
    )
    rows: Literal["packed", "padded"] = key(
        "packed", help="Rows of a pass lie end to end, or are filled up to one length; the results are the same."
    )
    activations: Activations = key(
        "keep",
        help="What a layer leaves for the backward pass: all, its input (checkpointing), or that in CPU memory.",
    )
    sleep: bool = key(
        False, help="Roles that share a pool keep weights and optimizer in CPU memory while others have their turn."
    )


class ValidationConfig(Section):
    """Scores on prompts that are never trained on."""

    every_steps: int = key(20, at_least=1, unit="steps", help="Also before the first and after the last step.")
    max_prompts: int | None = key(None, at_least=1, unit="prompts", help="Use the first so many; null for all.")
    temperature: float = key(1.0, at_least=0, at_most=10, help="0 is greedy.")


class CheckpointConfig(Section):
    """State that a run can be resumed from."""

    every_steps: int | None = key(
        None, at_least=1, unit="steps", help="Also after the last step and when interrupted; null for those only."
    )
    keep: int = key(2, at_least=1, help="Older checkpoints are removed.")


class CheckConfig(Section):
    """Bounds of the checks that every run makes of itself."""

    ratio_tolerance: float = key(
        1e-2, above=0, help="Largest |ratio - 1| in the first update of a step, where it must be 1."
    )
    rollout_gap: float = key(
        0.5, above=0, unit="nats", help="Largest mean difference between rollout_ and old_logprobs of a step."
    )


class ClusterConfig(Section):
    """Processes and devices."""

    runtime: Literal["ray", "inline"] = key("ray", help="Worker processes on Ray, or all in this process.")
    address: str | None = key(
        None, help="Running Ray cluster to join: auto, or the head's host:port; null starts one on this machine."
    )
    pools: dict[str, ProcessesPerNode] = key(
        {"main": (1,)}, help="Pool name to processes per node, such as {main: [4, 4]}."
    )
    num_cpus_per_process: int = key(1, at_least=1, at_most=1024, unit="cores", help="Cores (and torch threads) each.")
    num_gpus_per_process: float = key(
        1.0, above=0, at_most=16, unit="GPUs", help="With device=cuda; may be a fraction."
    )
    memory_gib_per_process: float | None = key(
        None, above=0, unit="GiB", help="Memory to reserve for each; null reserves none."
    )
    labels: dict[str, str] = key({}, help='Only nodes with these labels, such as {"ray.io/accelerator-type": H100}.')
    device: Literal["cpu", "cuda"] = key("cpu", help="With cuda every process takes GPUs.")
    rendezvous: Literal["auto", "ray", "tcp", "etcd"] = key(
        "auto", help="How ranks meet: a Ray actor, a TCP store of the driver, an etcd server; auto: what fits runtime."
    )
    etcd_address: str | None = key(None, help="URL of the etcd server, for rendezvous=etcd.")
    placement_timeout_s: float = key(300.0, above=0, unit="s", help="How long to wait for a place on the cluster.")
    call_timeout_s: float = key(1800.0, above=0, unit="s", help="How long a call may make no progress.")
    heartbeat_timeout_s: float = key(
        60.0, at_least=5, unit="s", help="How long a process may give no sign of life during a call."
    )
    object_store_gib: float = key(
        0.5, at_least=0.1, at_most=1024, unit="GiB", help="Shared memory for data between processes."
    )
    dashboard: bool = key(False, help="Ray's dashboard, on loopback.")


class TrainerConfig(Section):
    """The frame around the training step."""

    num_steps: int = key(100, at_least=1, unit="steps", help="Training steps of the whole run.")
    runs_dir: str = key("runs", help="Folder in which the run gets its own folder.")
    name: str | None = key(None, help="Name of the run's folder; null: recipe name and time.")
    num_logged_rollouts: int = key(
        8, at_least=0, unit="rollouts", help="Rollouts written to rollouts/ at each step; 0 for none."
    )


class RunConfig(Section):
    """Everything a run depends on."""

    recipe: Literal["ppo", "grpo"] = key(help="The algorithm: recipes/ppo.py or recipes/grpo.py.")
    seed: int = key(0, at_least=0, at_most=2**31 - 1, help="Of weights, order of prompts and sampling.")
    model: ModelConfig = section(ModelConfig, help="The model to train.")
    data: DataConfig = section(DataConfig, help="The prompts.")
    reward: RewardConfig = section(RewardConfig, help="The score.")
    rollout: RolloutConfig = section(RolloutConfig, help="Sampling.")
    actor: ActorConfig = section(ActorConfig, help="The policy.")
    critic: CriticConfig = section(CriticConfig, help="The value function (ppo).")
    reference: ReferenceConfig = section(ReferenceConfig, help="The frozen reference.")
    kl: KLConfig | None = section(None, help="KL to the reference; null for none.")
    ppo: PPOConfig = section(PPOConfig, help="Advantages of recipe ppo.")
    grpo: GRPOConfig = section(GRPOConfig, help="Advantages of recipe grpo.")
    engine: EngineConfig = section(EngineConfig, help="Forward and backward passes.")
    validation: ValidationConfig = section(ValidationConfig, help="Validation.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, help="Checkpoints.")
    checks: CheckConfig = section(CheckConfig, help="Checks of every step.")
    cluster: ClusterConfig = section(ClusterConfig, help="Placement.")
    trainer: TrainerConfig = section(TrainerConfig, help="Length, names, logs.")

    @property
    def roles(self) -> dict[RoleName, PlacementConfig]:
        """The roles that this run has, in the order in which they are created, and where each runs."""
        roles: dict[RoleName, PlacementConfig] = {"actor": self.actor.placement, "rollout": self.rollout.placement}
        if self.kl is not None:
            roles["reference"] = self.reference.placement
        if self.recipe == "ppo":
            roles["critic"] = self.critic.placement
        return roles

    @property
    def num_rows(self) -> int:
        """B: rollouts per training step."""
        return self.rollout.num_prompts * self.rollout.group_size

    @property
    def max_row_tokens(self) -> int:
        """The longest row there can be, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def sleeping(self) -> frozenset[RoleName]:
        """The roles that sleep between their turns, with engine.sleep: those that share a pool, but for rollout."""
        pools = [placement.pool for placement in self.roles.values()]
        return frozenset(
            role
            for role, placement in self.roles.items()
            if self.engine.sleep and role != "rollout" and pools.count(placement.pool) > 1
        )

    @property
    def rollout_shares_actor(self) -> bool:
        """Whether every rollout rank lives in a process that has an actor rank, and samples from its weights."""
        return self._lives_with_actor("rollout")

    @property
    def reference_shares_actor(self) -> bool:
        """Whether every reference rank lives in a process that has an actor rank, whose frozen weights it uses."""
        alone = all(mesh.dp_shard == mesh.sp == mesh.tp == 1 for mesh in (self.actor.mesh, self.reference.mesh))
        wanted = bool(self.model.lora and self.kl) and not self.engine.sleep
        return wanted and alone and self._lives_with_actor("reference")

    def _lives_with_actor(self, role: RoleName) -> bool:
        here = self.actor.mesh.dp_shard == self.actor.mesh.tp == 1 and self.roles[role].pool == self.roles["actor"].pool
        return here and self.num_ranks(role) <= self.num_ranks("actor")

    def num_ranks(self, role: RoleName) -> int:
        """Return how many processes a role has."""
        placement = self.roles[role]
        return placement.num_ranks or sum(self.cluster.pools[placement.pool])

    def mesh(self, role: RoleName) -> dict[str, int]:
        """Return the size of each axis of a role's mesh; every rank of the rollout role has a copy of its own."""
        sections = {"actor": self.actor.mesh, "critic": self.critic.mesh, "reference": self.reference.mesh}
        mesh = sections.get(role, MeshConfig())
        inner = {"dp_shard": mesh.dp_shard, "sp": mesh.sp, "tp": mesh.tp}
        return {"dp_replicate": max(1, self.num_ranks(role) // math.prod(inner.values())), **inner}

    def num_parts(self, role: RoleName) -> int:
        """Return over how many of a role's ranks rows are split; the others work on the same rows."""
        sizes = self.mesh(role)
        return sizes["dp_replicate"] * sizes["dp_shard"]


def unread_sections(config: RunConfig) -> dict[str, str]:
    """Return the sections that nothing reads in this run, each with the setting that makes it so."""
    recipe = f"recipe={config.recipe}"
    unread = {"grpo": recipe} if config.recipe == "ppo" else {"ppo": recipe, "critic": recipe}
    return unread if config.kl is not None else {**unread, "reference": "kl=null"}
