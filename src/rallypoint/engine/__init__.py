"""One rank of training: micro-batches, gradients, the optimizer step.

Must not know: roles, other processes but through `parallel`, where batches come from.
"""

from rallypoint.engine.forward import (
    TokenStream,
    choosing_tokens,
    critic_values,
    likeliest_tokens,
    policy_outputs,
    reward_scores,
    scored_tokens,
    trained_positions,
)
from rallypoint.engine.optimizer import optimizer_tensors, restore_optimizer
from rallypoint.engine.training_engine import TrainingEngine

__all__ = [
    "TokenStream",
    "TrainingEngine",
    "choosing_tokens",
    "critic_values",
    "likeliest_tokens",
    "optimizer_tensors",
    "policy_outputs",
    "restore_optimizer",
    "reward_scores",
    "scored_tokens",
    "trained_positions",
]
