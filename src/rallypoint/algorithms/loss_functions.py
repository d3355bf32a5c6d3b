"""What a learner minimises: an object that a recipe makes, that can be pickled, and that workers call.

Owns: the signature of loss functions, and those of PPO and GRPO. Must not know: configs, models, processes.

A loss function of your own needs little more than its formula. This is cross entropy:

    @dataclasses.dataclass(frozen=True)
    class CrossEntropy:
        def denominator(self, batch: Sequences) -> float:
            return batch.num_loss_tokens

        def __call__(self, outputs: TokenOutputs, inputs: LossInputs[Sequences]) -> tuple[Tensor, Metrics]:
            return -outputs.logprobs.sum(dtype=torch.float64), Metrics()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor

from rallypoint.algorithms.aggregation import AggregationName, aggregate, num_prompts_held
from rallypoint.algorithms.corrections import Correction, correct, own_weight
from rallypoint.algorithms.critic_losses import value_loss
from rallypoint.algorithms.kl import KL
from rallypoint.algorithms.losses import entropy_bonus, kl_loss
from rallypoint.algorithms.policy_losses import PolicyObjective, PolicyTokens
from rallypoint.errors import OwnLossError
from rallypoint.types import ActorBatch, CriticBatch, Mean, Metrics, Sequences, merge

BatchT_co = TypeVar("BatchT_co", bound=Sequences, covariant=True)
BatchT_contra = TypeVar("BatchT_contra", bound=Sequences, contravariant=True)
OutputsT_contra = TypeVar("OutputsT_contra", contravariant=True)
Denominator: TypeAlias = "float | tuple[float, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenOutputs:
    """A policy's outputs for the N trained tokens of some rows, in their order."""

    logprobs: Tensor
    """[N] float32 (float64 of a float64 model), at the temperature of the rollouts."""
    entropy: Tensor
    """[N], same dtype: entropy, in nats, of the distribution that the token was drawn from."""
    top_k_logprobs: Tensor | None = None
    """[N, M]: logprobs of M other tokens in place of each, if the rows name them (`DistilledBatch.top_tokens`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class LossInputs(Generic[BatchT_co]):
    """The rows of a micro-batch, and how to get at their N trained tokens."""

    rows: BatchT_co
    positions: Tensor
    """[N] int64: where in the rows the trained tokens are."""
    send: Callable[[Tensor], Tensor]
    """Moves a tensor to the model's device."""
    is_first_step: bool
    """Whether this is the first optimizer step of an update: the weights are still those from its start."""

    def at_tokens(self, field: Tensor) -> Tensor:
        """Return a field of the rows at the trained tokens, on the model's device: [T] -> [N]."""
        return self.send(field[self.positions])

    def old_logprobs(self: LossInputs[ActorBatch], logprobs: Tensor) -> Tensor:
        """Return those of the policy at the start of the update, [N]: at its first step the current ones."""
        if self.is_first_step:
            return logprobs.detach()
        assert self.rows.old_logprobs is not None, "`Actor.update` refuses such a batch"
        return self.at_tokens(self.rows.old_logprobs)


@runtime_checkable
class LossFunction(Protocol[BatchT_contra, OutputsT_contra]):
    """A sum over the trained tokens of some rows; several threads may call it at once."""

    def denominator(self, batch: BatchT_contra, /) -> Denominator:
        """Return what divides the sum over a whole mini-batch of all ranks; of several streams, each sum."""
        ...

    def __call__(self, outputs: OutputsT_contra, inputs: LossInputs[BatchT_contra], /) -> tuple[Tensor, Metrics]:
        """Return the sum, a float64 scalar with gradient ([K] for K streams), and what to watch.

        Args:
            outputs: the model's, for the trained tokens: `TokenOutputs` of a policy, [N] values of a critic.
            inputs: the rows of these tokens.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorLoss:
    """A policy loss, minus an entropy bonus, plus the KL where it belongs to the loss.

    In an update's first mini-batch its own logprobs are the old ones, so the ratio is exactly 1. Old logprobs from a
    separate pass are only compared with them, and do not change that pass.
    """

    objective: PolicyObjective
    """The policy loss."""
    corrections: tuple[Correction, ...]
    """Weights of its tokens, and of the KL's, that correct the gap between sampler and trainer."""
    aggregation: AggregationName
    """What the loss is a mean of."""
    length: float
    """Tokens by which `aggregation` by fixed length divides a row's sum."""
    entropy_coef: float
    kl: KL | None
    is_single_update: bool
    """Whether an update is one optimizer step: then every ratio is 1, and nothing is clipped."""

    @property
    def needs_advantage(self) -> bool:
        """Whether nothing is learned from a row whose advantages are all 0: its loss is 0, without a gradient."""
        is_kl_in_loss = self.kl is not None and self.kl.placement == "loss"
        return self.objective.needs_advantage and not self.entropy_coef and not is_kl_in_loss

    def with_selected(self, batch: ActorBatch, seed: int) -> ActorBatch:
        """Return all rows of a step with the tokens that the policy loss selects, before anything is cut."""
        selected = self.objective.choose(batch.rollout_logprobs, batch.advantages, batch.loss_mask, seed)
        return batch if selected is None else dataclasses.replace(batch, selected=selected)

    def denominator(self, batch: ActorBatch, /) -> float:
        """Return the number of trained tokens, of rows or of prompts."""
        if self.aggregation == "token":
            return float(batch.num_loss_tokens)
        if self.aggregation == "prompt" and batch.loss_weights is not None:
            return num_prompts_held(batch.loss_weights, batch.loss_mask, batch.offsets, batch.prompt_index)
        weights = aggregate(self.aggregation, batch.loss_mask, batch.offsets, batch.prompt_index, length=self.length)
        return weights.denominator

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs[ActorBatch], /) -> tuple[Tensor, Metrics]:
        """See `LossFunction`."""
        rows, logprobs = inputs.rows, outputs.logprobs
        everything = torch.ones_like(logprobs, dtype=torch.bool)
        old = inputs.old_logprobs(logprobs)
        tokens = PolicyTokens(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=inputs.at_tokens(rows.rollout_logprobs),
            advantages=inputs.at_tokens(rows.advantages),
            loss_mask=everything,
            rows=inputs.at_tokens(rows.row_of_token),
            num_rows=len(rows),
            selected=None if rows.selected is None else inputs.at_tokens(rows.selected),
        )
        weights = None if rows.loss_weights is None else inputs.send(rows.loss_weights)[tokens.rows]
        correction, corrected = self._correct(tokens)
        try:
            policy = self.objective(tokens, weights=weights, correction=correction)
        except OwnLossError as error:
            raise error.of_rollout(int(rows.prompt_index[error.row]), int(rows.sample_index[error.row])) from None
        entropy = entropy_bonus(outputs.entropy, everything, weights=weights)
        total = policy.sum
        if self.entropy_coef:  # a gradient of zeros would be another pass over all logits
            total = total - self.entropy_coef * entropy.sum
        metrics = merge(policy.metrics() if not self.is_single_update else policy.mean(), entropy.metrics(), corrected)
        if self.is_single_update and self.objective.is_watched_at_start:
            metrics = merge(metrics, policy.noted(float(len(logprobs))))
        if self.kl is not None and rows.reference_logprobs is not None:
            reference = inputs.at_tokens(rows.reference_logprobs)
            corrected_from = old if self.kl.importance_corrected else None
            penalty = kl_loss(
                logprobs,
                reference,
                everything,
                estimator=self.kl.estimator,
                corrected_from=corrected_from,
                correction=self._of_kl(tokens, correction),
                weights=weights,
            )
            total = total + (self.kl.coef if rows.kl_coef is None else rows.kl_coef) * penalty.sum
            metrics = merge(metrics, penalty.metrics())
        # Without weights the host knows the number of tokens, and does not wait for the device.
        weight = float(len(logprobs)) if weights is None else float(policy.weight)
        return total, merge(metrics, Metrics({"loss": Mean(float(total.detach()), weight)}))

    def _of_kl(self, tokens: PolicyTokens, correction: Tensor | None) -> Tensor | None:
        """Return the weight of each token in the KL: as in the policy loss, without masks that look at advantages."""
        weighing = tuple(each for each in self.corrections if each.weighs_kl)
        if (own := own_weight(self.objective)) is not None:
            weighing = (*weighing, own)
        if weighing == self.corrections:
            return correction
        return correct(weighing, tokens)[0] if weighing else None

    def _correct(self, tokens: PolicyTokens) -> tuple[Tensor | None, Metrics]:
        """Return the weight of each token, and metrics; None if nothing is corrected."""
        if not self.corrections:
            return None, Metrics()
        correction, watched = correct(self.corrections, tokens)
        num = float(len(correction))
        return correction, Metrics({name: Mean(float(x.sum(dtype=torch.float64)), num) for name, x in watched.items()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClippedValueLoss:
    """Half the squared error of a critic's values, clipped as in PPO."""

    clip: float | None
    """See `value_loss`."""

    def denominator(self, batch: CriticBatch, /) -> int:
        """Return the number of trained tokens."""
        return batch.num_loss_tokens

    def __call__(self, outputs: Tensor, inputs: LossInputs[CriticBatch], /) -> tuple[Tensor, Metrics]:
        """See `LossFunction`."""
        values, returns = (inputs.at_tokens(field) for field in (inputs.rows.values, inputs.rows.returns))
        loss = value_loss(outputs, values, returns, torch.ones_like(outputs, dtype=torch.bool), clip=self.clip)
        return loss.sum, loss.metrics()
