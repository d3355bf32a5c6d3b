"""The role that samples, from the actor's weights."""

from __future__ import annotations

from transformers import PreTrainedModel

from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, shard
from rallypoint.config import RunConfig
from rallypoint.engine import Engine
from rallypoint.errors import WeightsMismatchError
from rallypoint.generation import GenerationEngine, HFEngine, NativeEngine, SamplingParams, generate
from rallypoint.generation.requests import Decode
from rallypoint.generation.row import BLOCK_TOKENS
from rallypoint.models import trained_weights
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.turns import Turns, TurnTaker, in_turn
from rallypoint.types import ActorBatch, Prompts, RolloutBatch
from rallypoint.weights import Snapshot, load

ACTOR_ENGINE = "actor/engine"
"""Name under which an actor worker leaves its engine for the rollout worker of the same process."""
ROLLOUT_ENGINE, ROLLOUT_MODEL = "rollout/engine", "rollout/model"
"""Names under which a rollout worker leaves what it samples with for the guest worker of the same process."""


class RolloutWorker(TurnTaker):
    """One rank of sampling."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        config = spec.config
        spec.prepare(context)
        self.turns = Turns(context)
        if shares_actor:
            engine: Engine[ActorBatch] = context.shared[ACTOR_ENGINE]
            model = engine.model
            if "actor" in config.sleeping:
                self.turns.sleep_between(engine)
        else:
            model = spec.load_policy(context).model
        self._model, self._tick, self._shares_actor = model, context.tick, shares_actor
        self._engine = make_engine(config, model, spec.decoder())
        self._engine.sleep()
        context.shared[ROLLOUT_ENGINE], context.shared[ROLLOUT_MODEL] = self._engine, model

    @shard
    @in_turn()
    def sample(self, prompts: Prompts, params: SamplingParams, version: int) -> RolloutBatch:
        """Sample a group of rollouts for each prompt.

        Raises:
            WeightsMismatchError: this rank does not hold the weights of that version.
        """
        self._engine.wake()
        try:
            return generate(self._engine, prompts, params, version=version, tick=self._tick)
        finally:
            self._engine.sleep()  # other roles of this process have the memory while it is their turn

    @broadcast
    def load(self, version: int, snapshot: Snapshot | None) -> None:
        """Take over new weights: None when they are the actor's own, already in place."""
        if snapshot is not None:
            load(snapshot, trained_weights(self._model))
        elif not self._shares_actor:
            raise WeightsMismatchError(f"version {version} was published without weights to a rank with its own copy")
        self._engine.load(version, None)


def make_engine(config: RunConfig, model: PreTrainedModel, decode: Decode | None = None) -> GenerationEngine:
    """Return the engine that the config names, for a model in this process; stop texts need `decode`."""
    rollout = config.rollout
    if rollout.engine == "hf":
        return HFEngine(model, decode=decode)
    num_rows = min(rollout.max_batch_rows, -(-rollout.num_prompts // config.num_ranks("rollout")) * rollout.group_size)
    return NativeEngine(
        model,
        max_rows=rollout.max_batch_rows,
        cache_tokens=rollout.cache_tokens or num_rows * (config.max_row_tokens + 2 * BLOCK_TOKENS),
        mode="exact" if rollout.exact else "fast",
        decode=decode,
    )


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
