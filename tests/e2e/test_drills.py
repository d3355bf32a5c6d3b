"""Drills: runs that are broken in twenty ways end with the weights of untouched ones; what is no drill is refused."""

import pytest

from rallypoint.cli.replay import _with_row
from rallypoint.errors import ConfigError
from rallypoint.journal import Resumed, SliceSent, read_journal
from rallypoint.recipes.drilling import DrillOutcome, Drills
from rallypoint.recipes.drills import SHORT, Drill, chosen, table
from rallypoint.run.folder import RunFolder

pytestmark = pytest.mark.lasting_ray


ELSEWHERE = {
    "split/actor.train:step=3:kill": "test_lost_processes.py kills the actor when its update begins",
    "split/critic.train:step=1:kill": "it kills the critic, too",
    "split/reference.logprobs:step=3:kill": "and the reference",
    "split/rollout.advance:step=4:kill": "and a rank that samples",
    "split/rollout.load:step=3:kill": "and one that is published to",
    "split/actor.save:n=1:kill": "it kills the actor, and test_interruptions.py a run before a checkpoint appears",
    "one/RolesStarted:kill": "test_interruptions.py kills a run that starts and has no checkpoint",
    "one/WeightsLoaded:n=3:kill": "it kills one between two checkpoints",
    "one/BatchTaken:n=3:kill": "and at the third of six steps",
    "ahead/SliceSent:n=3:kill": "a run that samples ahead is killed after a checkpoint below, and in test_staleness.py",
    "one/CheckpointSaved:kill": "it kills one before a checkpoint appears; `ahead` is killed after one below",
    "one/rollout.advance:step=2:kill": "it kills a run on Ray after its third step, and one before a folder appears",
    "one/an edited journal": "tests/unit/journal/test_log.py edits one, and a torn one stays here",
    "one/a flipped bit": "tests/unit/test_checkpoint.py damages every file of a checkpoint",
}
"""Drills of what other tests do as well, and which: they are done by `make test-slow`."""


@pytest.fixture(scope="module")
def drills(tmp_path_factory):
    return Drills(tmp_path_factory.mktemp("drills"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ELSEWHERE else name for name in SHORT]
)
def test_a_run_that_is_broken_ends_with_the_weights_of_its_twin(drills, name):
    (drill,) = [one for one in table() if one.name == name]
    assert drills.do(drill).problem == ""


def test_names_of_drills_are_their_own_and_one_that_does_not_exist_is_refused():
    names = [drill.name for drill in table()]
    assert len(names) == len(set(names)) >= 200
    assert {name.partition("/")[0] for name in SHORT} == {"one", "split", "ahead"}
    with pytest.raises(ConfigError, match=r"no drill has 'actor.trian' in its name; `rally drill --list` has all 2"):
        chosen(["one/actor", "actor.trian"])


def test_a_table_of_results_keeps_its_order_and_takes_each_row_anew():
    first, second = Drill("split", "actor.train:step=3:kill"), Drill("one", "actor.train:n=2:raise")
    table = ""
    for drill, back_s, problem in ((second, 1.0, ""), (first, 9.0, "its weights differ"), (first, 16.0, "")):
        table = _with_row(table, DrillOutcome(drill, 0.1, back_s, "by itself", problem))
    assert table.splitlines()[2:] == [
        "| `split/actor.train:step=3:kill` | 0.1 s | 16.0 s | by itself, back after more than 15 s |",
        "| `one/actor.train:n=2:raise` | 0.1 s | 1.0 s | by itself |",
    ]


def test_what_is_promised_depends_on_how_a_process_is_lost():
    def late(how, noticed_s):
        return DrillOutcome(Drill("split", f"actor.train:{how}"), noticed_s, 2.0, "by itself").late

    assert [bool(late(how, 2.0)) for how in ("kill", "hang", "stop", "term")] == [True, False, False, True]
    assert late("hang", 14.0) == "noticed after more than 13 s"


def test_a_drill_is_failed_by_a_failpoint_that_never_fires(drills):
    assert "never fired" in drills.do(Drill("one", "StepDone:step=9:raise")).problem


def test_groups_that_a_killed_run_had_sampled_ahead_are_trained_on_and_not_sampled_again(drills):
    assert drills.do(Drill("ahead", "CheckpointSaved:kill")).problem == "", "it is the run that repeats its journal"
    run = RunFolder(max(folder for folder in drills.folder.glob("[0-9]??") if folder.is_dir()))
    events = [entry.event for entry in read_journal(run.journal)]
    (resumed,) = (event for event in events if isinstance(event, Resumed))
    assert resumed.kept, "some were finished while the actor trained"
    sent = [request for event in events if isinstance(event, SliceSent) for request in event.new]
    training = [prompt for turn, prompt, *_ in sent if turn < 2**32]
    assert all(training.count(prompt) == 1 for prompt in resumed.kept)
    assert not (run.path / "rollouts" / "ahead").exists(), "a run that is done has nothing to go on from"
