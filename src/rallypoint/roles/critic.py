"""The value function."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rallypoint.algorithms import explained_variance, value_loss
from rallypoint.cluster import WorkerContext, WorkerGroup, shard
from rallypoint.config import RunConfig
from rallypoint.engine import critic_values
from rallypoint.model_files import fresh, load_critic
from rallypoint.parallel.transfer import sent
from rallypoint.plan.plan import attention_cost
from rallypoint.roles.colocated import Turns, in_turn
from rallypoint.roles.dealing import per_token
from rallypoint.roles.learner import LearnerWorker, MiniBatches
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import CriticBatch, Last, Metrics, PerToken, Sequences


class CriticWorker(LearnerWorker[CriticBatch]):
    """One rank of the critic."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        config = spec.config
        spec.prepare(context)
        self.turns = Turns(context)
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
        super().__init__(context, spec, model, path, config.critic.optimizer)
        if "critic" in config.sleeping:
            self.turns.sleep_between(self.engine)

    @shard
    @in_turn()
    def values(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the value of every state in which a trained token of some parts of a batch was chosen."""
        model = self.engine.shard
        return [self.engine.evaluate(part, lambda rows, at: critic_values(model, rows, at)) for part in parts]

    def loss(self, part: CriticBatch, at: Tensor, *, on_policy: bool) -> tuple[Tensor, Metrics]:
        """See `LearnerWorker.loss`: half the squared error, clipped."""
        del on_policy
        values = critic_values(self.engine.shard, part, at)
        loss = value_loss(
            values,
            sent(part.values[at], values.device),
            sent(part.returns[at], values.device),
            torch.ones(len(at), dtype=torch.bool, device=values.device),
            clip=self.config.critic.clip,
        )
        return loss.sum, loss.metrics()


class Critic:
    """The value function as the driver sees it."""

    def __init__(self, config: RunConfig, group: WorkerGroup[CriticWorker]) -> None:
        self._config, self._group = config, group
        self._attention_cost = attention_cost(config)

    @classmethod
    async def create(cls, placement: Placement) -> Critic:
        """Start the workers; they load critic.path, or start from the initial policy."""
        return cls(placement.config, await placement.group("critic", CriticWorker))

    async def values(self, batch: Sequences) -> Tensor:
        """Return the value of every state in which a trained token was chosen: [T] float32."""
        return await per_token(self._group, CriticWorker.values, batch, self._attention_cost)

    async def update(self, batch: CriticBatch, step: int) -> Metrics:
        """Train on a step's rollouts, mini-batch by mini-batch."""
        config = self._config
        batches = MiniBatches.cut(
            batch, config.critic, seed=config.seed, step=step, attention_cost=self._attention_cost
        )
        merged = await self._group.call(CriticWorker.train, batches, step)
        means = merged.scalars()
        explained = explained_variance(
            error_mean=means["error"],
            error_square_mean=means["error_square"],
            return_mean=means["return"],
            return_square_mean=means["return_square"],
        )
        shown = {name: m for name, m in merged.items() if not name.startswith(("error", "return_square"))}
        return Metrics(shown | {"explained_variance": Last(explained)}).prefixed("critic")

    async def save(self, folder: Path) -> None:
        """Write the critic into a checkpoint: critic/, and training/critic.safetensors."""
        await self._group.call(CriticWorker.save, folder / "critic", folder / "training" / "critic.safetensors")

    async def restore(self, folder: Path) -> None:
        """Read the critic back from a checkpoint."""
        await self._group.call(CriticWorker.restore, folder / "critic", folder / "training" / "critic.safetensors")
