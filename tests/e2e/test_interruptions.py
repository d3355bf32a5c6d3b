"""What is killed or interrupted goes on as if nothing had happened."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from forks import ForkedRally
from tiny_runs import Runs

from rallypoint.checkpoint import visible
from rallypoint.config import load_config
from rallypoint.errors import CheckpointError
from rallypoint.library.run import load_run
from rallypoint.run.folder import RunFolder
from rallypoint.run.rollouts import read_rollouts, rollout_files

pytestmark = pytest.mark.lasting_ray

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
LONG = ("trainer.num_steps=6", "checkpoint={every_steps: 2, keep: 99}")


def wait_for(run, text, process, timeout_s=120):
    """Read what the program prints until a line has the text, and return it."""
    deadline, lines = time.monotonic() + timeout_s, []
    while time.monotonic() < deadline:
        line = process.stdout.readline()
        lines.append(line)
        if text in line:
            return "".join(lines)
        if not line and process.poll() is not None:
            break
    raise AssertionError(f"never saw {text!r} in:\n{''.join(lines)}")


@pytest.fixture(scope="module")
def of_six_steps(tmp_path_factory):
    """A run of one rank that nothing befell."""
    return Runs(tmp_path_factory.mktemp("six")).run("whole", *LONG, *INLINE)


# In one process: killed at other moments below, and between two checkpoints of adapters in test_lora.py.
@pytest.mark.parametrize("runtime", [pytest.param("inline", marks=pytest.mark.slow), "ray"])
def test_a_run_killed_with_9_and_resumed_ends_with_the_same_weights(runs, weights_of, of_six_steps, runtime):
    where = INLINE if runtime == "inline" else ("cluster.runtime=ray", "cluster.pools={main: [2]}")
    whole = of_six_steps if where == INLINE else runs.run("whole", *LONG, INLINE[0], where[1])
    process = runs.start("train", "digits", *runs.overrides("killed", *LONG, *where))
    wait_for("killed", "step 3/6", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    resumed = runs.resume("killed")
    assert weights_of(whole) == weights_of(resumed)
    assert sampled_in(whole) == sampled_in(resumed)


def sampled_in(run):
    """Return what a run has kept of its rollouts, by step: equal bits, and no step missing or there twice."""
    rows = {step: read_rollouts(run.path, step) for step in rollout_files(run.path)}
    assert list(rows) == list(range(1, 7))
    return rows


def test_a_run_killed_while_it_publishes_a_folder_and_resumed_ends_with_the_same_weights(runs, weights_of):
    keys = ("cluster.pools={main: [1], second: [1]}", "rollout.placement.pool=second", "rollout.weights=folder")
    keys += (LONG[1], INLINE[0])
    whole = runs.run("whole", *keys)
    third = "version_000006"  # of two updates each
    process = runs.start("train", "digits", *runs.overrides("killed", *keys), kill_before=third)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert (runs.folder / "killed" / "published" / f".{third}.partial").is_dir()
    resumed = runs.resume("killed")
    assert weights_of(whole) == weights_of(resumed)
    assert not resumed.published.exists()


def test_ctrl_c_saves_a_checkpoint_says_how_to_go_on_and_exits_with_130(runs, weights_of, of_six_steps):
    process = runs.start("train", "digits", *runs.overrides("stopped", "trainer.num_steps=6", *INLINE))
    wait_for("stopped", "step 2/6", process)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=180)
    assert process.returncode == 130
    assert f"rally train {runs.folder / 'stopped'} --resume" in printed.replace("\n", "")
    assert "Ctrl-C: what is under way is finished and saved, then the run ends" in printed
    assert len(list((runs.folder / "stopped" / "checkpoints").iterdir())) in (1, 2)  # and the one of step 5
    assert weights_of(runs.resume("stopped")) == weights_of(of_six_steps)


def test_a_damaged_checkpoint_is_named_and_nothing_of_the_run_is_lost(runs):
    run = runs.run("damaged", "trainer.num_steps=2", *INLINE)
    state, metrics = run.checkpoints / "step_000002" / "training" / "state.json", run.metrics.read_bytes()
    for damage in (json.loads(state.read_text()) | {"step": 0}, [1, 2]):
        state.write_text(json.dumps(damage))
        with pytest.raises(CheckpointError, match=r"training/state.json: .* damaged; .*--resume --from-step 0"):
            runs.resume("damaged")
    assert run.metrics.read_bytes() == metrics


def test_two_processes_cannot_train_in_one_run_folder(runs):
    process = runs.start("train", "digits", *runs.overrides("shared", "trainer.num_steps=400", *INLINE))
    wait_for("shared", "step   1/400", process)
    second = runs.start("train", str(runs.folder / "shared"), "--resume")
    printed, _ = second.communicate(timeout=180)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert second.returncode == 2
    assert f"is in use by process {process.pid}" in printed


def saved_all(run):
    """Whether the newest checkpoint has every step that was done."""
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return max(steps) == max(visible(run / "checkpoints"))


def test_a_scheduler_s_end_saves_like_ctrl_c(runs):
    process = runs.start("train", "digits", *runs.overrides("stopped", "trainer.num_steps=400", *INLINE))
    wait_for("stopped", "  3/400", process)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=180)
    assert process.returncode == 130
    assert "SIGTERM: what is under way is finished and saved" in printed
    assert saved_all(runs.folder / "stopped")


@pytest.mark.parametrize("moment", ["starting inline", "starting the roles"])
def test_a_scheduler_s_end_while_a_run_starts_ends_it_in_order_and_it_goes_on_later(runs, moment):
    process = runs.start("train", "digits", *runs.overrides("early", "trainer.num_steps=2", *INLINE))
    before = wait_for("early", moment, process)
    process.send_signal(signal.SIGTERM)
    printed = before + process.communicate(timeout=180)[0]
    assert process.returncode == 130, printed
    assert "interrupted: what was started is ended" in printed
    assert "Traceback" not in printed
    has_begun = (runs.folder / "early").exists()  # a folder of a run that never began is removed
    run = runs.resume("early") if has_begun else runs.run("early", "trainer.num_steps=2", *INLINE)
    assert run.state().step == 2


def test_a_terminal_that_is_closed_saves_like_ctrl_c_though_nothing_can_be_written_to_it(runs):
    ours, theirs = os.openpty()
    overrides = runs.overrides("closed", "trainer.num_steps=400", *INLINE)
    process = ForkedRally(["train", "digits", *overrides], terminal=os.ttyname(theirs), TERM="xterm")
    process.stdout.close()
    metrics = runs.folder / "closed" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and '"step": 3' in metrics.read_text()):
        if select.select([ours], [], [], 0.05)[0]:
            os.read(ours, 65536)
    os.close(theirs)
    os.close(ours)
    assert process.wait(timeout=180) == 130
    assert saved_all(runs.folder / "closed")


EVERY_TWO = ("checkpoint.every_steps=2", *INLINE)


@pytest.fixture(scope="module")
def whole_weights(tmp_path_factory, weights_of):
    """The weights of a run that nothing befell."""
    return weights_of(Runs(tmp_path_factory.mktemp("whole")).run("whole", *EVERY_TWO))


@pytest.mark.parametrize(
    "moment",
    [
        "/killed",
        "step_000002",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("killed/model", "killed/data", "step_000004")),
    ],
)
def test_a_run_killed_before_any_of_its_folders_appears_goes_on_to_the_same_weights(
    runs, weights_of, whole_weights, moment
):
    process = runs.start("train", "digits", *runs.overrides("killed", *EVERY_TWO), kill_before=moment)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    began = (runs.folder / "killed").exists()
    assert began == (moment != "/killed")
    resumed = runs.resume("killed") if began else runs.run("killed", *EVERY_TWO)
    assert weights_of(resumed) == whole_weights


SLOW = """
import time
from pathlib import Path
from pathlib import Path

def f(data_source, solution_str, ground_truth, extra_info):
    Path(__file__).with_name("scoring").touch()
    time.sleep(3600)
"""


def test_a_second_ctrl_c_ends_at_once_with_one_line_also_while_something_blocks(runs):
    reward = runs.folder / "slow.py"
    reward.write_text(SLOW)
    process = runs.start("train", "digits", *runs.overrides("blocked", *INLINE, f"reward.function={reward}:f"))
    while process.poll() is None and not reward.with_name("scoring").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    before = wait_for("blocked", "Ctrl-C: what is under way", process)  # two that are pending at once are one
    process.send_signal(signal.SIGINT)
    printed = before + process.communicate(timeout=180)[0]
    assert process.returncode == 130
    assert "Traceback" not in printed
    last = printed.strip().splitlines()[-1]
    assert last == (
        f"ended at once: all steps are lost, and are done again with: rally train {runs.folder / 'blocked'} --resume"
    )


def test_a_run_that_never_began_leaves_no_folder_and_does_not_advise_to_resume(runs):
    wrong = runs.folder / "wrong.py"
    wrong.write_text("import nowhere\ndef f(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    process = runs.start("train", "digits", *runs.overrides("never", *INLINE, f"reward.function={wrong}:f"))
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "nowhere" in printed
    assert "--resume" not in printed
    assert not (runs.folder / "never").exists()


def test_a_flipped_bit_in_the_model_that_a_run_made_for_itself_is_found(runs, weights_of):
    run = runs.run("flipped", *INLINE, "checkpoint={every_steps: 2, keep: 9}")
    whole = weights_of(run)
    shutil.rmtree(run.checkpoints / "step_000004")
    weights = run.model / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its content has changed .*; remove .*/model"):
        runs.resume("flipped")
    shutil.rmtree(run.model)
    assert weights_of(runs.resume("flipped")) == whole


def test_resuming_without_any_checkpoint_begins_at_the_first_step_and_says_so(runs, weights_of, whole_weights):
    process = runs.start("train", "digits", *runs.overrides("early", *INLINE))
    wait_for("early", "starting the roles", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert weights_of(runs.resume("early")) == whole_weights
    log = (runs.folder / "early" / "logs" / "train.log").read_text()
    assert "no checkpoint to go on from: the run begins at step 1" in log


def test_one_command_starts_a_run_of_a_file_says_that_it_is_done_starts_nothing_then_and_goes_on_with_it(
    runs, tmp_path
):
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: digits\n")
    command = ("train", str(mine), "--resume", *runs.overrides("mine", *INLINE, "trainer.num_steps=2"))
    started, _ = (process := runs.start(*command)).communicate(timeout=180)
    assert process.returncode == 0, started
    assert f"no run of {mine} to resume: a new one begins" in started.replace("\n", "")
    run = RunFolder(runs.folder / "mine")
    before = run.metrics.read_bytes()
    again, _ = (process := runs.start(*command)).communicate(timeout=180)
    assert process.returncode == 0, again
    assert "all 2 steps are done; for more of them raise trainer.num_steps" in again
    assert len(run.state().attempts) == 1
    assert run.metrics.read_bytes() == before
    process = runs.start("train", str(run.path), "--resume", "trainer.num_steps=3", "loss.clip_low=0.1")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "changed since step 2, the weights are others from here on: loss.clip_low=0.1 (was 0.2)" in printed
    assert load_config(str(run.path)).config.trainer.num_steps == 3
    assert tuple(run.state().launched.overrides[-2:]) == ("trainer.num_steps=3", "loss.clip_low=0.1")


# A program whose raylet is stopped says so and ends in order in tests/cluster/test_lost_ray.py; Ctrl-C is above.
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the raylet is looked up in /proc")
def test_ctrl_c_on_a_raylet_that_is_stopped_is_answered_at_once_and_ends_the_run_in_seconds(runs):
    endless = ("trainer.num_steps=900", "checkpoint={every_steps: 300, keep: 1}", "cluster.runtime=ray")
    limit = "cluster.heartbeat_timeout_s=600"  # what a Ray that is stopped may take: longer than this test
    process = runs.start("train", "digits", *runs.overrides("stopped", *endless, limit))
    wait_for("stopped", "step   3/900", process)
    (raylet,) = [pid for pid in children_of(process.pid) if comm_of(pid) == "raylet"]
    os.kill(raylet, signal.SIGSTOP)
    time.sleep(5)  # the step under way comes to its next call with data
    process.send_signal(signal.SIGINT)
    printed = process.stdout.read()
    status = process.wait(60)
    assert re.search(r"interrupted: waiting for Ray .*is stopped|Ctrl-C: what is under way", printed), printed
    if status == 130:  # the step needed nothing of the raylet, so it was finished and saved
        assert "nothing is lost" in printed
    else:
        assert status == 75, "what the machine does may pass"
        assert f"Ray's raylet (pid {raylet}) is stopped" in printed
    assert "--resume" in printed


def children_of(parent):
    """Process ids of the children of a process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == parent:
                found.append(int(name))
    return found


def comm_of(pid):
    """Name of the program that a process runs."""
    with open(f"/proc/{pid}/comm", encoding="utf-8") as file:
        return file.read().strip()


def test_the_best_checkpoint_is_kept_over_pruning_and_resumes(runs):
    def best_of(found):
        scores = {int(one["step"]): one["validation/score"] for one in found.metrics if "validation/score" in one}
        return max((step for step in scores if step), key=scores.__getitem__)

    keys = ("validation.every_steps=1", "checkpoint={keep: 1, every_steps: 4, keep_best: true}", "seed=1")
    inline = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "actor.optimizer.lr=0.1")
    found = load_run(runs.run("run", *keys, *inline, "recipe=grpo").path)
    best = best_of(found)
    assert set(found.checkpoints) == {best, 4}
    runs.resume("run", "trainer.num_steps=6")
    assert set(found.checkpoints) == {best_of(found), 6}


EPISODES = """
import asyncio
from pathlib import Path


async def waits(client, example):
    await client.sample(client.prompt)
    Path("begun").touch()
    await asyncio.Event().wait()


async def swallows(client, example):
    await client.sample(client.prompt)
    Path("begun").touch()
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
"""


@pytest.mark.parametrize(
    ("episode", "number"), [pytest.param("waits", signal.SIGTERM, marks=pytest.mark.slow), ("swallows", signal.SIGINT)]
)
def test_a_run_ends_while_its_episodes_hang_even_if_they_swallow_that(runs, tmp_path, monkeypatch, episode, number):
    monkeypatch.chdir(tmp_path)
    Path("episodes.py").write_text(EPISODES)
    own = f"rollout.episode={tmp_path}/episodes.py:{episode}"
    process = runs.start("train", "digits", *runs.overrides("hanging", own, *INLINE))
    deadline = time.monotonic() + 120
    while not Path("begun").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    printed, _ = process.communicate(timeout=120)  # an episode may take 600 s
    assert process.returncode == 130, printed
    assert "episodes were busy for 5 s more" in printed
    assert "destroyed" not in printed
