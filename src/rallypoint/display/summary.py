"""The last screen of a run: how it went, where its time went, where its things are, what to do next.

No frame is drawn around it and no line of it is broken, so that paths and commands can be copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from rallypoint.display.text import clean, clock_time, wrap
from rallypoint.display.theme import LEVELS, PALETTE, phase_colours
from rallypoint.observability.numbers import compact, number
from rallypoint.observability.spans import START, shares_of
from rallypoint.run.reports import Summary

LABEL, BAR = 14, 36
MAX_NOTES = 5


def print_summary(console: Console, summary: Summary, notes: Mapping[str, int]) -> None:
    """Print the summary; `notes` are warnings given on the way, each with how often."""
    lines = [Text(""), _heading(summary, console.width), Text("")]
    lines += [*_results(summary), Text(""), *_phases(summary, console.width)]
    lines += [*_places(summary), Text(""), *_commands(summary), *_notes(summary, notes, console.width)]
    for line in lines:
        console.print(line, soft_wrap=True)


def _heading(summary: Summary, width: int) -> Text:
    name = clean(summary.name)
    heading = Text().append("━━ ", style=PALETTE["frame"]).append(f"{name} finished", style="bold")
    return heading.append(" " + "━" * max(min(width, 80) - len(heading) - 1, 0), style=PALETTE["frame"])


def _row(label: str, value: str = "", style: str = "") -> Text:
    return Text().append(f"  {label:<{LABEL}}", style=PALETTE["quiet"]).append(value, style=style)


def _results(summary: Summary) -> list[Text]:
    rows: list[Text] = []
    if summary.validations:
        (_, first), (_, last) = summary.validations[0], summary.validations[-1]
        sign = -1.0 if summary.validated == "loss" else 1.0
        best_step, best = max(
            summary.validations, key=lambda pair: -math.inf if math.isnan(pair[1]) else sign * pair[1]
        )
        row = _row("val loss" if summary.validated == "loss" else "validation")
        if len(summary.validations) > 1:
            row.append(f"{number(first)} → ")
        row.append(number(last), style=f"bold {PALETTE['validation']}")
        rows.append(row.append(f"   best {number(best)} at step {best_step}", style=PALETTE["quiet"]))
    pace = f" of {number(summary.step_s)} s (median)" if math.isfinite(summary.step_s) else ""
    if (start_s := summary.phases.get(START, 0.0)) > 0:
        pace += f", start-up {number(start_s)} s"
    rows.append(_row("time", clock_time(summary.seconds)))
    rows[-1].append(f"   {summary.num_steps} steps{pace}", style=PALETTE["quiet"])
    if summary.num_tokens_sampled:
        trained = f"   {compact(summary.num_tokens_trained)} trained" if summary.num_tokens_trained else ""
        rows.append(_row("tokens", f"{compact(summary.num_tokens_sampled)} sampled"))
        rows[-1].append(trained, style=PALETTE["quiet"])
    if (agreement := summary.agreement) is not None:
        rows += [_row("agreement", agreement.gaps), _row("", clean(agreement.worst), PALETTE["quiet"])]
    for index, (role, (measured, predicted)) in enumerate(summary.memory_gib.items()):
        rows.append(_row("" if index else "memory", _size(measured)))
        beside = "" if predicted is None else f" predicted {_size(predicted)}"
        rows[-1].append(f"   {clean(role)}{beside}", style=PALETTE["quiet"])
    return rows


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{1024 * gib:.0f} MiB"


def _phases(summary: Summary, width: int) -> list[Text]:
    """Draw each phase's share of the time; `other` is what no phase covers."""
    shares = shares_of(summary.phases, summary.seconds)
    if not shares:
        return []
    colours, largest = phase_colours(shares), max(shares.values())
    cells = max(min(BAR, width - LABEL - 22), 4)
    whole = max(summary.seconds, sum(summary.phases.values()))
    rows: list[Text] = []
    for name, share in shares.items():
        filled = max(1, round(cells * share / largest)) if share > 0 else 0
        row = _row(clean(name))
        row.append("█" * filled + " " * (cells - filled), style=colours[name])
        row.append(f"{share:>6.1%}")
        rows.append(row.append(f"{share * whole:>9.1f} s", style=PALETTE["quiet"]))
    return [*rows, Text("")]


def _places(summary: Summary) -> list[Text]:
    rows = [_row("run folder", clean(str(summary.run_dir)))]
    if summary.curve is not None:
        rows.append(_row("curve", clean(str(summary.curve))))
    else:
        rows.append(_row("curve", f"not drawn: {clean(summary.why_no_curve)}"))
    if summary.checkpoints:
        rows.append(_row("checkpoint", clean(str(summary.checkpoints[-1]))))
        if len(summary.checkpoints) > 1:
            rows.append(_row("", f"and {len(summary.checkpoints) - 1} older beside it", "dim"))
    return rows


def _commands(summary: Summary) -> list[Text]:
    rows = [_row(clean(verb), clean(command), PALETTE["accent"]) for verb, command in summary.commands.items()]
    return [*rows, Text("")] if rows else []


def _notes(summary: Summary, notes: Mapping[str, int], width: int) -> list[Text]:
    counted = [message if count == 1 else f"{message} ({count} times)" for message, count in notes.items()]
    texts = list(dict.fromkeys((*summary.notes, *counted)))
    mark, style = LEVELS["watch"]
    rows: list[Text] = []
    for text in texts[:MAX_NOTES]:
        for line in wrap(clean(text), max(width - LABEL - 2, 20)):
            rows.append(_row("" if rows else f"{mark} note", line, style))
    if len(texts) > MAX_NOTES:
        rows.append(_row("", f"and {len(texts) - MAX_NOTES} more: see the run's logs", "dim"))
    return [*rows, Text("")] if rows else []
