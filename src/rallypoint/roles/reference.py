"""The frozen copy of the initial policy that the KL is measured to."""

from __future__ import annotations

from torch import Tensor

from rallypoint.cluster import WorkerContext, shard
from rallypoint.engine import policy_outputs
from rallypoint.models import ModelShard, twin
from rallypoint.roles.colocated import ActorParts, in_turn
from rallypoint.roles.frozen import FrozenModel, FrozenWorker
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import PerToken, Sequences


class ReferenceWorker(FrozenWorker):
    """One rank of the reference."""

    role = "reference"

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        self._shares_actor, self._temperature = shares_actor, spec.config.rollout.temperature
        super().__init__(context, spec)

    def load(self, context: WorkerContext, spec: WorkerSpec) -> ModelShard:
        """Load the initial policy, or take the frozen weights below the actor's adapters."""
        if self._shares_actor:
            actor = ActorParts.find(context)
            assert actor is not None, "an actor worker came to life here before"
            return ModelShard.whole(twin(actor.engine.model))
        with spec.meeting(context) as mesh:
            return spec.load_policy(context, mesh, frozen=True)

    @shard
    @in_turn()
    def logprobs(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the log-probability of every trained token of some parts of a batch."""
        model, temperature = self.engine.shard, self._temperature
        return [
            self.engine.evaluate(part, lambda rows, at: policy_outputs(model, rows, at, temperature).logprobs)
            for part in parts
        ]


class Reference(FrozenModel[ReferenceWorker]):
    """The reference as the driver sees it."""

    @classmethod
    async def create(cls, placement: Placement) -> Reference:
        """Start the workers if the run has the role, before the actor is trained; they keep the initial policy."""
        config = placement.config
        if "reference" not in config.roles:
            return cls(config, None)
        return cls(config, await placement.group("reference", ReferenceWorker, config.reference_shares_actor))

    async def logprobs(self, batch: Sequences) -> Tensor | None:
        """Return the log-probability of every trained token, [T] float32; None in a run without a reference."""
        return await self._per_token(ReferenceWorker.logprobs, batch)
