"""The value function; and the reward model while it is trained, in the actor's place: the same with another head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from rallypoint.algorithms import LossFunction, explained_variance
from rallypoint.cluster import WorkerContext, shard
from rallypoint.config import OptimizerConfig
from rallypoint.engine import critic_values, reward_scores, scored_tokens, trained_positions
from rallypoint.model_files import fresh, load_critic, load_new_reward_model
from rallypoint.models import ModelShard
from rallypoint.roles.colocated import MemoryLease, with_lease
from rallypoint.roles.dealing import per_token
from rallypoint.roles.frozen import by_row, scores_of
from rallypoint.roles.learner import Learner, LearnerWorker
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import CriticBatch, Last, Metrics, PairBatch, PerToken, Sequences, Sum, merge

BatchT = TypeVar("BatchT", bound=Sequences)


class ValueWorker(LearnerWorker[BatchT, Tensor]):
    """One rank of a model with a head that gives one number: for a state, or for a row."""

    def __init__(
        self,
        context: WorkerContext,
        spec: WorkerSpec,
        loss: LossFunction[BatchT, Tensor],
        *,
        load: Callable[..., ModelShard],
        path: str,
        optimizer: OptimizerConfig,
    ) -> None:
        lora = spec.config.model.lora
        spec.prepare(context)
        self.lease = MemoryLease(context)
        with spec.meeting(context) as mesh:
            loaded = spec.load(load, path, context, mesh, lora=lora and fresh(lora), seed=spec.config.seed)
        super().__init__(context, spec, loaded, path, optimizer, loss)


class CriticWorker(ValueWorker[CriticBatch]):
    """One rank of the critic."""

    balances_routers = False  # the keys are the actor's

    def __init__(self, context: WorkerContext, spec: WorkerSpec, loss: LossFunction[CriticBatch, Tensor]) -> None:
        critic = spec.config.critic
        path = critic.path or spec.model_path
        super().__init__(context, spec, loss, load=load_critic, path=path, optimizer=critic.optimizer)
        if "critic" in spec.config.sleeping:
            self.lease.sleep_between(self.engine)

    @shard
    @with_lease()
    def values(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the value of every state in which a trained token of some parts of a batch was chosen."""
        return [self.engine.evaluate(part, self.forward) for part in parts]

    def forward(self, rows: Sequences, at: Tensor) -> Tensor:
        """Return the value of the state in which each token was chosen."""
        return critic_values(self.engine.shard, rows, at)


class Critic(Learner[CriticBatch, CriticWorker]):
    """The value function as the driver sees it."""

    role, model_folder = "critic", "critic"

    @classmethod
    async def create(cls, placement: Placement, loss: LossFunction[CriticBatch, Tensor]) -> Critic:
        """Start the workers; they load critic.path or start from the initial policy, and are to minimise a loss."""
        return cls(placement.config, await placement.group("critic", CriticWorker, loss), loss)

    async def values(self, batch: Sequences) -> Tensor:
        """Return the value of every state in which a trained token was chosen: [T] float32."""
        return await per_token(self._group, CriticWorker.values, batch, self._attention_cost)

    async def update(self, batch: CriticBatch, step: int) -> Metrics:
        """Train on a step's rollouts, mini-batch by mini-batch."""
        merged = await self._group.call(CriticWorker.train, self.cut(batch, step), step)
        if "error" not in merged:  # nothing to train on, or nothing finite
            return merged.prefixed("critic")
        means = merged.scalars()
        explained = explained_variance(
            error_mean=means["error"],
            error_square_mean=means["error_square"],
            return_mean=means["return"],
            return_square_mean=means["return_square"],
        )
        shown = {name: m for name, m in merged.items() if not name.startswith(("error", "return_square"))}
        return Metrics(shown | {"explained_variance": Last(explained)}).prefixed("critic")


class RewardLearnerWorker(ValueWorker[PairBatch]):
    """One rank of a reward model while it is trained."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, loss: LossFunction[PairBatch, Tensor]) -> None:
        path, optimizer = spec.model_path, spec.config.actor.optimizer
        super().__init__(context, spec, loss, load=load_new_reward_model, path=path, optimizer=optimizer)

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
