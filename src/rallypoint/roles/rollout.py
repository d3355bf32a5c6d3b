"""The role that samples, from the actor's weights.

Owns: when a rank's engine is awake, and which weights it has. Must not know: what a response is for.

Consumes: requests, at any time. Produces: outputs, as responses end. Waits for: the ranks, one time slice per call.
Unblocked by: `sample`. Invariant: an engine is awake only while it has requests, and its role holds the turn meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, collect, scatter
from rallypoint.cluster.call import Process
from rallypoint.errors import GenerationError, RallyError, WeightsMismatchError
from rallypoint.generation import GenerationEngine, Output, Request
from rallypoint.generation.vllm import VLLMEngine
from rallypoint.models import ModelShard, trained_weights
from rallypoint.plan.run_plan import Way
from rallypoint.roles.colocated import ActorParts, Turns, TurnTaker, in_turn, make_room_for_neighbour
from rallypoint.roles.engines import make_engine, make_outside_engine, start_server
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.publishing import TransportEnd, way_between
from rallypoint.roles.requests import Gate, RankEngine, RequestQueue, SliceRequest, SliceResult
from rallypoint.roles.schedule import Schedule
from rallypoint.types import Metrics, Sum, merge
from rallypoint.weights import Receiver, TransferPlan, published_folder

_GRACE_S = 10.0
"""Seconds that ranks may take to drop cancelled requests."""


class RolloutWorker(TurnTaker):
    """One rank of sampling."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        config = spec.config
        spec.prepare(context)
        self.turns = Turns(context)
        self._spec, self._context, self._shares_actor = spec, context, shares_actor
        self._end, self._actor = TransportEnd(context, spec), ActorParts.find(context)
        self._problem: str | None = None
        self._until, self._sampling = contextlib.ExitStack(), contextlib.ExitStack()
        self._is_sampling = False
        self._shard: ModelShard | None = None
        self._server: VLLMEngine | None = None
        """Engine in a process of its own that holds the model; None if this process holds it."""
        if config.rollout.engine == "vllm":
            make_room_for_neighbour(context)
            self._server = start_server(spec, context, self._until)
            self._engine: GenerationEngine = self._server
        else:
            self._shard = self._own_model(context, spec)
            self._engine = make_engine(config, self._shard.model, spec.stop_decoder())
        self._engine.sleep()
        self._training = RankEngine(self._engine, context.tick)
        self._outside: RankEngine | None = None

    def _own_model(self, context: WorkerContext, spec: WorkerSpec) -> ModelShard:
        if not self._shares_actor:
            return spec.load_policy(context)
        assert self._actor is not None, "an actor worker came to life here before"
        if "actor" in spec.config.sleeping:
            self.turns.sleep_between(self._actor.engine)
        return self._actor.engine.shard

    @property
    def _model(self) -> PreTrainedModel:
        assert self._shard is not None, "a server has the model"
        return self._shard.model

    def __enter__(self) -> RolloutWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._until.close()

    @scatter
    def advance(self, asked: SliceRequest) -> SliceResult:
        """Start new requests, cancel others, then sample until one ends or the time slice is over.

        The role keeps its turn until no request is left.

        Raises:
            WeightsMismatchError: this rank does not hold the expected version of the weights.
            RallyError: a request failed for a reason other than its engine, such as logits that are not finite.
        """
        if not asked.new and not self._engine.has_work:
            return SliceResult()
        self.check_whole()
        if asked.version != self._engine.version:
            raise WeightsMismatchError(
                f"expected to sample from version {asked.version}, but version {self._engine.version} is loaded"
            )
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self.forget)
            if not self._is_sampling:
                self._sampling.enter_context(self.turns.turn())
                self._sampling.callback(self._engine.sleep)
                self._engine.wake()
                self._is_sampling = True
            # The driver waits for all ranks, so with several of them each samples for the whole slice.
            refused, is_alone = self._training.take(asked), self._context.num_ranks == 1
            done = self._training.sample(until_one_ends=is_alone, num_steps=asked.num_steps)
            done = dataclasses.replace(done, outputs=(*refused, *done.outputs))
            for error in (output.error for output in done.outputs):
                if error is not None and not isinstance(error, GenerationError):
                    raise error
            if_it_fails.pop_all()
        if not self._engine.has_work:
            self._stop()
        return done

    def _stop(self) -> None:
        """Put the engine to sleep and end the turn, so that other roles of this process get the memory."""
        self._is_sampling = False
        self._sampling.close()

    @broadcast
    def forget(self) -> None:
        """Cancel all requests of training."""
        self._stop()
        self._training.clear()

    @collect
    def open_outside(self, max_rows: int) -> int:
        """Prepare for requests from outside; return the most tokens that prompt and response may have together.

        Args:
            max_rows: requests from outside that run at once.
        """
        self._outside = self._new_outside(max_rows)
        self._max_outside_rows = max_rows
        return self._outside.engine.max_request_tokens

    def _new_outside(self, max_rows: int) -> RankEngine:
        config, decode = self._spec.config, self._spec.decoder()
        model = None if self._shard is None else self._shard.model
        engine = make_outside_engine(config, self._engine, model, max_rows=max_rows, decode=decode)
        return RankEngine(engine, self._context.tick)

    @scatter
    @in_turn()
    def advance_outside(self, asked: SliceRequest) -> list[Output]:
        """Do the same for requests from outside, on an engine of their own that sleeps between slices.

        So they change neither what training samples nor how much memory it finds.
        """
        assert self._outside is not None, "`open_outside` comes first"
        assert not self._is_sampling, "training samples: requests from outside wait"
        self.check_whole()
        engine = self._outside.engine
        if engine.version != self._engine.version:
            engine.load(self._engine.version, None)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self._renew_outside)
            # Streamed token by token, so that nothing is lost when the slice ends in the middle of a response.
            outputs = self._outside.take(asked, streamed=True)
            engine.wake()
            try:
                outputs += self._outside.sample(until_one_ends=False).outputs
            finally:
                engine.sleep()
            if_it_fails.pop_all()
        return outputs

    def _renew_outside(self) -> None:
        """Forget the requests from outside; the driver tells their callers."""
        self._outside = self._new_outside(self._max_outside_rows)

    @collect
    def memory(self) -> Metrics:
        """See `TurnTaker.memory`; includes the server's memory, and `num_server_restarts` since the last call."""
        if self._server is None:
            return self.turns.metrics()
        restarts = Metrics({"num_server_restarts": Sum(self._server.take_restarts())})
        return merge(self.turns.metrics(self._server.memory_bytes()), restarts)

    def check_whole(self) -> None:
        """Refuse to sample from a model whose last load did not complete.

        Raises:
            WeightsMismatchError: the last load has failed.
        """
        if self._problem is not None:
            raise WeightsMismatchError(f"{self._problem}, so that nothing is sampled until another one has been")

    @broadcast
    def connect(self, way: Way, plan: TransferPlan) -> None:
        """Check that the weights are those of this model, then connect to the ranks that send them.

        Raises:
            WeightsMismatchError: names, shapes or types are not those of the model.
        """
        plan.manifest.check(trained_weights(self._model))
        self._plan, self._place = plan, plan.place_of_receiver(self._context.rank)
        sends = plan.members[self._place].sender is not None
        self._end.open(way, plan, self._place, self._actor.exposed() if sends and self._actor is not None else None)

    @broadcast
    def load(self, version: int, published: Path | None) -> None:
        """Load new weights: from a folder, over the transport, or, if the actor's own tensors are used, those in place.

        Running requests continue with them. While tensors arrive the model has no version; after an error it keeps
        none, and nothing is sampled until a complete version has been loaded.

        Raises:
            WeightsMismatchError: they are damaged, incomplete, or of another version or model.
        """
        self._problem = f"version {version} was not loaded whole"
        if self._server is not None and published is not None:
            self._server.load_folder(version, published)
        elif self._shard is not None and published is not None:
            published_folder.read(self._shard, published, version)
        elif self._end.is_open:
            self._take_over(version)
        elif not self._shares_actor:
            raise WeightsMismatchError(f"version {version} was published without weights to a rank with its own copy")
        if self._server is None:
            self._engine.load(version, None)
        self._problem = None

    def _take_over(self, version: int) -> None:
        sink = Receiver(self._plan.manifest, trained_weights(self._model), version)
        with contextlib.ExitStack() as open_sources:
            source = None
            if self._plan.members[self._place].sender is not None:
                assert self._actor is not None, "the actor's rank of this process left its parts"
                source = open_sources.enter_context(self._actor.open_source())
            self._end.transport.run(version, source, sink, self._context.tick)
        sink.finish()


class Rollouts:
    """The sampling role as the driver sees it."""

    def __init__(self, group: WorkerGroup[RolloutWorker], way: Way, schedule: Schedule) -> None:
        self._group = group
        self.way: Way = way
        """How published weights reach this role; "shared" when it samples from the actor's own tensors."""
        self.version = 0
        """Version of the weights that this role holds."""
        self.num_loads = 0
        """Number of loads so far."""
        self.is_idle = asyncio.Event()
        """Set while training has no request under way."""
        self.is_idle.set()
        self.after_load: Callable[[], None] = lambda: None
        """Called when new weights were loaded."""
        self.schedule = schedule
        self._next_version = 0
        self.gate = Gate()
        self._requests = RequestQueue(self.num_ranks, self._advance, lambda: self._next_version, self.gate)
        self._busy_s = [0.0] * self.num_ranks
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._pump: asyncio.Task[None] | None = None

    @classmethod
    async def create(cls, placement: Placement, say: Callable[[str], None] = lambda _: None) -> Rollouts:
        """Start the workers; the actor's must be running already.

        Raises:
            PlacementError: the way that rollout.weights names cannot connect the processes of the two roles.
            ScheduleError: rollout.schedule cannot be read, or is of another number of ranks.
        """
        shares_actor = placement.config.rollout_shares_actor
        group = await placement.group("rollout", RolloutWorker, shares_actor)
        way = way_between(placement.config, placement.groups["actor"].processes, group.processes)
        return cls(group, way, Schedule.of(placement.config, placement.folder.path, group.mesh.size, say))

    @property
    def processes(self) -> Sequence[Process]:
        """The processes of its ranks."""
        return self._group.processes

    @property
    def num_ranks(self) -> int:
        """Ranks that sample, each with all of the weights."""
        return self._group.mesh.size

    def rank_of(self, place: int, num_prompts: int) -> int:
        """Return the rank that samples the prompt at a place in its batch; neighbouring prompts share a rank."""
        return (self.num_ranks * (place + 1) - 1) // num_prompts

    async def sample(self, request: Request, rank: int | None = None) -> list[Output]:
        """Sample one response and return its outputs; the last one has the finish reason.

        Requests that are submitted in the same pass of the event loop are sampled together.

        Args:
            request: what to sample.
            rank: the rank that samples it; None for the one with the fewest requests.

        Raises:
            GenerationError: the engine failed on this request.
            WorkerError: a rank failed, and all requests with it.
        """
        outputs: list[Output] = []
        number, ended = next(self._numbers), asyncio.get_running_loop().create_future()

        def deliver(output: Output) -> None:
            outputs.append(output)
            if output.finish_reason is not None and not ended.done():
                ended.set_result(None)

        self._waiting[number] = ended
        self._requests.submit(number, request, deliver, rank)
        self.schedule.wake()
        if self._pump is None or self._pump.done():
            self.is_idle.clear()
            self._pump = asyncio.create_task(self._sample_all())
            self._pump.add_done_callback(self._end_sampling)
        try:
            await ended
        except asyncio.CancelledError:
            self._requests.cancel(number)
            raise
        finally:
            del self._waiting[number]
        if outputs[-1].error is not None:
            raise outputs[-1].error
        return outputs

    async def stop(self) -> None:
        """Cancel all requests, and wait until none is running."""
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
            with contextlib.suppress(RallyError, TimeoutError):  # whoever stops has a reason, which is told
                async with asyncio.timeout(_GRACE_S):
                    await self._group.call(RolloutWorker.forget)

    def take_busy_s(self) -> list[float]:
        """Return the seconds that each rank has sampled since the last call."""
        busy_s, self._busy_s = self._busy_s, [0.0] * self.num_ranks
        return busy_s

    async def _advance(self, asked: Sequence[SliceRequest]) -> Sequence[Sequence[Output]]:
        """Have every rank do what it is asked; by a schedule when it says so."""
        slices = await self.schedule.send(asked, lambda asked: self._group.call(RolloutWorker.advance, asked))
        for rank, one in enumerate(slices):
            self._busy_s[rank] += one.busy_s
        return [one.outputs for one in slices]

    async def _sample_all(self) -> None:
        """Call the ranks until no request is left."""
        while self._requests.has_work:
            await self._requests.advance()

    def _end_sampling(self, pump: asyncio.Task[None]) -> None:
        """Pass a rank's error on to every caller who waits for a response."""
        if pump.cancelled() or pump.exception() is not None:
            self._requests.clear()
            for ended in self._waiting.values():
                if pump.cancelled():
                    ended.cancel()
                elif not ended.done():
                    ended.set_exception(cast("BaseException", pump.exception()))
        if self._pump is pump:
            self.is_idle.set()

    async def open_outside(self, max_rows: int) -> tuple[RequestQueue, int]:
        """Return a queue for requests from outside, and the most tokens that prompt and response may have together.

        Advance the queue only while `is_idle` is set; `max_rows` of its requests run on each rank at once.
        """
        longest = min(await self._group.call(RolloutWorker.open_outside, max_rows))
        queue = RequestQueue(
            self.num_ranks,
            lambda asked: self._group.call(RolloutWorker.advance_outside, asked),
            lambda: self._next_version,
        )
        return queue, longest

    async def connect(self, plan: TransferPlan) -> None:
        """Connect every rank to the ranks that send weights."""
        await self._group.call(RolloutWorker.connect, self.way, plan)

    async def load(self, version: int, published: Path | None = None) -> None:
        """Load new weights on every rank: from a folder, or as they arrive."""

        async def load() -> None:
            self._next_version = version  # calls reach a rank in the order in which they are sent
            await self._group.call(RolloutWorker.load, version, published)

        await self.schedule.load(version, load)
        self.version = version
        self.num_loads += 1
        self.after_load()
