"""What an update holds on an accelerator beside what `--dry-run` predicts, by the script that measures it."""

import pickle

import pytest
import torch
from accelerator_benchmark import run_benchmark

from rallypoint.roles.colocated import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]


def test_the_benchmark_runs_from_end_to_end_on_a_tiny_shape():
    (row,) = run_benchmark("--models", "tiny", "--activations", "keep", "--times", "1")
    assert float(row["tokens/s"].replace(",", "")) > 0
    assert float(row["peak GiB"]) > 0


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_the_peak_of_an_update_is_about_what_the_plan_says(activations):
    # 0.6B: some 10 GiB of weights, gradients and optimizer, beside which the workspaces of libraries are little. The
    # bound is that of runs on a CPU, 15 %, twice: nothing of the plan was fitted to a device.
    sizes = ("--models", "0.6B", "--times", "1", "--rows", "16", "--length", "256")
    (row,) = run_benchmark(*sizes, "--activations", activations)
    assert 0.7 <= float(row["predicted GiB"]) / float(row["peak GiB"]) <= 1.3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator whose allocator records")
def test_a_recorded_call_leaves_a_snapshot_of_what_it_allocated(tmp_path):
    with recorded(tmp_path / "train.json", torch.cuda.memory):
        torch.ones(1000, device="cuda").add(1)
    snapshot = pickle.loads((tmp_path / "train.memory.pickle").read_bytes())
    assert any(one["action"] == "alloc" for one in snapshot["device_traces"][0])
