"""A panel in a terminal of its own, played by whoever writes commands into a file that this one follows.

    python played_panel.py COMMANDS

Commands are lines: `start`, `step N`, `text N` (with texts of a real model), `note WORDS`, `end WORDS`, `print WORDS`,
`wait WORDS`, `finish`, `raise`.
"""

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from rallypoint.display import Progress, make_progress
from rallypoint.run import Completion, RunInfo, StepReport, Summary

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. " * 4
REASONING = "In April she sold 48 clips to her friends, so in May she sold 48 / 2 = 24 clips to them. " * 12
RUN = RunInfo(
    name="digits-20261123-150301",
    algorithm="ppo",
    num_steps=300,
    run_dir=Path("/data/somebody/experiments/rallypoint/runs/digits-20261123-150301"),
    detail="actor x2, rollout x2, reference x2, critic x2 on ray; weights: shared",
)


def report(step: int, *, is_real: bool) -> StepReport:
    """A step of digits, or one of a real task."""
    example = Completion(prompt="493105", response="013459", ground_truth="013495", score=0.67)
    if is_real:
        example = Completion(prompt=QUESTION, response=REASONING, ground_truth="72", score=1.0)
    scalars = {"reward/mean": step / 300, "actor/loss": 0.0123, "actor/approx_kl": 0.001, "actor/entropy": 2.01}
    scalars |= {"kl/reference_mean": 0.021, "actor/clip_fraction": 0.05, "actor/grad_norm": 0.7}
    scalars |= {"rollout/response_length": 7.0, "critic/explained_variance": 0.4}
    spans = {"rollout": 0.1, "reward": 0.01, "judge": 0.03, "weigh": 0.001, "learn": 0.06, "publish": 0.004}
    return StepReport(step=step, scalars=scalars, spans=spans, seconds=0.21, num_tokens=12_800, completion=example)


def summary() -> Summary:
    """How it went."""
    return Summary(
        name=RUN.name, run_dir=RUN.run_dir, num_steps=300, seconds=63.0, validations=[(0, 0.1), (300, 0.9)],
        phases={"rollout": 30.0, "learn": 20.0}, curve=RUN.run_dir / "curve.png",
    )  # fmt: skip


def follow(path: Path) -> Iterator[str]:
    """Wait for the next whole lines of a file."""
    position = 0
    while True:
        text = path.read_text()[position:]
        whole, newline, _ = text.rpartition("\n")
        position += len(whole) + len(newline)
        yield from whole.splitlines()
        time.sleep(0.02)


def play(panel: Progress, commands: Path) -> None:
    """Do what the commands say, until one of them ends it."""
    for line in follow(commands):
        verb, _, words = line.partition(" ")
        match verb:
            case "start":
                panel.start(RUN)
            case "wait":
                panel.waiting(words)
            case "step" | "text":
                panel.step(report(int(words), is_real=verb == "text"))
                panel.validation(int(words), int(words) / 300)
            case "note":
                panel.note(words)
            case "end":
                panel.ending(words)
            case "print":
                print(words, file=sys.stderr)
            case "finish":
                panel.finish(summary())
                return
            case _:
                raise RuntimeError(words)


if __name__ == "__main__":
    # As a run does: the first Ctrl-C asks for an end.
    console = Console()
    with make_progress(console) as shown:
        signal.signal(signal.SIGINT, lambda *_: shown.ending("finishing and saving step 13; Ctrl-C again ends at once"))
        play(shown, Path(sys.argv[1]))
