"""The frozen copy that the KL is measured to."""

from __future__ import annotations

from torch import Tensor

from rallypoint.cluster import WorkerContext, WorkerGroup, shard
from rallypoint.config import RunConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.models import ModelShard, twin
from rallypoint.plan.run_plan import attention_cost
from rallypoint.roles.colocated import ActorParts, Turns, TurnTaker, in_turn
from rallypoint.roles.dealing import per_token
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import PerToken, Sequences


class ReferenceWorker(TurnTaker):
    """One rank of the reference: an engine without an optimizer."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        spec.prepare(context)
        self.turns = Turns(context)
        config = spec.config
        if shares_actor:
            actor = ActorParts.find(context)
            assert actor is not None, "an actor worker came to life here before"
            model = ModelShard.whole(twin(actor.engine.model))
        else:
            with spec.meeting(context) as mesh:
                model = spec.load_policy(context, mesh, frozen=True)
        self._temperature = config.rollout.temperature
        self.engine: TrainingEngine[Sequences] = TrainingEngine(
            model,
            optimizer=None,
            max_tokens_per_micro_batch=config.engine.max_tokens_per_micro_batch,
            tick=context.tick,
        )
        if "reference" in config.sleeping:  # who shares the actor's weights never does
            self.turns.sleep_between(self.engine)

    @shard
    @in_turn()
    def logprobs(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the log-probability of every trained token of some parts of a batch."""
        model, temperature = self.engine.shard, self._temperature
        return [
            self.engine.evaluate(part, lambda rows, at: policy_outputs(model, rows, at, temperature).logprobs)
            for part in parts
        ]


class Reference:
    """The reference as the driver sees it; a run without KL has one that has nothing to say."""

    def __init__(self, config: RunConfig, group: WorkerGroup[ReferenceWorker] | None) -> None:
        self._group = group
        self._attention_cost = attention_cost(config)

    @classmethod
    async def create(cls, placement: Placement) -> Reference:
        """Start the workers if the config has a KL, before the actor is trained; they keep the initial policy."""
        config = placement.config
        if config.kl is None:
            return cls(config, None)
        return cls(config, await placement.group("reference", ReferenceWorker, config.reference_shares_actor))

    async def logprobs(self, batch: Sequences) -> Tensor | None:
        """Return the log-probability of every trained token, [T] float32; None without a KL."""
        if self._group is None:
            return None
        return await per_token(self._group, ReferenceWorker.logprobs, batch, self._attention_cost)
