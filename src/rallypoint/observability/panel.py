"""The live panel: one frame on a terminal that shows a run learning.

`render` is a pure function from a board and a width to a rich panel, so that a test or a picture needs no
terminal. `LivePanel` owns the terminal while it is entered and gives it back on every way out.
It draws when something was reported, at most three times a second, and once a second for the clock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from rallypoint.observability.board import Board
from rallypoint.observability.reports import REWARD, RunInfo, StepReport, Summary
from rallypoint.observability.summary import print_summary
from rallypoint.observability.text import (
    bar_cells,
    clean,
    clock_time,
    compact,
    number,
    resample,
    shorten,
    sparkline,
    stretch,
)
from rallypoint.observability.theme import LEVELS, PALETTE, phase_colours

REFRESH_S = 1 / 3
"""Reports closer together than this share a frame; with the clock's own that is four a second."""

LONG_WAIT_S = 20.0
"""A wait that is longer than this is coloured."""

LABEL, VALUE, NARROW_VALUE, SIDE = 12, 16, 9, 13
"""Cells of the columns left of a drawing, and right of it."""
NARROW = 50
"""With fewer cells inside the frame, values are written in their shortest form."""

NUMBERS: tuple[tuple[str, str], ...] = (
    ("actor/loss", "loss"),
    ("actor/approx_kl", "kl"),
    ("actor/entropy", "entropy"),
    ("actor/clip_fraction", "clip"),
    ("actor/grad_norm", "grad"),
    ("rollout/response_length", "length"),
    ("critic/explained_variance", "explained"),
    ("kl/reference_mean", "kl to reference"),
)
"""Scalars below the chart, with their short names, the most wanted first: what does not fit is left out."""


class LivePanel:
    """Shows a run in one panel that is redrawn in place."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._board = Board(clock)
        self._lock = threading.Lock()
        self._drawn = -math.inf
        self._live = Live(console=console, get_renderable=lambda: self, refresh_per_second=1)

    def start(self, run: RunInfo) -> None:
        """Show a run that begins or goes on."""
        with self._lock:
            self._board.start(run)
        self._draw()

    def waiting(self, message: str) -> None:
        """Say what is being waited for, and since when."""
        with self._lock:
            self._board.wait(message)
        self._draw()

    def step(self, report: StepReport) -> None:
        """Show a step that is done."""
        with self._lock:
            self._board.step(report)
        self._draw()

    def validation(self, step: int, score: float) -> None:  # noqa: ARG002 - the sparkline has no step axis
        """Show a validation score."""
        with self._lock:
            self._board.validate(score)
        self._draw()

    def note(self, message: str) -> None:
        """Show a warning; it is repeated in the summary."""
        with self._lock:
            self._board.note(message)
        self._draw()

    def finish(self, summary: Summary) -> None:
        """Replace the panel by the summary."""
        self._live.transient = True
        self._live.stop()
        print_summary(self._console, summary, self._board.notes)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            panel = render(self._board, options.max_width)
        yield panel

    def _draw(self) -> None:
        """Redraw, unless it was done just now: then the next report or the clock will."""
        now = self._clock()
        if self._live.is_started and now - self._drawn >= REFRESH_S:
            self._drawn = now
            self._live.refresh()


def render(board: Board, width: int) -> Panel:
    """Draw the state of a run, `width` cells wide."""
    inner = max(width - 6, 1)
    parts = [_step_row(board, inner), _waiting_row(board, inner)]
    if board.report is not None:
        parts += _scores(board, inner) + _health(board, inner) + _time(board, inner)
        parts += [Text(), _numbers(board.report.scalars, inner)]
    if board.completion is not None:
        parts += _completion(board, inner)
    if board.notes:
        parts.append(_note(board, inner))
    for part in parts:
        part.no_wrap, part.overflow = True, "crop"
    return Panel(
        Group(*parts),
        title=_title(board, inner),
        subtitle=_subtitle(board, inner),
        title_align="left",
        subtitle_align="left",
        border_style=PALETTE["frame"],
        padding=(1, 2),
        width=width,
    )


def _title(board: Board, inner: int) -> Text:
    title = Text("rallypoint", style="bold")
    if board.run is not None:
        name = shorten(clean(f"{board.run.algorithm} · {board.run.name}"), max(inner - 14, 4))
        title.append(f"  {name}", style=PALETTE["accent"])
    return title


def _subtitle(board: Board, inner: int) -> Text:
    subtitle = Text(f"{clock_time(board.elapsed_s)} elapsed", style=PALETTE["quiet"])
    if board.run is not None:
        parts = [part for part in (clean(board.run.detail), clean(str(board.run.run_dir))) if part]
        subtitle.append(shorten("".join(f" · {part}" for part in parts), max(inner - 18, 0)))
    return subtitle


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


def _step_row(board: Board, inner: int) -> Text:
    if board.run is None:
        return _row(inner, "step", "-", Text())
    done = board.report.step if board.report is not None else board.run.first_step - 1
    width = _drawing_cells(inner)
    filled = round(2 * width * min(1.0, done / max(board.run.num_steps, 1)))
    body = Text().append("━" * (filled // 2) + "╸" * (filled % 2), style=PALETTE["accent"])
    body.append("━" * (width - filled // 2 - filled % 2), style=PALETTE["track"])
    body.append(f"{'eta ' + clock_time(board.eta_s):>{SIDE}}")
    return _row(inner, "step", f"{done}/{board.run.num_steps}", body)


def _waiting_row(board: Board, inner: int) -> Text:
    """Say what is being waited for; blank while steps are being done, so that nothing jumps."""
    if not board.message:
        return Text()
    seconds = f" · {board.waiting_s:.0f} s"
    text = shorten(clean(board.message), max(inner - LABEL - len(seconds), 1)) + seconds
    return _label().append(text, style=PALETTE["watch" if board.waiting_s >= LONG_WAIT_S else "quiet"])


def _scores(board: Board, inner: int) -> list[Text]:
    """Draw the reward two rows tall, and the validation score as wide as the reward."""
    rewards = resample(board.rewards.points(), _drawing_cells(inner, side=0))
    top, bottom = sparkline(rewards, len(rewards), height=2)
    scores = stretch(board.validations.points(), len(rewards))
    value = number(board.validation)
    if len(board.validations.points()) > 1 and inner >= NARROW:
        value = f"{number(board.first_validation)} → {value}"
    reward = board.report.scalars.get(REWARD) if board.report is not None else None
    return [
        _row(inner, "", "", Text(top, style=PALETTE["reward"])),
        _row(inner, "reward", number(reward), Text(bottom, style=PALETTE["reward"])),
        Text(),
        _row(inner, "validation", value, Text(sparkline(scores, len(scores))[0], style=PALETTE["validation"])),
    ]


def _health(board: Board, inner: int) -> list[Text]:
    """Say the health words as far as they fit, and the advice for the worst."""
    row, room = _label("health"), inner - LABEL
    for at, finding in enumerate(board.health):
        mark, style = LEVELS[finding.level]
        amount = "" if math.isnan(finding.value) else f" {finding.value:.3g}"
        words = f"{mark} {finding.words}{amount}   "
        if at and len(words) + len("+10") > room:
            row.append(f"+{len(board.health) - at}", style=style)
            break
        row.append(words, style=style)
        room -= len(words)
    advice = shorten(board.health[0].advice, max(inner - LABEL, 1))
    return [row, _label().append(advice, style=PALETTE["quiet"])]


def _time(board: Board, inner: int) -> list[Text]:
    """Draw where the time of a step goes: a stacked bar and its legend."""
    shares, width = board.shares, _drawing_cells(inner)
    colours = phase_colours(shares)
    bar = Text()
    for name, cells in bar_cells(shares, width).items():
        bar.append("█" * cells, style=colours[name])
    speed = f"{compact(board.tokens_per_s)} tok/s" if board.tokens_per_s > 0 else ""
    bar.append(f"{speed:>{SIDE}}")
    seconds = f"{number(board.seconds_per_step)} s"
    rows = [_row(inner, "time", f"{seconds} a step" if inner >= NARROW else seconds, bar)]
    cell = max((cell_len(name) for name in shares), default=0) + 9
    columns = max(1, (inner - LABEL) // cell)
    names = list(shares)
    for start in range(0, len(names), columns):
        line = _label()
        for name in names[start : start + columns]:
            line.append("■ ", style=colours[name])
            line.append(f"{name} ", style=PALETTE["quiet"])
            line.append(f"{shares[name]:>4.0%}".strip().ljust(cell - 3 - cell_len(name)))
        rows.append(line)
    return rows


def _numbers(scalars: Mapping[str, float], inner: int) -> Text:
    row, room = _label("numbers"), inner - LABEL
    for name, label in NUMBERS:
        if name not in scalars:
            continue
        words = f"{number(scalars[name]):<7}"
        if len(label) + 1 + len(words) > room:
            break
        row.append(f"{label} ", style=PALETTE["quiet"]).append(f"{words}  ")
        room -= len(label) + 1 + len(words) + 2
    return row


def _completion(board: Board, inner: int) -> list[Text]:
    """Show one rollout; response and right answer stand under one another to be compared."""
    example = board.completion
    assert example is not None
    score = f"score {number(example.score)}"
    room = max(inner - LABEL, 1)
    prompt = shorten(clean(example.prompt), room)
    response = shorten(clean(example.response), max(room - len(score) - 2, 1))
    answer = shorten(clean(example.ground_truth), room)
    gap = " " * max(room - cell_len(response) - len(score), 1)
    return [
        Text(),
        _label("prompt").append(prompt),
        _label("response").append_text(_compared(response, answer)).append(gap + score, style="bold"),
        _label("answer").append(answer),
    ]


def _compared(response: str, answer: str) -> Text:
    """Mark the characters of a response that differ from an answer of the same length."""
    text = Text(response, style="bold")
    if len(response) == len(answer):
        for at, (said, right) in enumerate(zip(response, answer, strict=True)):
            if said != right:
                text.stylize(PALETTE["wrong"], at, at + 1)
    return text


def _note(board: Board, inner: int) -> Text:
    last = list(board.notes)[-1]
    count = f" (and {len(board.notes) - 1} more)" if len(board.notes) > 1 else ""
    text = shorten(clean(last), max(inner - LABEL - len(count), 1)) + count
    return _label("note").append(text, style=PALETTE["watch"])
