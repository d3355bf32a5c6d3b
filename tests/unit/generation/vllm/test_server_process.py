"""The life of a server's process, with a script in the place of vLLM."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from rallypoint.generation.vllm import Launch, Outline, ServerProcess
from rallypoint.generation.vllm.server import INSIDE, OwnFolder, hold, sweep
from rallypoint.model_files.pieces import same_names

SERVER = """
import os, subprocess, sys, time
beat, worker = os.environ["RALLYPOINT_BEAT"], subprocess.Popen(["sleep", "1000"])
if "--model=bad" in sys.argv:
    sys.exit("ValueError: no such model")
print(worker.pid, os.environ.get("PYTHONPATH"), flush=True)
with open(beat, "r+b") as file:
    file.write((7).to_bytes(8, "little"))
time.sleep(1000)
"""


@pytest.fixture
def launch(tmp_path):
    """A launch whose interpreter runs the script instead of vLLM, but our own guard as it is."""
    (tmp_path / "server.py").write_text(SERVER)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in *launch.py) exec {sys.executable} "$@";; esac\n'
        f'exec {sys.executable} {tmp_path}/server.py "$@"\n'
    )
    python.chmod(0o755)
    return Launch(
        python=python, model="good", dtype="float32", device="cpu", num_cpus=1, max_tokens=8, max_rows=2,
        cache_bytes=100, trust_remote_code=False, log=tmp_path / "logs" / "vllm.log",
    )  # fmt: skip


def wait_until(what):
    for _ in range(1000):
        if found := what():
            return found
        time.sleep(0.01)
    raise AssertionError("it never came")


def is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def worker_of(launch):
    lines = wait_until(lambda: launch.log.exists() and launch.log.read_text())
    return int(lines.split()[0])


def test_a_server_runs_with_our_inside_only_and_ends_with_all_that_it_started(launch, tmp_path):
    folder = OwnFolder(tmp_path)
    server = ServerProcess(launch, folder.path)
    worker = worker_of(launch)
    assert wait_until(lambda: server.beat() == 7)
    assert launch.log.read_text().split()[1] == str(INSIDE)
    assert server.ended() is None
    server.stop()
    wait_until(lambda: is_gone(worker))
    assert server.ended() is not None
    assert folder.path.exists(), "the next server wants its weights"
    folder.remove()
    assert not folder.path.exists()


def test_a_server_over_several_devices_is_told_so(launch, tmp_path):
    one, four = (dataclasses.replace(launch, num_devices=num).command(tmp_path) for num in (1, 4))
    assert set(four) - set(one) == {"--tensor-parallel-size=4", "--distributed-executor-backend=mp"}


def test_a_server_over_devices_of_other_processes_sees_them_and_its_own_have_their_cores(launch, tmp_path):
    shared = dataclasses.replace(launch, num_cpus=4, num_devices=2, visible_devices=("3", "5"))
    found = shared.environment(tmp_path, "key")
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("3,5", "2")


def test_a_server_that_ends_says_why(launch, tmp_path):
    server = ServerProcess(dataclasses.replace(launch, model="bad"), OwnFolder(tmp_path).path)
    why = wait_until(server.ended)
    assert "ValueError: no such model" in why
    assert str(launch.log) in why


def test_nothing_stays_of_a_server_whose_process_is_killed(launch, tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from rallypoint.generation.vllm import Launch, Outline, ServerProcess
from rallypoint.generation.vllm.server import OwnFolder
folder = OwnFolder(Path({str(tmp_path)!r}))
server = ServerProcess({launch!r}, folder.path)
print(folder.path, server.pid, flush=True)
time.sleep(1000)
""".replace("PosixPath", "Path")
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        folder, guard = owner.stdout.readline().split()
        worker = worker_of(launch)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    for pid in (int(guard), worker):
        wait_until(lambda pid=pid: is_gone(pid))
    wait_until(lambda: not Path(folder).exists())


def test_nothing_stays_of_a_server_whose_guard_is_killed(launch, tmp_path):
    """Ray kills the children of a worker that it ends, but not what these have started."""
    server = ServerProcess(launch, OwnFolder(tmp_path).path)
    worker = worker_of(launch)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(worker))
    assert server.ended() is not None


def test_folders_of_processes_that_are_gone_are_swept_and_others_are_not(tmp_path):
    mine = OwnFolder(tmp_path)
    left = tmp_path / "rallypoint-vllm-old"
    left.mkdir()
    (left / "lock").touch()
    other = OwnFolder(tmp_path)
    assert mine.path.exists()
    assert other.path.exists()
    assert not left.exists()
    assert os.stat(mine.path).st_mode & 0o077 == 0


def test_a_folder_that_a_neighbour_sweeps_up_before_it_is_held_is_not_taken_for_ones_own(tmp_path):
    empty, begun, held = (tmp_path / f"rallypoint-vllm-{name}" for name in ("empty", "begun", "held"))
    for folder in (empty, begun, held):
        folder.mkdir()
    (begun / "lock").touch()
    mine = hold(held)
    assert mine is not None
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [held.name]
    assert hold(empty) is None
    assert hold(begun) is None


def test_neighbours_that_start_at_once_leave_each_other_alone(tmp_path):
    """Each folder is there when all have started, however their sweeping and making fell together."""
    with ThreadPoolExecutor(8) as neighbours:
        folders = list(neighbours.map(lambda _: OwnFolder(tmp_path), range(64)))
    assert sorted(tmp_path.iterdir()) == sorted(folder.path for folder in folders)
    for folder in folders:
        folder.remove()


def test_what_has_to_be_free_on_an_accelerator_is_said_to_vllm_and_nothing_of_it_on_a_cpu(launch, tmp_path):
    command = dataclasses.replace(launch, memory_share=0.25).command(tmp_path)
    assert "--gpu-memory-utilization=0.2500" in command
    assert not [argument for argument in launch.command(tmp_path) if "utilization" in argument]


def test_the_memory_of_all_processes_of_a_server_is_measured_and_what_it_said_last_is_told(launch, tmp_path):
    server = ServerProcess(launch, OwnFolder(tmp_path).path)
    worker = worker_of(launch)
    assert server.last_said().startswith(str(worker))
    assert 2**20 < server.memory_bytes() < 2**30
    server.stop()
    assert server.memory_bytes() == 0


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (32, 32), (33, 64), (512, 512)])
def test_a_server_makes_room_for_adapters_of_at_least_their_rank(launch, tmp_path, rank, room):
    command = dataclasses.replace(launch, adapter_rank=rank).command(tmp_path)
    assert {"--enable-lora", f"--max-lora-rank={room}"} <= set(command)
    assert not [argument for argument in launch.command(tmp_path) if "lora" in argument]


def test_a_server_is_told_what_to_make_of_weights_and_what_of_them_is_left(launch, tmp_path):
    assert "--quantization=fp8_per_channel" in dataclasses.replace(launch, quantization="fp8").command(tmp_path)
    assert not [argument for argument in launch.command(tmp_path) if "quantization" in argument]
    weights = {
        "model.embed_tokens.weight": (7, 4),
        "model.layers.0.mlp.up_proj.weight": (8, 4),
        "model.norm.weight": (4,),
    }
    outline = Outline(
        weights={name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in weights.items()},
        sources=same_names, num_ids=7, cache_bytes_per_token=1, num_cache_heads=1,
    )  # fmt: skip
    assert (outline.num_bytes(), outline.num_bytes("fp8")) == (2 * (28 + 32 + 4), 2 * (28 + 4) + 32)
