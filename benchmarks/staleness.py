"""What sampling while the actor trains does to learning and to idle time: tables for docs/async.md.

    python benchmarks/staleness.py curves     # digits with max_staleness 0, 1 and 4, on a pool of one process each
    python benchmarks/staleness.py idle       # rewards that sleep for a lognormal time: measured beside simulated

Both take minutes, and use Ray. `idle` measures once with max_staleness 0, and lets `rally simulate` say the rest.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rallypoint.display import Silent
from rallypoint.recipes.loop import train
from rallypoint.recipes.preflight import load_checked
from rallypoint.roles.simulator import Measured, Setting, measured_outcome, simulate
from rallypoint.run import read_metrics
from rallypoint.run.folder import RunFolder, create_run
from rallypoint.run.timeline import TIMELINE, Timeline

SPLIT = ("cluster.pools={main: [1], sampling: [1]}", "rollout.placement.pool=sampling")
SLEEPING = """\
import math, random, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(2 * math.exp(random.Random(str(ground_truth)).gauss(0, 1)))
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)
"""
NUM_PROMPTS = 4


def run(folder: Path, name: str, *overrides: str) -> RunFolder:
    """Train digits, and return the folder of the run."""
    loaded = load_checked("digits", [*SPLIT, f"trainer.runs_dir={folder}", f"trainer.name={name}", *overrides])
    made = create_run(loaded)
    train(loaded, made, Silent(), resume=False)
    return made


def curves(folder: Path, num_steps: int, values: list[int]) -> None:
    """Print validation scores, and where the time went."""
    every = max(1, num_steps // 6)
    print("| max_staleness | " + " | ".join(f"step {step}" for step in range(0, num_steps + 1, every)), end="")
    print(" | s/step | rollout idle | actor idle | staleness |\n" + "|---:" * (num_steps // every + 6) + "|")
    for staleness in values:
        made = run(
            folder,
            f"curve-{staleness}",
            f"rollout.max_staleness={staleness}",
            f"trainer.num_steps={num_steps}",
            f"validation.every_steps={every}",
        )
        records = read_metrics(made.metrics)
        scores = {int(one["step"]): one["validation/score"] for one in records if "validation/score" in one}
        found = measured_outcome(Timeline(made.path / TIMELINE).read())
        aged = [one["rollout/staleness_mean"] for one in records if "rollout/staleness_mean" in one] or [0.0]
        cells = [f"{scores[step]:.3f}" for step in range(0, num_steps + 1, every)]
        cells += [f"{found.step_s:.2f}", f"{found.rollout_idle:.0%}", f"{found.actor_idle:.0%}"]
        print(f"| {staleness} | " + " | ".join([*cells, f"{sum(aged) / len(aged):.2f}"]) + " |", flush=True)


def idle(folder: Path, num_steps: int, values: list[int]) -> None:
    """Print idle shares of runs, beside what simulations have: by the times of the first run, and by their own."""
    reward = folder / "sleeping.py"
    reward.write_text(SLEEPING)
    print("| max_staleness | s/step | by S=0 | by its own | actor idle | by S=0 | by its own | rollout idle | by S=0 |")
    print("|---:" * 9 + "|")
    in_turns: Measured | None = None
    for staleness in values:
        made = run(
            folder,
            f"idle-{staleness}",
            f"rollout={{max_staleness: {staleness}, num_prompts: {NUM_PROMPTS}, group_size: 1}}",
            f"reward={{function: '{reward}:compute_score', num_processes: {5 * NUM_PROMPTS}}}",
            "actor.num_mini_batches=2",
            "critic.num_mini_batches=2",
            f"validation={{every_steps: {num_steps}, max_prompts: {NUM_PROMPTS}}}",
            f"trainer.num_steps={num_steps}",
        )
        steps = Timeline(made.path / TIMELINE).read()
        own = Measured.of(steps)
        in_turns = in_turns or own
        setting = Setting(num_prompts=NUM_PROMPTS, max_staleness=staleness, num_steps=num_steps)
        found = [measured_outcome(steps), simulate(in_turns, setting), simulate(own, setting)]
        cells = [f"{one.step_s:.2f}" for one in found] + [f"{one.actor_idle:.1%}" for one in found]
        cells += [f"{one.rollout_idle:.1%}" for one in found[:2]]
        print(f"| {staleness} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "idle"))
    parser.add_argument("--num-steps", type=int, default=60)
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1, 4])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        {"curves": curves, "idle": idle}[given.what](Path(folder), given.num_steps, given.max_staleness)


if __name__ == "__main__":
    main()
