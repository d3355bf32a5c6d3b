"""The frame of the live panel: a pure function from the state of a run, a width and a height to what a terminal shows.

Every row has a rank. On a low terminal, rows of the highest rank are dropped first, always all of a rank. On a high
one, texts of the model and notes get as many lines as they need, and the chart grows. A frame fits the terminal and
keeps its height from step to step: longer texts make it grow, nothing makes it shrink.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.cells import cell_len
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from rallypoint.display.state import Board
from rallypoint.display.text import bar_cells, clean, clock_time, fit, limits, resample, shorten, sparkline, stretch
from rallypoint.display.theme import LEVELS, PALETTE, phase_colours
from rallypoint.observability.numbers import compact, number

LONG_WAIT_S = 20.0
"""Seconds after which a wait is coloured."""

LABEL, VALUE, NARROW_VALUE, SIDE, AXIS = 12, 16, 9, 13, 7
"""Cells of the columns left of a drawing, and right of it; of a chart the latter has the numbers of its axis."""
LOW = 13
"""With less than this many lines inside the frame, the chart is one line."""
NARROW = 50
"""With fewer cells inside the frame, values are written in their shortest form."""
MAX_NOTE_LINES, MAX_CHART_LINES = 8, 6

NUMBERS: tuple[tuple[str, str], ...] = (
    ("actor/loss", "loss"),
    ("actor/entropy", "entropy"),
    ("actor/approx_kl", "update kl"),
    ("kl/reference_mean", "reference kl"),
    ("actor/clip_fraction", "clip"),
    ("actor/grad_norm", "grad"),
    ("rollout/response_length", "length"),
    ("critic/explained_variance", "explained"),
)
"""Scalars below the chart, with their short names, the most wanted first: what does not fit is left out."""

_Rows = list[tuple[int, Text]]
"""Lines with their ranks: 0 stays, 9 goes first."""
_SPACE, _MORE_NUMBERS, _TEXTS, _LEGEND, _NUMBERS, _ADVICE, _TIME, _NOTE, _CHART = 9, 8, 7, 6, 5, 4, 3, 2, 1


def render(state: Board, width: int, height: int) -> Panel:
    """Draw the state of a run, `width` cells wide, in at most `height - 1` lines: the cursor has the last one."""
    inner, room = max(width - 6, 1), max(height - 1 - 2, 1)
    rows: _Rows = [(_SPACE, Text()), (0, _step_row(state, inner)), *_waiting_rows(state, inner)]
    if state.report is not None:
        rows += _scores(state, inner, room) + _health(state, inner) + _time(state, inner)
        rows += [(_SPACE, Text()), *_numbers(state.watched, state.report.scalars, inner)]
    rows += _texts_and_notes(state, inner, room - len(rows) - 1)
    rows.append((_SPACE, Text()))
    while len(rows) > room and rows:
        lowest = max(rank for rank, _ in rows)
        rows = [(rank, line) for rank, line in rows if rank != lowest] if lowest else rows[:room]
    for _, line in rows:
        line.no_wrap, line.overflow = True, "crop"
    return Panel(
        Group(*(line for _, line in rows)),
        title=_title(state, inner),
        subtitle=_subtitle(state, inner),
        title_align="left",
        subtitle_align="left",
        border_style=PALETTE["frame"],
        padding=(0, 2),
        width=width,
    )


def _title(state: Board, inner: int) -> Text:
    title = Text("rallypoint", style="bold")
    if state.run is not None:
        name = shorten(clean(f"{state.run.algorithm} · {state.run.name}"), max(inner - 14, 4))
        title.append(f"  {name}", style=PALETTE["accent"])
    return title


def _subtitle(state: Board, inner: int) -> Text:
    """Say how long it has been at work, where its folder is, and what runs where, each whole or not at all."""
    subtitle = Text(f"{clock_time(state.elapsed_s)} elapsed", style=PALETTE["quiet"])
    if state.run is None:
        return subtitle
    room = inner - 4 - len(subtitle)
    for words in (_place(state.run.run_dir, room - 3), *clean(state.run.detail).split("; ")):
        part = f" · {words}"
        if words and cell_len(part) <= room:
            subtitle.append(part)
            room -= cell_len(part)
    return subtitle


def _place(folder: Path, room: int) -> str:
    """Write a folder's path as short as need be: from here, then its name alone."""
    near = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    return next((text for text in map(clean, (str(near), near.name)) if cell_len(text) <= room), "")


def _label(label: str = "") -> Text:
    return Text().append(f"{label:<{LABEL}}", style=PALETTE["quiet"])


def _row(inner: int, label: str, value: str, body: Text) -> Text:
    """Lay out one line: what it is, its number, its drawing."""
    row = _label(label)
    row.append(value + " " * max(1, _value_cells(inner) - cell_len(value)), style="bold")
    return row.append_text(body)


def _value_cells(inner: int) -> int:
    return VALUE if inner >= NARROW else NARROW_VALUE


def _drawing_cells(inner: int, side: int = SIDE) -> int:
    return max(inner - LABEL - _value_cells(inner) - side, 0)


def _step_row(state: Board, inner: int) -> Text:
    if state.run is None:
        return _row(inner, "step", "-", Text())
    done = state.report.step if state.report is not None else state.run.first_step - 1
    width = _drawing_cells(inner)
    filled = round(2 * width * min(1.0, done / max(state.run.num_steps, 1)))
    body = Text().append("━" * (filled // 2) + "╸" * (filled % 2), style=PALETTE["accent"])
    body.append("━" * (width - filled // 2 - filled % 2), style=PALETTE["track"])
    body.append(f"{'eta ' + clock_time(state.eta_s):>{SIDE}}")
    return _row(inner, "step", f"{done}/{state.run.num_steps}", body)


def _waiting_rows(state: Board, inner: int) -> _Rows:
    """Show what the run waits for, or how it ends; blank during steps, so that nothing jumps."""
    if state.end_message:
        lines = fit(f"{clean(state.end_message)} · {state.ending_s:.0f} s", max(inner - LABEL, 1), 2)
        labels = ["ending", ""]
        return [
            (0, _label(label).append(line, style=PALETTE["watch"])) for label, line in zip(labels, lines, strict=False)
        ]
    if not state.message:
        return [(0, Text())]
    seconds = f" · {state.waiting_s:.0f} s"
    text = shorten(clean(state.message), max(inner - LABEL - len(seconds), 1)) + seconds
    return [(0, _label().append(text, style=PALETTE["watch" if state.waiting_s >= LONG_WAIT_S else "quiet"]))]


def _scores(state: Board, inner: int, room: int) -> _Rows:
    """Draw the reward, or what else is watched, with the numbers of its axis, and the validation score as wide."""
    width = _drawing_cells(inner, side=AXIS)
    course = resample(state.course.points(), width)
    tall = min(max(2 + (room - 19) // 6, 2), MAX_CHART_LINES) if room >= LOW else 1
    axis = limits(course)
    *top, bottom = sparkline(course, len(course), tall, axis if tall > 1 else None)
    ends = [number(axis[1]), *[""] * (tall - 2), number(axis[0])] if tall > 1 and course else [""] * tall
    drawn = [
        Text(line.ljust(width), style=PALETTE["reward"]).append(f"{end:>{AXIS}}", style=PALETTE["quiet"])
        for line, end in zip((*top, bottom), ends, strict=True)
    ]
    scores = stretch(state.validations.points(), len(course))
    value = number(state.validation)
    if len(state.validations.points()) > 1 and inner >= NARROW:
        value = f"{number(state.first_validation)} → {value}"
    watched, label = state.watched[0]
    newest = state.report.scalars.get(watched) if state.report is not None else None
    validation = Text(sparkline(scores, len(scores))[0], style=PALETTE["validation"])
    return [
        *((_CHART, _row(inner, "", "", line)) for line in drawn[:-1]),
        (0, _row(inner, label, number(newest), drawn[-1])),
        (_SPACE, Text()),
        (0, _row(inner, state.validation_label, value, validation)),
    ]


def _health(state: Board, inner: int) -> _Rows:
    """Write the health words that fit, and the advice for the worst."""
    row, room = _label("health"), inner - LABEL
    for at, finding in enumerate(state.health):
        mark, style = LEVELS[finding.level]
        amount = "" if math.isnan(finding.value) else f" {finding.value:.3g}"
        words = f"{mark} {finding.words}{amount}   "
        if at and len(words) + len("+10") > room:
            row.append(f"+{len(state.health) - at}", style=style)
            break
        row.append(words, style=style)
        room -= len(words)
    advice = shorten(state.health[0].advice, max(inner - LABEL, 1))
    return [(0, row), (_ADVICE, _label().append(advice, style=PALETTE["quiet"]))]


def _time(state: Board, inner: int) -> _Rows:
    """Draw where the time of a step goes: a stacked bar and its legend."""
    shares, width = state.shares, _drawing_cells(inner)
    colours = phase_colours(shares)
    bar = Text()
    for name, cells in bar_cells(shares, width).items():
        bar.append("█" * cells, style=colours[name])
    speed = f"{compact(state.tokens_per_s)} tok/s" if state.tokens_per_s > 0 else ""
    bar.append(f"{speed:>{SIDE}}")
    seconds = f"{number(state.seconds_per_step)} s"
    rows: _Rows = [(_TIME, _row(inner, "time", f"{seconds} a step" if inner >= NARROW else seconds, bar))]
    line, room = _label(), inner - LABEL
    for name in shares:
        cells = cell_len(name) + len("■  100%  ")
        if cells > room and room < inner - LABEL:
            rows.append((_LEGEND, line))
            line, room = _label(), inner - LABEL
        line.append("■ ", style=colours[name]).append(f"{name} ", style=PALETTE["quiet"])
        line.append(f"{shares[name]:.0%}".ljust(cells - 3 - cell_len(name)))
        room -= cells
    return [*rows, (_LEGEND, line)]


def _numbers(watched: Sequence[tuple[str, str]], scalars: Mapping[str, float], inner: int) -> _Rows:
    """Write the scalars that there are, those that are watched first, in at most two rows; no word is cut."""
    lines, room = [_label("numbers")], inner - LABEL
    for name, label in dict([*watched[1:], *NUMBERS]).items():
        if name not in scalars or name == watched[0][0]:
            continue
        words = f"{number(scalars[name]):<7}"
        if len(label) + 1 + len(words) > room:
            lines.append(_label())
            room = inner - LABEL
        lines[-1].append(f"{label} ", style=PALETTE["quiet"]).append(f"{words}  ")
        room -= len(label) + 1 + len(words) + 2
    return [(_MORE_NUMBERS if at else _NUMBERS, line) for at, line in enumerate(lines[:2])]


def _texts_and_notes(state: Board, inner: int, room: int) -> _Rows:
    """Share what is left between a rollout and the last note.

    A new note is shown whole, in place of the rollout if there is no other room; later it gets what is left.
    """
    width = max(inner - LABEL, 1)
    note = _last_note(state)
    longest = min(_num_lines(state.longest_note, width), MAX_NOTE_LINES)
    shows_texts = state.completion is not None
    num_note_lines = 0
    if note:
        num_note_lines = longest if room - longest >= 4 or not shows_texts else 1
        if num_note_lines < longest and state.note_is_new:
            num_note_lines, shows_texts = longest, False
    rows = _completion(state, width, room - num_note_lines - 1) if shows_texts else []
    lines = fit(note, width, num_note_lines) if note else []
    # Where a note took the texts' place and needs less of it, the frame stays as high as it is.
    lines += [""] * (num_note_lines - len(lines))
    mark, style = LEVELS["watch"]
    labels = [f"{mark} note", *[""] * len(lines)]
    named = zip(labels, lines, strict=False)
    return rows + [(_NOTE, _label(label).append(line, style=style)) for label, line in named]


def _last_note(state: Board) -> str:
    count = f" (and {len(state.notes) - 1} more)" if len(state.notes) > 1 else ""
    return clean(list(state.notes)[-1]) + count if state.notes else ""


def _num_lines(cells: int, width: int) -> int:
    """Return the number of lines that a text of `cells` takes when it is broken between words."""
    return math.ceil(cells * 1.1 / width) if cells > width else 1


def _completion(state: Board, width: int, room: int) -> _Rows:
    """Show one rollout; of one line each, response and right answer stand under one another to be compared."""
    example = state.completion
    assert example is not None
    texts = {"prompt": example.prompt, "response": example.response, "answer": example.ground_truth}
    wanted = {name: _num_lines(cells, width) for name, cells in state.longest_texts.items()}
    lines = _shared(wanted, max(room, len(wanted)))
    score = f"score {number(example.score)}"
    rows: _Rows = [(_SPACE, Text())]
    for name, text in texts.items():
        cleaned, is_response = clean(text), name == "response"
        if is_response and lines[name] == 1:
            response = shorten(cleaned, max(width - len(score) - 2, 1))
            gap = " " * max(width - cell_len(response) - len(score), 1)
            body = _compared(response, clean(example.ground_truth)).append(gap + score, style="bold")
            rows.append((_TEXTS, _label(name).append_text(body)))
            continue
        found = fit(cleaned, width, lines[name])
        found += [""] * (lines[name] - len(found))
        labels = [name, score[: LABEL - 1] if is_response else "", *[""] * len(found)]
        style = "bold" if is_response else ""
        rows += [(_TEXTS, _label(label).append(line, style=style)) for label, line in zip(labels, found, strict=False)]
    return rows


_WEIGHTS = {"prompt": 1, "response": 2, "answer": 1}


def _shared(wanted: Mapping[str, int], num_lines: int) -> dict[str, int]:
    """Share lines out: one each, then to the text that lacks most; a response counts twice."""
    given = dict.fromkeys(wanted, 1)
    for _ in range(num_lines - len(wanted)):
        lacking = [name for name in wanted if given[name] < wanted[name]]
        if not lacking:
            break
        given[min(lacking, key=lambda name: given[name] / _WEIGHTS[name])] += 1
    return given


def _compared(response: str, answer: str) -> Text:
    """Mark the characters of a response that differ from an answer of the same length."""
    text = Text(response, style="bold")
    if len(response) == len(answer):
        for at, (said, right) in enumerate(zip(response, answer, strict=True)):
            if said != right:
                text.stylize(PALETTE["wrong"], at, at + 1)
    return text
