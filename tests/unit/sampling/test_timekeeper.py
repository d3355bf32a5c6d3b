"""Who is named when a step waits for a few of its groups."""

import dataclasses

import pytest

from rallypoint.sampling.timekeeper import Timekeeper

NUM_RANKS = 2


@dataclasses.dataclass
class Group:
    """What the words are made of."""

    index: int
    rank: int
    admitted_s: float
    scored_s: float | None
    sampled_s: float | None = None
    name: str = "train:0"


def groups_of(num_prompts, *, took_s, admitted_s=0.0):
    """Return the groups of a step, of which those of rank 0 took so many seconds and those of rank 1 have not ended."""
    ranks = [(NUM_RANKS * (place + 1) - 1) // num_prompts for place in range(num_prompts)]  # as the role deals them
    ends = [admitted_s + took_s if rank == 0 else None for rank in ranks]
    return [Group(index, rank, admitted_s, ends[index]) for index, rank in enumerate(ranks)]


@pytest.mark.parametrize("num_prompts", range(1, 10))
def test_a_rank_that_is_stuck_is_named_by_what_earlier_steps_took_however_many_prompts_there_are(num_prompts):
    keeper = Timekeeper()
    first = groups_of(num_prompts, took_s=2.0)
    for group in first:
        group.scored_s = 2.0
    keeper.taken(1, first, [1.0, 1.0], 2.0)
    second = groups_of(num_prompts, took_s=2.0, admitted_s=100.0)
    assert keeper.slowest(second, 110.0) is None
    said = keeper.slowest(second, 121.0)
    assert said is not None
    assert "has been under way for 21 s and is being sampled by rank 1 of rollout" in said
    assert "took 2.0 s" in said


@pytest.mark.parametrize("num_prompts", [3, 5, 7, 9])
def test_in_the_first_step_a_stuck_rank_is_named_once_it_took_much_longer_than_all_who_ended(num_prompts):
    said = Timekeeper().slowest(groups_of(num_prompts, took_s=2.0), 21.0)
    assert said is not None
    assert said.endswith("being sampled by rank 1 of rollout; those that have ended took at most 2.0 s")


def test_a_step_in_which_nothing_has_ended_yet_is_no_slower_than_any_other():
    assert Timekeeper().slowest(groups_of(1, took_s=0.0), 1000.0) is None
