"""One rank of training: micro-batches, gradients, the optimizer step.

Must not know: roles, other processes but through `parallel`, where batches come from.
"""

from rallypoint.engine.forward import (
    TokenStream as TokenStream,
    choosing_tokens as choosing_tokens,
    critic_values as critic_values,
    likeliest_tokens as likeliest_tokens,
    policy_outputs as policy_outputs,
    reward_scores as reward_scores,
    scored_tokens as scored_tokens,
    trained_positions as trained_positions,
)
from rallypoint.engine.optimizer import optimizer_tensors as optimizer_tensors, restore_optimizer as restore_optimizer
from rallypoint.engine.training_engine import TrainingEngine as TrainingEngine
