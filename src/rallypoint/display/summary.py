"""The last screen of a run: how it went, where its things are, what to do next, where its time went.

No frame is drawn around it and no line of it is broken, so that paths and commands can be copied. Every row has a rank.
On a terminal rows of the highest rank are left out, always all of a rank, until the result in the first line can be
seen together with the last one; then `summary.txt` in the folder of the run has all.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from rallypoint.display.text import clean, clock_time, wrap
from rallypoint.display.theme import LEVELS, PALETTE, phase_colours
from rallypoint.observability.numbers import compact, counted, number
from rallypoint.observability.spans import START, shares_of
from rallypoint.run.folder import RunFolder
from rallypoint.run.reports import Summary
from rallypoint.run.waste import Account

LABEL, BAR = 14, 36
MAX_NOTES, FIRST_NOTE_LINES, MAIN_PHASES = 5, 5, 3
REST = "summary.txt"

_Rows = list[tuple[int, Text]]
"""Lines with their ranks: 0 stays, 9 goes first."""
_SPACE, _MEMORY, _DETAIL, _MORE_PHASES, _MORE_NOTES, _TOKENS, _PHASES, _AGREEMENT = 9, 8, 7, 6, 5, 4, 3, 2


def print_summary(console: Console, summary: Summary, notes: Mapping[str, int]) -> None:
    """Print the summary; `notes` are warnings given on the way, each with how often."""
    rows: _Rows = [(_SPACE, Text("")), (0, _heading(summary, console.width)), (_SPACE, Text(""))]
    rows += [*_results(summary), (_SPACE, Text("")), *_places(summary), (_SPACE, Text("")), *_commands(summary)]
    rows += [*_phases(summary, console.width), *_notes(summary, notes, console.width)]
    rest = _row("", f"all of it: {summary.run_dir / REST}").plain  # where rows are left out
    room = console.height - 2 - max(2, math.ceil(cell_len(rest) / console.width))
    kept = _fitting(rows, console.width, room) if console.is_terminal else rows
    for _, line in kept:
        console.print(line, soft_wrap=True)
    if {rank for rank, _ in rows} - {rank for rank, _ in kept} - {_SPACE}:
        console.print(_row("", _written(rows, summary), "dim"), soft_wrap=True)


def _fitting(rows: _Rows, width: int, height: int) -> _Rows:
    """Leave out ranks, the highest first, until the lines that a terminal makes of the rows are at most so many."""
    while sum(max(math.ceil(cell_len(line.plain) / width), 1) for _, line in rows) > height:
        highest = max(rank for rank, _ in rows)
        if highest == 0:
            break
        rows = [(rank, line) for rank, line in rows if rank != highest]
    return rows


def _written(rows: _Rows, summary: Summary) -> str:
    """Write all of it into the folder of the run, and say where."""
    page = Console(file=io.StringIO(), color_system=None, force_terminal=False, width=80)
    with page.capture() as text:
        for _, line in rows:
            page.print(line, soft_wrap=True)
    path = summary.run_dir / REST
    with contextlib.suppress(OSError):
        path.write_text(text.get(), encoding="utf-8")
        return f"all of it: {clean(str(path))}"
    return "a higher terminal shows more"


def _heading(summary: Summary, width: int) -> Text:
    name = clean(summary.name)
    heading = Text().append("━━ ", style=PALETTE["frame"]).append(f"{name} finished", style="bold")
    return heading.append(" " + "━" * max(min(width, 80) - len(heading) - 1, 0), style=PALETTE["frame"])


def _row(label: str, value: str = "", style: str = "") -> Text:
    return Text().append(f"  {label:<{LABEL}}", style=PALETTE["quiet"]).append(value, style=style)


def _results(summary: Summary) -> _Rows:
    rows: _Rows = []
    if summary.validations:
        rows.append((0, _validation(summary)))
    elif summary.course is not None:
        label, first, last, num_steps = summary.course
        row = _row(label, f"{number(first)} → ").append(number(last), style=f"bold {PALETTE['reward']}")
        what = "first and last step" if num_steps == 1 else f"means of the first and the last {num_steps} steps"
        rows.append((0, row.append(f"   {what}", style=PALETTE["quiet"])))
    pace = f" of {number(summary.step_s)} s (median)" if math.isfinite(summary.step_s) else ""
    if (start_s := summary.phases.get(START, 0.0)) > 0:
        pace += f", start-up {number(start_s)} s"
    time = _row("time", clock_time(summary.seconds))
    rows.append((0, time.append(f"   {counted(summary.num_steps, 'step')}{pace}", style=PALETTE["quiet"])))
    if summary.num_tokens_sampled:
        trained = f"   {compact(summary.num_tokens_trained)} trained" if summary.num_tokens_trained else ""
        row = _row("tokens", f"{compact(summary.num_tokens_sampled)} sampled")
        rows.append((_TOKENS, row.append(trained, style=PALETTE["quiet"])))
    if (account := summary.account) is not None and account.wastes:
        rows.append((_TOKENS, _row("for nothing", in_short(account)).append("   rally waste", PALETTE["quiet"])))
    if (agreement := summary.agreement) is not None:
        rows.append((_AGREEMENT, _row("agreement", agreement.gaps)))
        rows.append((_DETAIL, _row("", clean(agreement.worst), PALETTE["quiet"])))
    for index, (role, (measured, predicted)) in enumerate(summary.memory_gib.items()):
        beside = "" if predicted is None else f" predicted {_size(predicted)}"
        row = _row("" if index else "memory", _size(measured))
        rows.append((_MEMORY, row.append(f"   {clean(role)}{beside}", style=PALETTE["quiet"])))
    return rows


def in_short(account: Account) -> str:
    """Say in a line what a run has wasted, and by which cause most.

    >>> from rallypoint.run.waste import Waste
    >>> waste = Waste("done again", 2, "step", 80, 2.0)
    >>> in_short(Account(seconds=8.0, tokens=160, wastes=(waste,)))
    '50.0% of tokens, 25.0% of seconds, most of them done again'
    """
    shares = {"tokens": (account.tokens_wasted, account.tokens), "seconds": (account.seconds_wasted, account.seconds)}
    said = ", ".join(f"{part / whole:.1%} of {name}" for name, (part, whole) in shares.items() if whole)
    return f"{said}, most of them {account.wastes[0].cause}"


def _validation(summary: Summary) -> Text:
    (_, first), (_, last) = summary.validations[0], summary.validations[-1]
    sign = -1.0 if summary.validated == "loss" else 1.0
    best_step, best = max(summary.validations, key=lambda pair: -math.inf if math.isnan(pair[1]) else sign * pair[1])
    row = _row("val loss" if summary.validated == "loss" else "validation")
    if len(summary.validations) > 1:
        row.append(f"{number(first)} → ")
    row.append(number(last), style=f"bold {PALETTE['validation']}")
    return row.append(f"   best {number(best)} at step {best_step}", style=PALETTE["quiet"])


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"


def _places(summary: Summary) -> _Rows:
    rows: _Rows = [(0, _row("run folder", clean(str(summary.run_dir))))]
    rows.append((_AGREEMENT, _row("report", clean(str(RunFolder(summary.run_dir).report)))))
    if summary.curve is not None:
        rows.append((_AGREEMENT, _row("curve", clean(str(summary.curve)))))
    else:
        rows.append((_AGREEMENT, _row("curve", f"not drawn: {clean(summary.why_no_curve)}")))
    if summary.checkpoints:
        rows.append((0, _row("checkpoint", clean(str(summary.checkpoints[-1])))))
        if len(summary.checkpoints) > 1:
            rows.append((_DETAIL, _row("", f"and {len(summary.checkpoints) - 1} older beside it", "dim")))
    return rows


def _commands(summary: Summary) -> _Rows:
    rows: _Rows = [
        (0, _row(clean(verb), clean(command), PALETTE["accent"])) for verb, command in summary.commands.items()
    ]
    return [*rows, (_SPACE, Text(""))] if rows else []


def _phases(summary: Summary, width: int) -> _Rows:
    """Draw each phase's share of the time; `other` is what no phase covers."""
    shares = shares_of(summary.phases, summary.seconds)
    if not shares:
        return []
    colours, largest = phase_colours(shares), max(shares.values())
    cells = max(min(BAR, width - LABEL - 22), 4)
    whole = max(summary.seconds, sum(summary.phases.values()))
    main = sorted(shares, key=lambda name: -shares[name])[:MAIN_PHASES]
    rows: _Rows = []
    for name, share in shares.items():
        filled = max(1, round(cells * share / largest)) if share > 0 else 0
        row = _row(clean(name))
        row.append("█" * filled + " " * (cells - filled), style=colours[name])
        row.append(f"{share:>6.1%}")
        row.append(f"{share * whole:>9.1f} s", style=PALETTE["quiet"])
        rows.append((_PHASES if name in main else _MORE_PHASES, row))
    return [*rows, (_SPACE, Text(""))]


def _notes(summary: Summary, notes: Mapping[str, int], width: int) -> _Rows:
    counts = [message if count == 1 else f"{message} ({count} times)" for message, count in notes.items()]
    texts = list(dict.fromkeys((*summary.notes, *counts)))
    mark, style = LEVELS["watch"]
    rows: _Rows = []
    for text in texts[:MAX_NOTES]:
        for line in wrap(clean(text), max(width - LABEL - 2, 20)):
            rank = 0 if len(rows) < FIRST_NOTE_LINES else _MORE_NOTES
            rows.append((rank, _row("" if rows else f"{mark} note", line, style)))
    if len(texts) > MAX_NOTES:
        rows.append((0, _row("", f"and {len(texts) - MAX_NOTES} more: see the run's logs", "dim")))
    return [*rows, (_SPACE, Text(""))] if rows else []
