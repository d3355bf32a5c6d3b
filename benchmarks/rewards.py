"""What a grader that sleeps costs a step: 128 rollouts of the digits model, beside a grader that answers at once.

    python benchmarks/rewards.py [--steps 7] [--sleep 0.2] [--processes null 2 16 64 128]

`null` leaves the number to the run. Seconds are medians over the steps after the first two; the first one, in which
most processes are started, has a column of its own. `reward` is what is waited for after the last token.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from rallypoint.display import Silent
from rallypoint.journal import fold, read_journal
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.run.folder import create_run

GRADER = """\
import asyncio, time

def share(solution_str, ground_truth):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)

def at_once(data_source, solution_str, ground_truth, extra_info=None):
    return share(solution_str, ground_truth)

def sleeps(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep({sleep})
    return share(solution_str, ground_truth)
"""
STEP = (
    "rollout={num_prompts: 16, group_size: 8}",
    "validation={every_steps: 1000, max_prompts: 1}",
    "cluster.runtime=inline",
    "cluster.pools={main: [1]}",
)


def measure(folder: Path, name: str, num_steps: int, *overrides: str) -> tuple[float, float, float, float]:
    """Return the seconds of the first step, of a later one, and of its phases rollout and reward."""
    keys = [*STEP, f"trainer={{runs_dir: {folder}, name: {name}, num_steps: {num_steps}}}", *overrides]
    loaded = load_checked("digits-grpo", keys)
    made = create_run(loaded)
    train(loaded, made, Silent(), resume=False)
    steps = [one for one in fold(read_journal(made.journal)).records if "time_s/rollout" in one]
    rollout, reward = (statistics.median(one[f"time_s/{part}"] for one in steps[2:]) for part in ("rollout", "reward"))
    first, *whole = [sum(value for key, value in one.items() if key.startswith("time_s/")) for one in steps]
    return first, statistics.median(whole[1:]), rollout, reward


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--sleep", type=float, default=0.2)
    parser.add_argument("--processes", nargs="+", default=["null", "2", "16", "64", "128"])
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        file = folder / "grader.py"
        file.write_text(GRADER.format(sleep=wanted.sleep))
        print("| grader | processes | step 1, s | step, s | rollout, s | reward, s |\n|---|---:|---:|---:|---:|---:|")
        cases = [("at once", "at_once", "2")] + [
            (f"sleeps {wanted.sleep:g} s", "sleeps", processes) for processes in wanted.processes
        ]
        for label, function, processes in cases:
            keys = (f"reward.function='{file}:{function}'", f"reward.num_processes={processes}")
            found = measure(folder, f"{function}-{processes}", wanted.steps, *keys)
            shown = [label, processes.replace("null", "automatic"), *(f"{seconds:.2f}" for seconds in found)]
            print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
