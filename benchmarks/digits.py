"""The figures of the demo: how long it takes and how well it ends, for several seeds.

    python benchmarks/digits.py                      # rally train digits, seeds 0, 1 and 2
    python benchmarks/digits.py digits-grpo --seeds 0
    python benchmarks/digits.py digits trainer.num_steps=60
    python benchmarks/digits.py rloo actor.entropy_coef=0.01      # any recipe, on the model and the task of `digits`

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

from rallypoint.config import load_config
from rallypoint.journal import fold, read_journal

SORTING = (
    "model.create={architecture: llama, hidden_size: 64, num_layers: 2, num_heads: 2, num_key_value_heads: 2, "
    "intermediate_size: 128, initializer_range: 0.08}",
    "data.generate={task: sort, num_digits: 6}",
    "data.max_prompt_tokens=8",
    "reward.function=digits",
    "rollout.max_response_tokens=8",
    "actor.num_mini_batches=4",
    "actor.optimizer={lr: 2e-3, betas: [0.9, 0.99], schedule: linear, warmup_ratio: 0.08}",
    "engine.max_tokens_per_micro_batch=2048",
    "cluster={runtime: inline, pools: {main: [1]}}",
    "validation.every_steps=20",
    "trainer.num_steps=120",
)
"""Model, task and rates of `digits`, for recipes that have none."""


def with_a_task(recipe: str, overrides: list[str]) -> list[str]:
    """Return the overrides, after those of the task if the recipe has none; 512 rollouts a step in any case."""
    loaded = load_config(recipe, draft=True)
    if "model.path" not in loaded.missing:
        return overrides
    groups = [] if loaded.config.rollout.group_size == 1 else ["rollout.num_prompts=128", "rollout.group_size=4"]
    return [*SORTING, *groups, *overrides]


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
    records = fold(read_journal(metrics.with_name("journal.jsonl"))).records
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
    overrides = with_a_task(arguments.recipe, arguments.overrides)
    with tempfile.TemporaryDirectory() as folder:
        results = []
        print("seed  steps  first step  training  command  validation         cores busy")
        for seed in arguments.seeds:
            result = measure(arguments.recipe, seed, overrides, Path(folder))
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
