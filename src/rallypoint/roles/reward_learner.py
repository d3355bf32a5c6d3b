"""The reward model while it is trained, in the actor's place; the run has no policy."""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.algorithms import LossFunction
from rallypoint.cluster import WorkerContext, shard
from rallypoint.engine import reward_scores, scored_tokens, trained_positions
from rallypoint.model_files import fresh, load_new_reward_model
from rallypoint.roles.colocated import MemoryLease, with_lease
from rallypoint.roles.dealing import per_token
from rallypoint.roles.learner import Learner, LearnerWorker
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.reward import by_row, scores_of
from rallypoint.types import Metrics, PairBatch, PerToken, Sequences, Sum, merge


class RewardLearnerWorker(LearnerWorker[PairBatch, Tensor]):
    """One rank of a reward model."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, loss: LossFunction[PairBatch, Tensor]) -> None:
        config = spec.config
        spec.prepare(context)
        self.lease = MemoryLease(context)
        with spec.meeting(context) as mesh:
            model = load_new_reward_model(
                spec.model_path,
                dtype=config.model.dtype,
                mesh=mesh,
                device=torch.device(context.device),
                trust_remote_code=config.model.trust_remote_code,
                lora=config.model.lora and fresh(config.model.lora),
                seed=config.seed,
            )
        super().__init__(context, spec, model, spec.model_path, config.actor.optimizer, loss)

    @shard
    @with_lease()
    def scores(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the score of every row of some parts of a batch, at the token that has it."""
        return scores_of(self.engine, parts)

    def forward(self, rows: Sequences, at: Tensor) -> Tensor:
        """Return the score of every row, as the reward role does: [B]."""
        del at
        scored = scored_tokens(rows, self.engine.model.config.pad_token_id)
        return reward_scores(self.engine.shard, scored, trained_positions(scored))


class RewardLearner(Learner[PairBatch, RewardLearnerWorker]):
    """The reward model as the driver sees it."""

    role, model_folder = "actor", ""

    @classmethod
    async def create(cls, placement: Placement, loss: LossFunction[PairBatch, Tensor]) -> RewardLearner:
        """Start the workers; they are to minimise a loss."""
        return cls(placement.config, await placement.group("actor", RewardLearnerWorker, loss), loss)

    async def scores(self, batch: Sequences) -> Tensor:
        """Return the score of every row: [B] float32."""
        values = await per_token(self._group, RewardLearnerWorker.scores, batch, self._attention_cost)
        return by_row(batch, values)

    async def update(self, batch: PairBatch, step: int) -> Metrics:
        """Train on the pairs of a step, mini-batch by mini-batch."""
        self.learned = batch
        batches = self.cut(batch, step)
        metrics = await self._group.call(RewardLearnerWorker.train, batches, step)
        self.version += len(batches.parts)
        return merge(metrics, Metrics({"num_tokens": Sum(batch.num_loss_tokens)})).prefixed("actor")
