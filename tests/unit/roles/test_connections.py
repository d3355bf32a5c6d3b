"""How a rank whose model is in a server takes weights over; the server, and ranks of the actor, are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from rallypoint.cluster import Mesh
from rallypoint.cluster.process import Invocation, WorkerContext, WorkerProcess
from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.errors import (
    CallCancelledError,
    MembershipLostError,
    PeerFailedError,
    PublishError,
    RallyError,
    WeightsMismatchError,
)
from rallypoint.model_files.pieces import same_names
from rallypoint.models import Part
from rallypoint.roles.connections import ServerReplica, StreamConnection
from rallypoint.roles.publishing import Stream, make_plan
from rallypoint.transport_kinds import BROADCAST, MEMORY
from rallypoint.weights import Held, Sender
from rallypoint.weights.relay import Relay
from rallypoint.weights.served import Invitation, ServerReceiver
from rallypoint.weights.transports import join_broadcast

WEIGHTS = {"a": torch.randn(3, 700_000, generator=torch.Generator().manual_seed(1)), "b": torch.arange(6.0).view(2, 3)}
HELD = [{name: Held(tensor.dtype, Part.whole(tensor.shape)) for name, tensor in WEIGHTS.items()}]


class Server:
    """A server of two workers; `refuse` and `take` are what goes wrong with it."""

    outline = SimpleNamespace(weights=WEIGHTS, sources=same_names)

    def __init__(self):
        self.workers, self.loaded, self.refuse, self.take = [], [], None, None

    def join(self, invite, given_up):
        if self.refuse is not None:
            raise self.refuse
        told = Invitation.read(invite())
        with ThreadPoolExecutor(len(told.places)) as pool:
            numbers = range(len(told.places))
            self.workers = list(pool.map(lambda number: ServerReceiver(told, number, torch.device("cpu")), numbers))

    def receive(self, version, given_up):
        if self.take is not None:
            return self.take(version, given_up)
        try:
            with ThreadPoolExecutor(len(self.workers)) as pool:
                self.loaded = list(pool.map(lambda worker: dict(worker.tensors(version)), self.workers))
        except RallyError as error:
            for worker in self.workers:
                worker.close()
            raise WeightsMismatchError(f"version {version} was not loaded by vllm: {error}") from error
        return self.workers[0].digest


class Run:
    """A rank with a server, and a rank of the actor in another process, between which weights are broadcast."""

    def __init__(self, rendezvous, *, timeout_s=60.0):
        self.rendezvous, self.server, self.said = rendezvous, Server(), []
        context = WorkerContext("rollout", 0, Mesh({"dp_replicate": 1}), 1, "cpu", {}, say=self.said.append)
        spec = SimpleNamespace(rendezvous=rendezvous, config=SimpleNamespace(cluster=SimpleNamespace(device="cpu")))
        self.connection = StreamConnection(context, spec)
        self.replica = ServerReplica(self.connection, context, self.server, None)
        self.stream = Stream(BROADCAST, "xxh3", timeout_s, num_workers=2)

    def connect(self):
        plan = make_plan(self.stream, HELD, [object()], [object()])
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(join_broadcast, self.rendezvous, plan, 0)
            self.replica.connect(self.stream, plan)
            self.actor = joining.result()
        return self

    def publish(self, version, tick=lambda: None):
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self.actor.run, version, Sender(WEIGHTS), None, tick)
            try:
                return self.replica.receive(version)
            finally:
                self.sent = sending.exception()


@pytest.fixture
def rendezvous():
    with open_rendezvous("memory", "these tests", lease_s=10) as rendezvous:
        yield rendezvous


def test_a_servers_workers_get_what_is_broadcast_to_their_ranks_process(rendezvous):
    run = Run(rendezvous).connect()
    digests = [run.publish(version) for version in (1, 2)]
    assert digests[0] == digests[1] == run.server.workers[1].digest
    assert len(run.server.loaded) == 2
    assert all(torch.equal(loaded[name], WEIGHTS[name]) for loaded in run.server.loaded for name in WEIGHTS)
    assert run.said == []


def test_a_server_that_cannot_connect_says_so_and_its_rank_waits_for_nobody(rendezvous):
    run = Run(rendezvous, timeout_s=600.0)
    run.server.refuse = PublishError("vllm cannot take weights from memory: OSError: no room")
    with pytest.raises(PublishError, match="no room"):
        run.replica.connect(run.stream, make_plan(run.stream, HELD, [object()], [object()]))
    assert run.said == ["vllm cannot take weights from memory: OSError: no room; the server gets them from a folder"]


def test_a_server_that_is_lost_in_the_middle_leaves_the_others_their_weights(rendezvous):
    run = Run(rendezvous).connect()

    def lost(version, given_up):
        next(run.server.workers[0].tensors(version))
        for worker in run.server.workers:
            worker.close()
        raise PublishError("vllm was lost while weights were sent to it")

    run.server.take = lost
    with pytest.raises(PublishError, match="vllm was lost"):
        run.publish(1)
    assert run.sent is None
    assert run.said == ["vllm was lost while weights were sent to it; the server gets them from a folder"]
    run.server.take = None
    assert run.connect().publish(2)


def test_a_server_that_is_silent_in_the_middle_is_given_up(rendezvous):
    run = Run(rendezvous, timeout_s=4.0).connect()

    def silent(version, given_up):
        assert given_up.wait(120)
        raise PublishError("publishing weights to vllm was given up")

    run.server.take = silent
    with pytest.raises(PublishError, match="worker 0 of rollout rank 0's server was silent for 2 s"):
        run.publish(1)
    assert run.sent is None


def test_a_rank_of_the_actor_that_is_lost_in_the_middle_ends_the_waiting_of_the_server(rendezvous):
    run = Run(rendezvous, timeout_s=600.0).connect()

    class BrokenError(Exception):
        """Whatever goes wrong."""

    def tick():  # while the second of three buckets is under way
        raise BrokenError

    with pytest.raises((PeerFailedError, MembershipLostError)):
        run.publish(1, tick)
    assert isinstance(run.sent, BrokenError)
    assert run.server.loaded == []


class Publishing:
    """A worker that does what is asked, with the context of its process."""

    def __init__(self, context, do):
        self.do = do

    def load(self):
        self.do()


@pytest.fixture
def cancelled():
    """Return a function that does something as a call, cancels the call once it has begun, and returns its error."""

    def cancel(do, has_begun):
        process = WorkerProcess(1, "cpu")
        process.create(Invocation(1, "rollout", 0, "create", False), Publishing, Mesh({"dp_replicate": 1}), (do,), {})
        with ThreadPoolExecutor(1) as pool:
            call = pool.submit(process.call, Invocation(2, "rollout", 0, "load", True), (), {})
            assert has_begun.wait(120)
            process.interrupt(2)
            return call.exception()

    return cancel


def test_a_cancelled_publish_waits_no_longer_for_its_server(rendezvous, cancelled):
    run, begun, ended = Run(rendezvous, timeout_s=600.0).connect(), threading.Event(), threading.Event()

    def stalled(version, given_up):
        begun.set()
        assert given_up.wait(120)
        ended.set()
        raise PublishError("publishing weights to vllm was given up")

    run.server.take = stalled
    assert isinstance(cancelled(lambda: run.publish(1), begun), CallCancelledError)
    assert ended.is_set()


def test_a_server_that_has_all_of_a_version_may_load_it_although_the_call_is_cancelled(
    rendezvous, cancelled, monkeypatch
):
    """It is cancelled where another rank's server has failed; to end this one, too, would cost a start."""
    run, begun, was_given_up = Run(rendezvous, timeout_s=600.0).connect(), threading.Event(), []
    finish = Relay.finish

    def slow(version, given_up):
        run.server.take = None
        digest = run.server.receive(version, given_up)
        was_given_up.append(given_up.wait(3))
        return digest

    run.server.take = slow
    monkeypatch.setattr(Relay, "finish", lambda relay: (finish(relay), begun.set()))
    assert isinstance(cancelled(lambda: run.publish(1), begun), CallCancelledError)
    assert was_given_up == [False]


def test_a_cancelled_connection_waits_no_longer_for_ranks_that_do_not_come(rendezvous, cancelled):
    run, begun = Run(rendezvous, timeout_s=600.0), threading.Event()
    stream = Stream(MEMORY, "xxh3", 600.0, num_workers=2)
    meet, run.connection.meet = run.connection.meet, lambda *given: (begun.set(), meet(*given))[1]
    plan = make_plan(stream, HELD, [object()], [object()])
    assert isinstance(cancelled(lambda: run.replica.connect(stream, plan), begun), CallCancelledError)
