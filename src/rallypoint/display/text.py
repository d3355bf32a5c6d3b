"""Small drawings and tidy words for a terminal: sparklines, stacked bars, numbers, and untrusted text.

Everything here is a pure function of its arguments and knows nothing of runs.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from rallypoint.observability.numbers import finite_mean

BLOCKS = " ▁▂▃▄▅▆▇█"
ELLIPSIS = "…"

_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[P^_X][^\x1b]*(?:\x1b\\)?|[\x1b\x9b]\[?[0-?]*[ -/]*[@-~]?"
)
_SPACES = re.compile(r"\s+")
_MAX_MARKS = 2
"""Combining marks allowed on one letter; languages need two, mischief uses hundreds."""


def clean(text: str, max_chars: int = 2000) -> str:
    r"""Return text that a terminal can print on one line, whatever a model has written.

    Escape sequences go, and so do control, format (bidirectional and zero-width) and unassigned
    characters; every run of white space becomes one space. Only the head and tail of a very long text are read.

    >>> clean("a\x1b[31mred\x1b[0m\tb\n\u202ec")
    'ared b c'
    """
    if len(text) > 2 * max_chars:
        text = text[:max_chars] + ELLIPSIS + text[-max_chars:]
    kept: list[str] = []
    marks = 0
    for char in _SPACES.sub(" ", _ESCAPES.sub("", text)):
        category = unicodedata.category(char)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        if category[0] != "C" and marks <= _MAX_MARKS and not "\ufe00" <= char <= "\ufe0f":
            kept.append(char)
    return "".join(kept).strip()


def shorten(text: str, cells: int) -> str:
    """Cut the middle out of a text that is wider than `cells`; a wide character takes two.

    >>> shorten("the quick brown fox", 11)
    'the qu… fox'
    """
    if cell_len(text) <= cells:
        return text
    if cells <= 1:
        return ELLIPSIS[: max(cells, 0)]
    tail_cells = (cells - 1) * 2 // 5
    head = set_cell_size(text, cells - 1 - tail_cells).rstrip(" ")
    tail = set_cell_size(text[::-1], tail_cells)[::-1].lstrip(" ") if tail_cells else ""
    spare = cells - 1 - cell_len(head) - cell_len(tail)
    if spare and len(tail) < len(text):
        longer = text[len(text) - len(tail) - 1 :]
        tail = longer if cell_len(longer) <= cell_len(tail) + spare else tail
    return head + ELLIPSIS + tail


def wrap(text: str, cells: int) -> list[str]:
    """Break a text into lines of at most `cells`, between words if possible; wide characters take two.

    >>> wrap("the quick brown fox", 11), wrap("abcdefgh ij", 3)
    (['the quick', 'brown fox'], ['abc', 'def', 'gh', 'ij'])
    """
    lines, line = list[str](), ""
    for word in text.split():
        whole = f"{line} {word}" if line else word
        if cell_len(whole) <= cells:
            line = whole
            continue
        lines += [line] if line else []
        line = word
        while cell_len(line) > max(cells, 2):
            head = set_cell_size(line, max(cells, 2)).rstrip(" ")
            lines.append(head)
            line = line[len(head) :]
    return [*lines, line] if line else lines


def fit(text: str, cells: int, num_lines: int) -> list[str]:
    """Break a text into at most `num_lines`; the middle of a longer one is cut out, as `shorten` does.

    >>> fit("one two three four five six seven", 9, 2)
    ['one two', 'th… seven']
    """
    room = cells * num_lines
    lines = wrap(text, cells)
    while len(lines) > num_lines and room > 0:
        lines = wrap(shorten(text, room), cells)
        room -= max(cells // 8, 1)
    return lines


def resample(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values, each the mean of its part; what is not finite is left out.

    >>> resample([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    if len(values) <= width:
        return list(values)
    if width <= 0:
        return []
    edges = [column * len(values) // width for column in range(width + 1)]
    return [finite_mean(values[start:end]) for start, end in itertools.pairwise(edges)]


def stretch(values: Sequence[float], width: int) -> list[float]:
    """Return `width` values, each repeated as often as needed to fill the place.

    >>> stretch([1.0, 2.0], 5)
    [1.0, 1.0, 1.0, 2.0, 2.0]
    """
    if len(values) >= width or not values:
        return resample(values, width)
    return [values[column * len(values) // width] for column in range(width)]


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an axis: from 0, unless a third would be empty; and so wide that noise looks small.

    >>> limits([0.1, 0.9]), limits([0.5, 0.5]), limits([-0.1, 0.1])
    ((0.0, 0.945), (0.445, 0.555), (-0.11, 0.11))
    """
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if low == high == 0.0:
        return 0.0, 1.0
    if high <= 0.0:
        bottom, top = limits([-value for value in finite])
        return -top, -bottom
    if 0.0 < 3 * low <= high:
        low = 0.0
    elif low > 0.0:
        missing = max(0.0, _LEAST_SPAN * high - (high - low)) / 2
        low, high = low - missing, high + missing
    margin = (high - low) / 20
    return round(low and low - margin, 12), round(high + margin, 12)


_LEAST_SPAN = 0.2
"""Least height of an axis that does not begin at 0, as a share of the highest value."""


def sparkline(
    values: Sequence[float], width: int, height: int = 1, axis: tuple[float, float] | None = None
) -> list[str]:
    """Draw values as columns of eighth blocks, `height` rows tall; the first row is the top.

    Without an axis, which is for drawings that have its numbers beside them, columns stand on zero unless a value is
    negative, so that their heights compare honestly. A column without a finite value is left blank.

    >>> sparkline([0.0, 1.0, 2.0, 4.0], 4)
    ['▁▂▄█']
    """
    columns = resample(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return [" " * len(columns)] * height
    low, high = axis or (min(0.0, *finite), max(finite))
    eighths = [_eighths(value, low, high, 8 * height) for value in columns]
    return [
        "".join(BLOCKS[min(8, max(0, column - 8 * row))] for column in eighths) for row in range(height - 1, -1, -1)
    ]


def bar_cells(shares: Mapping[str, float], width: int) -> dict[str, int]:
    """Split `width` cells by share, so that they add up (largest remainder first).

    >>> bar_cells({"rollout": 0.5, "learn": 0.3, "other": 0.2}, 9)
    {'rollout': 4, 'learn': 3, 'other': 2}
    """
    total = sum(shares.values())
    if total <= 0 or width <= 0:
        return dict.fromkeys(shares, 0)
    exact = {name: width * share / total for name, share in shares.items()}
    cells = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: cells[name] - exact[name])
    for name in by_remainder[: width - sum(cells.values())]:
        cells[name] += 1
    return cells


def clock_time(seconds: float) -> str:
    """Write a duration as hours, minutes and seconds.

    >>> clock_time(62.4), clock_time(90061.0), clock_time(float("nan"))
    ('0:01:02', '25:01:01', '-:--:--')
    """
    if not math.isfinite(seconds):
        return "-:--:--"
    whole = max(0, int(seconds))
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _eighths(value: float, low: float, high: float, full: int) -> int:
    """Return a column's height; at least one eighth, so that zero is seen as a value."""
    if not math.isfinite(value):
        return 0
    return max(1, round(full * (value - low) / (high - low))) if high > low else 1
