"""What is killed or interrupted goes on as if nothing had happened."""

import json
import signal
import time

import pytest

from rallypoint.errors import CheckpointError

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
LONG = ("trainer.num_steps=12", "checkpoint={every_steps: 2, keep: 99}")


def wait_for(run, text, process, timeout_s=120):
    """Read what the program prints until a line has the text."""
    deadline, lines = time.monotonic() + timeout_s, []
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        lines.append(line)
        if text in line:
            return
        if not line and process.poll() is not None:
            break
    raise AssertionError(f"never saw {text!r} in:\n{''.join(lines)}")


@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_a_run_killed_with_9_and_resumed_ends_with_the_same_weights(runs, weights_of, runtime):
    where = INLINE if runtime == "inline" else ("cluster.runtime=ray", "cluster.pools={main: [2]}")
    inline = (INLINE[0], where[1])
    whole = runs.run("whole", *LONG, *inline)
    process = runs.start("train", "digits", *runs.overrides("killed", *LONG, *where))
    wait_for("killed", "step  7/12", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    resumed = runs.resume("killed")
    assert weights_of(whole) == weights_of(resumed)


def test_a_run_killed_while_it_publishes_a_folder_and_resumed_ends_with_the_same_weights(runs, weights_of):
    pools = ("cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second", "rollout.weights=folder")
    whole = runs.run("whole", *LONG, INLINE[0], *pools)
    process = runs.start("train", "digits", *runs.overrides("killed", *LONG, INLINE[0], *pools))
    wait_for("killed", "step  5/12", process)
    published = runs.folder / "killed" / "published"
    is_publishing = False
    while process.poll() is None and not is_publishing:
        is_publishing = any(published.glob(".version_*.partial"))  # it is there for a moment
    assert is_publishing
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    resumed = runs.resume("killed")
    assert weights_of(whole) == weights_of(resumed)
    assert not resumed.published.exists()


def test_ctrl_c_saves_a_checkpoint_says_how_to_go_on_and_exits_with_130(runs, weights_of):
    whole = runs.run("whole", "trainer.num_steps=12", *INLINE)
    process = runs.start("train", "digits", *runs.overrides("stopped", "trainer.num_steps=12", *INLINE))
    wait_for("stopped", "step  3/12", process)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"rally train {runs.folder / 'stopped'} --resume" in printed.replace("\n", "")
    assert len(list((runs.folder / "stopped" / "checkpoints").iterdir())) == 1
    assert weights_of(whole) == weights_of(runs.resume("stopped"))


def test_a_damaged_checkpoint_is_named_and_nothing_of_the_run_is_lost(runs):
    run = runs.run("damaged", "trainer.num_steps=2", *INLINE)
    state, metrics = run.checkpoints / "step_000002" / "training" / "state.json", run.metrics.read_bytes()
    for damage in (json.loads(state.read_text()) | {"step": 0}, [1, 2]):
        state.write_text(json.dumps(damage))
        with pytest.raises(CheckpointError, match=r"training/state.json: .* remove its folder to go on from the one"):
            runs.resume("damaged")
    assert run.metrics.read_bytes() == metrics


def test_two_processes_cannot_train_in_one_run_folder(runs):
    process = runs.start("train", "digits", *runs.overrides("shared", "trainer.num_steps=400", *INLINE))
    wait_for("shared", "step   1/400", process)
    second = runs.start("train", str(runs.folder / "shared"), "--resume")
    printed, _ = second.communicate(timeout=60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert second.returncode == 2
    assert f"is in use by process {process.pid}" in printed


def test_resuming_without_any_checkpoint_begins_at_the_first_step(runs, weights_of):
    whole = runs.run("whole", *INLINE)
    process = runs.start("train", "digits", *runs.overrides("early", *INLINE))
    wait_for("early", "starting the roles", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert weights_of(whole) == weights_of(runs.resume("early"))
