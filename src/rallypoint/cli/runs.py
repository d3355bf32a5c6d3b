"""`rally runs`, `rally show` and `rally diff`: which runs there are, what one has sampled, and where two part.

The texts of rollouts are the model's and the data's: they are cleaned before they reach a terminal.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rallypoint.config import shown
from rallypoint.display.text import clean, shorten, sparkline, wrap
from rallypoint.display.theme import GREEN, PALETTE, SKY, VERMILION
from rallypoint.journal import Change
from rallypoint.observability.numbers import counted, finite_mean
from rallypoint.prepare.preflight import newest_of
from rallypoint.run.overview import Overview, State, find_runs


def list_runs(folder: str) -> None:
    """Print the runs below a folder, the newest first."""
    console, found = Console(highlight=False), find_runs(Path(folder).expanduser())
    if not found:
        console.print(f"no runs in {Path(folder).absolute()}; start one with `rally train RECIPE`", markup=False)
        return
    print_runs(console, found, now=time.time())


_EACH = 2
_MAX_LINES = 12
"""Lines of each text, without --full."""
_FIRST_TURNS, _LAST_TURNS = 6, 2
"""Turns of a rollout that are printed, without --full."""


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
    print_rollouts(Console(highlight=False), rows, chosen, max_lines=None if full else _MAX_LINES)


def write_traces(run: str, file: str, *, step: int | None, validation: bool) -> None:
    """Write the rollouts of a step as training traces, a line of JSON each."""
    from rallypoint.run.rollouts import read_rollouts  # only now torch
    from rallypoint.sampling.traces import trace_of

    rows = read_rollouts(run_of(run), step, "validation" if validation else "step")
    Path(file).write_text("".join(json.dumps(trace_of(row)) + "\n" for row in rows))
    Console(highlight=False).print(f"{counted(len(rows), 'rollout')} of step {rows[0]['step']} in {file}", markup=False)


def print_difference(a: str, b: str) -> bool:
    """Print what differs in config and packages, and the first step and place in which two runs part.

    Returns:
        Whether the steps that both have done are equal.
    """
    from rallypoint.run.comparison import compare_runs  # only now torch

    console, found = Console(highlight=False), compare_runs(run_of(a), run_of(b))

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

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
    """Return the folder of a run by its path or name, or the newest run of a recipe."""
    return Path(name) if Path(name).is_dir() else newest_of(name, ())


Row = Mapping[str, Any]
"""A rollout by the columns of docs/tracking.md."""

_LABEL_CELLS, _WIDEST = 13, 120
_MAX_CHARS = 20_000
"""Characters of one line of a text that are looked at."""


def choose(rows: Sequence[Row], *, best: int, worst: int, failed: int) -> dict[str, list[Row]]:
    """Return the rollouts to show, under a title each; none twice, and of equal scores the first.

    >>> rows = [{"score": score} for score in (0.0, 1.0, None, 0.5)]
    >>> choose(rows, best=1, worst=9, failed=1)
    {'best': [{'score': 1.0}], 'worst': [{'score': 0.0}, {'score': 0.5}], 'without a score': [{'score': None}]}
    """
    scored = sorted((row for row in rows if row["score"] is not None), key=lambda row: -row["score"])
    found = {
        "best": scored[:best],
        "worst": sorted(scored[best:], key=lambda row: row["score"])[:worst],
        "without a score": [row for row in rows if row["score"] is None][:failed],
    }
    return {title: chosen for title, chosen in found.items() if chosen}


def print_rollouts(
    console: Console, rows: Sequence[Row], chosen: Mapping[str, Sequence[Row]], *, max_lines: int | None
) -> None:
    """Print a line on all rollouts of a step, and the chosen ones.

    Args:
        console: to print to.
        rows: all of the step.
        chosen: some of them, by title.
        max_lines: lines of each text; None for all.
    """
    width = min(console.width, _WIDEST)
    console.print(_heading(rows))
    for title, some in chosen.items():
        for number, row in enumerate(some, 1):
            console.print()
            console.print(Rule(_title(f"{title} {number}", row), align="left", style=PALETTE["frame"]), width=width)
            console.print(Group(*_body(row, width, max_lines)))
    console.print()


def _heading(rows: Sequence[Row]) -> Text:
    scores = [row["score"] for row in rows if row["score"] is not None]
    prompts = len({row["prompt_index"] for row in rows})
    lengths = [sum(row["loss_mask"]) for row in rows]
    text = Text(f"step {rows[0]['step']}", "bold")
    text.append(f"  {len(rows)} rollouts of {prompts} prompts", "not bold")
    if scores:
        mean = finite_mean(scores)
        text.append(f"  score {mean:.3f}", PALETTE["reward"])
        text.append(f" (from {min(scores):.3f} to {max(scores):.3f})", "not bold dim")
    if without := len(rows) - len(scores):
        text.append(f"  {without} without a score", PALETTE["wrong"])
    cut = sum(row["finish_reason"] == "length" for row in rows)
    text.append(f"  {sum(lengths) / len(rows):.0f} tokens, {cut / len(rows):.0%} cut off", "not bold dim")
    return text


def _title(title: str, row: Row) -> Text:
    score = "no score" if row["score"] is None else f"score {row['score']:.3f}"
    return Text.assemble(
        (title, "dim"),
        "  ",
        (score, f"bold {PALETTE['wrong' if row['score'] is None else 'reward']}"),
        f"  {clean(row['name'])} ",
        (f"prompt {row['prompt_index']}, sample {row['sample_index']} ", "dim"),
    )


def _body(row: Row, width: int, max_lines: int | None) -> Iterable[Text]:
    cells = width - _LABEL_CELLS
    if row.get("turns"):  # which files of older versions lack
        yield from _conversation(row, cells, max_lines)
    else:
        yield from _labelled("prompt", _lines(row["prompt"], cells, max_lines))
        yield from _labelled("response", _lines(row["response"], cells, max_lines))
    yield from _labelled("truth", _lines(row["ground_truth"], cells, max_lines))
    if row["failure"] is not None:
        yield from _labelled("failure", _lines(row["failure"], cells, max_lines), PALETTE["wrong"])
    numbers = {**(row["reward_parts"] or {}), **(row["reward_extras"] or {})}
    if numbers:
        yield from _labelled("rewards", wrap(_named(numbers), cells))
    if counted_by_episode := _counted(row):
        yield from _labelled("metrics", wrap(counted_by_episode, cells))
    yield from _labelled("tokens", wrap(_tokens(row), cells), "dim")


def _conversation(row: Row, cells: int, max_lines: int | None) -> Iterable[Text]:
    """Print what was said, turn by turn; turns in the middle of many are left out, and that is said."""
    turns: Sequence[Row] = row["turns"]
    left_out = range(0) if max_lines is None else range(_FIRST_TURNS, len(turns) - _LAST_TURNS)
    for number, turn in enumerate(turns):
        if number in left_out:
            if number == left_out.start:
                yield from _labelled("", [f"... {counted(len(left_out), 'more turn')} (--full)"])
            continue
        if turn["parent"] != number - 1:
            where = "begins anew" if turn["parent"] < 0 else f"goes on after turn {turn['parent'] + 1}"
            yield from _labelled("", [f"turn {number + 1} {where}:"], "dim")
        for message in turn["said"]:
            yield from _labelled(clean(message["role"]) or "context", _lines(message["text"], cells, max_lines))
        yield from _labelled(f"policy {number + 1}", _lines(turn["response"], cells, max_lines), "bold")
        yield from _labelled("", wrap(_turn_tokens(row, turn), cells), "dim")


def _turn_tokens(row: Row, turn: Row) -> str:
    """Say how long a response is, how likely it was, what it got, and at which limit it was cut off."""
    begin = turn["start"] - len(row["prompt_ids"])
    said = slice(begin, begin + turn["length"])
    if not turn["length"]:
        return "no token"
    parts = [counted(turn["length"], "token"), _perplexity(row["rollout_logprobs"][said])]
    if row["token_rewards"] is not None:
        parts.append(f"reward {math.fsum(row['token_rewards'][said]):.4g}")
    return ", ".join([*parts, *([f"cut off ({turn['limit']} limit)"] if turn["limit"] else [])])


def _counted(row: Row) -> str:
    """Say what an episode counted, and what it took; nothing of rollouts without one."""
    parts = [_named(row["metrics"])] if row.get("metrics") else []
    if row.get("num_tool_calls"):
        parts.append(f"{counted(row['num_tool_calls'], 'tool call')}, {row['num_tool_errors']} of them failed")
    if row.get("environment_s"):
        parts.append(f"{row['environment_s']:.3g} s in the environment")
    return ", ".join(parts)


def _named(numbers: Mapping[str, float | None]) -> str:
    return ", ".join(f"{clean(name)} {'none' if value is None else f'{value:.4g}'}" for name, value in numbers.items())


def _perplexity(logprobs: Sequence[float]) -> str:
    return f"perplexity {math.exp(min(-finite_mean(logprobs), 700.0)):.3g}"


def _tokens(row: Row) -> str:
    """Say in words how long a response is, how it ended, how likely it was, and what was learned from it."""
    sampled = row["loss_mask"]
    logprobs = [value for value, mine in zip(row["rollout_logprobs"], sampled, strict=True) if mine]
    ended = "cut off at the limit" if row["finish_reason"] == "length" else "ended by itself"
    parts = [f"{len(row['prompt_ids'])} + {sum(sampled)}, {ended}"]
    breaks = sum(not sampled[place - 1] for place in range(1, len(sampled)) if sampled[place])
    if (turns := len(row.get("turns") or ()) or breaks + 1) > 1:
        parts.append(f"{turns} turns")
    if starts := sum(row.get("sequence_starts") or ()):
        parts.append(f"{starts + 1} sequences")
    if logprobs:
        parts.append(_perplexity(logprobs))
    if row["advantages"]:
        learned = [value for value, mine in zip(row["advantages"], sampled, strict=True) if mine]
        parts.append(f"advantage {finite_mean(learned):+.3f}")
    return ", ".join([*parts, f"version {row['version']}"])


def _lines(text: str, width: int, max_lines: int | None) -> list[str]:
    """Break a text into lines of a terminal; the middle of a long one is left out, and that is said."""
    lines = [part for line in text.strip("\n").split("\n") for part in wrap(clean(line, _MAX_CHARS), width) or [""]]
    if max_lines is None or len(lines) <= max_lines:
        return lines
    head = max(1, max_lines * 2 // 3)
    tail = max(max_lines - head - 1, 0)
    left_out = f"... {len(lines) - head - tail} more lines (--full)"
    return [*lines[:head], left_out, *lines[len(lines) - tail :]]


def _labelled(label: str, lines: Sequence[str], style: str = "") -> Iterable[Text]:
    for number, line in enumerate(lines or [""]):
        text = Text(f"{label if number == 0 else '':{_LABEL_CELLS}}", PALETTE["quiet"])
        yield text.append(line, style or "not dim")


_STYLES: dict[State, tuple[str, str]] = {
    "running": ("▶", f"bold {SKY}"),
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
