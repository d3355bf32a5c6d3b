"""The role that samples, from the actor's weights.

Owns: when a rank's engine is awake, and which weights it has. Must not know: what a response is for.

Consumes: slices of time with the requests to begin in them. Produces: what was sampled in a slice. Waits for: nothing,
as a slice ends by itself. Invariant: an engine is awake only while it has requests, and its role holds the
memory of the process meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, collect, scatter
from rallypoint.cluster.call import Process
from rallypoint.errors import GenerationError, NotFiniteError, RequestError, WeightsMismatchError
from rallypoint.generation import GenerationEngine, Output
from rallypoint.generation.vllm import VLLMEngine
from rallypoint.models import ModelShard
from rallypoint.roles.colocated import ActorParts, MemoryLease
from rallypoint.roles.connections import ModelReplica, ServerReplica, StreamConnection
from rallypoint.roles.engines import make_engine, make_guest_engine, start_server
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.publishing import (
    Publisher,
    SharedTensors,
    Stream,
    WeightTransport,
    WrittenFolder,
    joint_digest,
    transport_between,
)
from rallypoint.roles.rank_engine import GuestEngine, RankEngine, SliceRequest, SliceResult
from rallypoint.roles.server_ranks import RolloutRank, ServerRanks
from rallypoint.types import Metrics, Sum, merge
from rallypoint.weights import TransferPlan, published_folder


class RolloutWorker(RolloutRank):
    """One rank of sampling; of ranks that share a server, all but the first are a `ServerFollower` (`RolloutRank`)."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        config = spec.config
        spec.prepare(context)
        self.lease = MemoryLease(context)
        self._spec, self._context, self.shares_actor = spec, context, shares_actor
        connection, self._actor = StreamConnection(context, spec), ActorParts.find(context)
        self._problem: str | None = None
        self._at_exit, self._while_sampling = contextlib.ExitStack(), contextlib.ExitStack()
        self._is_sampling = False
        self._shard: ModelShard | None = None
        self._server: VLLMEngine | None = None
        """Engine whose server, another process, holds the model; None if this process holds it."""
        sharing = ServerRanks.meet(context, spec) if config.rollout.engine == "vllm" else None
        if sharing is not None:
            self._server = start_server(spec, context, sharing.devices, self._at_exit)
            self._engine: GenerationEngine = self._server
            self._replica = ServerReplica(connection, context, self._server, self._actor)
        else:
            self._shard = self._own_model(context, spec)
            self._engine = make_engine(config, self._shard.model, spec.stop_decoder())
            self._replica = ModelReplica(connection, context, self._shard, self._actor)
        self._engine.sleep()
        self._rank_engine = RankEngine(self._engine, context.tick, self._shard and self._shard.mesh, sharing)
        self._guests = GuestEngine(self._rank_engine, context)

    def _own_model(self, context: WorkerContext, spec: WorkerSpec) -> ModelShard:
        if not self.shares_actor:
            return spec.load_copy(context)
        assert self._actor is not None, "an actor worker started here before"
        if "actor" in spec.config.sleeping:
            self.lease.sleep_between(self._actor.engine)
        return self._actor.engine.shard

    def __enter__(self) -> RolloutWorker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._at_exit.close()

    def advance(self, asked: SliceRequest) -> SliceResult:
        """Start new requests, cancel others, then sample for a time slice, a shorter one if a request ends.

        The role keeps the memory of the process until no request is left.

        Raises:
            WeightsMismatchError: this rank does not hold the expected version of the weights.
            RallyError: a request failed for a reason other than its engine or its logits.
        """
        with self._rank_engine.together(), contextlib.ExitStack() as if_it_fails:
            if not asked.new and not self._engine.has_work:
                return SliceResult()
            self.check_whole()
            if asked.version != self._engine.version:
                raise WeightsMismatchError(
                    f"expected to sample from version {asked.version}, but version {self._engine.version} is loaded"
                )
            if_it_fails.callback(self.forget)
            if not self._is_sampling:
                self._while_sampling.enter_context(self.lease.held(doing="sample"))
                self._while_sampling.callback(self._engine.sleep)
                self._engine.wake()
                self._is_sampling = True
            refused = self._rank_engine.take(asked)
            done = self._rank_engine.sample(until_one_ends=True, num_steps=asked.num_steps)
            done = dataclasses.replace(done, outputs=(*refused, *done.outputs))
            for error in (output.error for output in done.outputs):
                if error is not None and not isinstance(error, GenerationError | NotFiniteError | RequestError):
                    raise error
            if_it_fails.pop_all()
            lacks_weights = self._server is not None and self._server.lacks_weights
            if lacks_weights or not self._engine.has_work:
                self._stop()
        return dataclasses.replace(done, lacks_weights=lacks_weights, is_sampling=self._is_sampling)

    def _stop(self) -> None:
        """Put the engine to sleep, so that other roles of this process get the memory."""
        self._is_sampling = False
        self._while_sampling.close()

    @broadcast
    def forget(self) -> None:
        """Cancel all requests but those of guests."""
        self._stop()
        self._rank_engine.clear()

    @collect
    def open_guests(self, max_rows: int) -> int:
        """Make the engine for guests (see `GuestEngine`); return the most tokens of prompt and response together.

        Args:
            max_rows: requests of guests that run at once.
        """
        config, decode, shard = self._spec.config, self._spec.decoder(), self._shard

        def make() -> RankEngine:
            engine = make_guest_engine(config, self._engine, shard and shard.model, max_rows=max_rows, decode=decode)
            return RankEngine(engine, self._context.tick, shard and shard.mesh)

        return self._guests.open(make, self._spec, shard and shard.mesh)

    @scatter
    def advance_guests(self, asked: SliceRequest) -> list[Output]:
        """Do as `advance` for guests; training samples the same as without them, and finds as much memory."""
        return self._guests.advance(asked, self._ready_for_guests)

    @contextlib.contextmanager
    def _ready_for_guests(self) -> Iterator[None]:
        with self.lease.held(doing="advance_guests"):
            assert not self._is_sampling, "guests wait while training samples"
            self.check_whole()
            yield

    def memory(self) -> Metrics:
        """See `LeaseHolder.memory`; includes the server's memory, and `num_server_restarts` since the last call."""
        if self._server is None:
            return self.lease.metrics()
        restarts = Metrics({"num_server_restarts": Sum(self._server.take_restarts())})
        return merge(self.lease.metrics(self._server.memory_bytes()), restarts)

    def check_whole(self) -> None:
        """Refuse to sample from a model whose last load did not complete.

        Raises:
            WeightsMismatchError: the last load has failed.
        """
        if self._problem is not None:
            raise WeightsMismatchError(f"{self._problem}: nothing is sampled until another version has been")

    @broadcast
    def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Check that the weights are those of this model, then connect to the ranks that send them.

        Raises:
            WeightsMismatchError: names, shapes or types are not those of the model.
        """
        self._replica.connect(stream, plan)

    @collect
    def load(self, version: int, transport: WeightTransport, published: Path | None) -> str | None:
        """Load new weights, as their transport does, and return their digest; None if they are the actor's own.

        Running requests continue with them. While tensors arrive the model has no version; after an error it keeps
        none, and nothing is sampled until a complete version has been loaded.

        Raises:
            WeightsMismatchError: they are damaged, incomplete, or of another version or model.
        """
        self._problem = f"version {version} was not loaded whole"
        digest = transport.load(self._replica, version, published)
        if self._server is None:  # a server has the version already
            self._engine.load(version, None)
        self._problem = None
        return digest


class Rollouts:
    """The sampling role as the driver sees it; `Mailbox` calls it."""

    def __init__(self, group: WorkerGroup[RolloutWorker], transport: WeightTransport) -> None:
        self._group = group
        self.transport = transport
        """What carries published weights to this role."""
        self.publisher: Publisher | None = None
        """The actor, once it has published."""
        self._max_guest_rows: int | None = None
        self._sampling: set[int] = set()
        """Ranks that have the memory of their process."""
        self._lacking: set[int] = set()
        """Ranks that have lost their weights."""
        self._giving = asyncio.Lock()

    @classmethod
    async def create(cls, placement: Placement) -> Rollouts:
        """Start the workers; the actor's must be running already.

        Raises:
            PlacementError: what rollout.weights names cannot connect the processes of the two roles.
        """
        shares_actor = placement.config.rollout_shares_actor
        group = await placement.group("rollout", RolloutWorker, shares_actor)
        return cls(group, transport_between(placement.config, placement.groups["actor"].processes, group.processes))

    @property
    def shares_actor(self) -> bool:
        """Whether it samples from the actor's own tensors."""
        return isinstance(self.transport, SharedTensors)

    @property
    def processes(self) -> Sequence[Process]:
        """The processes of its ranks."""
        return self._group.processes

    @property
    def num_ranks(self) -> int:
        """Ranks that sample, each with all of the weights; ranks that share them (`rollout.mesh.tp`) count as one."""
        return self._group.mesh.num_parts

    async def advance(self, rank: int, asked: SliceRequest) -> SliceResult:
        """Have a rank sample for a slice; the request is sent at once, before the first wait."""
        self._sampling.add(rank)
        done = await self._group.call_ranks(self._group.mesh.sharing(rank), RolloutWorker.advance, asked)
        if not done.is_sampling:
            self._sampling.discard(rank)
        if done.lacks_weights:
            self._lacking.add(rank)
            if self._may_ask_actor:
                await self._give_folder()
        return done

    @property
    def _may_ask_actor(self) -> bool:
        """Whether the actor has the memory to write its weights: not while a rank samples in one of its processes."""
        is_free = not self._sampling - self._lacking  # a rank that lacks weights gives the memory back after a slice
        return is_free or not self.publisher or not any(one in self.processes for one in self.publisher.processes)

    async def until_whole(self, ranks: Iterable[int]) -> None:
        """If one of these ranks lacks its weights while the actor trains newer ones, wait for these to be published."""
        if self.publisher is not None and self._lacking.intersection(ranks):
            await self.publisher.is_published.wait()

    async def forget(self) -> None:
        """Have all ranks cancel their requests, but those of guests."""
        await self._group.call(RolloutWorker.forget)
        self._sampling.clear()

    async def refill(self, rank: int) -> None:
        """Give a rank that was made anew the weights of the others, unless the actor trains newer ones for all."""
        self._sampling.discard(rank)
        if self._max_guest_rows is not None:
            sharing = self._group.mesh.sharing(rank)
            await self._group.call_ranks(sharing, RolloutWorker.open_guests, self._max_guest_rows)
        self._lacking.add(rank)
        await self._give_folder()

    async def _give_folder(self) -> None:
        """Have the actor write its weights for ranks that lack them, unless it trains newer ones for all."""
        if isinstance(self.transport, Stream):  # it may connect to a process that was lost
            self.transport.is_open = self.transport.is_refused = False
        async with self._giving:
            if not self._lacking or self.publisher is None or not self.publisher.is_published.is_set():
                return
            version, written = self.publisher.version, await self.publisher.written("rollout")
            if not self.publisher.is_published.is_set() or self.publisher.version != version:  # an update came first
                return
            for rank in sorted(self._lacking):
                sharing = self._group.mesh.sharing(rank)
                await self._group.call_ranks(sharing, RolloutWorker.load, version, WrittenFolder(), written)
                self._lacking.discard(rank)
            published_folder.remove_others(written)  # a server that is started again reads it, too

    async def open_guests(self, max_rows: int) -> int:
        """Make an engine for guests on each rank, for `max_rows` at once; return the most tokens of a request."""
        self._max_guest_rows = max_rows
        return min(await self._group.call(RolloutWorker.open_guests, max_rows))

    async def advance_guests(self, asked: Sequence[SliceRequest]) -> Sequence[Sequence[Output]]:
        """Have all ranks sample for guests for a slice."""
        mesh = self._group.mesh
        each = [asked[mesh.part(rank)] for rank in range(mesh.size)]
        return (await self._group.call(RolloutWorker.advance_guests, each))[:: mesh.size // mesh.num_parts]

    async def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Connect every rank to the ranks that send weights."""
        await self._group.call(RolloutWorker.connect, stream, plan)

    async def load(self, version: int, published: Path | None = None) -> str | None:
        """Load new weights on every rank, and return their digest; None if these are the actor's own tensors.

        Raises:
            WeightsMismatchError: ranks hold different weights now.
        """
        digests = await self._group.call(RolloutWorker.load, version, self.transport, published)
        self._lacking.clear()
        own = {rank: digest for rank, digest in enumerate(digests) if digest is not None}
        what = f"the ranks that sample hold different weights of version {version}"
        return joint_digest(what, own, self._group.mesh, "tp") if own else None
