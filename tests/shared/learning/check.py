"""Every algorithm trains small tasks, and none may have stopped learning; an algorithm of your own does beside them.

    PYTHONPATH=tests/shared python -m learning.check gspo --loss mine.py:my_loss --out here

`make learn-check` draws docs/learning.png with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from learning.cells import CELLS, Cell, own_advantage, own_loss
from learning.picture import save_learning
from learning.tasks import TASKS
from learning.training import BOUND, Result, learn
from rallypoint.disk import naming
from rallypoint.display.theme import PALETTE
from rallypoint.errors import ConfigError
from rallypoint.run import why_no_plot
from rallypoint.user_code import UserFunction


def learn_check(
    names: Sequence[str], *, losses: Sequence[str], advantages: Sequence[str], num_seeds: int, folder: str
) -> int:
    """Train, print a line for each algorithm, write learning.json and learning.png; return 1 if one does not learn.

    Raises:
        ConfigError: there is no algorithm of one of the names.
        UserCodeError: there is no such function.
    """
    console, began, cells = Console(highlight=False), time.monotonic(), _chosen(names, losses, advantages)
    console.print(
        f"share of the possible gain at the end, {num_seeds} seeds; the interval must not reach below {BOUND}",
        soft_wrap=True,
    )
    results: list[Result] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, torch.set_num_threads, (1,)) as processes:
        jobs = [(cell, task, seed) for cell in cells for task in cell.tasks for seed in range(num_seeds)]
        curves = processes.map(_learn, *zip(*jobs, strict=True))
        for cell in cells:
            of_task = [
                Result(cell=cell, task=task, curves=[next(curves) for _ in range(num_seeds)]) for task in cell.tasks
            ]
            _say(console, of_task)
            results += of_task
    failed = dict.fromkeys(result.cell.name for result in results if not result.verdict.passes)
    _write(console, Path(folder).expanduser(), results)
    verdict = f"{', '.join(failed)}: learned too little" if failed else f"all {len(cells)} learn"
    console.print(f"{escape(verdict)} ({time.monotonic() - began:.0f} s)", soft_wrap=True)
    return int(bool(failed))


def _chosen(names: Sequence[str], losses: Sequence[str], advantages: Sequence[str]) -> list[Cell]:
    if unknown := sorted(set(names) - set(CELLS)):
        raise ConfigError((f"learn-check knows no {', '.join(unknown)}; expected some of: {', '.join(CELLS)}",))
    own = [own_loss(spec, UserFunction.read(spec, {})) for spec in losses]
    own += [own_advantage(spec, UserFunction.read(spec, {})) for spec in advantages]
    return [*(CELLS[name] for name in names), *own] or list(CELLS.values())


def _learn(cell: Cell, task: str, seed: int) -> list[float]:
    return learn(cell, TASKS[task], seed)


def _say(console: Console, of_task: Sequence[Result]) -> None:
    found = [(result.task, result.verdict) for result in of_task]
    shown = "  ".join(f"{task} {verdict.mean:5.2f} ± {verdict.half_width:.2f}" for task, verdict in found)
    style = "" if all(verdict.passes for _, verdict in found) else PALETTE["wrong"]
    console.print(escape(f"{of_task[0].cell.name:28}  {shown}"), style=style, soft_wrap=True)


def _write(console: Console, folder: Path, results: Sequence[Result]) -> None:
    table = folder / "learning.json"
    with naming(table):
        folder.mkdir(parents=True, exist_ok=True)
        values = {"bound": BOUND, "cells": [result.described() for result in results]}
        table.write_text(json.dumps(values), encoding="utf-8")
    picture = save_learning(results, folder / "learning.png")
    console.print(f"wrote {escape(str(table))} and {picture or f'no picture: {why_no_plot()}'}", soft_wrap=True)


def main(arguments: Sequence[str]) -> int:
    """Read the command line and train; return its exit status."""
    parser = argparse.ArgumentParser(description="Train small tasks; fail if an algorithm has stopped learning.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as gspo; by default all")
    parser.add_argument("--loss", action="append", default=[], metavar="FILE:NAME", help="an own policy loss")
    parser.add_argument("--advantage", action="append", default=[], metavar="FILE:NAME", help="an own advantage")
    parser.add_argument("--num-seeds", type=int, default=5, choices=range(3, 11), help="trainings of each on each task")
    parser.add_argument("--out", default="learn-check", metavar="FOLDER", help="for learning.json and learning.png")
    given = parser.parse_args(arguments)
    return learn_check(
        given.names, losses=given.loss, advantages=given.advantage, num_seeds=given.num_seeds, folder=given.out
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
