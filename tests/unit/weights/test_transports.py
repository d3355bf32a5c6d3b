"""Weights on their way between processes, which are threads here: every transport keeps the same promises."""

import contextlib
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.errors import MembershipLostError, PeerFailedError, PublishError, RallyError, WeightsMismatchError
from rallypoint.models import Part
from rallypoint.weights import same_node
from rallypoint.weights.endpoints import Receiver, Sender
from rallypoint.weights.manifest import HEADER_BYTES, Held, Manifest
from rallypoint.weights.shared import share
from rallypoint.weights.transfer import Participant, TransferPlan
from rallypoint.weights.transports import join_broadcast

WHOLE = {
    "matrix": torch.randn(40, 24, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "number": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "long": torch.randn(3, 1, 900, generator=torch.Generator().manual_seed(2)),
}
BUCKET_BYTES = HEADER_BYTES + 1024


def cuts(num_roots):
    """What each rank holds: the rows of a matrix, the columns of the long one, and the rest like everybody."""
    for rank in range(num_roots):
        parts = {name: Part.whole(tensor.shape) for name, tensor in WHOLE.items()}
        parts["matrix"] = parts["matrix"].cut(0, rank, num_roots)
        parts["long"] = parts["long"].cut(2, rank, num_roots)
        yield parts


def manifest(num_roots):
    return Manifest.of(
        [{name: Held(WHOLE[name].dtype, part) for name, part in parts.items()} for parts in cuts(num_roots)],
        bucket_bytes=BUCKET_BYTES,
    )


def source(parts, factor=1.0):
    return Sender({name: (WHOLE[name] * factor)[part.within(Part.whole(part.shape))] for name, part in parts.items()})


def blank():
    return {name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}


class Company:
    """A line of threads: actor ranks 0..R-1, then rollout ranks; with `shared`, the first rollout rank is rank 0."""

    def __init__(self, rendezvous, join, num_roots, num_takers, *, shared=False, timeout_s=60.0, name="weights"):
        self.sources = [source(parts) for parts in cuts(num_roots)]
        members = [Participant(rank, 0 if shared and rank == 0 else None) for rank in range(num_roots)]
        members += [Participant(None, rank) for rank in range(int(shared), num_takers)]
        self.plan = TransferPlan(name, tuple(members), manifest(num_roots), timeout_s)
        self.rendezvous, self.join_line = rendezvous, join
        self.models = {place: blank() for place in self.plan.receivers}
        self.lines = {}

    def each(self, do, places=None):
        """Do something at every place at once; return what came of it, errors too."""
        places = range(len(self.plan.members)) if places is None else places

        def attempt(place):
            try:
                return do(place)
            except RallyError as error:
                return error

        with ThreadPoolExecutor(len(places)) as pool:
            return list(pool.map(attempt, places))

    def meet(self, places=None):
        def join(place):
            self.lines[place] = self.join_line(self.rendezvous, self.plan, place)

        return self.each(join, places)

    def publish(self, version, places=None, *, tick=lambda: None, expected=None):
        def run(place):
            member = self.plan.members[place]
            mine = None if member.sender is None else self.sources[member.sender]
            if member.receiver is None:
                self.lines[place].run(version, mine, None, tick)
                return
            sink = Receiver(self.plan.manifest, self.models[place], expected or version)
            self.lines[place].run(version, mine, sink, tick)
            sink.finish()

        return self.each(run, places)


@pytest.fixture
def rendezvous():
    with open_rendezvous("memory", "these tests", lease_s=10) as rendezvous:
        yield rendezvous


@pytest.fixture(params=[same_node.join, join_broadcast], ids=["memory", "broadcast"])
def make(request, rendezvous):
    """Make a company, which leaves at the end of the test."""
    made, numbers = [], itertools.count()

    def company(num_roots, num_takers, **how):
        made.append(Company(rendezvous, request.param, num_roots, num_takers, name=f"weights {next(numbers)}", **how))
        return made[-1]

    yield company
    for one in made:
        for line in one.lines.values():
            line.close()


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("num_takers", [1, 2])
@pytest.mark.parametrize("num_roots", [1, 2])
def test_weights_arrive_whole_from_whatever_ranks_hold_them(make, num_roots, num_takers, shared):
    company = make(num_roots, num_takers, shared=shared)
    assert not any(company.meet())
    for version, factor in ((1, 1.0), (2, -3.0)):
        company.sources = [source(parts, factor) for parts in cuts(num_roots)]
        assert not any(company.publish(version))
        assert len(company.models) == num_takers
        for model in company.models.values():
            assert all(torch.equal(model[name], tensor * factor) for name, tensor in WHOLE.items())


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
@pytest.mark.parametrize("packed", [(), ("number",)], ids=["all stay", "one is packed"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize(("num_roots", "num_takers"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_weights_that_takers_read_from_where_they_are_arrive_whole(rendezvous, num_roots, num_takers, shared, packed):
    whole = Part.whole
    own = [{n: WHOLE[n][p.within(whole(p.shape))].clone() for n, p in parts.items()} for parts in cuts(num_roots)]
    memories = [share(tensor for name, tensor in tensors.items() if name not in packed) for tensors in own]
    held = {name: Held(tensor.dtype, whole(tensor.shape)) for name, tensor in WHOLE.items()}

    def join(rendezvous, plan, place):
        root = plan.members[place].sender
        exposed = None if root is None else memories[root].exposed(held, own[root])
        return same_node.join(rendezvous, plan, place, exposed=exposed)

    company = Company(rendezvous, join, num_roots, num_takers, shared=shared)
    company.sources = [Sender(tensors) for tensors in own]
    assert not any(company.meet())
    for version, factor in ((1, 1.0), (2, -3.0)):
        assert not any(company.publish(version))
        assert len(company.models) == num_takers
        for model in company.models.values():
            assert all(torch.equal(model[name], tensor * factor) for name, tensor in WHOLE.items())
        for tensor in itertools.chain(*(tensors.values() for tensors in own)):
            tensor.mul_(-3.0)
    for line in company.lines.values():
        line.close()


def test_a_stale_version_is_refused_by_all_who_take_and_the_next_one_arrives(make):
    company = make(2, 2)
    company.meet()
    sent = company.publish(3, expected=4)
    assert [type(error) for error in sent] == [type(None), type(None), WeightsMismatchError, WeightsMismatchError]
    assert "version 4 was not loaded: expected bucket 0 of version 4, found bucket 0 of 3" in str(sent[-1])
    assert all(not tensor.any() for model in company.models.values() for tensor in model.values())
    assert not any(company.publish(5))
    assert all(torch.equal(model["matrix"], WHOLE["matrix"]) for model in company.models.values())


class Damaged:
    """A source that flips a bit of a bucket after its checksums were taken."""

    def __init__(self, inner, at):
        self.inner, self.at = inner, at

    def pack(self, manifest, index, version, memory):
        self.inner.pack(manifest, index, version, memory)
        if index == self.at:
            memory[manifest.buckets[index].rectangles[0].start] ^= 4


def test_a_flipped_bit_is_found_named_and_does_not_reach_the_model_and_the_line_goes_on(make):
    company = make(1, 2)
    company.meet()
    whole = company.sources
    company.sources = [Damaged(whole[0], at=3)]
    _, *errors = company.publish(1)
    lost = company.plan.manifest.buckets[3].rectangles[0]
    for error in errors:
        assert isinstance(error, WeightsMismatchError)
        assert f"version 1 was not loaded: {lost.name} was damaged on its way" in str(error)
    where = lost.part.within(Part.whole(lost.part.shape))
    assert not company.models[1][lost.name][where].any()
    company.sources = whole
    assert not any(company.publish(2))


def test_who_does_not_come_is_named(make):
    company = make(1, 2, timeout_s=0.3)
    errors = company.meet([0, 1])
    assert all(isinstance(error, PublishError) for error in errors)
    assert any("waited 0.3 s for rollout rank 1 to take part" in str(error) for error in errors)


@pytest.mark.parametrize("place", [0, 2], ids=["sender", "taker"])
def test_who_fails_under_way_ends_the_waiting_of_everybody_at_once(make, place):
    """With half of a model taken over, and long before the time is over."""
    company = make(1, 2, timeout_s=600)
    company.meet()
    num_ticks = itertools.count()

    class BrokenError(Exception):
        """Whatever goes wrong."""

    def run(at):
        def tick():
            if at == place and next(num_ticks) == 5:
                raise BrokenError

        sink = Receiver(company.plan.manifest, company.models[at], 1) if at else None
        with contextlib.suppress(BrokenError):
            company.lines[at].run(1, None if at else company.sources[0], sink, tick)

    gone = (PeerFailedError, MembershipLostError)
    outcomes = company.each(run)
    assert outcomes.pop(place) is None
    assert all(isinstance(error, gone) for error in outcomes)
    assert all(isinstance(error, gone) for error in company.publish(2))


def test_who_is_silent_is_named_when_the_time_is_over(rendezvous):
    company = Company(rendezvous, same_node.join, 1, 2, timeout_s=0.5)
    company.meet()
    sender, taker = company.publish(1, [0, 1])
    company.lines[2].close()
    assert isinstance(sender, PublishError)
    assert "rollout rank 1 was silent for 0.5 s" in str(sender)
    assert isinstance(taker, PeerFailedError | PublishError)
    assert "actor rank 0" in str(taker)
