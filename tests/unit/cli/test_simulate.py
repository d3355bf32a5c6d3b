"""`rally simulate`, with the times of runs that nobody ran."""

import pytest

from rallypoint.cli.simulate import print_simulation
from rallypoint.config import load_config
from rallypoint.journal import BatchTaken, GroupScored, Journal
from rallypoint.run.folder import create_run

NUM_PROMPTS = 4


def times(num_steps, num_ranks, *, hidden_s=0.0, slow=0):
    """Steps in turns: a group on each rank takes 2 s, training 2 s, and `hidden_s` go by before the question."""
    begins, steps = 1.0, []
    for number in range(num_steps):
        takes = 2.0 + (50.0 if number < slow else 0.0)
        groups = [
            GroupScored(prompt=NUM_PROMPTS * number + place, rank=place % num_ranks, admitted_s=begins,
                        sampled_s=begins + takes, scored_s=begins + takes, turns=[(0, 0, [(number, 10)], "")])
            for place in range(NUM_PROMPTS)
        ]  # fmt: skip
        taken = begins + takes
        steps += [*groups, BatchTaken(step=number + 1, prompts=[group.prompt for group in groups], asked_s=begins,
                                      taken_s=taken, loaded_s=begins, busy_s=[takes] * num_ranks)]  # fmt: skip
        begins = taken + 2.0 + hidden_s
    return steps


@pytest.fixture
def table(tmp_path, capsys):
    """Return the lines of a simulation, of steps under a config."""

    def simulate(steps, *overrides, staleness=(0, 1), windows=(1,), num_steps=40):
        loaded = load_config("digits", [f"trainer.runs_dir={tmp_path}", f"rollout.num_prompts={NUM_PROMPTS}",
                                        *overrides])  # fmt: skip
        run = create_run(loaded)
        with Journal(run.journal) as journal:
            journal.append(*steps)
        print_simulation(str(run.path), staleness, windows, num_steps)
        return capsys.readouterr().out.splitlines()

    return simulate


def rows(lines):
    """Return (S, window) -> (seconds, speed) of the simulated rows, in order."""
    cells = [line.split() for line in lines[3:] if not line.startswith("note:")]
    return {tuple(map(int, cell[:2])): (float(cell[2]), float(cell[4])) for cell in cells}


def test_ahead_of_a_trainer_that_shares_its_processes_rollout_gets_a_pool_as_the_error_suggests(table):
    lines = table(times(12, 4), "cluster.pools={main: [4]}", "cluster.runtime=ray")
    found = rows(lines)
    assert list(found) == [(0, 1), (1, 1)]
    assert found[0, 1] == pytest.approx((4.0, 1.0), abs=0.05)
    assert found[1, 1] == pytest.approx((4.0, 1.0), abs=0.2)  # two ranks sample four groups, and two train
    assert lines[-1] == (
        "note: rows above S = 0 have the pool for rollout alone that they need: cluster.pools={'main': [2], "
        "'sampling': [2]}"
    )


def test_one_process_that_samples_and_trains_needs_another_one(table):
    lines = table(times(12, 1), "cluster.pools={main: [1]}")
    found = rows(lines)
    assert found[0, 1] == pytest.approx((4.0, 1.0), abs=0.05)
    assert found[1, 1] == pytest.approx((2.0, 2.0), abs=0.1)
    assert "cluster.pools={'main': [1], 'sampling': [1]}" in lines[-1]


def test_speed_is_relative_to_turns_which_come_first_whatever_is_asked_for(table):
    apart = ("cluster.pools={main: [1], sampling: [2]}", "rollout.placement.pool=sampling", "cluster.runtime=ray")
    lines = table(times(12, 2), *apart, staleness=(1,))
    assert lines[2].split()[:3] == ["0", "1", "4.00"]
    assert lines[2].endswith("measured")
    found = rows(lines)
    assert list(found) == [(0, 1), (1, 1)]
    assert found[0, 1] == pytest.approx((4.0, 1.0), abs=0.05)
    assert found[1, 1] == pytest.approx((2.0, 2.0), abs=0.1)


def test_the_runs_own_setting_is_simulated_beside_what_was_measured_also_if_it_was_not_asked_for(table):
    apart = ("cluster.pools={main: [1], sampling: [2]}", "rollout.placement.pool=sampling", "cluster.runtime=ray")
    lines = table(times(12, 2), *apart, "rollout.max_staleness=2", "rollout.window=3", staleness=(1,))
    assert [line.split()[:2] for line in lines[2:5]] == [["2", "3"], ["0", "1"], ["2", "3"]]
    assert lines[-1].startswith("note: the run's own step is ")  # these were the times of turns
    assert "shorter simulated than measured" in lines[-1]


def test_a_simulation_that_agrees_has_nothing_to_say(table):
    apart = ("cluster.pools={main: [1], sampling: [2]}", "rollout.placement.pool=sampling", "cluster.runtime=ray")
    assert not [line for line in table(times(12, 2), *apart) if line.startswith("note:")]


def test_the_first_steps_are_left_out_and_said_to_be(table):
    lines = table(times(20, 1, slow=3), "cluster.pools={main: [1]}")
    assert lines[0].startswith("times of 20 steps in ")
    assert lines[0].endswith("; the first 5 are left out, as the run was starting")
    assert rows(lines)[0, 1] == pytest.approx((4.0, 1.0), abs=0.05)
