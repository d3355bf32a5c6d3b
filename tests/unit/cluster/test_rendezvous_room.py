"""The rules of a rendezvous, without any backend: by example, and by a machine that tries a thousand schedules."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rallypoint.cluster.rendezvous import Member, Room
from rallypoint.cluster.rendezvous.leases import LOOKS_PER_LEASE
from rallypoint.cluster.rendezvous.memory import RoomKeeper
from rallypoint.errors import (
    MembershipLostError,
    RankTakenError,
    RendezvousError,
    StaleGenerationError,
    WorldSizeError,
)


def member(rank, name="first", pid=None):
    return Member(rank, b"\x00payload", "node-a", pid or 100 + rank, f"{name}-{rank}", since=0.0)


def full(size=3, generation=None, name="first"):
    """A complete room."""
    room = Room("actor")
    for rank in range(size):
        room = room.join(member(rank, name), size, generation)
    for rank in range(size):
        room = room.confirm(f"{name}-{rank}")
    assert room.complete
    return room


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_in_any_order_of_arrival_the_members_are_sorted_and_complete_with_the_last_confirmation(order):
    room = Room("actor")
    for rank in order:
        assert not room.assembled
        room = room.join(member(rank), 3)
    for rank in order[:-1]:
        assert not room.complete
        assert order[0] in room.missing or room.confirmed
        room = room.confirm(f"first-{rank}")
    assert room.complete, "the last to arrive has shown that it is alive"
    assert [seat.rank for seat in room.seats] == [0, 1, 2]
    assert room.missing == ()


def test_a_world_of_one_needs_nobody():
    assert Room("actor").join(member(0), 1).complete


def test_who_died_while_others_were_on_their_way_is_not_handed_to_them():
    room = Room("actor").join(member(0), 2).join(member(1), 2)
    assert room.assembled
    assert room.missing == (0,)
    assert room.whereabouts(0) == "rank 0 (node node-a, pid 100) came, but did not answer when all were there"
    room = room.depart("first-0", "died or froze", at=0.0)
    assert room.confirmed == frozenset(), "those who are left have to confirm the next assembly again"
    again = room.join(member(0, "second"), 2)
    assert (again.generation, again.assembled, again.complete) == (1, True, False)
    complete = again.confirm("first-1")
    assert [seat.incarnation for seat in complete.seats] == ["second-0", "first-1"]


def test_the_same_rank_twice_is_refused_and_both_are_named():
    error = Room("actor").join(member(1), 3).join(member(1, "second", pid=999), 3)
    assert isinstance(error, RankTakenError)
    assert "rank 1 (node node-a, pid 999) is refused" in str(error)
    assert "rank 1 (node node-a, pid 101) has the seat" in str(error)
    assert error.ranks == (1,)


def test_joining_again_with_the_same_incarnation_changes_nothing():
    room = Room("actor").join(member(1), 3)
    assert room.join(member(1), 3) is room


def test_another_world_size_is_refused_and_says_who_set_it():
    error = Room("actor").join(member(2), 3).join(member(0), 4)
    assert isinstance(error, WorldSizeError)
    assert "expects world_size=4" in str(error)
    assert "world_size=3 was set by rank 2 (node node-a, pid 102)" in str(error)


def test_when_all_have_gone_again_the_next_one_sets_the_world_size():
    room = Room("actor").join(member(2), 3).depart("first-2", "left", at=0.0).join(member(0), 2)
    assert (room.generation, room.world_size) == (1, 2)


def test_when_all_members_of_a_complete_generation_have_gone_the_next_one_may_have_another_size():
    room = full(2).depart("first-0", "left", at=1.0).depart("first-1", "left", at=2.0)
    assert room.depart("first-1", "died or froze", at=3.0) is room, "who left cannot die as well"
    room = room.join(member(0, "second"), 3)
    assert (room.generation, room.world_size, room.missing) == (2, 3, (1, 2))


def test_who_rejoins_a_complete_generation_begins_the_next_and_the_old_members_are_remembered():
    room = full().depart("first-1", "died or froze", at=0.0)
    assert [sighting.rank for sighting in room.departed] == [1]
    assert len(room.seats) == 3, "members of a complete generation never change"
    room = room.join(member(1, "second"), 3)
    assert (room.generation, room.complete, room.missing) == (2, False, (0, 2))
    assert room.whereabouts(2).startswith("rank 2 (node node-a, pid 102) took part in generation 1")
    assert isinstance(room.lost("first-0"), StaleGenerationError)
    assert "generation 2 of rendezvous 'actor' has begun, with rank 1 (node node-a, pid 101)" in str(
        room.lost("first-0")
    )


def test_a_rank_whose_member_is_alive_cannot_begin_the_next_generation_unless_it_says_which():
    assert isinstance(full().join(member(1, "second"), 3), RankTakenError)
    assert isinstance(full().join(member(1, "second"), 3, generation=1), RankTakenError)
    assert full().join(member(1, "second"), 3, generation=2).generation == 2


def test_a_complete_generation_does_not_take_its_lost_rank_back():
    error = full().depart("first-1", "left", at=0.0).join(member(1, "second"), 3, generation=1)
    assert isinstance(error, StaleGenerationError)
    assert "begin generation 2" in str(error)


def test_an_older_generation_is_refused_with_the_current_number():
    error = full(generation=7).join(member(0, "second"), 3, generation=6)
    assert isinstance(error, StaleGenerationError)
    assert "came to generation 6" in str(error)
    assert "generation 7 has begun" in str(error)


def test_a_newer_generation_may_have_another_size():
    room = full(3).join(member(0, "second"), 2, generation=2)
    assert (room.world_size, room.missing) == (2, (1,))


def test_giving_up_frees_the_seat_unless_the_generation_was_completed_meanwhile():
    room = Room("actor").join(member(0), 2)
    gone = room.give_up("first-0", at=1.5e9)
    assert gone.seats == ()
    assert (
        gone.whereabouts(0) == "rank 0 (node node-a, pid 100) gave up waiting in generation 1, 2017-07-14 02:40:00 UTC"
    )
    assert gone.whereabouts(1) == "rank 1 never came"
    assert full().give_up("first-0", at=0.0) == full()


def test_who_was_given_up_is_told_so_when_it_comes_to_itself():
    room = Room("actor").join(member(0), 2).depart("first-0", "died or froze", at=0.0)
    error = room.confirm("first-0")
    assert isinstance(error, MembershipLostError)
    assert "lost its seat" in str(error)


def test_a_member_that_renews_for_an_hour_is_there_when_the_late_rank_comes():
    keeper = RoomKeeper()
    keeper.renew("actor", "first-0")
    keeper.transact("actor", lambda room: room.join(member(0), 2))
    for _ in range(3600 * LOOKS_PER_LEASE):
        keeper.renew("actor", "first-0")
        assert not keeper.look()
    room, is_news = keeper.transact("actor", lambda room: room.join(member(1), 2))
    assert is_news
    assert room.confirm("first-0").complete


def test_a_member_that_does_not_renew_for_a_lease_departs():
    keeper = RoomKeeper()
    keeper.transact("actor", lambda room: room.join(member(0), 2))
    assert [keeper.look() for _ in range(LOOKS_PER_LEASE + 2)] == [False] * LOOKS_PER_LEASE + [True, False]
    assert "died or froze" in keeper.room("actor").whereabouts(0)


@pytest.mark.parametrize("room", [Room("a"), Room("a").join(member(0), 2), full().depart("first-1", "left", at=12.5)])
def test_a_room_survives_its_way_through_json(room):
    assert Room.decode(room.name, room.encode()) == room
    assert Room.decode("actor", b"") == Room("actor")


@dataclasses.dataclass(eq=False)
class Participant:
    """What the machine knows of one of its processes."""

    me: Member
    world_size: int
    wanted: int | None
    alive: bool = True
    done: bool = False
    """Has its answer: a membership or an error."""


class Schedules(RuleBasedStateMachine):
    """Participants that come, wake, die, freeze the room's observer, give up and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = RoomKeeper()
        self.everybody: dict[str, Participant] = {}
        self.acted_since_assembly: set[str] = set()
        self.handed_out: dict[int, tuple[Member, ...]] = {}
        self.before = Room("actor")

    people = st.runner().flatmap(lambda self: st.sampled_from(sorted(self.everybody) or [""]))

    def transact(self, change):
        was = self.room.seats
        outcome, _ = self.keeper.transact("actor", change)
        if self.room.seats != was:
            self.acted_since_assembly.clear()
        return outcome

    @property
    def room(self):
        return self.keeper.room("actor")

    @rule(rank=st.integers(0, 2), size=st.sampled_from([3, 3, 3, 2]), ahead=st.sampled_from([None] * 6 + [0, 0, -1, 1]))
    def arrive(self, rank, size, ahead):
        if rank >= size:
            return
        number = len(self.everybody)
        me = Member(rank, bytes([number]), f"node-{number % 2}", 1000 + number, f"{number:03}", since=float(number))
        wanted = None if ahead is None else max(1, self.room.generation + ahead)
        participant = self.everybody[me.incarnation] = Participant(me, size, wanted)
        before = self.room
        self.keeper.renew("actor", me.incarnation)
        outcome = self.transact(lambda room: room.join(me, size, wanted))
        if not isinstance(outcome, RendezvousError):
            assert me in outcome.seats
            assert wanted in {None, outcome.generation}
            self.acted_since_assembly.add(me.incarnation)
            return
        participant.done = True
        assert self.room == before, "a refusal changes nothing"
        assert str(me) in str(outcome)
        assert outcome.ranks == (rank,)
        holder = before.member_of(rank)
        if isinstance(outcome, RankTakenError):
            assert holder in before.present
            assert str(holder) in str(outcome)
        elif isinstance(outcome, WorldSizeError):
            assert size != before.world_size
            assert str(before.present[0]) in str(outcome)
        else:
            assert wanted is not None
            assert wanted < before.generation or before.complete

    @rule(incarnation=people)
    def wake(self, incarnation):
        """What a participant does whenever it is woken: see whether it still has its seat, confirm, take its answer."""
        participant = self.everybody.get(incarnation)
        if participant is None or not participant.alive or participant.done:
            return
        self.keeper.renew("actor", incarnation)
        outcome = self.transact(lambda room: room.confirm(incarnation))
        if isinstance(outcome, RendezvousError):
            assert participant.me not in self.room.seats
            participant.done = True
            return
        if outcome.assembled:
            self.acted_since_assembly.add(incarnation)
        if outcome.complete:
            participant.done = True
            assert outcome.seats == self.handed_out.setdefault(outcome.generation, outcome.seats)
            assert participant.me in outcome.seats

    @rule(incarnation=people)
    def die(self, incarnation):
        if incarnation in self.everybody:
            self.everybody[incarnation].alive = False

    @rule(incarnation=people, how=st.sampled_from(["give up", "leave"]))
    def go(self, incarnation, how):
        participant = self.everybody.get(incarnation)
        if participant is None or not participant.alive:
            return
        if how == "leave":
            self.transact(lambda room: room.depart(incarnation, "left", at=0.0))
        else:
            self.transact(lambda room: room.give_up(incarnation, at=0.0))
            if self.room.complete:
                return
        participant.alive = False
        assert participant.me not in self.room.present

    @rule(num_looks=st.integers(1, 2 * LOOKS_PER_LEASE))
    def time_passes(self, num_looks):
        for _ in range(num_looks):
            for incarnation, participant in self.everybody.items():
                if participant.alive:
                    self.keeper.renew("actor", incarnation)
            was = self.room.seats
            self.keeper.look()
            if self.room.seats != was:
                self.acted_since_assembly.clear()
        if num_looks > LOOKS_PER_LEASE:
            assert all(self.everybody[seat.incarnation].alive for seat in self.room.present), "the dead are gone"
        assert all(not self.everybody[gone.incarnation].alive for gone in self.room.departed), "and nobody else is"

    @invariant()
    def the_rules_hold(self):
        room, before = self.room, self.before
        ranks = [seat.rank for seat in room.seats]
        assert ranks == sorted(set(ranks)), "never two on a seat"
        assert all(0 <= rank < room.world_size for rank in ranks)
        assert all(self.everybody[seat.incarnation].world_size == room.world_size for seat in room.seats)
        assert all(self.everybody[seat.incarnation].wanted in {None, room.generation} for seat in room.seats)
        assert room.generation >= before.generation
        assert room.news >= before.news
        if before.complete and room.generation == before.generation:
            assert room.seats == before.seats, "a complete generation keeps its members"
            assert room.complete
        if room.complete:
            assert len(ranks) == room.world_size
            if not before.complete:
                incarnations = {seat.incarnation for seat in room.seats}
                assert incarnations <= self.acted_since_assembly, "nobody completes with one that may be dead"
        else:
            assert set(room.missing) == set(range(room.world_size)) - (
                {seat.rank for seat in room.seats if seat.incarnation in room.confirmed}
                if room.assembled
                else set(ranks)
            )
            assert all(room.whereabouts(rank) for rank in room.missing)
        assert Room.decode("actor", room.encode()) == room
        self.before = room


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=18, deadline=None)  # many: below


@pytest.mark.slow
class TestManySchedules(Schedules.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=18, deadline=None)
