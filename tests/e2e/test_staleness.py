"""Runs that sample while the actor trains: the bound, schedules that repeat them, kills, and what they would gain."""

import json
import shutil
import time

import pytest
from metrics_file import read_metrics

from rallypoint.cli.simulate import print_simulation
from rallypoint.display import Silent
from rallypoint.errors import ConfigError, ScheduleError
from rallypoint.journal import (
    BatchTaken,
    Journal,
    Resumed,
    RunBegan,
    SliceSent,
    WeightsLoaded,
    read_journal,
)
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.roles import rollout as role
from rallypoint.roles.engines import make_engine

pytestmark = pytest.mark.lasting_ray

SPLIT = ("cluster.pools={main: [1], sampling: [1]}", "rollout.placement.pool=sampling", "validation.every_steps=10")
AHEAD = (*SPLIT, "rollout.max_staleness=2", "rollout.max_response_tokens=12", "rollout.min_response_tokens=12")
AHEAD = (*AHEAD, "cluster.runtime=inline", "checkpoint.every_steps=2")


@pytest.fixture
def slow(monkeypatch):
    """Have our own engine take so long for a step that weights arrive in the middle of responses."""

    def make(*args):
        engine = make_engine(*args)
        step = engine.step

        def slow_step():
            time.sleep(0.04)
            return step()

        engine.step = slow_step
        return engine

    monkeypatch.setattr(role, "make_engine", make)


def events(run):
    """Return what was sent, and taken."""
    kinds = SliceSent | WeightsLoaded | Resumed | BatchTaken
    return [entry.event for entry in read_journal(run.journal) if isinstance(entry.event, kinds)]


def told(run):
    """Return what each rank was told, in order, and what was trained on; how ranks took turns says nothing."""
    found = events(run)
    ranks = {event.rank for event in found if isinstance(event, SliceSent)}
    calls = [event for event in found if not isinstance(event, BatchTaken)]
    each = {rank: [one for one in calls if not isinstance(one, SliceSent) or one.rank == rank] for rank in ranks}
    return each, [event.prompts for event in found if isinstance(event, BatchTaken)]


def part(requests, num_steps):
    return SliceSent(rank=0, new=requests, num_steps=num_steps)


def halfway(file, orders):
    """Write a schedule in which new weights arrive when the responses of a step, 12 tokens each, have 6 of them.

    Args:
        file: is written.
        orders: prompts that each step trains on.
    """
    begin = [[[0, prompt, 0, 4] for prompt in prompts] for prompts in orders]
    validation = [[2**32, prompt, 0, 1] for prompt in range(16)]
    window = 9 if orders[0][0] else 1
    lines = [
        RunBegan(first=0, config={"rollout.window": window}, software={}, machine=""),
        WeightsLoaded(version=0, num_ranks=1),
        part(begin[0], 12),
        part(validation, 12),
    ]
    for step, requests in enumerate(begin[1:], start=1):
        prompts = list(orders[step - 1])
        lines += [BatchTaken(step=step, prompts=prompts, asked_s=0, taken_s=0, loaded_s=0, busy_s=[])]
        lines += [part(requests, 6), WeightsLoaded(version=2 * step, num_ranks=1), part([], 6)]
    file.unlink(missing_ok=True)
    with Journal(file) as journal:
        journal.append(*lines)
    return [*AHEAD, f"rollout.schedule={file}"]


IN_ORDER = [range(first, first + 8) for first in (0, 8, 16, 24)]
STRAGGLER = [range(1, 9), [0, *range(9, 16)], range(16, 24), range(24, 32)]
"""Prompt 0 is so late that the first step overtakes it, in a window of 9."""


def test_responses_go_on_with_keys_and_values_of_new_weights_that_arrive_in_their_middle(runs, tmp_path):
    run = runs.run("halfway", *halfway(tmp_path / "journal.jsonl", IN_ORDER), "rollout.on_load=recompute")
    first, *steps = [record for record in read_metrics(run.metrics) if "rollout/staleness_max" in record]
    assert (first["rollout/staleness_max"], first["rollout/logprob_gap_max"] < 1e-4) == (0, True)
    assert len(steps) == 3
    for record in steps:
        assert (record["rollout/staleness_mean"], record["rollout/staleness_max"]) == (0.5, 1)
        assert record["rollout/logprob_gap_max"] < 1e-4  # of the newer halves, from keys and values of the older ones
        assert record["rollout/drift/1"] > 100 * record["rollout/logprob_gap_mean"]


def test_responses_go_on_with_the_old_keys_and_values_and_a_step_overtakes_a_straggler_inline_and_on_ray(
    runs, weights_of, tmp_path
):
    options = [*halfway(tmp_path / "journal.jsonl", STRAGGLER), "rollout.on_load=keep", "rollout.window=9"]
    made = {name: runs.run(name, *options, f"cluster.runtime={name}") for name in ("inline", "ray")}
    for run in made.values():
        first, *steps = [record for record in read_metrics(run.metrics) if "rollout/staleness_max" in record]
        assert (first["rollout/staleness_max"], first["rollout/logprob_gap_max"] < 1e-4) == (0, True)
        assert len(steps) == 3
        for record in steps:
            assert (record["rollout/staleness_mean"], record["rollout/staleness_max"]) == (0.5, 1)
            assert "rollout/logprob_gap_max" not in record  # newer tokens come from older keys and values, too
            assert record["rollout/drift/1"] > 1e-3
        assert told(run)[1] == [list(prompts) for prompts in STRAGGLER]
    assert weights_of(made["ray"]) == weights_of(made["inline"])


@pytest.mark.parametrize(
    ("more", "runtime"),
    [
        # In one process, a run on Ray repeats a schedule above; and weights are loaded halfway in each way there.
        pytest.param(("rollout.on_load=recompute",), "ray", marks=pytest.mark.slow),
        (("rollout.on_load=keep", "rollout.window=10", "cluster.pools={main: [1], sampling: [2]}"), "inline"),
    ],
    ids=["on Ray", "two ranks"],
)
def test_a_run_with_the_recorded_schedule_has_the_same_weights(runs, weights_of, slow, more, runtime):
    recorded = runs.run("recorded", *AHEAD, *more)
    steps = [record for record in read_metrics(recorded.metrics) if "rollout/staleness_max" in record]
    oldest = [record["rollout/staleness_max"] for record in steps]
    assert all(age <= most for age, most in zip(oldest, (0, 1, 2, 2), strict=True))
    assert max(oldest) >= 1
    assert all(0 <= record[f"{role}/idle"] <= 1 for record in steps for role in ("rollout", "actor"))
    again = (f"rollout.schedule={recorded.path}/journal.jsonl", f"cluster.runtime={runtime}")
    repeated = runs.run("repeated", *AHEAD, *more, *again)
    assert weights_of(repeated) == weights_of(recorded)
    assert told(repeated) == told(recorded)


def resume_from(run, step):
    assert train(load_checked(str(run.path), ()), run, Silent(), resume=True, from_step=step)


def test_a_run_that_was_killed_samples_what_was_under_way_again_and_its_schedule_repeats_it_without_a_kill(
    runs, weights_of, slow
):
    killed = runs.run("killed", *AHEAD)
    resume_from(killed, 2)
    assert [event.step for event in events(killed) if isinstance(event, Resumed)] == [2]
    shutil.rmtree(killed.checkpoints / "step_000004.aside")  # of the start that was "killed" after step 2
    state = json.loads((max(killed.checkpoints.iterdir()) / "training" / "state.json").read_text())
    assert state["done"] == {"num_taken": 32, "oldest": 32, "ahead": []}
    repeated = runs.run("repeated", *AHEAD, f"rollout.schedule={killed.path}/journal.jsonl")
    assert weights_of(repeated) == weights_of(killed)
    with pytest.raises(ScheduleError, match=r"cannot continue after step 2: .* start over with"):
        resume_from(repeated, 2)


def test_a_schedule_of_another_config_is_refused_before_anything_is_started(runs, slow):
    recorded = runs.run("recorded", *AHEAD, "trainer.num_steps=1")
    file = recorded.journal
    other = ("cluster.pools={main: [1], sampling: [2]}", f"rollout.schedule={file}", "actor.optimizer.lr=1e-3")
    with pytest.raises(ConfigError, match=r"of a run with .*optimizer.lr=0.003 .here 0.001.*num_steps=1 .here 4"):
        runs.run("config", *AHEAD, *other)
    file.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        runs.run("damaged", *AHEAD, other[1])
    assert not (runs.folder / "config").exists()
    options = halfway(file, [[*range(7), 99], range(8, 16), range(16, 24), range(24, 32)])
    with pytest.raises(ScheduleError, match="has prompt 99 sample 0 next, which did not come in 5 s"):
        runs.run("prompts", *options, "cluster.call_timeout_s=5")


def test_a_run_says_what_other_settings_would_give(runs, capsys):
    run = runs.run("measured", *AHEAD, "rollout.max_staleness=0")
    print_simulation(str(run.path), [0, 1], [1, 9], 20)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("note:")]
    assert lines[0].startswith("times of 4 steps in ")
    assert [line.split()[:2] for line in lines[2:]] == [["0", "1"]] * 2 + [["1", window] for window in ("1", "9")]
    assert lines[2].endswith("measured")
    assert lines[3].endswith("0.0 to 0")
