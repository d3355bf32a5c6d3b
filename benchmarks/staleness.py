"""What sampling while the actor trains does to learning and to idle time: tables for docs/async.md.

    python benchmarks/staleness.py curves     # digits with max_staleness 0, 1 and 4, on a pool of one process each
    python benchmarks/staleness.py waits      # rewards that sleep for a lognormal time: measured beside simulated

Both take minutes, and use Ray. The last one measures once with max_staleness 0, and lets the simulator say the rest.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

from rallypoint.display import Silent
from rallypoint.journal import fold, read_journal
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.run.folder import RunFolder, create_run
from rallypoint.sampling.simulator import Measured, Simulation, measured_outcome, read_steps

SPLIT = ("cluster.pools={main: [1], sampling: [1]}", "rollout.placement.pool=sampling")
SLEEPING = """\
import math, random, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(MEDIAN_S * math.exp(random.Random(str(ground_truth)).gauss(0, 1)))
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)
"""

NUM_WARMUP_STEPS = 5
"""Steps that do not count, neither measured nor simulated: in them processes start."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What rewards and batches of a measured run are like."""

    num_prompts: int
    group_size: int
    median_s: float
    """Of the time that a reward takes."""
    num_processes: int
    """That rewards have."""
    num_epochs: int
    """Of each batch, so that the trainer has to do."""


# No reward waits for a process, and nobody for a core.
WAITS = Case(num_prompts=4, group_size=1, median_s=0.5, num_processes=20, num_epochs=8)


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
        records = fold(read_journal(made.journal)).records
        scores = {int(one["step"]): one["validation/score"] for one in records if "validation/score" in one}
        found = measured_outcome(read_steps(made.journal))
        aged = [one["rollout/staleness_mean"] for one in records if "rollout/staleness_mean" in one] or [0.0]
        cells = [f"{scores[step]:.3f}" for step in range(0, num_steps + 1, every)]
        cells += [f"{found.step_s:.2f}", f"{found.rollout_idle:.0%}", f"{found.actor_idle:.0%}"]
        print(f"| {staleness} | " + " | ".join([*cells, f"{sum(aged) / len(aged):.2f}"]) + " |", flush=True)


def draw(folder: Path, values: list[int], file: Path) -> None:
    """Draw the curves of runs that `curves` made, by steps and by seconds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for staleness in sorted(values):
        path = folder / f"curve-{staleness}"
        taken = {step.batch.step: step.batch.taken_s for step in read_steps(path / "journal.jsonl")}
        records = fold(read_journal(path / "journal.jsonl")).records
        scores = {int(one["step"]): one["validation/score"] for one in records if "validation/score" in one}
        for panel, places in zip(axes, (list(scores), [taken.get(step, 0.0) for step in scores]), strict=True):
            panel.plot(places, list(scores.values()), marker=".", label=f"max_staleness {staleness}")
    for panel, name in zip(axes, ("step", "seconds"), strict=True):
        panel.set_xlabel(name)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("validation score")
    axes[0].legend(frameon=False)
    figure.savefig(file, dpi=110)


def idle(folder: Path, num_steps: int, values: list[int], case: Case) -> None:
    """Print idle shares of runs, beside what simulations have: by the times of the first run, and by their own."""
    reward = folder / "sleeping.py"
    reward.write_text(SLEEPING.replace("MEDIAN_S", str(case.median_s)))
    print("| max_staleness | s/step | by S=0 | by its own | actor idle | by S=0 | by its own | rollout idle | by S=0 |")
    print("|---:" * 9 + "|")
    in_turns: Measured | None = None
    for staleness in values:
        made = run(
            folder,
            f"idle-{staleness}",
            f"rollout={{max_staleness: {staleness}, num_prompts: {case.num_prompts}, group_size: {case.group_size}}}",
            f"reward={{function: '{reward}:compute_score', num_processes: {case.num_processes}}}",
            f"actor={{num_mini_batches: 2, num_epochs: {case.num_epochs}}}",
            f"critic={{num_mini_batches: 2, num_epochs: {case.num_epochs}}}",
            f"validation={{every_steps: {num_steps}, max_prompts: 1}}",
            f"trainer.num_steps={num_steps}",
        )
        steps = read_steps(made.journal)
        own = Measured(steps)
        in_turns = in_turns or own
        found = [measured_outcome(steps[NUM_WARMUP_STEPS:])]
        for times in (in_turns, own):
            setting = {"num_prompts": case.num_prompts, "max_staleness": staleness, "num_steps": num_steps}
            found.append(Simulation(times, **setting).run(NUM_WARMUP_STEPS))
        cells = [f"{one.step_s:.2f}" for one in found] + [f"{one.actor_idle:.1%}" for one in found]
        cells += [f"{one.rollout_idle:.1%}" for one in found[:2]]
        print(f"| {staleness} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("curves", "waits"))
    parser.add_argument("--num-steps", type=int, default=60)
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--runs-dir", type=Path, help="keeps the runs; without it they are removed")
    parser.add_argument("--picture", type=Path, help="file for the curves; needs matplotlib")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs_dir = given.runs_dir or Path(folder)
        if given.what == "curves":
            curves(runs_dir, given.num_steps, given.max_staleness)
            if given.picture is not None:
                draw(runs_dir, given.max_staleness, given.picture)
        else:
            idle(runs_dir, given.num_steps, given.max_staleness, WAITS)


if __name__ == "__main__":
    main()
