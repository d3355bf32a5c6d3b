"""Models that are evaluated and never trained: what reference, reward models and teachers share, and the reward models.

These are classifiers that give every rollout one number each; `Scorers` has them beside the reward function.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rallypoint.algorithms import Advantage
from rallypoint.cluster import WorkerContext, WorkerGroup, shard
from rallypoint.config import RoleName, RunConfig
from rallypoint.engine import TrainingEngine, reward_scores, scored_tokens
from rallypoint.environments.grader import Grader
from rallypoint.model_files import load_reward_model
from rallypoint.models import ModelShard
from rallypoint.prepare.plan import attention_cost
from rallypoint.roles.colocated import LeaseHolder, MemoryLease, with_lease
from rallypoint.roles.dealing import per_token
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import PerToken, Sequences

WorkerT = TypeVar("WorkerT", bound="FrozenWorker")


class FrozenWorker(LeaseHolder, abc.ABC):
    """One rank: an engine without an optimizer for each model."""

    role: ClassVar[RoleName]

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        spec.prepare(context)
        self.lease = MemoryLease(context)
        config = spec.config.engine
        self.engines: list[TrainingEngine[Sequences]] = [
            TrainingEngine(
                model,
                optimizer=None,
                max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
                deterministic=config.deterministic,
                tick=context.tick,
            )
            for model in self.load(context, spec)
        ]
        if self.role in spec.config.sleeping:
            self.lease.sleep_between(*self.engines)

    @property
    def engine(self) -> TrainingEngine[Sequences]:
        """The first one."""
        return self.engines[0]

    @abc.abstractmethod
    def load(self, context: WorkerContext, spec: WorkerSpec) -> Sequence[ModelShard]:
        """Load this rank's part of the models."""


class FrozenModel(Generic[WorkerT]):
    """The driver's handle; in a run without the role it returns None."""

    def __init__(self, config: RunConfig, group: WorkerGroup[WorkerT] | None) -> None:
        self._config, self._group = config, group
        self._attention_cost = attention_cost(config)


class RewardWorker(FrozenWorker):
    """One rank of every reward model."""

    role = "reward"

    def load(self, context: WorkerContext, spec: WorkerSpec) -> list[ModelShard]:
        """Load this rank's part of every classifier."""
        models = spec.config.reward.all_models
        with spec.meeting(context) as mesh:
            return [spec.load(load_reward_model, one.path, context, mesh, frozen=True) for one in models]

    @shard
    @with_lease()
    def scores(self, parts: list[Sequences], model: int) -> list[PerToken]:
        """Return what one of the models gives every row of some parts of a batch, at the token that has it."""
        return scores_of(self.engines[model], parts)


def scores_of(engine: TrainingEngine[Any], parts: list[Sequences]) -> list[PerToken]:
    """Return the score of every row of some parts of a batch, at the token that has it."""
    model, padding = engine.shard, engine.model.config.pad_token_id
    return [
        engine.evaluate(scored_tokens(part, padding), lambda rows, at: reward_scores(model, rows, at)) for part in parts
    ]


def by_row(batch: Sequences, values: Tensor) -> Tensor:
    """Return the one number of each row, which stands among zeros: [T] -> [B]."""
    return torch.zeros(len(batch)).index_add_(0, batch.row_of_token, values)


class RewardModels(FrozenModel[RewardWorker]):
    """The reward models as the driver sees them."""

    @classmethod
    async def create(cls, placement: Placement) -> RewardModels:
        """Start the workers if the run has the role."""
        config = placement.config
        if "reward" not in config.roles:
            return cls(config, None)
        return cls(config, await placement.group("reward", RewardWorker))

    async def scores(self, batch: Sequences) -> list[Tensor]:
        """Return what each model says of every rollout's last sequence: [B] float32; nothing without a model.

        NaN where it gives that.
        """
        if self._group is None:
            return []
        batch = batch.bare().last_sequences()
        return [
            by_row(batch, await per_token(self._group, RewardWorker.scores, batch, self._attention_cost, model))
            for model in range(len(self._config.reward.all_models))
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Scorers:
    """What scores rollouts."""

    grader: Grader
    """Asks the reward function."""
    models: RewardModels
    advantage: Advantage
    """The estimator, which says whether scores differ enough to learn from them."""
