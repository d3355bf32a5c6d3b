"""The reward model: a frozen classifier that gives every rollout one number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rallypoint.cluster import WorkerContext, shard
from rallypoint.engine import TrainingEngine, reward_scores, scored_tokens
from rallypoint.model_files import load_reward_model
from rallypoint.models import ModelShard
from rallypoint.roles.colocated import in_turn
from rallypoint.roles.frozen import FrozenModel, FrozenWorker
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import PerToken, Sequences


class RewardWorker(FrozenWorker):
    """One rank of the reward model."""

    role = "reward"

    def load(self, context: WorkerContext, spec: WorkerSpec) -> ModelShard:
        """Load this rank's part of the classifier."""
        config = spec.config
        assert config.reward.path is not None, "the role is there because the config names its folder"
        with spec.meeting(context) as mesh:
            return load_reward_model(
                config.reward.path,
                dtype=config.model.dtype,
                mesh=mesh,
                device=torch.device(context.device),
                trust_remote_code=config.model.trust_remote_code,
                frozen=True,
            )

    @shard
    @in_turn()
    def scores(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the score of every row of some parts of a batch, at the token that has it."""
        return scores_of(self.engine, parts)


def scores_of(engine: TrainingEngine[Any], parts: list[Sequences]) -> list[PerToken]:
    """Return the score of every row of some parts of a batch, at the token that has it."""
    model, padding = engine.shard, engine.model.config.pad_token_id
    return [
        engine.evaluate(scored_tokens(part, padding), lambda rows, at: reward_scores(model, rows, at)) for part in parts
    ]


def by_row(batch: Sequences, values: Tensor) -> Tensor:
    """Return the one number of each row, which stands among zeros: [T] -> [B]."""
    return torch.zeros(len(batch)).index_add_(0, batch.row_of_token, values)


class RewardModel(FrozenModel[RewardWorker]):
    """The reward model as the driver sees it."""

    @classmethod
    async def create(cls, placement: Placement) -> RewardModel:
        """Start the workers if the run has the role."""
        config = placement.config
        if "reward" not in config.roles:
            return cls(config, None)
        return cls(config, await placement.group("reward", RewardWorker))

    async def scores(self, batch: Sequences) -> Tensor | None:
        """Return the score of every row, [B] float32, NaN where the model gives that; None without a model."""
        values = await self._per_token(RewardWorker.scores, batch)
        return None if values is None else by_row(batch, values)
