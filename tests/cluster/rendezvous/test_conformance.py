"""What a rendezvous promises, the same wherever it is kept: in memory, in a Ray actor, in a TCPStore, in etcd."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from rallypoint.cluster.rendezvous import Member, Room
from rallypoint.errors import (
    MembershipLostError,
    RankTakenError,
    RendezvousError,
    RendezvousTimeoutError,
    RendezvousUnreachableError,
    StaleGenerationError,
    WorldSizeError,
)

PATIENCE_S = 20
"""Nothing takes this long; only what hangs."""


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def join(rendezvous, name, pool):
    """Return a function that joins in a thread, and close every membership at the end."""
    futures = []

    def start(rank, world_size=2, *, timeout_s=PATIENCE_S, of=rendezvous, **options):
        payload = f"payload of {rank}".encode()
        call = partial(of.join, name, rank=rank, world_size=world_size, payload=payload, timeout_s=timeout_s, **options)
        futures.append(pool.submit(call))
        return futures[-1]

    yield start
    for future in futures:
        if not future.exception():
            future.result().close()


def look(rendezvous, name):
    return rendezvous.rooms.transact(name, lambda room: room)


def until(condition):
    """Wait for something that has no event of its own."""
    deadline = time.monotonic() + PATIENCE_S
    while not (outcome := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)
    return outcome


def until_seated(rendezvous, name, rank):
    return until(lambda: look(rendezvous, name).member_of(rank))


def lost(membership):
    """Return what `check` raises, as soon as it does."""

    def error():
        try:
            return membership.check()
        except RendezvousError as error:
            return error

    return until(error)


def take_seat_and_die(rendezvous, name, rank, world_size):
    """Leave behind what a process does that was killed while it waited."""
    ghost = Member(rank, b"of the dead", "node-of-the-dead", 4242, f"ghost-{name}-{rank}", time.time())
    rendezvous.rooms.renew(name, ghost.incarnation)
    rendezvous.rooms.transact(name, partial(Room.join, member=ghost, world_size=world_size))
    return ghost


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (2, 1, 0)], ids=str)
def test_in_any_order_of_arrival_everybody_gets_what_everybody_brought(rendezvous, name, join, order):
    joining = {}
    for rank in order:
        joining[rank] = join(rank, 3)
        if rank != order[-1]:
            until_seated(rendezvous, name, rank)
    memberships = [joining[rank].result() for rank in range(3)]
    for rank, membership in enumerate(memberships):
        assert (membership.rank, membership.world_size, membership.name) == (rank, 3, name)
        assert membership.members == memberships[0].members
        assert membership.generation == memberships[0].generation
        membership.check()
    assert [member.rank for member in memberships[0].members] == [0, 1, 2]
    assert [member.payload for member in memberships[0].members] == [b"payload of 0", b"payload of 1", b"payload of 2"]
    assert {member.pid for member in memberships[0].members} == {os.getpid()}


def test_twelve_that_come_at_once_meet(join):
    memberships = [future.result() for future in [join(rank, 12) for rank in range(12)]]
    assert len({membership.members for membership in memberships}) == 1


def test_who_comes_after_the_others_gave_up_is_told_where_they_were_and_when(join):
    early = [join(rank, 3, timeout_s=0.2) for rank in (0, 1)]
    for rank, future in enumerate(early):
        with pytest.raises(
            RendezvousTimeoutError, match=rf"rank {rank} .* gave up after timeout_s=0.2.*rank 2 never came"
        ):
            future.result()
    with pytest.raises(RendezvousTimeoutError) as caught:
        join(2, 3, timeout_s=0.2).result()
    assert caught.value.ranks == (0, 1)
    for rank in (0, 1):
        assert (
            f"rank {rank} (node {os.uname().nodename}, pid {os.getpid()}) gave up waiting in generation 1, 20"
            in str(caught.value)
        )


def test_the_same_rank_twice_is_refused_both_are_named_and_the_first_is_not_disturbed(rendezvous, name, join):
    first = join(0)
    until_seated(rendezvous, name, 0)
    with pytest.raises(RankTakenError) as caught:
        join(0).result()
    who = rf"rank 0 (node {os.uname().nodename}, pid {os.getpid()})"
    assert f"{who} is refused, because {who} has the seat" in str(caught.value)
    assert join(1).result().members == first.result().members


def test_another_world_size_is_refused_at_once_and_says_who_set_it(rendezvous, name, join):
    join(2, 3, timeout_s=0.5)
    until_seated(rendezvous, name, 2)
    with pytest.raises(
        WorldSizeError, match=r"rank 0 .* expects world_size=2 .* world_size=3 was set by rank 2 \(node"
    ):
        join(0, 2).result()


def test_who_died_before_the_others_came_is_not_handed_to_them_and_its_seat_can_be_retaken(rendezvous, name, join):
    ghost = take_seat_and_die(rendezvous, name, 0, 2)
    other, again = join(1), join(0)
    members = other.result().members
    assert members == again.result().members
    assert ghost not in members
    assert other.result().generation == 1


def test_a_timeout_says_which_ranks_never_came_and_where_the_others_were_last_seen(rendezvous, name, join):
    take_seat_and_die(rendezvous, name, 2, 4)
    with pytest.raises(RendezvousTimeoutError) as caught:
        join(0, 4, timeout_s=2.5).result()
    assert caught.value.ranks == (1, 2, 3)
    assert (
        "1 of 4 ranks are there. Missing: rank 1 never came; rank 2 (node node-of-the-dead, pid 4242) died or froze"
        in str(caught.value)
    )


def test_who_leaves_is_missed_by_name(join):
    stays, leaves = join(0), join(1)
    stays.result().check()
    leaves.result().close()
    error = lost(stays.result())
    assert isinstance(error, MembershipLostError)
    assert error.ranks == (1,)
    assert "has lost 1 of 2 members: rank 1 (node" in str(error)


def test_who_forgets_its_membership_is_missed_like_the_dead(join, rendezvous, name, pool):
    stays = join(0)
    pool.submit(rendezvous.join, name, rank=1, world_size=2, timeout_s=PATIENCE_S).result()
    assert "rank 1" in str(lost(stays.result()))


def test_remains_of_an_earlier_attempt_are_fenced_off(rendezvous, name, join):
    left_over = join(0, generation=3)
    until_seated(rendezvous, name, 0)
    joining = [join(rank, generation=4) for rank in (0, 1)]
    assert [future.result().generation for future in joining] == [4, 4]
    with pytest.raises(StaleGenerationError, match=r"generation 4 of rendezvous .* has begun, with rank [01] \(node"):
        left_over.result()
    with pytest.raises(StaleGenerationError, match=r"rank 1 .* came to generation 3 .* but generation 4 has begun"):
        join(1, generation=3).result()


def test_who_rejoins_begins_the_next_generation_and_the_members_of_the_last_one_are_told(join):
    stays, goes = (future.result() for future in [join(0), join(1)])
    goes.close()
    again = join(1)
    error = until(lambda: (found := lost(stays)) and isinstance(found, StaleGenerationError) and found)
    assert "generation 2 of rendezvous" in str(error)
    assert error.ranks == (1,)
    stays.close()
    renewed = join(0).result()
    assert renewed.members == again.result().members
    assert (stays.generation, renewed.generation) == (1, 2)


def test_two_runs_that_use_the_same_name_do_not_see_each_other(place, rendezvous, join):
    with place.open() as other:
        futures = [(join(rank), join(rank, of=other)) for rank in (0, 1)]
        ours, theirs = zip(*[(one.result(), two.result()) for one, two in futures], strict=True)
        assert ours[0].members == ours[1].members
        assert theirs[0].members == theirs[1].members
        assert not set(ours[0].members) & set(theirs[0].members)


def test_who_was_given_up_learns_it(rendezvous, name, join):
    one, other = (future.result() for future in [join(0), join(1)])
    incarnation = other.members[1].incarnation
    rendezvous.rooms.transact(name, partial(Room.depart, incarnation=incarnation, how="died or froze", at=0.0))
    assert lost(one).ranks == lost(other).ranks == (1,)


def test_who_waits_when_the_rendezvous_is_closed_gets_an_error(place, name, join):
    closed = place.open()
    waiting = join(0, of=closed)
    until_seated(closed, name, 0)
    closed.close()
    with pytest.raises(RendezvousUnreachableError):
        waiting.result(PATIENCE_S)
    closed.close()


def test_processes_that_are_killed_before_and_after_are_noticed(rendezvous, name, join, start_process):
    first = start_process(rendezvous, name, 0, 2)
    second = start_process(rendezvous, name + " again", 0, 2)
    assert until_seated(rendezvous, name, 0).pid == first
    os.kill(first, signal.SIGKILL)
    with pytest.raises(
        RendezvousTimeoutError, match=rf"rank 0 .*, pid {first}\) (died or froze|came, but did not answer)"
    ):
        join(1, timeout_s=0.5).result()

    membership = rendezvous.join(name + " again", rank=1, world_size=2, timeout_s=PATIENCE_S)
    assert membership.members[0].pid == second
    membership.check()
    os.kill(second, signal.SIGKILL)
    error = lost(membership)
    assert isinstance(error, MembershipLostError)
    assert f"rank 0 (node {os.uname().nodename}, pid {second}) died or froze" in str(error)
    membership.close()


@pytest.mark.parametrize(("rank", "world_size", "generation"), [(2, 2, None), (-1, 2, None), (0, 0, None), (0, 1, 0)])
def test_what_can_never_be_is_refused_before_anything_is_sent(rendezvous, name, rank, world_size, generation):
    with pytest.raises(ValueError, match=r"expected at least 0 and less than|are counted from 1"):
        rendezvous.join(name, rank=rank, world_size=world_size, timeout_s=1, generation=generation)
