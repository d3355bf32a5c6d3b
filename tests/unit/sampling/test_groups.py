"""The order of groups and the bound on their staleness, whatever the latencies of sampling, training and loading."""

import itertools
from random import Random

import pytest
from hypothesis import given, settings, strategies as st

from rallypoint.errors import StalenessError
from rallypoint.sampling.groups import Groups, OverSampledGroups, PromptsDone


class Run:
    """A run whose groups are sampled token by token, in any order, beside steps of training and loads."""

    def __init__(self, num_prompts, max_staleness, window=1, **options):
        self.groups = Groups(num_prompts=num_prompts, max_staleness=max_staleness, window=window, **options)
        self.num_prompts, self.max_staleness = num_prompts, max_staleness
        self.loaded, self.trained, self.dropped = 0, 0, []
        self.under_way, self.oldest, self.taken, self.staleness, self.replaced = {}, {}, [], [], []
        self.without: set[int] | None = None
        """Groups without signal, dropped once they are sampled; None: any may be dropped."""
        self.groups.loaded(0)

    def admit(self):
        for index in self.groups.admit():
            self.under_way[index] = []

    @property
    def num_in_flight(self):
        """Groups that were admitted, and neither taken nor dropped."""
        return len(self.under_way) + len(self.oldest) - len({*self.taken, *self.dropped})

    def sample(self, choice):
        """Sample a token of one of the groups, which may end with it, and may be dropped then."""
        index = sorted(self.under_way)[choice % len(self.under_way)]
        self.under_way[index].append(self.loaded)
        if choice % 3 == 0:
            self.oldest[index] = min(self.under_way.pop(index))
            if self.without is not None and index in self.without:
                self.groups.drop(index)
                self.dropped.append(index)
                self.admit()
                return
            self.groups.complete(index)
            if self.without is None and choice % 7 == 1 and index not in (self.groups.next() or ()):
                self.groups.drop(index)
                self.dropped.append(index)

    def train(self):
        """Train on a batch if one is complete, and its weights are the newest but for those not loaded."""
        indices = self.groups.next() if self.trained == self.loaded else None
        if indices is None or any(index in self.under_way for index in indices):
            return
        self.replaced.append(len(self.groups.count_replaced()))
        self.groups.take({index: self.oldest[index] for index in indices})
        self.taken += indices
        self.staleness += [self.trained - self.oldest[index] for index in indices]
        self.trained += 1

    def load(self):
        if self.loaded < self.trained:
            self.loaded = self.trained
            self.groups.loaded(self.loaded)


settings_of_runs = st.tuples(st.integers(0, 4), st.integers(1, 4), st.floats(0, 1)).map(
    lambda given: (*given[:2], 1 + round(given[2] * given[0] * given[1]))
)


@given(settings_of_runs, st.lists(st.integers(0, 1000), max_size=400))
@settings(deadline=None)
def test_no_latency_window_or_dropped_group_breaks_the_bound(given, choices):
    max_staleness, num_prompts, window = given
    run = Run(num_prompts, max_staleness, window)
    for choice in choices:
        (run.admit, run.train, run.load)[choice % 3]()
        if run.under_way:
            run.sample(choice // 3)
        assert run.num_in_flight <= (max_staleness + 1) * num_prompts - (window - 1)
    assert len(set(run.taken)) == len(run.taken) == run.groups.num_taken
    assert all(0 <= staleness <= max_staleness for staleness in run.staleness)
    if window == 1:
        assert run.taken == sorted(run.taken)
    done = run.groups.done
    assert {*range(done.oldest), *done.ahead} == {*run.taken, *run.dropped}, "no group is lost, none comes twice"


@given(settings_of_runs, st.sets(st.integers(0, 60)), st.lists(st.integers(0, 1000), max_size=400))
@settings(deadline=None)
def test_groups_without_signal_are_replaced_as_soon_as_they_are_scored_within_the_bound(given, without, choices):
    max_staleness, num_prompts, window = given
    run = Run(num_prompts, max_staleness, window, drops_ahead=True)
    run.without = without
    for choice in choices:
        (run.admit, run.train, run.load)[choice % 3]()
        if run.under_way:
            run.sample(choice // 3 * 3 if choice % 2 else choice // 3)
        assert run.num_in_flight <= (max_staleness + 1) * num_prompts - (window - 1)
    assert not without & {*run.taken}
    assert all(0 <= staleness <= max_staleness for staleness in run.staleness)
    done = run.groups.done
    assert {*range(done.oldest), *done.ahead} == {*run.taken, *run.dropped}, "no group is lost, none comes twice"
    if window == 1:  # what a step takes, and has replaced, follows from the signals alone
        assert run.taken == [index for index in range(1000) if index not in without][: len(run.taken)]
        ends = [0, *(last + 1 for last in run.taken[num_prompts - 1 :: num_prompts])]
        counted = [len(without & {*range(*each)}) for each in itertools.pairwise(ends)]
        assert run.replaced == counted


@given(settings_of_runs, st.integers(0, 10**6))
@settings(deadline=None)
def test_a_run_whose_groups_are_replaced_never_stands_still(given, seed):
    max_staleness, num_prompts, window = given
    run, random = Run(num_prompts, max_staleness, window, drops_ahead=True), Random(seed)
    run.without = {index for index in range(1000) if Random(seed + index).random() < 0.5}
    for _ in range(3000):
        run.admit()
        if run.under_way and random.random() < 0.7:
            run.sample(random.randrange(1000))
        else:
            random.choice((run.train, run.load))()
        if run.trained == 5:
            return
    raise AssertionError(f"{run.trained} steps of 5 were done")


@given(settings_of_runs, st.integers(0, 10**6))
@settings(deadline=None)
def test_a_run_never_stands_still(given, seed):
    max_staleness, num_prompts, window = given
    run, random = Run(num_prompts, max_staleness, window), Random(seed)
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


@pytest.mark.parametrize(("max_staleness", "window"), [(2, 3), (3, 3), (3, 5)])
def test_a_straggler_is_overtaken_by_its_window_alone_and_still_is_not_older_than_it_may_be(max_staleness, window):
    run = Run(2, max_staleness, window)
    for _ in range(8):
        run.admit()
        for index in [index for index in run.under_way if index]:  # all but prompt 0 are sampled at once
            run.under_way[index] = [run.loaded]
            run.oldest[index] = run.under_way.pop(index)[0]
            run.groups.complete(index)
        run.train()
        run.load()
    assert run.taken == list(range(1, window))
    run.under_way[0] = [0]
    run.sample(0)
    run.train()
    assert run.taken[window - 1] == 0
    assert run.staleness[window - 1] == (window - 1) // 2 <= max_staleness


def test_a_run_that_goes_on_takes_the_prompts_that_were_not_done():
    run = Run(3, 1, window=2, done=PromptsDone(num_taken=6, oldest=5, ahead=(6,)))
    run.admit()
    assert sorted(run.under_way) == [5, 7, 8, 9, 10]
    assert run.groups.done == PromptsDone(6, 5, (6,))


def test_no_prompt_is_admitted_that_no_step_will_be_trained_on():
    run = Run(2, 2, limit=4)
    run.admit()
    assert sorted(run.under_way) == [0, 1, 2, 3]


def test_the_prompt_that_refills_the_slot_of_a_dropped_group_is_admitted_at_once_and_trained_in_its_place():
    run = Run(2, 0)
    run.admit()
    run.groups.drop(0)
    assert run.groups.admit() == [2]
    assert run.groups.next() == (1, 2)
    run.groups.take({1: 0, 2: 0})
    assert run.groups.done == PromptsDone(2, 3)


def test_without_new_weights_no_prompt_is_admitted():
    run = Run(2, 0)
    run.admit()
    while run.under_way:
        run.sample(3)
    run.train()
    assert run.taken == [0, 1]
    assert not run.groups.admit()
    run.load()
    assert run.groups.admit() == [2, 3]


def test_a_token_that_is_too_old_stops_the_run():
    groups = Groups(num_prompts=1, max_staleness=1)
    for version in (0, 4, 8):
        groups.loaded(version)
    groups.admit()
    assert [groups.age(version) for version in (8, 4)] == [0, 1]
    with pytest.raises(StalenessError, match="prompt 0 was sampled from version 0; the newest is 8, and with max_stal"):
        groups.take({0: 0})


def test_a_group_without_a_rollout_has_no_version():
    groups = Groups(num_prompts=2)
    groups.loaded(3)
    groups.admit()
    groups.take({0: None, 1: 3})
    assert groups.num_taken == 2


NOTHING_DONE = PromptsDone()


def over_sampled_steps(num_prompts, num_sampled, num_steps, lengths, drops, done=NOTHING_DONE):
    """Yield the prompts of each step, those that were dropped for it, and what is done then."""
    first = done.num_taken // num_prompts
    limit = num_steps * num_prompts
    groups = OverSampledGroups(num_prompts=num_prompts, num_sampled=num_sampled, limit=limit, done=done)
    for step in range(first, num_steps):
        groups.loaded(step)
        under_way, dropped = groups.admit(), []
        while (taken := groups.next()) is None:
            index = min(under_way, key=lambda index: (lengths(index), index))
            under_way.remove(index)
            if drops(index):
                groups.drop(index)
                dropped.append(index)
                under_way += groups.admit()
            else:
                groups.complete(index)
        assert sorted(groups.abort(taken)) == sorted(under_way)
        groups.take(dict.fromkeys(taken, step))
        yield taken, dropped, groups.done


@given(
    num_prompts=st.integers(1, 4),
    num_beside=st.integers(1, 9),
    num_steps=st.integers(1, 12),
    seed=st.integers(0, 999),
    one_in=st.sampled_from([0, 3]),
)
@settings(deadline=None)
def test_every_prompt_of_an_over_sampled_run_makes_one_step_also_after_a_kill(
    num_prompts, num_beside, num_steps, seed, one_in
):
    def lengths(index):
        return Random(seed * 10_000 + index).random()

    def drops(index):
        return bool(one_in) and index % one_in == 2

    steps = list(over_sampled_steps(num_prompts, num_prompts + num_beside, num_steps, lengths, drops))
    found = [index for taken, dropped, _ in steps for index in (*taken, *dropped)]
    assert len(found) == len(set(found))
    if not one_in:
        assert sorted(found) == list(range(num_steps * num_prompts))
    for step, (_, _, done) in enumerate(steps):
        rest = over_sampled_steps(num_prompts, num_prompts + num_beside, num_steps, lengths, drops, done)
        assert list(rest) == steps[step + 1 :]


def test_overtaken_prompts_make_a_step_of_their_own_once_there_are_enough():
    steps = over_sampled_steps(4, 6, 20, lambda index: index % 3 == 0, lambda index: False)
    taken = [taken for taken, _, _ in steps]
    assert taken[:4] == [(1, 2, 4, 5), (7, 8, 10, 11), (0, 3, 6, 9), (13, 14, 16, 17)]
