"""The batch script for Slurm, run for real with stand-ins for ray, rally, srun and scancel on its PATH.

The stand-ins write what happens to them into one file, and stay until they get a TERM, as the real ones do.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "cluster" / "slurm.sbatch"
BASH = shutil.which("bash") or "bash"

STAND_INS = {
    "ray": """
        for argument; do case $argument in --temp-dir=*) folder=${argument#*=};; esac; done
        [[ $2 = --head ]] && name=head || name=worker
        [[ ${FAIL:-} != "$name" ]] || exit 7
        echo "$name starts: $*" >>events
        trap 'echo "$name stops" >>events; exit 143' TERM
        touch "joined-$$"
        [[ $name = worker ]] || echo 127.0.0.1:4242 >"$folder/ray_current_cluster"
        while :; do sleep 0.05; done
    """,
    "srun": """
        options=()
        while [[ $1 = --* ]]; do options+=("$1"); [[ $1 = --ntasks=* ]] && count=${1#*=}; shift; done
        echo "srun: ${options[*]}" >>events
        for ((i = 0; i < count; i++)); do "$@" & echo $! >>step; done
        wait
    """,
    "scancel": """
        echo "scancel: $*" >>events
        for pid in $(<step); do kill "$pid" 2>/dev/null; done
    """,
    "scontrol": """
        echo "scontrol: $*" >>events
    """,
    "rally": """
        until joined=(joined-*) && ((${#joined[@]} == SLURM_JOB_NUM_NODES)); do sleep 0.02; done
        echo "rally: $*" >>events
        stat -c '%a %s' "$RAY_AUTH_TOKEN_PATH" >token
        stat -c '%a' "$(dirname "$RAY_AUTH_TOKEN_PATH")" >>token
        echo "$RAY_AUTH_MODE ${RAY_AUTH_TOKEN:-unset}" >>token
        trap 'echo "rally saves" >>events; exit 130' TERM
        touch training
        [[ -z ${STAYS:-} ]] || while :; do sleep 0.05; done
        exit "${STATUS:-0}"
    """,
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder that a job was submitted from."""
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!{BASH}\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def start(job: Path, *arguments: str, num_nodes: int = 1, **environment: str) -> subprocess.Popen[str]:
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": str(num_nodes), "SLURM_CPUS_PER_TASK": "8"}
    path = f"{job / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    return subprocess.Popen(
        [BASH, str(SCRIPT), *arguments],
        cwd=job,
        env={"PATH": path, **slurm, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(job: Path, *arguments: str, num_nodes: int = 1, **environment: str) -> tuple[int, str]:
    process = start(job, *arguments, num_nodes=num_nodes, **environment)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def events(job: Path) -> list[str]:
    return (job / "events").read_text().splitlines()


def assert_nothing_is_left(job: Path) -> None:
    assert list(job.glob(".rally-*")) == []
    (head,) = (event for event in events(job) if event.startswith("head starts"))
    assert not Path(head.partition("--temp-dir=")[2]).exists()
    assert sum("starts" in event for event in events(job)) == sum("stops" in event for event in events(job))


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_any_number_of_nodes_starts_joins_trains_and_leaves_in_this_order(job: Path, num_nodes: int):
    status, output = run(job, "digits", "trainer.num_steps=3", num_nodes=num_nodes)
    assert status == 0, output
    happened = events(job)
    assert "--port=0 --num-cpus=8" in happened[0]
    assert sum(event.startswith("worker starts: start --address=127.0.0.1:4242") for event in happened) == num_nodes - 1
    (trained,) = (event for event in happened if event.startswith("rally"))
    pool = ",".join("1" * num_nodes)
    assert trained == (
        f"rally: train digits cluster.address=127.0.0.1:4242 cluster.pools.main=[{pool}] "
        f"cluster.num_cpus_per_process=8 trainer.runs_dir={job}/runs trainer.grace_s=240 "
        "trainer.name=rally-17 --resume trainer.num_steps=3"
    )
    assert happened.index(trained) == num_nodes + (num_nodes > 1)
    if num_nodes > 1:
        (asked,) = (event for event in happened if event.startswith("srun"))
        assert f"--relative=1 --nodes={num_nodes - 1} --ntasks={num_nodes - 1}" in asked
        assert "scancel: --signal=TERM 17.0" in happened
    assert happened[-1] == "head stops"
    assert_nothing_is_left(job)


def test_a_node_gets_as_many_processes_as_it_has_gpus_and_the_user_has_the_last_word(job: Path):
    status, output = run(job, "mine.yaml", "cluster.pools.main=[2]", num_nodes=2, SLURM_GPUS_ON_NODE="4")
    assert status == 0, output
    (trained,) = (event for event in events(job) if event.startswith("rally"))
    assert "cluster.pools.main=[4,4] cluster.num_cpus_per_process=2 " in trained
    assert trained.endswith("cluster.pools.main=[2]")


def test_only_the_user_can_read_the_token_and_it_stands_in_no_environment(job: Path):
    assert run(job, "digits")[0] == 0
    assert (job / "token").read_text().splitlines() == ["600 64", "700", "token unset"]


def test_the_status_of_the_run_is_the_status_of_the_job(job: Path):
    assert run(job, "digits", num_nodes=2, STATUS="3")[0] == 3
    assert_nothing_is_left(job)


@pytest.mark.parametrize("status", [75, 1])
def test_a_run_that_lost_a_process_is_queued_again_and_one_that_failed_is_not(job: Path, status: int):
    assert run(job, "digits", STATUS=str(status))[0] == status
    assert ("scontrol: requeue 17" in events(job)) == (status == 75)


def test_the_folder_of_a_run_keeps_its_name(job: Path):
    (job / "runs" / "one").mkdir(parents=True)
    assert run(job, "runs/one")[0] == 0
    (trained,) = (event for event in events(job) if event.startswith("rally"))
    assert trained.endswith("trainer.grace_s=240 --resume")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_lets_the_run_save_before_ray_is_stopped(job: Path, number: signal.Signals):
    process = start(job, "digits", num_nodes=2, STAYS="1")
    deadline = time.monotonic() + 60
    while not (job / "training").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    happened = events(job)
    assert ("scontrol: requeue 17" in happened) == (number == signal.SIGUSR1), "the time was up"
    assert happened.index("rally saves") < happened.index("worker stops") < happened.index("head stops")
    assert_nothing_is_left(job)


def test_a_head_that_does_not_start_ends_the_job_at_once(job: Path):
    status, output = run(job, "digits", FAIL="head")
    assert status == 1
    assert "error: Ray's head ended before it was up" in output
    assert list(job.glob(".rally-*")) == []


def test_what_is_missing_is_named(job: Path):
    assert "which recipe?" in run(job)[1]
    assert "this script is started by Slurm" in run(job, "digits", SLURM_JOB_ID="")[1]
    (job / "bin" / "rally").unlink()
    assert "rally is not on PATH" in run(job, "digits")[1]
