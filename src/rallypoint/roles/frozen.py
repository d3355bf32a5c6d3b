"""What reference, reward models and teachers share: models that are evaluated and never trained."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from rallypoint.cluster import WorkerContext, WorkerGroup
from rallypoint.config import RoleName, RunConfig
from rallypoint.engine import TrainingEngine
from rallypoint.models import ModelShard
from rallypoint.plan.run_plan import attention_cost
from rallypoint.roles.colocated import LeaseHolder, MemoryLease
from rallypoint.roles.dealing import per_token
from rallypoint.roles.placement import WorkerSpec
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

    async def _per_token(
        self, method: Callable[[WorkerT, list[Sequences]], list[PerToken]], batch: Sequences
    ) -> Tensor | None:
        """Have the ranks compute a number for every token: [T] float32; None without the role."""
        if self._group is None:
            return None
        return await per_token(self._group, method, batch, self._attention_cost)
