"""What a journal says of wasted work, cause by cause, in numbers that can be added up by hand."""

import pytest

from rallypoint.journal import (
    BatchTaken,
    CheckpointSaved,
    Entry,
    GroupDropped,
    GroupScored,
    Resumed,
    RolesStarted,
    RolloutFailed,
    RunBegan,
    RunEnded,
    StepDone,
)
from rallypoint.run.waste import Waste, account, sampled_again


def began(first=0, **config):
    return RunBegan(first=first, config={"actor.num_epochs": 1, **config}, software={}, machine="")


def scored(prompt, *lengths):
    turns = [(sample, 0, [(0, length)], "d") for sample, length in enumerate(lengths)]
    return GroupScored(prompt=prompt, rank=0, admitted_s=0, sampled_s=1, scored_s=1, turns=turns)


def taken(step, *prompts, asked=0.0, at=10.0, busy=(4.0, 6.0)):
    return BatchTaken(step=step, prompts=prompts, asked_s=asked, taken_s=at, loaded_s=0, busy_s=busy)


def done(step, tokens=100, seconds=12.0, **metrics):
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return StepDone(step=step, metrics={"rollout/num_tokens": tokens, **named}, digests={}, seconds=seconds)


def found(*events, times=None):
    times = times or range(len(events))
    accounted = account(
        Entry(number, float(at), event) for number, (at, event) in enumerate(zip(times, events, strict=True))
    )
    return accounted, {waste.cause: waste for waste in accounted.wastes}


def test_tokens_of_each_cause_have_their_share_of_the_seconds_in_which_ranks_sampled():
    failed = RolloutFailed(prompt=1, sample=0, validation=None, num_turns=1, num_tokens=20, why="raised", reason="")
    learned = {"actor__num_tokens": 60, "actor__num_tokens_without_signal": 10, "actor__skipped_fraction": 0.1}
    unscored = {"reward__failed": 2, "rollout__unscored_tokens": 8, "actor__correction_dropped": 0.5}
    events = (
        *(began(), scored(0, 30, 10), GroupDropped(prompt=0, why="no signal"), failed, scored(1, 60)),
        *(GroupDropped(prompt=2, why="others had ended"), taken(1, 1), done(1, **learned, **unscored)),
    )
    whole, wastes = found(*events)
    assert (whole.tokens, whole.seconds) == (120, 7.0)
    each_s = 5.0 / 120
    assert wastes == {
        "replaced": Waste("replaced", 1, "group", 40, pytest.approx(40 * each_s)),
        "given up": Waste("given up", 1, "group", 0, 0.0),
        "failed": Waste("failed", 3, "rollout", 28, pytest.approx(28 * each_s)),
        "without signal": Waste("without signal", 0, "", 10, pytest.approx(10 * each_s)),
        "stale": Waste("stale", 0, "", 25, pytest.approx(25 * each_s)),
        "samplers waited": Waste("samplers waited", 0, "", 0, 5.0),
    }
    assert whole.tokens_wasted == 103
    of_validation = RolloutFailed(prompt=1, sample=0, validation=1, num_turns=1, num_tokens=9, why="raised", reason="")
    assert found(began(), of_validation, scored(1, 60), taken(1, 1, busy=(10.0,)), done(1))[1] == {}


def test_a_run_that_samples_ahead_waits_on_both_sides_and_the_longer_wait_counts():
    keys = {"rollout.max_staleness": 1}
    whole, wastes = found(
        *(began(**keys), taken(1, 0, busy=(10.0,)), done(1)),
        *(taken(2, 1, asked=17.0, at=20.0, busy=(6.0, 8.0)), done(2)),
    )
    assert wastes["samplers waited"].seconds == 3.0
    assert wastes["trainer waited"].seconds == 10.0 + 3.0
    assert whole.seconds_wasted == 13.0


def test_what_a_resume_does_again_counts_once_with_all_that_was_under_way_when_the_start_was_killed():
    started = RolesStarted(step=0, metrics={"time_s/start": 3.0})
    costly = done(3, 50, 7.0, actor__num_tokens_without_signal=30)
    whole, wastes = found(
        *(began(), started, done(1), done(2), CheckpointSaved(step=2, weights="w", metrics={"time_s/checkpoint": 1.0})),
        *(scored(8, 4), taken(3, 8), costly, CheckpointSaved(step=3, weights="v", metrics={"time_s/checkpoint": 0.5})),
        *(scored(9, 11), began(first=2), started, done(3, 50), RunEnded(how="finished")),
        times=[0, 3, 10, 20, 21, 22, 23, 28, 29, 33, 40, 44, 50, 51],
    )
    assert wastes == {
        "done again": Waste("done again", 1, "step", 50 + 11, 7.0 + 0.5 + 4.0),
        "started again": Waste("started again", 1, "start", 0, 3.0),
    }
    assert (whole.tokens, whole.seconds) == (100 + 100 + 50 + 11 + 50, 33.0 + 11.0)
    stopped = (began(), started, done(1), RunEnded(how="stopped"), began(first=1), started, done(2))
    assert set(found(*stopped, times=[0, 3, 9, 12, 40, 43, 50])[1]) == {"started again"}, "it was saved in order"
    again = (began(), started, done(1), done(2), began(first=1), started, done(2), began(), started, done(1))
    assert found(*again)[1]["done again"].num == 3, "those of both earlier starts"
    running = (began(), started, done(1), scored(5, 6))
    assert found(*running)[1] == {}, "what is under way may still be trained on"


def test_a_resume_samples_again_what_was_finished_and_not_saved():
    events = (began(), scored(1, 7), taken(1, 1), done(1, 7), scored(2, 9), taken(2, 2), done(2, 9), scored(3, 5, 6))

    def again(first, *kept):
        resumed = Resumed(step=first, version=first, done={}, kept=kept)
        whole = (*events, began(first=first), resumed)
        return sampled_again(Entry(number, 0.0, event) for number, event in enumerate(whole))

    assert [again(first) for first in (0, 1, 2)] == [27, 20, 11]
    assert [again(1, 2, 3), again(2, 3)] == [0, 0], "groups that were taken over"
    events += (taken(3, 3),)
    assert [again(2), again(2, 3)] == [11, 0], "of a step that was begun"
    assert sampled_again([]) == sampled_again([Entry(0, 0.0, began())]) == 0


def test_groups_that_a_later_start_takes_over_were_sampled_once():
    resumed = Resumed(step=1, version=1, done={}, kept=(2,))
    before = (began(), scored(1, 7), taken(1, 1), done(1, 7), scored(2, 9), taken(2, 2), done(2, 9), scored(3, 5))
    whole, wastes = found(*before, began(first=1), resumed, scored(2, 9), taken(2, 2), done(2, 9), scored(3, 6))
    assert (whole.tokens, wastes["done again"].tokens) == (7 + 5 + 9, 5)
