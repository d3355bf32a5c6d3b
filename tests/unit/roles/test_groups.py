"""The order of groups and the bound on their staleness, whatever the latencies of sampling, training and loading."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.errors import StalenessError
from rallypoint.roles.groups import Groups


class Run:
    """A run whose groups are sampled token by token, in any order, beside steps of training and loads."""

    def __init__(self, num_prompts, max_staleness, first=0):
        self.groups = Groups(num_prompts=num_prompts, max_staleness=max_staleness, num_taken=first)
        self.num_prompts, self.max_staleness = num_prompts, max_staleness
        self.loaded, self.trained = 0, 0
        self.under_way, self.taken, self.staleness = {}, [], []
        self.groups.loaded(0)

    def admit(self):
        for index in self.groups.admit():
            self.under_way[index] = []

    def sample(self, choice):
        """Sample a token of one of the groups, which may end with it."""
        index = sorted(self.under_way)[choice % len(self.under_way)]
        self.under_way[index].append(self.loaded)
        if choice % 3 == 0:
            versions = self.under_way.pop(index)
            self.groups.complete(index, (index, min(versions)), min(versions))

    def train(self):
        """Train on a batch if one is complete, and its weights are the newest but for those not loaded."""
        taken = self.groups.take() if self.trained == self.loaded else None
        for index, oldest in taken or ():
            self.taken.append(index)
            self.staleness.append(self.trained - oldest)
        self.trained += taken is not None

    def load(self):
        if self.loaded < self.trained:
            self.loaded = self.trained
            self.groups.loaded(self.loaded)


@given(st.integers(0, 4), st.integers(1, 4), st.lists(st.integers(0, 1000), max_size=400))
@settings(deadline=None)
def test_no_latency_breaks_the_bound_or_the_order(max_staleness, num_prompts, choices):
    run = Run(num_prompts, max_staleness)
    for choice in choices:
        (run.admit, run.train, run.load)[choice % 3]()
        if run.under_way:
            run.sample(choice // 3)
        assert run.groups.num_under_way <= (max_staleness + 1) * num_prompts
    assert run.taken == list(range(len(run.taken)))
    assert all(0 <= staleness <= max_staleness for staleness in run.staleness)


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 10**6))
@settings(deadline=None)
def test_a_run_never_stands_still(max_staleness, num_prompts, seed):
    run, random = Run(num_prompts, max_staleness), Random(seed)
    for _ in range(2000):
        run.admit()
        if run.under_way and random.random() < 0.7:
            run.sample(random.randrange(1000))
        else:
            random.choice((run.train, run.load))()
        if run.trained == 5:
            return
    raise AssertionError(f"{run.trained} steps of 5 were done")


@pytest.mark.parametrize("max_staleness", range(5))
def test_the_bound_is_reached_when_training_is_slower_than_sampling(max_staleness):
    run = Run(2, max_staleness)
    for _ in range(8):
        run.admit()
        while run.under_way:
            run.sample(0)
        run.train()
        run.load()
    assert max(run.staleness) == max_staleness


def test_a_run_that_goes_on_takes_the_prompts_after_those_it_was_trained_on():
    run = Run(3, 1, first=6)
    run.admit()
    assert sorted(run.under_way) == [6, 7, 8, 9, 10, 11]


def test_without_new_weights_no_prompt_is_admitted():
    run = Run(2, 0)
    run.admit()
    while run.under_way:
        run.sample(0)
    run.train()
    assert run.taken == [0, 1]
    assert not list(run.groups.admit())
    run.load()
    assert list(run.groups.admit()) == [2, 3]


def test_a_token_that_is_too_old_stops_the_run():
    groups = Groups(num_prompts=1, max_staleness=1)
    for version in (0, 4, 8):
        groups.loaded(version)
    groups.admit()
    groups.complete(0, "old", 0)
    with pytest.raises(StalenessError, match="prompt 0 was sampled from version 0; the newest is 8, and with max_stal"):
        groups.take()


def test_a_group_without_a_rollout_has_no_version_and_takes_its_place():
    groups = Groups(num_prompts=2)
    groups.loaded(3)
    groups.admit()
    groups.complete(1, "answered", 3)
    assert groups.take() is None
    groups.complete(0, "failed", None)
    assert groups.take() == ["failed", "answered"]
