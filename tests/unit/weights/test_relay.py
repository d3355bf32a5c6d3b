"""Weights for servers on other nodes: ranks receive what is broadcast, and pass it on. All are threads here."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.errors import PeerFailedError, PublishError, RallyError, WeightsMismatchError
from rallypoint.model_files.pieces import same_names
from rallypoint.models import Part
from rallypoint.transport_kinds import MEMORY
from rallypoint.weights import same_node
from rallypoint.weights.buffers import HostMemory
from rallypoint.weights.endpoints import Receiver, Sender
from rallypoint.weights.manifest import HEADER_BYTES, Held, Manifest
from rallypoint.weights.relay import Relay, relayed
from rallypoint.weights.served import Invitation, ServerReceiver
from rallypoint.weights.sockets import Listener
from rallypoint.weights.transfer import Participant, TransferPlan
from rallypoint.weights.transports import join_broadcast

WHOLE = {
    "matrix": torch.randn(40, 24, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "number": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "long": torch.randn(3, 1, 900, generator=torch.Generator().manual_seed(2)),
}
PIECES = {name: same_names(name, tensor.shape) for name, tensor in WHOLE.items()}
CPU = torch.device("cpu")


class Nodes:
    """Actor ranks, each with rows of the matrix; a rollout rank whose server has workers; one with a model of its own.

    If they are colocated, the first of the actor's processes has the rank with the server, too.
    """

    def __init__(self, rendezvous, *, num_senders=2, num_workers=2, colocated=False, timeout_s=40.0):
        parts = [{name: Part.whole(tensor.shape) for name, tensor in WHOLE.items()} for _ in range(num_senders)]
        for rank, own in enumerate(parts):
            own["matrix"] = own["matrix"].cut(0, rank, num_senders)
        held = [{name: Held(WHOLE[name].dtype, part) for name, part in own.items()} for own in parts]
        self.sources = [
            Sender({n: WHOLE[n][p.within(Part.whole(p.shape))].clone() for n, p in own.items()}) for own in parts
        ]
        members = [Participant(rank, 0 if colocated and rank == 0 else None) for rank in range(num_senders)]
        members += [Participant(None, rank) for rank in ((1,) if colocated else (0, 1))]
        manifest = Manifest.of(held, bucket_bytes=HEADER_BYTES + 1024)
        self.plan = TransferPlan("weights", tuple(members), manifest, timeout_s)
        self.model = {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}
        self.server = self.plan.place_of_receiver(0)
        own = relayed(self.plan, 0, num_workers)
        with Listener() as listener, ThreadPoolExecutor(num_workers) as pool:
            told = Invitation.read(Invitation(MEMORY, own, own.receivers, [listener.address], PIECES).text())
            joining = [pool.submit(ServerReceiver, told, worker, CPU) for worker in range(num_workers)]
            self.outlet = same_node.relay(own, listener, (HostMemory(),), own.timeout_s)
            self.workers = [one.result() for one in joining]
        with ThreadPoolExecutor(len(members)) as pool:
            self.lines = list(pool.map(lambda at: join_broadcast(rendezvous, self.plan, at), range(len(members))))

    def publish(self, version, *, expected=None, receive=None):
        """Return what each worker got, and what came of it at each place of the broadcast; errors, too."""
        relay = Relay(self.plan.manifest, self.outlet)

        def attempt(do, *given):
            try:
                return do(*given)
            except RallyError as error:
                return error

        def run(place):
            member, sink = self.plan.members[place], None
            if member.receiver is not None:
                sink = relay if place == self.server else Receiver(self.plan.manifest, self.model, version)
            source = None if member.sender is None else self.sources[member.sender]
            self.lines[place].run(version, source, sink, lambda: None)
            if isinstance(sink, Receiver):
                sink.finish()
            if sink is relay:
                relay.finish()
            return relay.problem if sink is relay else None

        receive = receive or (lambda worker: dict(worker.tensors(expected or version)))
        with ThreadPoolExecutor(len(self.lines) + len(self.workers)) as pool:
            running = [pool.submit(attempt, run, place) for place in range(len(self.lines))]
            received = list(pool.map(lambda worker: attempt(receive, worker), self.workers))
            return received, [one.result() for one in running]

    def close(self):
        for end in (self.outlet, *self.workers, *self.lines):
            end.close()


@pytest.fixture
def rendezvous():
    with open_rendezvous("memory", "these tests", lease_s=10) as rendezvous:
        yield rendezvous


@pytest.fixture
def make(rendezvous):
    """Make nodes, whose connections end with the test."""
    made = []

    def nodes(**how):
        made.append(Nodes(rendezvous, **how))
        return made[-1]

    yield nodes
    for one in made:
        one.close()


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
@pytest.mark.parametrize(("num_senders", "num_workers"), [(1, 1), (2, 2)])
def test_every_worker_of_a_server_gets_the_weights_that_other_ranks_get(make, num_senders, num_workers, colocated):
    nodes, digests = make(num_senders=num_senders, num_workers=num_workers, colocated=colocated), []
    for version, factor in ((1, 1.0), (2, -3.0)):
        received, outcomes = nodes.publish(version)
        assert not any(outcomes)
        assert len(received) == num_workers
        for tensors in (*received, nodes.model):
            assert tensors.keys() == WHOLE.keys()
            assert all(torch.equal(tensors[name], tensor * factor) for name, tensor in WHOLE.items())
        digests.append({worker.digest for worker in nodes.workers})
        for source in nodes.sources:
            for tensor in source._tensors.values():
                tensor.mul_(-3.0)
    assert [len(each) for each in digests] == [1, 1]
    assert digests[0] != digests[1]


class Counted:
    """A source that counts how often each bucket is packed."""

    def __init__(self, inner):
        self.inner, self.packed = inner, []

    def pack(self, manifest, index, version, memory):
        self.packed.append(index)
        self.inner.pack(manifest, index, version, memory)


def test_a_rank_that_sends_and_relays_packs_each_bucket_once(make):
    nodes = make(colocated=True)
    nodes.sources[0] = Counted(nodes.sources[0])
    received, outcomes = nodes.publish(1)
    assert not any(outcomes)
    assert len(received) == 2
    own = [index for index, bucket in enumerate(nodes.plan.manifest.buckets) if bucket.sender == 0]
    assert nodes.sources[0].packed == own


class Damaged:
    """A source that flips a bit of a bucket after its checksums were taken."""

    def __init__(self, inner):
        self.inner = inner

    def pack(self, manifest, index, version, memory):
        self.inner.pack(manifest, index, version, memory)
        memory[manifest.buckets[index].rectangles[0].start] ^= 4


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
def test_a_bit_that_flips_on_the_way_is_found_by_the_workers_and_the_next_version_arrives(make, colocated):
    nodes = make(colocated=colocated)
    whole, nodes.sources = nodes.sources, [Damaged(nodes.sources[0]), nodes.sources[1]]
    received, outcomes = nodes.publish(1)
    assert len(received) == 2
    for error in (*received, outcomes[-1]):
        assert isinstance(error, WeightsMismatchError)
        assert "version 1 was not loaded: matrix was damaged on its way" in str(error)
    assert outcomes[nodes.server] is None
    nodes.sources = whole
    received, outcomes = nodes.publish(2)
    assert not any(outcomes)
    assert all(torch.equal(tensors["matrix"], WHOLE["matrix"]) for tensors in received)


def test_a_worker_that_expects_another_version_loads_none(make):
    received, outcomes = make().publish(3, expected=4)
    assert not any(outcomes)
    assert all("expected bucket 0 of version 4, found bucket 0 of 3" in str(error) for error in received)


def test_a_worker_that_is_lost_in_the_middle_fails_its_rank_and_no_other(make):
    nodes = make(num_workers=1)

    def receive(worker):
        next(worker.tensors(1))
        worker.close()

    _, outcomes = nodes.publish(1, receive=receive)
    problem = outcomes.pop(nodes.server)
    assert isinstance(problem, PeerFailedError)
    assert "worker 0 of rollout rank 0's server went away" in str(problem)
    assert not any(outcomes)
    assert all(torch.equal(nodes.model[name], tensor) for name, tensor in WHOLE.items())


def test_a_worker_that_is_silent_is_named_before_other_ranks_lose_patience(make):
    nodes = make(num_workers=1, timeout_s=4.0)
    _, outcomes = nodes.publish(1, receive=lambda worker: next(worker.tensors(1)))
    problem = outcomes.pop(nodes.server)
    assert isinstance(problem, PublishError)
    assert "worker 0 of rollout rank 0's server was silent for 2 s" in str(problem)
    assert not any(outcomes)
    assert all(torch.equal(nodes.model[name], tensor) for name, tensor in WHOLE.items())


def test_the_rank_that_relays_is_named_to_its_servers_workers(make):
    nodes = make()
    nodes.outlet.close()
    received, outcomes = nodes.publish(1)
    assert all(isinstance(error, PeerFailedError) and "rollout rank 0 went away" in str(error) for error in received)
    assert isinstance(outcomes.pop(nodes.server), PeerFailedError)
    assert not any(outcomes)
