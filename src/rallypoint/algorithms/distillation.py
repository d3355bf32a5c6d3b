"""What a student minimises who samples by itself and is judged by a teacher, and several losses of the same rows.

Owns: the divergences between student and teacher, and how streams of loss are added up. Must not know: who the teacher
is. With d = log p_student - log p_teacher of a token that the student sampled, rho the ratio of the student as it is to
the one that sampled, and sg: no gradient:

    policy_gradient   the config's policy loss with the advantage -sg(d)    KL(student || teacher), by its score
    reverse           sg(rho) d^2 / 2                                       KL(student || teacher)
    forward           sg(rho) (exp(-d) - 1 + d)                             KL(teacher || student)
    mixed             the mean of the last two

The gradients are those of the divergences in expectation over the student's samples (arXiv 2306.13649, 2601.02780).
rho = student / old * old / sampler. The first factor is what this update has moved; the second is the weight of the
corrections, and 1 without any: right where the policy at the start of the update is the one that sampled.
With the teacher's likeliest tokens, reverse, forward and mixed are sums over these instead, see `top_divergence`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rallypoint.algorithms.corrections import Correction, correct
from rallypoint.algorithms.kl import kl_penalty
from rallypoint.algorithms.loss_functions import Denominator, LossFunction, LossInputs, TokenOutputs
from rallypoint.algorithms.policy_losses import PolicyObjective, PolicyTokens
from rallypoint.types import DistilledBatch, Mean, Metrics, Sequences, merge

DistillationName = Literal["policy_gradient", "reverse", "forward", "mixed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """The divergence from a teacher, of the tokens that it has judged."""

    name: DistillationName
    objective: PolicyObjective
    """Policy loss of `policy_gradient`."""
    corrections: tuple[Correction, ...] = ()
    """Weights of tokens for the gap between sampler and trainer, of every loss that reads the sampled token."""

    def denominator(self, batch: DistilledBatch, /) -> float:
        """Return the number of trained tokens that a teacher has judged; without one the sum is 0, too."""
        return max(1.0, float((batch.loss_mask & batch.teacher_logprobs.isfinite()).sum()))

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs[DistilledBatch], /) -> tuple[Tensor, Metrics]:
        """See `LossFunction`."""
        rows, logprobs = inputs.rows, outputs.logprobs
        said = inputs.at_tokens(rows.teacher_logprobs)
        judged = said.isfinite()
        teacher = torch.where(judged, said, logprobs.detach())
        old = inputs.old_logprobs(logprobs)
        num_judged = float(judged.sum())
        # Of the student that sampled: later mini-batches see one that has moved, by what this update has learned.
        gap = torch.where(judged, old - teacher, 0.0).sum(dtype=torch.float64)
        watched = Metrics(
            {"teacher_kl": Mean(float(gap), num_judged), "teacher_judged": Mean(num_judged, float(len(judged)))}
        )
        tokens = PolicyTokens(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=inputs.at_tokens(rows.rollout_logprobs),
            advantages=teacher - old,
            loss_mask=judged,
            rows=inputs.at_tokens(rows.row_of_token),
            num_rows=len(rows),
        )
        correction = correct(self.corrections, tokens)[0] if self.corrections else None
        if self.name == "policy_gradient":
            total = self.objective(tokens, correction=correction).sum
        elif rows.top_tokens is not None and rows.top_logprobs is not None:
            assert outputs.top_k_logprobs is not None, "`ActorWorker.forward` asks for them"
            top = torch.where(judged.unsqueeze(1), inputs.at_tokens(rows.top_logprobs), -torch.inf)
            lost = top_divergence(self.name, outputs.top_k_logprobs, top)
            total = torch.where(judged, lost, 0.0).sum(dtype=torch.float64)
            mass = float(torch.where(judged, top.exp().sum(1), 0.0).sum(dtype=torch.float64))
            watched = merge(watched, Metrics({"teacher_mass": Mean(mass, num_judged)}))
        else:
            ratio = (logprobs.detach() - old).exp()
            ratio = ratio if correction is None else ratio * correction
            lost = {
                name: kl_penalty(logprobs, teacher, estimator) for name, estimator in _ESTIMATORS[self.name].items()
            }
            total = torch.where(judged, ratio * sum(lost.values()) / len(lost), 0.0).sum(dtype=torch.float64)
        watched = merge(watched, Metrics({"loss": Mean(float(total.detach()), num_judged)}))
        # Without a judged token there is nothing to say of them but that: a mean of nothing is not a number.
        return total, watched if num_judged else Metrics({"teacher_judged": watched["teacher_judged"]})


def top_divergence(name: DistillationName, student: Tensor, teacher: Tensor) -> Tensor:
    """Return a divergence of two distributions over K tokens and one class of all others: [N].

        forward = sum over K + 1 classes of  p_teacher * (log p_teacher - log p_student)        reverse the other way

    The mass of the others counts as that of one class, which makes this a lower bound of the divergence over the whole
    vocabulary, 0 if and only if the two agree in every class, and equal to it where K is the vocabulary. Without that
    class a student could leave the K tokens altogether to please a reverse KL. A mass below 1e-5, which float32 hardly
    tells from the sum of the others, counts as 1e-5. No ratio weighs it: given what stands before a token, nothing here
    depends on the token sampled, so it has no bias, whichever policy sampled it.

    >>> teacher = torch.tensor([[0.5, 0.25]]).log()  # and 0.25 elsewhere
    >>> top_divergence("reverse", torch.tensor([[0.25, 0.25]]).log(), teacher) / torch.tensor(2.0).log()
    tensor([0.2500])

    Args:
        name: `forward`, `reverse` or `mixed`.
        student: [N, K] logprobs of the K tokens.
        teacher: [N, K] logprobs of the same ones; -inf of a token that is missing, and belongs to the others.
    """
    counts = teacher > -torch.inf
    said, of_said = _classes(teacher, counts)
    own, of_own = _classes(student, counts)
    forward, reverse = (of_said * (said - own)).sum(1), (of_own * (own - said)).sum(1)
    return {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[name]


_LEAST_MASS = 1e-5


def _classes(logprobs: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return logarithms and shares of the tokens that count, 0 of those that do not, and of all others: [N, K + 1]."""
    logprobs = torch.where(counts, logprobs, 0.0)
    shares = torch.where(counts, logprobs.exp(), 0.0)
    others = (1.0 - shares.sum(1, keepdim=True)).clamp_min(_LEAST_MASS)
    return torch.cat([logprobs, others.log()], 1), torch.cat([shares, others], 1)


_ESTIMATORS: dict[str, dict[str, Literal["k2", "k3"]]] = {
    "reverse": {"reverse": "k2"},
    "forward": {"forward": "k3"},
    "mixed": {"reverse": "k2", "forward": "k3"},
}
"""Schulman's estimators whose gradients, of tokens that the student sampled, are those of the divergences."""


@dataclasses.dataclass(frozen=True)
class LossStreams:
    """Several losses of the same rows: the sum of coefficient * (sum over tokens / denominator), each with its own.

    Every denominator is counted over the whole mini-batch of all ranks, so that no cut changes the weight of a stream.
    """

    streams: Mapping[str, tuple[float, LossFunction[Any, TokenOutputs]]]
    """What stands before the names of its metrics, unless they begin with it -> coefficient and loss."""

    def denominator(self, batch: Sequences, /) -> tuple[float, ...]:
        """Return that of each stream; one of a stream without tokens divides 0."""
        found: list[Denominator] = [loss.denominator(batch) for _, loss in self.streams.values()]
        return tuple(one if isinstance(one, int | float) and one else 1.0 for one in found)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs[Any], /) -> tuple[Tensor, Metrics]:
        """Return the sum of each stream times its coefficient, [K], and what each watches."""
        totals: list[Tensor] = []
        watched: list[Metrics] = []
        for prefix, (coef, loss) in self.streams.items():
            total, metrics = loss(outputs, inputs)
            totals.append(coef * total)
            names = {name: name if name.startswith(prefix) else f"{prefix}{name}" for name in metrics}
            watched.append(Metrics({names[name]: metric for name, metric in metrics.items()}))
        return torch.stack(totals), merge(*watched)
