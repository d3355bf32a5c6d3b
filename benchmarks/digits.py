"""The figures of the demo: how long it takes and how well it ends, for several seeds.

    python benchmarks/digits.py                      # rally train digits, seeds 0, 1 and 2
    python benchmarks/digits.py digits-grpo --seeds 0
    python benchmarks/digits.py digits trainer.num_steps=60

Every run is a process of its own, as a user starts it. Seconds are read from the run's metrics.jsonl; the first
step's are counted from the start of the process. How busy the cores were stands beside them:
two ranks keep two cores at about 90 %, and what is above that is somebody else's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rallypoint.run import read_metrics


def cpu_seconds() -> tuple[float, float]:
    """Return (busy, all) seconds of all cores since the machine started."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = numbers[3] + numbers[4]
    return (sum(numbers) - idle) / os.sysconf("SC_CLK_TCK"), sum(numbers) / os.sysconf("SC_CLK_TCK")


def measure(recipe: str, seed: int, overrides: list[str], runs_dir: Path) -> dict[str, float]:
    """Run one recipe to its end and return its figures."""
    name = f"{recipe}-seed{seed}"
    command = [sys.executable, "-m", "rallypoint.cli.main", "train", recipe, f"seed={seed}", *overrides]
    command += [f"trainer.runs_dir={runs_dir}", f"trainer.name={name}"]
    (busy_before, all_before), began = cpu_seconds(), time.monotonic()
    first_step = None
    metrics = runs_dir / name / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        time.sleep(0.1)
        if first_step is None and metrics.is_file() and '"step": 1,' in metrics.read_text():
            first_step = time.monotonic() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with status {process.returncode}")
    busy, total = (after - before for after, before in zip(cpu_seconds(), (busy_before, all_before), strict=True))
    records = read_metrics(metrics)
    scores = [record["validation/score"] for record in records if "validation/score" in record]
    return {
        "seed": seed,
        "steps": max(record["step"] for record in records),
        "command_s": time.monotonic() - began,
        "first_step_s": first_step or float("nan"),
        "training_s": records[-1]["time_s"],
        "validation_first": scores[0],
        "validation_last": scores[-1],
        "busy_share": busy / total,
    }


def main() -> None:
    """Print a table and, with --json, write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="digits")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = []
        print("seed  steps  first step  training  command  validation         cores busy")
        for seed in arguments.seeds:
            result = measure(arguments.recipe, seed, arguments.overrides, Path(folder))
            results.append(result)
            print(
                f"{seed:4}  {result['steps']:5.0f}  {result['first_step_s']:8.1f} s  {result['training_s']:6.1f} s"
                f"  {result['command_s']:5.1f} s  {result['validation_first']:6.3f} -> {result['validation_last']:.3f}"
                f"  {result['busy_share']:9.0%}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps({"recipe": arguments.recipe, "results": results}, indent=1))


if __name__ == "__main__":
    main()
