"""Training: the policy, its critic and its reference, advantages, penalties and passes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from rallypoint.config.fields import Section, key, section
from rallypoint.config.sections.places import MeshConfig, PlacementConfig

Activations = Literal["keep", "checkpoint", "offload"]
Offload = Literal["nothing", "optimizer", "optimizer_and_gradients"]
KLEstimator = Literal["k1", "k2", "k3", "abs"]
Decay = Annotated[float, Field(ge=0, le=0.99999)]


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-6, above=0, at_most=1, help="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = key("constant", help="Decay after the warmup.")
    warmup_ratio: float = key(0.0, at_least=0, at_most=0.9, help="Part of the run that lr rises in, linearly from 0.")
    min_lr_ratio: float = key(0.0, at_least=0, at_most=1, help="Where the decay ends, as a part of lr.")
    betas: Annotated[tuple[Decay, Decay], Strict(False)] = key(
        (0.9, 0.95), help="Decay of the gradient's running mean, and of its running square."
    )
    weight_decay: float = key(0.0, at_least=0, at_most=1, help="Decoupled weight decay, on matrices only.")
    max_grad_norm: float = key(1.0, above=0, help="Global gradient norm above which gradients are scaled down.")


class CriticOptimizerConfig(OptimizerConfig):
    """AdamW of the critic and its schedule, with the higher rate that a value function wants."""

    lr: float = key(1e-5, above=0, at_most=1, help="Peak learning rate.")


class ActorConfig(Section):
    """The policy being trained."""

    num_epochs: int = key(1, at_least=1, at_most=100, help="Passes over the rollouts of a step.")
    num_mini_batches: int = key(1, at_least=1, help="Optimizer steps per pass.")
    entropy_coef: float = key(0.0, at_least=-1, at_most=1, help="Weight of the entropy bonus in the loss.")
    router_aux_loss_coef: float = key(
        0.0, at_least=0, at_most=1, hidden=True, help="Weight of a mixture's load-balancing loss (docs/engine.md)."
    )
    router_bias_update_rate: float = key(
        0.0, at_least=0, at_most=1, hidden=True, help="Step of the biases of a mixture's routers (docs/engine.md)."
    )
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
    warmup_steps: int = key(
        0, at_least=0, unit="steps", help="First steps, in which the critic alone learns and the actor stays as it is."
    )
    clip: float | None = key(
        0.2,
        above=0,
        help="How far a value may move from its old one before the loss is clipped; null for no bound.",
    )
    optimizer: CriticOptimizerConfig = section(CriticOptimizerConfig, help="AdamW of the critic.")
    placement: PlacementConfig = section(PlacementConfig, help="Where the critic runs.")
    mesh: MeshConfig | None = section(None, help="How its ranks divide model and rows; null: all axes 1.")


class ReferenceConfig(Section):
    """The frozen copy that the KL is measured to; present when kl is on."""

    refresh_every_steps: int | None = key(
        None, at_least=1, unit="steps", help="Steps after which it takes over the actor's weights; null for never."
    )
    placement: PlacementConfig = section(PlacementConfig, help="Where the reference runs.")
    mesh: MeshConfig | None = section(None, help="How its ranks divide model and rows; null: all axes 1.")


class AdaptiveKLConfig(Section):
    """A coefficient that holds the KL near a target (arXiv 1909.08593)."""

    target: float = key(0.1, above=0, unit="nats", help="KL (k3) per token that is wanted.")
    horizon: int = key(
        10_000, at_least=1, unit="rollouts", help="In so many, the coefficient changes by a factor of e**0.2 at most."
    )


class KLConfig(Section):
    """Penalty for leaving the reference."""

    coef: float = key(1e-3, above=0, at_most=100, help="Weight of the penalty; with adaptive, of the first step.")
    estimator: KLEstimator | None = key(
        None, help="Estimate of the KL per token; null: k1 in the reward, k3 in the loss."
    )
    placement: Literal["reward", "loss"] = key("loss", help="Subtracted from the rewards or added to the loss.")
    importance_corrected: bool = key(
        False,
        help="Weigh k1 or k3 in the loss with policy / old: the gradient stays right (arXiv 2512.02556).",
    )
    adaptive: AdaptiveKLConfig | None = section(None, help="A coefficient that adapts; null for one that is fixed.")

    @property
    def estimator_used(self) -> KLEstimator:
        """The estimator that is set, or the one that its placement has."""
        return self.estimator or ("k1" if self.placement == "reward" else "k3")


class ServedTeacherConfig(Section):
    """How teachers behind HTTP endpoints are asked."""

    model: str | None = key(None, help="What the endpoint calls the model; null: the only one that it serves.")
    concurrency: int = key(32, at_least=1, at_most=1024, unit="requests", help="Rows that are judged at once.")
    timeout_s: float = key(120.0, above=0, unit="s", help="Silence after which an attempt has failed.")
    retries: int = key(5, at_least=0, at_most=100, help="Attempts after the first, where the endpoint is busy or gone.")
    key: str | None = key(None, help="Environment variable that holds the API key; null for none.")


class TeacherConfig(Section):
    """The models that judge every token that a student samples (opd)."""

    path: str | None = key(
        None, help="Folder (or hub name) of a language model with the policy's tokenizer, or a URL that serves one."
    )
    by_source: dict[str, str] = key(
        {}, help="Other teachers for the prompts of a data_source, such as {math: folder}; path judges the others."
    )
    hint: str | None = key(
        None,
        help="Text after each prompt, with {ground_truth} or {feedback}; without path the policy teaches itself.",
    )
    loss: Literal["policy_gradient", "reverse", "forward", "mixed"] = key(
        "policy_gradient", help="Reverse KL as the advantage of `loss`; or reverse, forward or both KLs as the loss."
    )
    top_k: int | None = key(
        None,
        at_least=1,
        at_most=1024,
        unit="tokens",
        help="Its likeliest tokens that a KL compares; null: the sampled one.",
    )
    served: ServedTeacherConfig | None = section(None, help="How teachers with a URL are asked; null: as usual.")
    reward_coef: float = key(
        0.0, at_least=0, at_most=100, help="Weight of the rewards' part of the loss beside the teacher's; 0 for none."
    )
    placement: PlacementConfig = section(PlacementConfig, help="Where the teachers run.")
    mesh: MeshConfig | None = section(None, help="How their ranks divide models and rows; null: all axes 1.")

    @property
    def paths(self) -> tuple[str, ...]:
        """Folders and URLs of all teachers, each once; folders first."""
        return tuple(sorted(dict.fromkeys(self.named.values()), key=is_url))

    @property
    def named(self) -> dict[str, str]:
        """Key -> folder or URL of every teacher."""
        by_source = {f"teacher.by_source.{source}": path for source, path in self.by_source.items()}
        return {**({} if self.path is None else {"teacher.path": self.path}), **by_source}

    @property
    def folders(self) -> tuple[str, ...]:
        """Those that workers of the run load."""
        return tuple(path for path in self.paths if not is_url(path))

    @property
    def urls(self) -> tuple[str, ...]:
        """Those that are asked over HTTP."""
        return self.paths[len(self.folders) :]

    def of(self, source: str) -> int:
        """Return which teacher judges the prompts of a data_source, by its place in `paths`; -1 for none."""
        path = self.by_source.get(source, self.path)
        return -1 if path is None else self.paths.index(path)


class PreferenceConfig(Section):
    """How a policy learns which of two answers is better (dpo)."""

    name: Literal["sigmoid", "sigmoid_norm", "ipo"] = key(
        "sigmoid", help="DPO's loss (arXiv 2305.18290), the same with means over tokens, or IPO's (arXiv 2310.12036)."
    )
    beta: float = key(0.1, above=0, at_most=100, help="How near the policy stays to the one that the run begins with.")


def is_url(path: str) -> bool:
    """Whether a model is served, and not in a folder."""
    return path.startswith(("http://", "https://"))


class EngineConfig(Section):
    """The training engine of actor, critic, reference and reward model."""

    max_tokens_per_micro_batch: int = key(
        16_384, at_least=1, unit="tokens", help="Hard cap of one forward pass; bounds the activations."
    )
    activations: Activations = key(
        "keep",
        automatic=True,
        help="What layers keep for the backward pass: all, inputs, or those in CPU memory; null: what has room.",
    )
    offload: Offload = key(
        "nothing",
        automatic=True,
        hidden=True,
        help="What waits in CPU memory between steps of the optimizer; null: what has no room otherwise.",
    )
    deterministic: bool = key(
        True,
        help="Off the CPU, train with kernels that give equal bits for equal seeds; false may be faster.",
    )
    sleep: bool = key(
        False, help="Roles that share a pool keep weights and optimizer in CPU memory while others have their turn."
    )
