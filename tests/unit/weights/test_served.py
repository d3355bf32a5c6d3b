"""Weights that the workers of a server take from the memory of the ranks that send; all are threads here."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.errors import PeerFailedError, RallyError, WeightsMismatchError
from rallypoint.model_files.pieces import Piece, same_names
from rallypoint.models import Part
from rallypoint.transport_kinds import MEMORY
from rallypoint.weights import same_node
from rallypoint.weights.endpoints import Sender
from rallypoint.weights.manifest import HEADER_BYTES, Held, Manifest
from rallypoint.weights.served import Invitation, ServerReceiver
from rallypoint.weights.shared import share
from rallypoint.weights.transfer import Participant, TransferPlan

WHOLE = {
    "matrix": torch.randn(40, 24, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "number": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "experts": torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(2)),
}
CPU = torch.device("cpu")


def pieces():
    """Every weight is one tensor in files, but each expert has its own."""
    found = {name: same_names(name, tensor.shape) for name, tensor in WHOLE.items()}
    whole = Part.whole(WHOLE["experts"].shape)
    return found | {"experts": [Piece(f"experts.{at}", whole.rows(at, at + 1), Part.whole([4, 3])) for at in range(2)]}


STORED = {name: tensor for name, tensor in WHOLE.items() if name != "experts"} | {
    f"experts.{at}": WHOLE["experts"][at] for at in range(2)
}


class Served:
    """Ranks of an actor, of which the first has a rank of the rollout role in its process; its server has workers."""

    def __init__(self, rendezvous, *, num_senders=1, num_workers=1, in_place=False):
        parts = []
        for rank in range(num_senders):
            parts.append({name: Part.whole(tensor.shape) for name, tensor in WHOLE.items()})
            parts[-1]["matrix"] = parts[-1]["matrix"].cut(0, rank, num_senders)
        held = [{name: Held(WHOLE[name].dtype, part) for name, part in own.items()} for own in parts]
        own = [{n: WHOLE[n][p.within(Part.whole(p.shape))].clone() for n, p in each.items()} for each in parts]
        self.memory = [share(list(each.values())) if in_place else None for each in own]
        members = [Participant(rank, 0 if rank == 0 else None) for rank in range(num_senders)]
        members += [Participant(None, 0, part) for part in range(num_workers)]
        manifest = Manifest.of(held, bucket_bytes=HEADER_BYTES + 1024)
        self.plan = TransferPlan("weights", tuple(members), manifest, 20.0)
        self.rendezvous, self.held, self.own, self.num_senders = rendezvous, held, own, num_senders

    def invitation(self):
        places = self.plan.places_of_receiver(0)
        with ThreadPoolExecutor(len(places)) as pool:
            addresses, *_ = pool.map(lambda place: same_node.meet_members(self.rendezvous, self.plan, place), places)
        return Invitation.read(Invitation(MEMORY, self.plan, places, addresses, pieces()).text())

    def open(self, rank):
        memory = self.memory[rank]
        exposed = memory.exposed(self.held[rank], self.own[rank]) if memory is not None else None
        return same_node.join(self.rendezvous, self.plan, rank, exposed=exposed)

    def join(self, worker):
        """Return the ends of the ranks, or why there is none, and what a function of the invitation returns."""
        with ThreadPoolExecutor(self.num_senders + 1) as pool:
            opened = [pool.submit(self.open, rank) for rank in range(self.num_senders)]
            done = pool.submit(lambda: worker(self.invitation()))
            errors = [one.exception() for one in opened]
            assert all(error is None or isinstance(error, RallyError) for error in errors)
            return [error or one.result() for error, one in zip(errors, opened, strict=True)], done.result()

    def join_workers(self):
        def workers(invitation):
            with ThreadPoolExecutor(len(invitation.places)) as pool:
                numbers = range(len(invitation.places))
                return list(pool.map(lambda number: ServerReceiver(invitation, number, CPU), numbers))

        self.lines, self.receivers = self.join(workers)
        return self

    def publish(self, version, expected=None):
        """Return what each worker got: tensors, or why it has none."""

        def receive(receiver):
            try:
                return dict(receiver.tensors(expected or version))
            except RallyError as error:
                return error

        with ThreadPoolExecutor(self.num_senders + len(self.receivers)) as pool:
            sending = [
                pool.submit(line.run, version, Sender(self.own[rank]), None, lambda: None)
                for rank, line in enumerate(self.lines)
            ]
            received = list(pool.map(receive, self.receivers))
            for one in sending:
                one.result()
        return received

    def close(self):
        for end in (*self.lines, *self.receivers):
            end.close()


@pytest.fixture
def rendezvous():
    with open_rendezvous("memory", "these tests", lease_s=10) as rendezvous:
        yield rendezvous


@pytest.mark.parametrize("in_place", [False, True], ids=["through buckets", "in place"])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_senders", [1, 2])
def test_the_workers_of_a_server_get_the_tensors_that_files_would_have(rendezvous, num_senders, num_workers, in_place):
    served = Served(rendezvous, num_senders=num_senders, num_workers=num_workers, in_place=in_place).join_workers()
    digests = []
    for version, factor in ((1, 1.0), (2, -3.0)):
        received = served.publish(version)
        assert len(received) == num_workers
        for tensors in received:
            assert tensors.keys() == STORED.keys()
            assert all(torch.equal(tensors[name], tensor * factor) for name, tensor in STORED.items())
        assert len({receiver.digest for receiver in served.receivers}) == 1
        digests.append(served.receivers[0].digest)
        for own in served.own:
            for tensor in own.values():
                tensor.mul_(-3.0)
    assert digests[0] != digests[1]
    served.close()


def test_a_worker_that_expects_another_version_loads_none(rendezvous):
    served = Served(rendezvous).join_workers()
    (error,) = served.publish(3, expected=4)
    assert isinstance(error, WeightsMismatchError)
    assert "version 4 was not loaded: expected bucket 0 of version 4, found bucket 0 of 3" in str(error)
    served.close()


def test_who_sends_to_a_server_that_will_not_come_is_told_at_once(rendezvous):
    served = Served(rendezvous, num_senders=2, num_workers=2)
    errors, _ = served.join(lambda told: same_node.leave_out(told.plan, told.places, told.addresses))
    assert all(isinstance(error, PeerFailedError) for error in errors)
    assert "worker 0 of rollout rank 0's server went away" in str(errors[0])


def test_a_worker_that_ends_in_the_middle_of_a_version_fails_those_who_send(rendezvous):
    served = Served(rendezvous).join_workers()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(served.lines[0].run, 1, Sender(served.own[0]), None, lambda: None)
        next(served.receivers[0].tensors(1))
        served.receivers[0].close()
        assert isinstance(sending.exception(), PeerFailedError)
