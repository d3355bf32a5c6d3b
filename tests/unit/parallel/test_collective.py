import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.errors import MembershipLostError, PeerFailedError, RendezvousTimeoutError
from rallypoint.parallel import Collective, meet
from rallypoint.parallel.collective import Grouped, connect


@pytest.fixture
def rendezvous():
    with open_rendezvous("memory", "these tests", lease_s=2) as rendezvous:
        yield rendezvous


@pytest.fixture
def ranks(rendezvous):
    """Return a function that runs one call per rank, each in a thread with a collective of its own."""
    meetings = itertools.count()

    def run(size, call):
        meeting, groups = f"meeting {next(meetings)}", []

        def on_rank(rank):
            groups.append(group := connect(rendezvous, meeting, rank, size))  # kept until all are connected, and done
            return call(group)

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(on_rank, range(size)))

    return run


def test_a_single_rank_meets_nobody_and_sums_nothing(rendezvous):
    alone = connect(rendezvous, "meeting", 0, 1)
    tensor = torch.tensor([1.0, 2.0])
    alone.all_reduce_sum([tensor])
    assert type(alone) is Collective
    assert tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_gets_the_sum_of_all(ranks, size):
    def call(group):
        tensors = [torch.full((3,), 10.0**group.rank), torch.tensor(group.rank, dtype=torch.int64)]
        group.all_reduce_sum(tensors)
        return group.rank, group.size, tensors[0].tolist(), tensors[1].item()

    total = float(sum(10**rank for rank in range(size)))
    assert ranks(size, call) == [(rank, size, [total] * 3, size * (size - 1) // 2) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_rank_gets_the_same_bits_every_time(ranks, size, dtype):
    parts = torch.randn(size, 100_003, generator=torch.Generator().manual_seed(0)).to(dtype)

    def call(group):
        mine = parts[group.rank].clone()
        group.all_reduce_sum([mine])
        return mine

    first, *others = [*ranks(size, call), *ranks(size, call)]
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first.double(), parts.double().sum(0), rtol=0.05, atol=0.05)


def test_tensors_of_any_type_and_layout_are_summed_in_place(ranks):
    def make(rank):
        base = torch.arange(12, dtype=torch.float32).view(3, 4) * (rank + 1)
        return [
            base.T,
            torch.tensor(rank + 0.5, dtype=torch.float64),
            torch.zeros(0, 3),
            base.clone()[:, 1],
            torch.tensor([rank], dtype=torch.int64),
            torch.ones(2).bfloat16(),
        ]

    def call(group):
        tensors = make(group.rank)
        same = list(tensors)
        group.all_reduce_sum(tensors)
        assert all(one is other for one, other in zip(tensors, same, strict=True))
        return tensors

    expected = [sum(parts[1:], parts[0].clone()) for parts in zip(*(make(rank) for rank in range(3)), strict=True)]
    for tensors in ranks(3, call):
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert tensor.dtype == wanted.dtype
            assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_the_largest_of_all(ranks, size):
    def call(group):
        tensor = torch.tensor([group.rank, -group.rank])
        group.all_reduce_max(tensor)
        return tensor.tolist()

    assert ranks(size, call) == [[size - 1, 0]] * size


@pytest.mark.parametrize("sizes", [[2], [2, 3], [0, 4, 1]], ids=str)
def test_parts_of_any_length_are_gathered_in_rank_order(ranks, sizes):
    parts = [torch.full((size, 2), rank, dtype=torch.float64) for rank, size in enumerate(sizes)]
    for gathered in ranks(len(sizes), lambda group: group.all_gather(parts[group.rank], sizes)):
        assert all(torch.equal(one, other) for one, other in zip(gathered, parts, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_exchange_gives_every_rank_its_part_of_every_other(ranks, size):
    def part(sender, receiver):  # of different lengths, one of them empty
        return torch.full((sender + receiver, 2), 10.0 * sender + receiver)

    def call(group):
        given = [part(group.rank, other) for other in range(size)]
        return group.exchange(given, [other + group.rank for other in range(size)])

    for rank, received in enumerate(ranks(size, call)):
        assert all(torch.equal(one, part(sender, rank)) for sender, one in enumerate(received))


def test_nan_of_one_rank_reaches_all(ranks):
    def call(group):
        tensor = torch.tensor([1.0, float("nan") if group.rank == 1 else 1.0])
        group.all_reduce_sum([tensor])
        return tensor.isnan().tolist()

    assert ranks(3, call) == [[False, True]] * 3


def test_nothing_to_sum_is_fine(ranks):
    assert ranks(2, lambda group: group.all_reduce_sum([])) == [None, None]


def test_groups_of_one_process_do_not_disturb_each_other(ranks, rendezvous):
    """As in an inline run, where actor and critic each have a group over the same threads."""

    def call(group):
        other = connect(rendezvous, "critic", group.rank, group.size)
        totals = []
        for number in range(20):
            one, two = torch.tensor([1.0 + number]), torch.tensor([100.0 + number])
            group.all_reduce_sum([one])
            other.all_reduce_sum([two])
            totals.append((one.item(), two.item()))
        return totals

    assert ranks(2, call) == [[(2.0 + 2 * n, 200.0 + 2 * n) for n in range(20)]] * 2


def test_a_rank_that_never_comes_is_named_after_the_timeout(rendezvous):
    with pytest.raises(RendezvousTimeoutError, match="rank 1 never came"):
        connect(rendezvous, "meeting", 0, 2, timeout_s=0.2)


def test_a_rank_that_leaves_is_named_to_those_who_wait_for_it(rendezvous):
    with ThreadPoolExecutor(2) as pool:
        stays, leaves = pool.map(lambda rank: meet(rendezvous, "meeting", rank=rank, world_size=2, timeout_s=2), (0, 1))
    leaves.close()
    with pytest.raises(MembershipLostError, match=r"rank 1 .* left"):
        Grouped(stays).all_reduce_sum([torch.ones(3)])
    stays.close()


def test_a_rank_that_leaves_in_the_middle_ends_the_waiting_of_the_others(rendezvous):
    """The timeout is longer than a test may take."""

    def wait_for_the_others(group):
        with pytest.raises(MembershipLostError, match=r"has lost 1 of 3 members: rank 1 .* left"):
            Grouped(group).all_reduce_sum([torch.ones(3)])

    with ThreadPoolExecutor(3) as pool:
        groups = list(
            pool.map(lambda rank: meet(rendezvous, "meeting", rank=rank, world_size=3, timeout_s=3600), range(3))
        )
        waiting = [pool.submit(wait_for_the_others, groups[rank]) for rank in (0, 2)]
        groups[1].abandon()
        for one in waiting:
            one.result()


@pytest.mark.parametrize("name", "abcd")
def test_the_end_of_an_abandoned_group_does_not_wait_for_what_is_under_way(rendezvous, name):
    """The timeout is longer than a test may take, and gloo ends what is sent and received in some cases only."""
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: meet(rendezvous, name, rank=rank, world_size=2, timeout_s=3600), range(2)))
    for group in (*groups, *groups):
        group.torch_group.broadcast([torch.zeros(8 << 20)])
    for group in groups:
        group.abandon()
    del group
    ending = threading.Thread(target=groups.clear, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()


def test_an_operation_that_is_never_told_that_a_rank_left_is_given_up(rendezvous):
    class NeverEnds:
        def wait(self, timeout):
            raise RuntimeError("Operation timed out!")

        def is_completed(self):
            return False

    with ThreadPoolExecutor(2) as pool:
        stays, leaves = pool.map(
            lambda rank: meet(rendezvous, "meeting", rank=rank, world_size=2, timeout_s=3600), range(2)
        )
    leaves.close()
    with pytest.raises(MembershipLostError, match=r"has lost 1 of 2 members: rank 1 .* left"), stays.watched():
        stays.wait(NeverEnds())


def test_a_rank_that_leaves_one_group_stays_in_the_others(rendezvous):
    def on_rank(rank):
        return [meet(rendezvous, name, rank=rank, world_size=2, timeout_s=60) for name in ("lost", "kept")]

    def add_up(group):
        total = torch.ones(3)
        Grouped(group).all_reduce_sum([total])
        return total.tolist()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(on_rank, range(2))
        second[0].abandon()
        assert list(pool.map(add_up, (first[1], second[1]))) == [[2.0] * 3] * 2


def test_a_rank_that_hangs_is_an_error_after_the_timeout(rendezvous):
    with ThreadPoolExecutor(2) as pool:
        waits, hangs = pool.map(lambda rank: meet(rendezvous, "meeting", rank=rank, world_size=2, timeout_s=1), (0, 1))
    with pytest.raises(PeerFailedError, match=r"'meeting': an operation of rank 0 of 2 .*(?i:time)"):
        Grouped(waits).all_reduce_sum([torch.ones(3)])
    hangs.close()
