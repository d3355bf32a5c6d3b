"""One carrier per stage of a training step, each with all its fields filled.

    RolloutBatch -> ScoredBatch -> JudgedBatch (-> ValuedBatch) -> ActorBatch, CriticBatch
      sampled        rewarded       compared        valued          weighed, ready to learn

Frame of reference: every per-token field is aligned with `tokens`. `logprobs[t]` is the log-probability
of token t given the tokens before it in its row, and `values[t]` is the value of the state in which
token t was chosen. The shift by one that this needs is made in one place, `engine.forward`.

A worked example. A prompt of two tokens (5 6) was answered with 7 8 <eos>:

    tokens            5     6     7     8     <eos>
    loss_mask         F     F     T     T     T
    rollout_logprobs  0     0    -1.2  -0.3  -0.1
    token_rewards     0     0     0     0     1.0      the score, on the last token
    values            0     0     0.4   0.6   0.9      before 7, before 8, before <eos> was chosen
    advantages        0     0     0.6   0.4   0.1      with discount = gae_lambda = 1
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from rallypoint.types.carrier import Carrier, per_row, per_token


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompts(Carrier):
    """Prompts to be answered without a run, as token ids; here B counts prompts."""

    tokens: Tensor = per_token()
    """[T] int64."""
    prompt_index: Tensor = per_row()
    """[B] int64: the prompt's index in the run; it seeds the random numbers of its rollouts."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sequences(Carrier):
    """Token ids of prompt and response, and which of them the policy sampled.

    A rollout of an agent may be several sequences: its history was rewritten, or it went on from an earlier point. Then
    they stand one after another in one row of the carrier, so that whatever is done by row is done by rollout: scores,
    baselines, returns, weights, masks. Only a forward pass splits them.

    Two rollouts, of which the first is the sequences 5 6 7 and 5 8:

    >>> batch = Sequences(
    ...     offsets=torch.tensor([0, 5, 7]),
    ...     tokens=torch.tensor([5, 6, 7, 5, 8, 5, 9]),
    ...     loss_mask=torch.tensor([False, True, True, False, True, False, True]),
    ...     sequence_starts=torch.tensor([False, False, False, True, False, False, False]),
    ...     prompt_index=torch.tensor([3, 3]),
    ...     sample_index=torch.tensor([0, 1]),
    ... )
    >>> apart = batch.by_sequence()
    >>> apart.offsets.tolist(), apart.sample_index.tolist()
    ([0, 3, 5, 7], [0, 0, 1])
    >>> batch.last_sequences().tokens.tolist()
    [5, 8, 5, 9]
    """

    tokens: Tensor = per_token()
    """[T] int64."""
    loss_mask: Tensor = per_token()
    """[T] bool: True where the token was sampled by the policy and is trained."""
    prompt_index: Tensor = per_row()
    """[B] int64: the prompt's index in the run; rows with the same index are a group."""
    sample_index: Tensor = per_row()
    """[B] int64: which of the G rollouts of that prompt."""
    sequence_starts: Tensor | None = per_token(optional=True, fill=True)
    """[T] bool: True at the first token of each sequence of a row but its first; None if each row is one sequence."""

    @property
    def num_sequences(self) -> Tensor:
        """[B] int64: sequences of each row."""
        ones = torch.ones(len(self), dtype=torch.int64)
        if self.sequence_starts is None:
            return ones
        return ones.index_add_(0, self.row_of_token, self.sequence_starts.long())

    def by_sequence(self) -> Self:
        """Return a row for each sequence; all tokens stay where they are."""
        if self.sequence_starts is None:
            return self
        times = self.num_sequences
        offsets = torch.cat([self.offsets, self.sequence_starts.nonzero().flatten()]).sort().values
        repeated = {
            name: value.repeat_interleave(times, 0)
            for name, axis in self._field_axes()
            if axis == "B" and (value := cast("Tensor | None", getattr(self, name))) is not None
        }
        return dataclasses.replace(self, offsets=offsets, sequence_starts=None, **cast("dict[str, Any]", repeated))

    def last_sequences(self) -> Self:
        """Return the last sequence of each row."""
        return self.by_sequence().rows(self.num_sequences.cumsum(0) - 1)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained, of all rows together."""
        return int(self.loss_mask.sum())

    @property
    def num_prompt_tokens(self) -> Tensor:
        """[B] int64: tokens of each row before its first trained one; 0 if it has none."""
        trained = self.loss_mask.nonzero().flatten()
        first = torch.full((len(self),), self.num_tokens)
        first.scatter_reduce_(0, self.row_of_token[trained], trained, "amin")
        return torch.where(first < self.num_tokens, first - self.offsets[:-1], 0)

    def bare(self) -> Sequences:
        """Return the fields of this stage only, which are all that a forward pass needs."""
        return self.widen(Sequences)

    def response(self, row: int) -> Tensor:
        """Return the ids that the policy sampled in one row."""
        part = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return self.tokens[part][self.loss_mask[part]]

    def responses(self) -> list[list[int]]:
        """Return those of each row."""
        offsets, tokens, sampled = (
            cast("list[int]", x.tolist())  # pyright: ignore[reportUnknownMemberType]
            for x in (self.offsets, self.tokens, self.loss_mask)
        )
        return [
            list(itertools.compress(tokens[start:end], sampled[start:end]))
            for start, end in itertools.pairwise(offsets)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairBatch(Sequences):
    """Two answers to each prompt, neighbours: the chosen one (sample 0), then the rejected one (sample 1)."""

    reference_logprobs: Tensor | None = per_row(optional=True)
    """[B] float64: logprob of each answer by the reference; None where there is none."""

    rows_together: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PerToken(Carrier):
    """Numbers for each token: what `logprobs` and `values` return."""

    values: Tensor = per_token(columns=True)
    """[T] float32 ([T, columns] for several of each), zero where `loss_mask` is False."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PolicySequences(Sequences):
    """What a forward pass of the policy itself needs."""

    experts: Tensor | None = per_token(optional=True, columns=True, fill=True)
    """[T, bytes] uint8: experts that the sampler chose for the token before each, in every layer of a mixture, see
    `rallypoint.models.kinds.router_replay`; zeros where the policy chooses itself. None if it does so everywhere."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch(PolicySequences):
    """Sampled trajectories; the rollouts of a prompt are neighbours."""

    rollout_logprobs: Tensor = per_token()
    """[T] float32: logprobs under the model as trained: its full distribution at the sampling temperature."""
    versions: Tensor = per_row()
    """[B] int64: `Learner.version` of the oldest weights that sampled a token of this row."""
    truncated: Tensor = per_row()
    """[B] bool: True if the rollout ended at the length limit and not by itself."""
    sampled_logprobs: Tensor | None = per_token(optional=True)
    """[T] float32: logprobs under the distribution sampled from, after top-k, top-p, min-p and penalty; None if nothing
    narrowed it, so that they equal `rollout_logprobs`."""

    token_versions: Tensor | None = per_token(optional=True)
    """[T] int64: `Learner.version` of the weights that sampled each token, zero where `loss_mask` is False; None
    in runs in which `versions` says it for whole rows."""
    steps_behind: Tensor | None = per_token(optional=True)
    """[T] int64: steps of training that are in the actor's weights and not in those that the keys and values before
    each token come from; zero where `loss_mask` is False. None in runs that sample and train in turns."""

    turn_states: Tensor | None = per_token(optional=True)
    """[T] int64: what says in which state of its environment the turn of each token began, zero where `loss_mask` is
    False; None unless the advantage compares turns of the same state."""

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride] - of its own class
        """See `Carrier.join`; beside narrowed parts, of which episodes make some, the others say that they are not."""
        if any(part.sampled_logprobs is not None for part in parts):
            parts = [
                part
                if part.sampled_logprobs is not None
                else dataclasses.replace(part, sampled_logprobs=part.rollout_logprobs)
                for part in parts
            ]
        return super().join(parts)

    def scored(
        self, token_rewards: Tensor, parts: Tensor | None = None, part_names: tuple[str, ...] = ()
    ) -> ScoredBatch:
        """Return the batch with its rewards, and what each of several rewards said."""
        batch = self.widen(ScoredBatch, token_rewards=token_rewards, reward_parts=parts)
        return dataclasses.replace(batch, part_names=part_names)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoredBatch(RolloutBatch):
    """Trajectories whose reward is known."""

    token_rewards: Tensor = per_token()
    """[T] float32: the reward that arrives with each token; zero where `loss_mask` is False."""
    rounding: Tensor | None = per_row(optional=True)
    """[B] float64: what float32 has cut off the sum of each row's rewards; None if nothing."""
    reward_parts: Tensor | None = per_row(optional=True, columns=True)
    """[B, K] float64: the score by each of K rewards before it is weighed, NaN where it does not apply; None where
    there is one reward."""
    part_names: tuple[str, ...] = ()
    """Name of each of the K rewards."""
    scores_before: Tensor | None = per_row(optional=True)
    """[B] float64: the scores before a penalty for length was subtracted; None if none was."""

    @property
    def scores(self) -> Tensor:
        """[B] float64: the sum of each row's rewards."""
        rewards = self.token_rewards.to(torch.float64)
        total = torch.zeros(len(self), dtype=torch.float64).index_add_(0, self.row_of_token, rewards)
        return total if self.rounding is None else total + self.rounding

    def judged(self, *, old_logprobs: Tensor | None, reference_logprobs: Tensor | None) -> JudgedBatch:
        """Return the batch with the logprobs of the training forward passes."""
        return self.widen(JudgedBatch, old_logprobs=old_logprobs, reference_logprobs=reference_logprobs)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JudgedBatch(ScoredBatch):
    """Trajectories with the logprobs of the current policy and the reference."""

    old_logprobs: Tensor | None = per_token()
    """[T] float32: logprobs by the policy at the start of the update; None if the update's own pass computes them, NaN
    in rows that nothing is learned from."""
    reference_logprobs: Tensor | None = per_token()
    """[T] float32: logprobs by the frozen reference; None if the run has no reference role."""

    def valued(self, values: Tensor) -> ValuedBatch:
        """Return the batch with the critic's values."""
        return self.widen(ValuedBatch, values=values)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ValuedBatch(JudgedBatch):
    """Trajectories with the critic's value of every state."""

    values: Tensor = per_token()
    """[T] float32: expected sum of rewards from the state in which token t was chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ActorBatch(PolicySequences):
    """What the actor learns from."""

    rollout_logprobs: Tensor = per_token()
    """[T] float32: logprobs as sampled, for comparison."""
    steps_behind: Tensor | None = per_token(optional=True)
    """[T] int64, see `RolloutBatch`."""
    old_logprobs: Tensor | None = per_token()
    """[T] float32, or None if the batch is for one optimizer step, whose own pass computes them."""
    reference_logprobs: Tensor | None = per_token()
    """[T] float32, or None when the loss has no KL term."""
    advantages: Tensor = per_token()
    """[T] float32."""
    loss_weights: Tensor | None = per_row(optional=True)
    """[B] float64: weight of each trained token of a row in the loss; None is 1 for all."""
    selected: Tensor | None = per_token(optional=True)
    """[T] bool: True at tokens that the policy loss has selected to treat in another way; None if none."""
    kl_coef: float | None = None
    """Coefficient of the KL in the loss in this step; None is that of the loss."""
    places: Tensor | None = per_token(optional=True)
    """[T] int64: place of each token in the batch of the step, where a pass keeps what it computed; None elsewhere."""
    entropies: Tensor | None = per_token(optional=True)
    """[T] float32: entropy, in nats, of the distribution that each token was drawn from, in the update's first pass;
    NaN in rows that it left out. None before the update."""

    def with_first_pass(self, ranks: Sequence[FirstPass]) -> Self:
        """Return the batch with what the update's first pass computed, also as old_logprobs if it has none."""
        found = torch.where(self.loss_mask, math.nan, 0.0).repeat(2, 1)
        for rank in ranks:
            found[:, rank.places] = torch.stack([rank.logprobs, rank.entropies])
        old = found[0] if self.old_logprobs is None else self.old_logprobs
        return dataclasses.replace(self, old_logprobs=old, entropies=found[1])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FirstPass(Carrier):
    """What a rank computed in the first pass of an update over trained tokens: one row of T tokens, in any order."""

    places: Tensor = per_token()
    """[T] int64, see `ActorBatch`."""
    logprobs: Tensor = per_token()
    """[T] float32: logprobs by the policy that the optimizer step over the token begins with."""
    entropies: Tensor = per_token()
    """[T] float32, in nats: entropy of the distribution of that policy that the token was drawn from."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DistilledBatch(ActorBatch):
    """What a student learns from, whose tokens a teacher has judged."""

    teacher_logprobs: Tensor = per_token()
    """[T] float32: logprobs by the row's teacher; NaN in rows without one."""
    top_logprobs: Tensor | None = per_token(optional=True, columns=True)
    """[T, K] float32: logprobs, by the teacher, of its K likeliest tokens in place of each; -inf of a missing one."""
    top_tokens: Tensor | None = per_token(optional=True, columns=True)
    """[T, K] int64: which tokens these are."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CriticBatch(Sequences):
    """What the critic learns from."""

    values: Tensor = per_token()
    """[T] float32: values predicted at the start of the update."""
    returns: Tensor = per_token()
    """[T] float32: the targets of the values."""
