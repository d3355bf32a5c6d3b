"""A worker's ends of the ways that weights take: what it sends through, and the model that it fills.

Owns: the open transport, and how a rollout rank takes weights over: in its own model, or in a server's. Must not know:
when weights are published.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from rallypoint.cluster import WorkerContext
from rallypoint.disk import Outage
from rallypoint.errors import CheckpointError, PublishError, RallyError, WeightsMismatchError, first_line
from rallypoint.generation.vllm import VLLMEngine
from rallypoint.models import ModelShard, trained_weights
from rallypoint.roles.colocated import ActorParts
from rallypoint.roles.placement import WorkerSpec
from rallypoint.roles.publishing import Stream
from rallypoint.transport_kinds import TransportKind, within_a_node
from rallypoint.weights import Exposed, Receiver, Sender, TransferPlan, Transport, digested, join, published_folder
from rallypoint.weights.buffers import kinds_of_memory
from rallypoint.weights.relay import Relay, relayed
from rallypoint.weights.same_node import Outlet, leave_out, meet_members, relay
from rallypoint.weights.served import Invitation
from rallypoint.weights.sockets import Listener

_GRACE_S = 20.0
"""Seconds that a server still has to load what was passed on to it, when another rank's failure cancels the call. A
server that holds a part of a version has to be started again."""
_LOOK_EVERY_S = 1.0
"""Seconds between two looks at whether the server is done; a cancelled call is noticed in between."""
PUBLISHED = "published"
"""Folder within that of the run, for weights that are written."""


class StreamConnection:
    """A worker's end of a stream, which it opens at the first publish, and again after one that failed; or a folder."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        self._context, self._spec = context, spec
        self._transport: Transport | None = None
        self._outage = Outage(context.say, "the run waits, and tries again")

    def open(self, stream: Stream, plan: TransferPlan, place: int, exposed: Exposed | None) -> None:
        """Meet the others; they read what is exposed directly from this process's memory."""
        self.close()
        assert self._spec.rendezvous is not None, "who publishes has a place to meet"
        device = self._spec.config.cluster.device
        self._transport = join(stream.kind, self._spec.rendezvous, plan, place, device=device, exposed=exposed)

    def meet(self, plan: TransferPlan, place: int, given_up: threading.Event) -> list[bytes]:
        """Meet the others for a process that cannot come itself; see `same_node.meet_members`."""
        assert self._spec.rendezvous is not None, "who publishes has a place to meet"
        return meet_members(self._spec.rendezvous, plan, place, given_up=given_up)

    def send(self, version: int, open_sender: Callable[[], contextlib.AbstractContextManager[Sender]]) -> None:
        """Send weights, if this worker takes part."""
        if self._transport is not None:
            with open_sender() as source:
                self._transport.run(version, source, None, self._context.tick)

    @property
    def transport(self) -> Transport:
        """The open transport."""
        assert self._transport is not None, "the driver opens it before it publishes"
        return self._transport

    def write(self, shard: ModelShard, version: int, below: str, *, base: str) -> tuple[Path, str]:
        """Write weights into a folder that all nodes see; see `published_folder.write`.

        Returns:
            The folder, and why it could not be written, as of a full disk, else empty: all ranks may try again.
        """
        folder = self._spec.folder.path / PUBLISHED / below
        with shard.mesh.abandoned_on_error():
            try:
                written = published_folder.write(shard, folder, version, base=base)
            except CheckpointError as error:
                self._outage.lasts(error)
                return folder, str(error)
        self._outage.ends(f"weights of version {version} are published")
        return written, ""

    def close(self) -> None:
        """Leave, if it is open."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


class ModelReplica:
    """Weights of a rollout rank that has the model in its own process; see `Replica`."""

    def __init__(
        self, connection: StreamConnection, context: WorkerContext, shard: ModelShard, actor: ActorParts | None
    ) -> None:
        """Take a model.

        Args:
            connection: of the rank.
            context: of the rank.
            shard: whose weights are replaced.
            actor: what the actor's rank of this process has left; None if there is none.
        """
        self._connection, self._context, self._shard, self._actor = connection, context, shard, actor
        self.shares_actor = actor is not None and shard is actor.engine.shard

    def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Check that the weights are those of this model, then connect to the ranks that send them.

        Raises:
            WeightsMismatchError: names, shapes or types are not those of the model.
        """
        plan.manifest.check(trained_weights(self._shard.model))
        self._plan, self._place = plan, plan.place_of_receiver(self._context.rank)
        exposed = self._actor.exposed() if self._sends and self._actor is not None else None
        self._connection.open(stream, plan, self._place, exposed)

    @property
    def _sends(self) -> bool:
        return self._plan.members[self._place].sender is not None

    def read(self, version: int, published: Path) -> str | None:
        """See `Replica`."""
        published_folder.read(self._shard, published, version)
        return digested(trained_weights(self._shard.model))

    def receive(self, version: int) -> str | None:
        """See `Replica`."""
        weights = trained_weights(self._shard.model)
        sink = Receiver(self._plan.manifest, weights, version)
        with contextlib.ExitStack() as open_senders:
            source = None
            if self._sends:
                assert self._actor is not None, "the actor's rank of this process left its parts"
                source = open_senders.enter_context(self._actor.open_sender())
            self._connection.transport.run(version, source, sink, self._context.tick)
        sink.finish()
        return digested(weights)


class ServerReplica:
    """Weights of a rollout rank whose model is in a server; see `Replica`.

    The server's workers are receivers of their own, which this process invites. If it has a rank of the actor, too, it
    sends while they receive. Weights that are broadcast it receives itself, and passes them on; see `weights.relay`.
    """

    shares_actor = False

    def __init__(
        self, connection: StreamConnection, context: WorkerContext, server: VLLMEngine, actor: ActorParts | None
    ) -> None:
        """Take a server; see `ModelReplica`."""
        self._connection, self._context, self._server, self._actor = connection, context, server, actor
        self._outlet: Outlet | None = None
        """To the server's workers, if this process passes weights on."""

    def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Check that the weights are those of the server's model, and have its workers connect to those who send them.

        Raises:
            WeightsMismatchError: names, shapes or types are not those of the model.
            PublishError: the workers cannot connect; those who wait for them are told.
        """
        plan.manifest.check(self._server.outline.weights)
        self._leave()
        self._plan, rank = plan, self._context.rank
        if not stream.kind.within_node:
            self._place: int | None = plan.place_of_receiver(rank)
            assert stream.num_workers is not None, "the server has workers"
            with contextlib.ExitStack() as unless_connected:
                unless_connected.callback(self._leave)
                self._relay_to(relayed(plan, rank, stream.num_workers), plan.timeout_s)
                self._connection.open(stream, plan, self._place, None)
                unless_connected.pop_all()
            return
        self._place, given_up = plan.place_of_process(rank), threading.Event()
        with self._together(lambda: self._join(stream.kind, plan, given_up), given_up):
            if self._place is not None:
                assert self._actor is not None, "the actor's rank of this process left its parts"
                self._connection.open(stream, plan, self._place, self._actor.exposed())

    def _join(
        self, kind: TransportKind, plan: TransferPlan, given_up: threading.Event, own: Sequence[bytes] = ()
    ) -> str:
        """Have the server's workers connect; those who wait for them are told if they cannot.

        Args:
            kind: see `Invitation`.
            plan: whose receivers they are.
            given_up: see `VllmConnection.join`.
            own: addresses of members; empty if these are to be met.
        """
        places, shapes = plan.places_of_receiver(self._context.rank), plan.manifest.shapes
        with contextlib.ExitStack() as unless_joined:
            if own:
                unless_joined.callback(leave_out, plan, places, own)

            def invite() -> str:
                addresses = own
                if not own:
                    with ThreadPoolExecutor(len(places), thread_name_prefix="publish") as threads:
                        addresses, *_ = threads.map(lambda place: self._connection.meet(plan, place, given_up), places)
                    unless_joined.callback(leave_out, plan, places, addresses)
                pieces = {name: self._server.outline.sources(name, shape) for name, (_, shape) in shapes.items()}
                return Invitation(kind, plan, places, addresses, pieces).text()

            self._server.join(invite, given_up)
            unless_joined.pop_all()
        return ""

    def _relay_to(self, own: TransferPlan, timeout_s: float) -> None:
        """Have the server's workers connect to this process; the server may be started until then."""
        given_up, device = threading.Event(), self._context.device
        kind = within_a_node(device)
        at = torch.device(device) if device == "cpu" else torch.device(device, torch.accelerator.current_device_index())
        with (
            Listener() as listener,
            self._together(lambda: self._join(kind, own, given_up, [listener.address]), given_up),
        ):
            try:
                self._outlet = relay(own, listener, kinds_of_memory(kind, at), timeout_s)
            except RallyError:
                given_up.set()
                listener.close()
                raise

    def _leave(self) -> None:
        """Close all connections, so that those who wait for this process or its server stop waiting."""
        self._connection.close()
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    def read(self, version: int, published: Path) -> str | None:
        """See `Replica`."""
        self._server.load_folder(version, published)
        return published_folder.digest_of(published)

    def receive(self, version: int) -> str | None:
        """See `Replica`; a relay goes on without its server, for the other ranks."""
        given_up, sink = threading.Event(), None
        if self._outlet is not None:
            sink = Relay(self._plan.manifest, self._outlet)
        is_direct = sink is None
        grace_s = 0.0 if is_direct else _GRACE_S
        receive = functools.partial(self._server.receive, version, given_up)
        together = self._together(receive, given_up, is_cause=is_direct, grace_s=grace_s)
        with together as received, contextlib.ExitStack() as open_senders:
            if self._place is not None:
                source = None
                if self._plan.members[self._place].sender is not None:
                    assert self._actor is not None, "it sends what the actor's rank of this process left"
                    source = open_senders.enter_context(self._actor.open_sender())
                self._connection.transport.run(version, source, sink, self._context.tick)
            if sink is not None:
                sink.finish()
                if isinstance(sink.problem, PublishError):
                    given_up.set()  # a silent server will not answer either
                    raise sink.problem
        if sink is not None and sink.problem is not None:
            raise sink.problem
        return received.result()

    @contextlib.contextmanager
    def _together(
        self, do: Callable[[], str], given_up: threading.Event, *, is_cause: bool = True, grace_s: float = 0.0
    ) -> Iterator[Future[str]]:
        """Do something with the server while the block does this process's part.

        If this call is cancelled, what either waits for ends soon.

        Args:
            do: called in another thread.
            given_up: ends it.
            is_cause: whether of two errors the server's is raised, not that of the block.
            grace_s: seconds that the server still has when the block succeeded and the call is cancelled afterwards.

        Raises:
            PublishError, WeightsMismatchError: the server's, which the run says: it gets a folder instead.
        """
        ours: RallyError | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="publish") as thread, contextlib.ExitStack() as unless_ended:
            unless_ended.callback(given_up.set)
            unless_ended.callback(self._leave)
            done = thread.submit(do)
            try:
                yield done
            except RallyError as error:
                ours = error
                self._leave()
            unless_ended.callback(wait, [done], grace_s if ours is None else 0.0)
            while wait([done], _LOOK_EVERY_S).not_done:
                self._context.tick()
            unless_ended.pop_all()
        theirs = done.exception()
        error = ours if theirs is None or (ours is not None and not is_cause) else theirs
        if isinstance(error, PublishError | WeightsMismatchError):
            self._context.say(f"{first_line(error)}; the server gets them from a folder")
        if error is not None:
            raise error
