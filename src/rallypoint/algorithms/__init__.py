"""Advantages, losses and KL: pure functions of tensors, the same on one process and on a thousand.

Nothing here knows of processes, configs or models. Shape legend: P prompts per step, G rollouts per
prompt, B = P*G rows, T tokens (of a packed stream), V vocabulary; N is the number of trained tokens, and
B1 in an annotation is B+1, the length of offsets.
"""

from rallypoint.algorithms.advantages import (
    gae_advantages,
    group_relative_advantages,
    group_relative_token_advantages,
    whiten,
)
from rallypoint.algorithms.critic_losses import ValueLoss, explained_variance, value_loss
from rallypoint.algorithms.kl import KL, KLEstimator, kl_penalty
from rallypoint.algorithms.loss_functions import (
    ClippedPolicyLoss,
    ClippedValueLoss,
    LossFunction,
    LossInputs,
    TokenOutputs,
)
from rallypoint.algorithms.losses import (
    EntropyBonus,
    KLLoss,
    PolicyLoss,
    entropy_bonus,
    kl_loss,
    policy_loss,
)
from rallypoint.algorithms.weigh import gae, group_relative

__all__ = [
    "KL",
    "ClippedPolicyLoss",
    "ClippedValueLoss",
    "EntropyBonus",
    "KLEstimator",
    "KLLoss",
    "LossFunction",
    "LossInputs",
    "PolicyLoss",
    "TokenOutputs",
    "ValueLoss",
    "entropy_bonus",
    "explained_variance",
    "gae",
    "gae_advantages",
    "group_relative",
    "group_relative_advantages",
    "group_relative_token_advantages",
    "kl_loss",
    "kl_penalty",
    "policy_loss",
    "value_loss",
    "whiten",
]
