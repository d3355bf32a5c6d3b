"""The role that samples, from the actor's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, collect, shard
from rallypoint.cluster.call import Process
from rallypoint.config import RunConfig
from rallypoint.engine import TrainingEngine
from rallypoint.errors import GenerationError, WeightsMismatchError
from rallypoint.generation import GenerationEngine, SamplingParams, generate
from rallypoint.generation.vllm import VLLMEngine
from rallypoint.models import ModelShard, trained_weights
from rallypoint.plan.run_plan import Way
from rallypoint.roles.colocated import Turns, TurnTaker, in_turn, make_room_for_neighbour
from rallypoint.roles.engines import make_engine, start_server
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.publishing import EXPOSED, SOURCE, GetExposed, LineEnd, OpenSender, way_between
from rallypoint.types import ActorBatch, Metrics, Prompts, RolloutBatch, Sum, merge
from rallypoint.weights import Receiver, TransferPlan, published_folder

ACTOR_ENGINE = "actor/engine"
"""Name under which an actor worker leaves its engine for the rollout worker of the same process."""
ROLLOUT_ENGINE, ROLLOUT_MODEL, ROLLOUT_CHECK = "rollout/engine", "rollout/model", "rollout/check"
"""Names under which a rollout worker leaves what it samples with, and may not, for the guest worker of its process."""


class RolloutWorker(TurnTaker):
    """One rank of sampling."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        config = spec.config
        spec.prepare(context)
        self.turns = Turns(context)
        self._rank, self._tick, self._shares_actor = context.rank, context.tick, shares_actor
        self._end = LineEnd(context, spec)
        self._open_source: OpenSender | None = context.shared.get(SOURCE)
        self._exposed: GetExposed | None = context.shared.get(EXPOSED)
        self._problem: str | None = None
        self._failures: list[GenerationError] = []
        self._until = contextlib.ExitStack()
        self._shard: ModelShard | None = None
        self._server: VLLMEngine | None = None
        """Another process, with the model, where that is what samples."""
        if config.rollout.engine == "vllm":
            make_room_for_neighbour(context)
            self._server = start_server(spec, context, self._until)
            self._engine: GenerationEngine = self._server
        else:
            self._shard = self._own_model(context, spec)
            self._engine = make_engine(config, self._shard.model, spec.decoder())
            context.shared[ROLLOUT_MODEL] = self._shard.model
        self._engine.sleep()
        context.shared[ROLLOUT_ENGINE], context.shared[ROLLOUT_CHECK] = self._engine, self.check_whole

    def _own_model(self, context: WorkerContext, spec: WorkerSpec) -> ModelShard:
        if not self._shares_actor:
            return spec.load_policy(context)
        engine: TrainingEngine[ActorBatch] = context.shared[ACTOR_ENGINE]
        if "actor" in spec.config.sleeping:
            self.turns.sleep_between(engine)
        return engine.shard

    @property
    def _model(self) -> PreTrainedModel:
        assert self._shard is not None, "a server has the model"
        return self._shard.model

    def __enter__(self) -> RolloutWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._until.close()

    @shard
    @in_turn()
    def sample(self, prompts: Prompts, params: SamplingParams, version: int) -> RolloutBatch:
        """Sample a group of rollouts for each prompt; what its engine fails on is left out, see `failures`.

        Raises:
            WeightsMismatchError: this rank does not hold the weights of that version.
        """
        self.check_whole()
        self._engine.wake()
        try:
            return generate(self._engine, prompts, params, version=version, tick=self._tick, failures=self._failures)
        finally:
            self._engine.sleep()  # other roles of this process have the memory while it is their turn

    @collect
    def failures(self) -> list[str]:
        """Return why rollouts failed since this was last asked, one sentence each."""
        failed, self._failures = self._failures, []
        return [str(error) for error in failed]

    @collect
    def memory(self) -> Metrics:
        """See `TurnTaker.memory`; with that of the server, and `num_server_restarts` since this was last asked."""
        if self._server is None:
            return self.turns.metrics()
        restarts = Metrics({"num_server_restarts": Sum(self._server.take_restarts())})
        return merge(self.turns.metrics(self._server.memory_bytes()), restarts)

    def check_whole(self) -> None:
        """Refuse to sample from a model of which only parts were loaded.

        Raises:
            WeightsMismatchError: the last load has failed.
        """
        if self._problem is not None:
            raise WeightsMismatchError(f"{self._problem}, so that nothing is sampled until another one has been")

    @broadcast
    def open_line(self, way: Way, plan: TransferPlan) -> None:
        """Meet those who send weights, when it is sure that they are of this model.

        Raises:
            WeightsMismatchError: names, shapes or types are not those of the model.
        """
        plan.manifest.check(trained_weights(self._model))
        self._plan, self._place = plan, plan.place_of_receiver(self._rank)
        sends = plan.members[self._place].sender is not None
        self._end.open(way, plan, self._place, self._exposed() if sends and self._exposed is not None else None)

    @broadcast
    def load(self, version: int, published: Path | None) -> None:
        """Take over new weights: of a folder, from the line, or, beside an unsharded actor, those that are in place.

        From the first tensor to the last one the model is of no version, and after an error it stays so: `sample`
        refuses until a whole version has been loaded.

        Raises:
            WeightsMismatchError: they are damaged, incomplete, or of another version or model.
        """
        self._problem = f"version {version} was not loaded whole"
        if self._server is not None and published is not None:
            self._server.load_folder(version, published)
            self._problem = None
            return
        if self._shard is not None and published is not None:
            published_folder.read(self._shard, published, version)
        elif self._end.is_open:
            self._take_over(version)
        elif not self._shares_actor:
            raise WeightsMismatchError(f"version {version} was published without weights to a rank with its own copy")
        self._engine.load(version, None)
        self._problem = None

    def _take_over(self, version: int) -> None:
        sink = Receiver(self._plan.manifest, trained_weights(self._model), version)
        with contextlib.ExitStack() as open_sources:
            source = None
            if self._plan.members[self._place].sender is not None:
                assert self._open_source is not None, "the actor's rank of this process left it"
                source = open_sources.enter_context(self._open_source())
            self._end.line.run(version, source, sink, self._tick)
        sink.finish()


class Rollouts:
    """The sampling role as the driver sees it."""

    def __init__(self, config: RunConfig, group: WorkerGroup[RolloutWorker], way: Way) -> None:
        self._config, self._group = config, group
        self.way: Way = way
        """That published weights take to it; "shared" when it samples from the actor's own tensors."""
        self.version = 0
        """Of the weights it holds."""
        self.failures: tuple[str, ...] = ()
        """Why rollouts of the newest batch are missing."""

    @classmethod
    async def create(cls, placement: Placement) -> Rollouts:
        """Start the workers; the actor's must be there before.

        Raises:
            PlacementError: rollout.weights is a way that does not lead from one role to the other.
        """
        shares_actor = placement.config.rollout_shares_actor
        group = await placement.group("rollout", RolloutWorker, shares_actor)
        way = way_between(placement.config, placement.groups["actor"].processes, group.processes)
        return cls(placement.config, group, way)

    @property
    def processes(self) -> Sequence[Process]:
        """The processes of its ranks."""
        return self._group.processes

    async def sample(self, prompts: Prompts, params: SamplingParams) -> RolloutBatch:
        """Sample a group of rollouts for each prompt, in the order of the prompts; some may be missing, see `failures`.

        Raises:
            GenerationError: all of them are.
        """
        batch = await self._group.call(RolloutWorker.sample, prompts, params, self.version)
        failures: list[str] = []
        if len(batch) < len(prompts) * params.group_size:
            failures = [failure for rank in await self._group.call(RolloutWorker.failures) for failure in rank]
        if not len(batch):
            raise GenerationError(f"all {len(failures)} rollouts failed; the first one: {failures[0]}")
        self.failures = tuple(failures)
        return batch

    async def open_line(self, plan: TransferPlan) -> None:
        """Have every rank meet those who send weights."""
        await self._group.call(RolloutWorker.open_line, self.way, plan)

    async def load(self, version: int, published: Path | None = None) -> None:
        """Take over new weights on every rank: from a folder, or as they come."""
        await self._group.call(RolloutWorker.load, version, published)
        self.version = version
