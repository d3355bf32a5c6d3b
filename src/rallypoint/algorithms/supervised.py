"""What is minimised where answers are given: by fine-tuning, reward models and preferences.

Owns: their formulas, and what to watch of them. Must not know: configs, models, processes.

    CrossEntropy                    -log p(token)                     of trained tokens
    BradleyTerry                    -log sigmoid(score+ - score-)     of pairs; + is the chosen answer, - the other
    PreferenceLoss  sigmoid         -log sigmoid(beta (s+ - s-))      s: sum of log p - log p_reference over tokens
                    sigmoid_norm    the same                          s: their mean
                    ipo             (s+ - s- - 1 / (2 beta))^2        s: their mean
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.algorithms.loss_functions import LossInputs, TokenOutputs
from rallypoint.types import Mean, Metrics, PairBatch, Sequences

PreferenceName = Literal["sigmoid", "sigmoid_norm", "ipo"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Cross entropy of the trained tokens, each with the same weight."""

    def denominator(self, batch: Sequences, /) -> float:
        """Return the number of trained tokens."""
        return float(batch.num_loss_tokens)

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs[Sequences], /) -> tuple[Tensor, Metrics]:
        """See `LossFunction`."""
        del inputs
        total, num_tokens = -outputs.logprobs.sum(dtype=torch.float64), len(outputs.logprobs)
        entropy = outputs.entropy.detach().sum(dtype=torch.float64)
        return total, Metrics(
            {"loss": Mean(float(total.detach()), num_tokens), "entropy": Mean(float(entropy), num_tokens)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BradleyTerry:
    """The chosen answer's score is the higher one (Bradley and Terry 1952; as in arXiv 2203.02155)."""

    def denominator(self, batch: PairBatch, /) -> float:
        """Return the number of pairs."""
        return len(batch) / 2

    def __call__(self, outputs: Tensor, inputs: LossInputs[PairBatch], /) -> tuple[Tensor, Metrics]:
        """See `LossFunction`; the outputs are a score for each row: [B]."""
        del inputs
        chosen, rejected = outputs.to(torch.float64).reshape(-1, 2).unbind(1)
        total = -functional.logsigmoid(chosen - rejected).sum()
        return total, preference_metrics(total.detach(), chosen.detach(), rejected.detach())


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLoss:
    """The score of an answer is how much likelier the policy makes it than the reference does.

    Direct preference optimisation (arXiv 2305.18290), with means instead of sums (arXiv 2411.15124), and IPO (arXiv
    2310.12036), whose authors take means as well.
    """

    name: PreferenceName
    beta: float

    def denominator(self, batch: PairBatch, /) -> float:
        """Return the number of pairs."""
        return len(batch) / 2

    def __call__(self, outputs: TokenOutputs, inputs: LossInputs[PairBatch], /) -> tuple[Tensor, Metrics]:
        """See `LossFunction`."""
        rows, reference = inputs.rows, inputs.rows.reference_logprobs
        assert reference is not None, "the recipe has computed them"
        place = inputs.at_tokens(rows.row_of_token)
        zeros = torch.zeros(len(rows), dtype=torch.float64, device=place.device)
        logprobs = zeros.index_add(0, place, outputs.logprobs.to(torch.float64))
        gain = logprobs - inputs.send(reference)
        if self.name != "sigmoid":
            gain = gain / zeros.index_add(0, place, torch.ones_like(outputs.logprobs, dtype=torch.float64))
        chosen, rejected = gain.reshape(-1, 2).unbind(1)
        gap = chosen - rejected
        if self.name == "ipo":
            total = (gap - 1 / (2 * self.beta)).square().sum()
        else:
            total = -functional.logsigmoid(self.beta * gap).sum()
        watched = preference_metrics(total.detach(), self.beta * chosen.detach(), self.beta * rejected.detach())
        likely = float(logprobs.detach()[::2].sum()), len(chosen)
        return total, Metrics({**watched, "chosen_logprob": Mean(*likely)})


def preference_metrics(loss: Tensor, chosen: Tensor, rejected: Tensor) -> Metrics:
    """Return what to watch of pairs: the mean loss, how often the chosen one is ahead, and by how much.

    >>> preference_metrics(torch.tensor(1.0), torch.tensor([2.0, 1.0]), torch.tensor([0.5, 1.5])).scalars()
    {'loss': 0.5, 'accuracy': 0.5, 'margin': 0.5, 'chosen': 1.5, 'rejected': 1.0}

    Args:
        loss: the sum.
        chosen: [N] scores of the chosen answers, or beta times what they gained.
        rejected: [N] likewise.
    """
    num = len(chosen)
    sums = {
        "loss": loss,
        "accuracy": (chosen > rejected).sum(),
        "margin": (chosen - rejected).sum(),
        "chosen": chosen.sum(),
        "rejected": rejected.sum(),
    }
    return Metrics({name: Mean(float(value), num) for name, value in sums.items()})
