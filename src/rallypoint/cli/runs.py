"""`rally runs`, `show`, `logs` and `diff`: which runs there are, what one has sampled and said, and where two part.

The texts of rollouts are the model's and the data's: they are cleaned before they reach a terminal.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rallypoint.cli.rollouts import MAX_LINES, choose, print_rollouts
from rallypoint.config import TrainerConfig, shown
from rallypoint.data.files import is_url
from rallypoint.disk import naming
from rallypoint.display.text import clean, shorten, sparkline
from rallypoint.display.theme import GREEN, PALETTE, SKY, VERMILION
from rallypoint.errors import RunFolderError
from rallypoint.journal import (
    Change,
    Entry,
    Event,
    JournalTail,
    RoleLost,
    RolesRestarted,
    RolloutFailed,
    RunBegan,
    RunEnded,
    Said,
    StepDone,
    read_journal,
)
from rallypoint.observability.numbers import counted
from rallypoint.prepare.preflight import newest_of
from rallypoint.run.copies import borrow, borrow_all
from rallypoint.run.folder import RunFolder
from rallypoint.run.overview import Overview, State, find_runs, overview


def list_runs(folder: str) -> None:
    """Print the runs below a folder, the newest first."""
    console, where = Console(highlight=False), Path(folder).expanduser()
    found = [overview(one) for one in borrow_all(folder)] if is_url(folder) else find_runs(where)
    if not found:
        console.print(
            f"no runs in {folder if is_url(folder) else where.absolute()}; start one with `rally train RECIPE`",
            markup=False,
        )
        return
    print_runs(console, found, now=time.time())


_EACH = 2


def show(
    run: str,
    *,
    step: int | None,
    best: int | None,
    worst: int | None,
    failed: int | None,
    validation: bool,
    full: bool,
) -> None:
    """Print rollouts of a step of a run, or of a recipe's newest run."""
    from rallypoint.run.rollouts import read_rollouts  # only now torch

    rows = read_rollouts(run_of(run), step, "validation" if validation else "step")
    if best is worst is failed is None:
        best = worst = failed = _EACH
    chosen = choose(rows, best=best or 0, worst=worst or 0, failed=failed or 0)
    print_rollouts(Console(highlight=False), rows, chosen, max_lines=None if full else MAX_LINES)


def write_traces(run: str, file: str, *, step: int | None, validation: bool) -> None:
    """Write the rollouts of a step as training traces, a line of JSON each."""
    from rallypoint.run.rollouts import read_rollouts  # only now torch
    from rallypoint.sampling.traces import trace_of

    rows = read_rollouts(run_of(run), step, "validation" if validation else "step")
    Path(file).write_text("".join(json.dumps(trace_of(row)) + "\n" for row in rows))
    Console(highlight=False).print(f"{counted(len(rows), 'rollout')} of step {rows[0]['step']} in {file}", markup=False)


def write_trace(names: Sequence[str], steps: str, file: str | None, collector: str | None) -> None:
    """Write some steps of a run as a trace, or send them to a collector of OpenTelemetry.

    Raises:
        RunFolderError: the steps are not as expected, or none of them is done.
        ExportError: the collector does not take them.
    """
    from rallypoint.run.trace import otlp, send, trace

    found = re.fullmatch(r"(\d+)(?::(\d+))?", steps)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
    if not 1 <= first <= last:
        raise RunFolderError(f"{steps}: expected steps as FIRST:LAST, such as 10:20, counted from 1")
    folder, *others = runs_of(names)
    if others:
        raise RunFolderError(f"expected one run with --trace, found {len(others) + 1}")
    drawn = trace(read_journal(RunFolder(folder).journal), range(first, last + 1))
    if collector is not None:
        send(collector, otlp(folder.absolute().name, drawn))
        return
    path = Path(file or f"trace-{first}-{last}.json")
    with naming(path):
        path.write_text(json.dumps(drawn))
    num = counted(len(drawn["traceEvents"]), "event")
    Console(highlight=False).print(f"{num} in {path}: open it at https://ui.perfetto.dev", markup=False, soft_wrap=True)


_LOOK_AGAIN_S = 0.5
_NAMES_AN_ERROR = re.compile(r"\b\w*(Error|Exception|Traceback)\b")


def print_logs(run: str, *, errors: bool, follow: bool) -> None:
    """Print what a run has said, with its failures whole.

    Args:
        run: folder or name.
        errors: whether to print failures alone.
        follow: whether to go on, with what it says from now on, until its newest start ends.
    """
    folder, console, step = RunFolder(run_of(run)), Console(highlight=False), 0
    tail = JournalTail(folder.journal)
    while True:
        has_ended, goes_on = False, follow and folder.is_in_use()
        for entry in tail.read():
            assert isinstance(entry, Entry), "nothing is read later"
            has_ended = isinstance(entry.event, RunEnded)
            match entry.event:
                case RunBegan(first=first):
                    step = first + 1
                case StepDone():
                    step = entry.event.step + 1
                case _:
                    pass
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time_s))
            for number, line in enumerate(_said(entry.event, errors=errors)):
                head = f"{at} step {step:<5} " if number == 0 else "  "
                console.print(head + line, markup=False, soft_wrap=True)
        if has_ended or not goes_on:
            return
        time.sleep(_LOOK_AGAIN_S)


def _said(event: Event, *, errors: bool) -> Iterator[str]:
    """Yield the lines of an event, cleaned; none if it is not asked for."""
    text, is_failure = "", True
    match event:
        case Said(text=text, level=level) if level != "wait":
            is_failure = _NAMES_AN_ERROR.search(text) is not None
        case RolloutFailed(prompt=prompt, sample=sample, why=why, reason=reason):
            text = f"rollout failed, prompt {prompt}, sample {sample}: {why}: {reason}"
        case RoleLost(role=role, rank=rank, why=why):
            text = f"lost {role} rank {rank}: {why}"
        case RolesRestarted(seconds=seconds, processes=processes):
            text, is_failure = f"started again after {seconds:.1f} s: {', '.join(processes)}", False
        case RunEnded(how=how, why=why):
            text, is_failure = f"{how}: {why}" if why else how, how == "failed"
        case RunBegan(first=first):
            text, is_failure = f"begun after step {first}", False
        case _:
            return
    if is_failure or not errors:
        for line in text.splitlines():
            yield " " * (len(line) - len(line.lstrip(" "))) + clean(line)


def print_difference(a: str, b: str) -> bool:
    """Print what differs in config and packages, and the first step and place in which two runs part.

    Returns:
        Whether the steps that both have done are equal.
    """
    from rallypoint.run.comparison import compare_runs  # only now torch

    say, found = Console(highlight=False, markup=False, soft_wrap=True).print, compare_runs(run_of(a), run_of(b))
    _list(say, "config", found.config)
    _list(say, "config, on which no weight depends", found.free)
    _list(say, "files", found.files)
    _list(say, "packages and machine", found.around)
    compared = f"{counted(found.num_compared, 'step')} that both have done"
    if found.first is None:
        say(f"equal in the {compared}" if found.num_compared else "nothing to compare: no step that both have done")
        return True
    say(f"first difference: step {found.first.step}, {found.first.what}, of the {compared}")
    for line in found.where or (f"{found.first.of_a}  |  {found.first.of_b}",):
        say(f"  {line}")
    return False


def _list(say: Callable[[str], None], title: str, changes: Sequence[Change]) -> None:
    if changes:
        say(title)
        for one in changes:
            say(f"  {one.key}: {shown(one.of_a)}  |  {shown(one.of_b)}")


def run_of(name: str) -> Path:
    """Return the folder of a run by its path, name or URL, or the newest run of a recipe."""
    if is_url(name):
        return borrow(name)
    return Path(name) if Path(name).is_dir() else newest_of(name, ())


def runs_of(names: Sequence[str]) -> list[Path]:
    """Return the folders of runs by name; of no name, that of the run below `runs` that changed last.

    Raises:
        RunFolderError: there is none.
    """
    if names:
        return [run_of(name) for name in names]
    folder = Path(TrainerConfig().runs_dir)
    found = find_runs(folder) if folder.is_dir() else []
    if not found:
        raise RunFolderError(f"no runs in {folder.absolute()}; name the folder of one: rally view FOLDER")
    return [found[0].path]


_STYLES: dict[State, tuple[str, str]] = {
    "running": ("▶", f"bold {SKY}"),
    "elsewhere": ("▶", SKY),
    "silent": ("?", PALETTE["watch"]),
    "finished": ("●", GREEN),
    "stopped": ("‖", PALETTE["watch"]),
    "failed": ("✖", f"bold {VERMILION}"),
    "killed": ("✖", VERMILION),
    "damaged": ("✖", VERMILION),
}
"""Mark and style of a state; the mark says the same without colour."""
_CURVE_CELLS, _MAX_WHY = 10, 200
_CURVE = " "
_SPARE = (_CURVE, "best", "age", "recipe", "score", "step")
"""Columns to do without where all do not fit, in this order."""


def print_runs(console: Console, runs: Sequence[Overview], *, now: float) -> None:
    """Print a line for each run, and below the reasons of those that failed.

    Args:
        console: to print to.
        runs: in the order of the lines.
        now: seconds since the epoch, for ages.
    """
    unbounded = console.options.update(width=10_000)
    tables = (_table(runs, now, without=_SPARE[:count]) for count in range(len(_SPARE) + 1))
    sized = [(table, Measurement.get(console, unbounded, table).maximum) for table in tables]
    table = next((table for table, width in sized if width <= console.width), sized[-1][0])
    console.print(table, crop=False, no_wrap=True)
    if any(run.scores and not run.is_validated for run in runs):
        console.print("* mean reward of a step: the run has no validation", style="dim")
    for run in runs:
        if run.why:
            said = shorten(f"{clean(run.path.name)}: {clean(run.why)}", _MAX_WHY)
            console.print(Text(said, PALETTE["wrong"]), soft_wrap=True)


def _table(runs: Sequence[Overview], now: float, without: Sequence[str]) -> Table:
    """Return it without some columns; a name is never cut, for it is what other commands take."""
    columns: dict[str, list[Text]] = {
        "run": [Text(clean(run.path.name), "bold") for run in runs],
        "recipe": [Text(clean(run.recipe)) for run in runs],
        "state": [Text(f"{_STYLES[run.state][0]} {run.state}", _STYLES[run.state][1]) for run in runs],
        "step": [Text(f"{run.step}/{run.num_steps}") for run in runs],
        "score": [Text(_score(run), PALETTE["reward"]) for run in runs],
        "best": [
            Text.assemble(_number(run.best[1]), (f" @{run.best[0]}", "dim") if run.scores else "") for run in runs
        ],
        _CURVE: [
            Text("".join(sparkline([score for _, score in run.scores], _CURVE_CELLS)), PALETTE["validation"])
            for run in runs
        ],
        "age": [Text(age(now - run.changed), "dim") for run in runs],
    }
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    shown = [name for name in columns if name not in without]
    for name in shown:
        justify = "right" if name in {"step", "score", "best", "age"} else "left"
        cells = max(column.cell_len for column in columns[name])
        table.add_column(name.strip(), justify=justify, no_wrap=True, min_width=cells)
    for row in zip(*(columns[name] for name in shown), strict=True):
        table.add_row(*row)
    return table


def _score(run: Overview) -> str:
    return _number(run.last) + ("*" if run.scores and not run.is_validated else "")


def age(seconds: float) -> str:
    """Write how long ago something was, in its largest unit.

    >>> [age(seconds) for seconds in (-1.0, 59.0, 90.0, 7200.0, 200_000.0)]
    ['0 s', '59 s', '1 min', '2 h', '2 d']
    """
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
