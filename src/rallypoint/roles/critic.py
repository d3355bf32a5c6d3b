"""The value function."""

from __future__ import annotations

import torch
from torch import Tensor

from rallypoint.algorithms import LossFunction, explained_variance
from rallypoint.cluster import WorkerContext, shard
from rallypoint.engine import critic_values
from rallypoint.model_files import fresh, load_critic
from rallypoint.roles.colocated import MemoryLease, with_lease
from rallypoint.roles.dealing import per_token
from rallypoint.roles.learner import Learner, LearnerWorker
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import CriticBatch, Last, Metrics, PerToken, Sequences


class CriticWorker(LearnerWorker[CriticBatch, Tensor]):
    """One rank of the critic."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, loss: LossFunction[CriticBatch, Tensor]) -> None:
        config = spec.config
        spec.prepare(context)
        self.lease = MemoryLease(context)
        path = config.critic.path or spec.model_path
        with spec.meeting(context) as mesh:
            model = load_critic(
                path,
                dtype=config.model.dtype,
                mesh=mesh,
                device=torch.device(context.device),
                trust_remote_code=config.model.trust_remote_code,
                lora=config.model.lora and fresh(config.model.lora),
                seed=config.seed,
            )
        super().__init__(context, spec, model, path, config.critic.optimizer, loss)
        if "critic" in config.sleeping:
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
        if not batch.num_loss_tokens:
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
