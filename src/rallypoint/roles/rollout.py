"""The role that samples, from the actor's weights."""

from __future__ import annotations

import torch

from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, shard
from rallypoint.config import RunConfig
from rallypoint.errors import WeightsMismatchError
from rallypoint.generation import NativeGenerator, SamplingParams
from rallypoint.models import load_policy, named_weights
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import Prompts, RolloutBatch
from rallypoint.weights import Snapshot, load

ACTOR_MODEL = "actor/model"
"""Name under which an actor worker leaves its model for the rollout worker of the same process."""


class RolloutWorker:
    """One rank of sampling."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        config = spec.config
        spec.prepare(context)
        if shares_actor:
            model = context.shared[ACTOR_MODEL]
        else:
            model = load_policy(
                spec.model_path,
                dtype=config.model.dtype,
                device=torch.device(context.device),
                trust_remote_code=config.model.trust_remote_code,
            ).model
        self._generator = NativeGenerator(model, max_batch_rows=config.rollout.max_batch_rows, tick=context.tick)
        self._shares_actor = shares_actor
        self._version = 0

    @shard
    def sample(self, prompts: Prompts, params: SamplingParams, version: int) -> RolloutBatch:
        """Sample a group of rollouts for each prompt.

        Raises:
            WeightsMismatchError: this rank does not hold the weights of that version.
        """
        if version != self._version:
            raise WeightsMismatchError(
                f"expected to sample from version {version}, but version {self._version} is loaded"
            )
        return self._generator.generate(prompts, params, version=version)

    @broadcast
    def load(self, version: int, snapshot: Snapshot | None) -> None:
        """Take over new weights: None when they are the actor's own, already in place."""
        if snapshot is not None:
            load(snapshot, named_weights(self._generator.model))
        elif not self._shares_actor:
            raise WeightsMismatchError(f"version {version} was published without weights to a rank with its own copy")
        self._version = version


class Rollouts:
    """The sampling role as the driver sees it."""

    def __init__(self, config: RunConfig, group: WorkerGroup[RolloutWorker], shares_actor: bool) -> None:
        self._config, self._group = config, group
        self.shares_actor = shares_actor
        """Whether it samples from the actor's own tensors, so that publishing moves nothing."""
        self.version = 0
        """Of the weights it holds."""

    @classmethod
    async def create(cls, placement: Placement) -> Rollouts:
        """Start the workers; the actor's must be there before."""
        shares_actor = placement.config.rollout_shares_actor
        group = await placement.group("rollout", RolloutWorker, shares_actor)
        return cls(placement.config, group, shares_actor)

    async def sample(self, prompts: Prompts, params: SamplingParams) -> RolloutBatch:
        """Sample a group of rollouts for each prompt, in the order of the prompts."""
        return await self._group.call(RolloutWorker.sample, prompts, params, self.version)

    async def load(self, version: int, snapshot: Snapshot | None) -> None:
        """Take over new weights on every rank."""
        await self._group.call(RolloutWorker.load, version, snapshot)
        self.version = version
