"""A reward function that hangs, exits or forks costs its own rollouts; the run stays in the hands of its user."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from metrics_file import read_metrics

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "trainer.num_steps=2")

REWARDS = """
import os, subprocess, time
from pathlib import Path

BEGUN = Path({begun!r})


def hangs(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "train":
        BEGUN.write_text(f"{{os.getpid()}}\\n")
        time.sleep(600)
    return 0.0


def hangs_in_step_2(data_source, solution_str, ground_truth, extra_info=None):
    metrics = BEGUN.parent / "hurried" / "metrics.jsonl"
    if not BEGUN.with_suffix(".over").exists() and metrics.exists() and '"rollout/num_tokens"' in metrics.read_text():
        BEGUN.write_text(f"{{os.getpid()}}\\n")
        time.sleep(600)
    return float(len(solution_str))


def forks_and_exits(data_source, solution_str, ground_truth, extra_info=None):
    if not BEGUN.exists():
        sleeper = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
        BEGUN.write_text(f"{{sleeper.pid}}\\n")
        time.sleep(600)
    if extra_info["split"] == "train" and extra_info["index"] % 4 == 0:
        os._exit(0)
    return 1.0
"""


@pytest.fixture
def begun(tmp_path):
    """The file that the functions write, in which a process id stands; that process is ended with the test."""
    path = tmp_path / "begun"
    (tmp_path / "rewards.py").write_text(REWARDS.format(begun=str(path)))
    yield path
    if path.exists() and is_alive(pid := int(path.read_text())):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds, process, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def has_begun(begun):
    return lambda: begun.exists() and begun.read_text().endswith("\n")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_second_ctrl_c_ends_a_run_whose_reward_function_hangs_and_the_function_with_it(runs, begun, number):
    function = f"reward={{function: '{begun.parent}/rewards.py:hangs', timeout_s: 600}}"
    process = runs.start("train", "digits", *runs.overrides("stopped", *INLINE, function))
    wait_until(has_begun(begun), process)
    process.send_signal(number)
    time.sleep(1)
    for _ in range(3):  # two that come at the same time are one
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=30)
            break
    assert process.returncode in {130, -number, 128 + number}
    deadline = time.monotonic() + 60
    while is_alive(int(begun.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.timeout(280)
def test_a_ctrl_c_gives_hanging_rewards_some_seconds_and_the_abandoned_step_is_repeated(runs, weights_of, begun):
    over = begun.with_suffix(".over")
    function = (f"reward={{function: '{begun.parent}/rewards.py:hangs_in_step_2', timeout_s: 600}}",)
    over.touch()
    expected = weights_of(runs.run("whole", *INLINE, *function))
    over.unlink()
    process = runs.start("train", "digits", *runs.overrides("hurried", *INLINE, *function))
    wait_until(has_begun(begun), process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)  # the function takes 600 s
    assert process.returncode == 130
    run = runs.folder / "hurried"
    assert "step 2 is given up, and repeated by --resume" in (run / "logs" / "train.log").read_text()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000001"]
    over.touch()
    assert weights_of(runs.resume("hurried")) == expected


def test_a_run_is_resumed_at_once_though_a_reward_function_forked_before_it_was_killed(runs, begun):
    failing = (f"reward.function={begun.parent}/rewards.py:forks_and_exits", "rollout.max_failed=0.9")
    process = runs.start("train", "digits", *runs.overrides("killed", *INLINE, *failing))
    wait_until(has_begun(begun), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    resumed = runs.resume("killed")
    steps = [record for record in read_metrics(resumed.metrics) if "reward/mean" in record]
    assert sum(record["reward/failed_crashed"] for record in steps) > 0
    assert all(record["reward/num_scored"] + record["reward/failed"] == 32 for record in steps)
    assert "ended with status 0, as by os._exit" in (resumed.logs / "train.log").read_text()
