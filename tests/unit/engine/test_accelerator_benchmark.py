"""The benchmark of updates on an accelerator runs, on a CPU too; what it says there means little."""

import math

from accelerator_benchmark import run_benchmark


def test_the_benchmark_for_accelerators_runs_on_a_cpu():
    tiny = ("--models", "tiny", "--times", "1", "--rows", "8", "--length", "32")
    rows = run_benchmark(*tiny, "--device", "cpu")
    assert [(row["model"], row["activations"]) for row in rows] == [("tiny", "keep"), ("tiny", "checkpoint")]
    for row in rows:
        assert float(row["tokens/s"].replace(",", "")) > 0
        assert float(row["MFU"].rstrip("%")) >= 0
        assert math.isnan(float(row["peak GiB"]))  # of a process, a CPU tells other tests' memory as well
        assert float(row["predicted GiB"]) >= 0
