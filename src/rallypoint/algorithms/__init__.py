"""Advantages, losses and KL: pure functions of tensors, the same on one process and on a thousand.

Must not know: processes, configs, models.

`estimators`, `policy_losses`, `covariance` and `corrections` have a class for
every name, with its parameters; docs/algorithms.md lists them. Shape legend: P prompts per step, G rollouts per
prompt, B = P*G rows, T tokens (of a packed stream), V vocabulary; N is the number of trained tokens, and B1 in an
annotation is B+1, the length of offsets.
"""

from rallypoint.algorithms.aggregation import Weights, aggregate
from rallypoint.algorithms.corrections import CORRECTIONS, Correction, correct, gap_metrics
from rallypoint.algorithms.critic_losses import explained_variance
from rallypoint.algorithms.distillation import DistillationLoss, LossStreams
from rallypoint.algorithms.estimators import ADVANTAGES, GAE
from rallypoint.algorithms.group_relative import Advantage
from rallypoint.algorithms.kl import KL, AdaptiveKL, kl_penalty
from rallypoint.algorithms.loss_functions import (
    ActorLoss,
    ClippedValueLoss,
    Denominator,
    LossFunction,
    LossInputs,
    TokenOutputs,
)
from rallypoint.algorithms.losses import OBJECTIVES
from rallypoint.algorithms.own import OwnAdvantage, OwnObjective, tensors_of
from rallypoint.algorithms.policy_losses import PolicyObjective, PolicyTokens
from rallypoint.algorithms.rewards import Rewards
from rallypoint.algorithms.shaping import OverlongPenalty, RowMask, rows_that_learn
from rallypoint.algorithms.supervised import BradleyTerry, CrossEntropy, PreferenceLoss
from rallypoint.algorithms.weigh import has_signal, rows_with_signal, weigh, weigh_valued

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "GAE",
    "KL",
    "OBJECTIVES",
    "ActorLoss",
    "AdaptiveKL",
    "Advantage",
    "BradleyTerry",
    "ClippedValueLoss",
    "Correction",
    "CrossEntropy",
    "Denominator",
    "DistillationLoss",
    "LossFunction",
    "LossInputs",
    "LossStreams",
    "OverlongPenalty",
    "OwnAdvantage",
    "OwnObjective",
    "PolicyObjective",
    "PolicyTokens",
    "PreferenceLoss",
    "Rewards",
    "RowMask",
    "TokenOutputs",
    "Weights",
    "aggregate",
    "correct",
    "explained_variance",
    "gap_metrics",
    "has_signal",
    "kl_penalty",
    "rows_that_learn",
    "rows_with_signal",
    "tensors_of",
    "weigh",
    "weigh_valued",
]
