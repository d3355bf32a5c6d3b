"""The reward model: a frozen classifier that gives every rollout one number."""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.cluster import WorkerContext, WorkerGroup, shard
from rallypoint.config import RunConfig
from rallypoint.engine import TrainingEngine, reward_scores, scored_tokens
from rallypoint.model_files import load_reward_model
from rallypoint.plan.run_plan import attention_cost
from rallypoint.roles.colocated import Turns, TurnTaker, in_turn
from rallypoint.roles.dealing import per_token
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import PerToken, Sequences


class RewardWorker(TurnTaker):
    """One rank of the reward model: an engine without an optimizer."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        spec.prepare(context)
        self.turns = Turns(context)
        config = spec.config
        assert config.reward.path is not None, "the role is there because the config names its folder"
        with spec.meeting(context) as mesh:
            model = load_reward_model(
                config.reward.path,
                dtype=config.model.dtype,
                mesh=mesh,
                device=torch.device(context.device),
                trust_remote_code=config.model.trust_remote_code,
                frozen=True,
            )
        self.engine: TrainingEngine[Sequences] = TrainingEngine(
            model,
            optimizer=None,
            max_tokens_per_micro_batch=config.engine.max_tokens_per_micro_batch,
            tick=context.tick,
        )
        if "reward" in config.sleeping:
            self.turns.sleep_between(self.engine)

    @shard
    @in_turn()
    def scores(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the score of every row of some parts of a batch, at the token that has it."""
        model, padding = self.engine.shard, self.engine.model.config.pad_token_id
        return [
            self.engine.evaluate(scored_tokens(part, padding), lambda rows, at: reward_scores(model, rows, at))
            for part in parts
        ]


class RewardModel:
    """The reward model as the driver sees it; a run without one has one that has nothing to say."""

    def __init__(self, config: RunConfig, group: WorkerGroup[RewardWorker] | None) -> None:
        self._group = group
        self._attention_cost = attention_cost(config)

    @classmethod
    async def create(cls, placement: Placement) -> RewardModel:
        """Start the workers if the config names a folder of one."""
        config = placement.config
        if config.reward.path is None:
            return cls(config, None)
        return cls(config, await placement.group("reward", RewardWorker))

    async def scores(self, batch: Sequences) -> Tensor | None:
        """Return the score of every row, [B] float32, NaN where the model gives that; None without a model."""
        if self._group is None:
            return None
        values = await per_token(self._group, RewardWorker.scores, batch, self._attention_cost)
        # One number a row, among zeros.
        return torch.zeros(len(batch)).index_add_(0, batch.row_of_token, values)
