"""What snapshots cost a run: 50M parameters, whose runs with and without them take turns.

    python benchmarks/snapshots.py [--steps 12] [--times 2] [KEY=VALUE ...]

A snapshot is taken between two steps, so its cost is the time from the end of a step to the beginning of the next one,
beyond what a run without snapshots needs there. The share is of all time from the first step's end to the last one's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rallypoint.journal import StepDone, read_journal
from rallypoint.run.folder import RunFolder

RUN = (
    *(sys.executable, "-m", "rallypoint.cli.main", "train", "digits-grpo"),
    *("model.create.hidden_size=512", "model.create.num_layers=14", "model.create.intermediate_size=1792"),
    *("model.create.num_heads=8", "model.create.num_key_value_heads=8", "rollout.num_prompts=32"),
    *("cluster.pools={main: [1]}", "checkpoint.every_steps=1000000", "validation.every_steps=1000000"),
)


def steps_of(folder: Path, name: str, keys: list[str]) -> list[StepDone]:
    """Train, and return the steps."""
    own = [f"trainer.runs_dir={folder}", f"trainer.name={name}"]
    subprocess.run([*RUN, *own, *keys], check=True, stdout=subprocess.DEVNULL)
    entries = read_journal(RunFolder(folder / name).journal)
    return [entry.event for entry in entries if isinstance(entry.event, StepDone)]


def pauses(steps: list[StepDone]) -> list[float]:
    """Return the seconds between each step and the next."""
    return [after.began_s - one.began_s - one.seconds for one, after in itertools.pairwise(steps)]


def main(*, steps: int, times: int, keys: list[str]) -> None:
    """Take turns, and print."""
    found = defaultdict[bool, list[list[StepDone]]](list)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(times):
            for has in (False, True):
                name, own = f"{turn}-{has}", [f"trainer.num_steps={steps}", f"checkpoint.snapshots={str(has).lower()}"]
                found[has].append(steps_of(Path(folder), name, [*own, *keys]))
    for has, runs in found.items():
        seconds = statistics.median(step.seconds for run in runs for step in run[1:])
        print(f"{'with' if has else 'without'} snapshots: a step {seconds:.2f} s, the median of {times * (steps - 1)}")
    usual = statistics.median(pause for run in found[False] for pause in pauses(run))
    extra = [pause - usual for run in found[True] for pause in pauses(run)]
    passed = sum(run[-1].began_s + run[-1].seconds - run[0].began_s - run[0].seconds for run in found[True])
    taken = [one for one in extra if one > max(extra) / 4]
    print(f"{len(taken)} snapshots after {len(extra)} steps, {statistics.median(taken):.2f} s each, the median")
    print(f"{sum(extra) / passed:.1%} of the time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--times", type=int, default=2, help="runs with, and runs without")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE")
    main(**vars(parser.parse_args()))
