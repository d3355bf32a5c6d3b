"""What `make gpu-check` measures, on the pretend device: the numbers mean nothing, but all of it runs."""

import math

import pytest
from accelerator_benchmark import run_benchmark


@pytest.mark.parametrize("activations", [pytest.param("keep", marks=pytest.mark.slow), "checkpoint"])
def test_an_update_is_measured_with_its_peak_beside_the_plan(activations, pretend):
    tiny = ("--models", "tiny", "--times", "1", "--rows", "8", "--length", "32", "--activations", activations)
    (row,) = run_benchmark(*tiny, "--device", "pretend")
    assert float(row["tokens/s"].replace(",", "")) > 0
    assert pretend.peak() > 0
    assert 0 <= float(row["peak GiB"]) < 0.1
    assert float(row["predicted GiB"]) >= 0


def test_rollouts_are_measured(pretend):
    tiny = ("--models", "tiny", "--times", "1", "--batches", "2", "--tokens", "8", "--dtype", "float32")
    (row,) = run_benchmark(*tiny, "--device", "pretend", name="accelerator_rollouts")
    assert row["batch"] == "2"
    # So few tokens are a difference of noise, of any sign.
    assert math.isfinite(float(row["tokens/s"].replace(",", "")))


def test_steps_are_those_of_the_cpu(pretend):
    rows = run_benchmark("--device", "pretend", "--roles", "actor", name="parity")
    assert [(row["rows"], row["fine"]) for row in rows] == [("packed", "yes"), ("padded", "yes")]
