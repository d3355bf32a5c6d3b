"""Numbers as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def finite_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are finite; NaN when none is."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def number(value: float | None) -> str:
    """Write a number in at most seven characters, three digits that matter.

    >>> [number(value) for value in (0.41234, 0.01234, 0.00049, 12.345, -0.5, 61234.0, None)]
    ['0.412', '0.0123', '0.0005', '12.3', '-0.500', '61k', '-']
    """
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    size = abs(value)
    if size >= 1000:
        return compact(value)
    if 0 < size < 0.0001:
        return f"{value:.0e}"
    digits = next((digits for digits, limit in enumerate((100.0, 10.0, 1.0, 0.1)) if size >= limit), 4)
    return f"{value:.{3 if size == 0 else digits}f}"


def compact(count: float) -> str:
    """Write a count with a letter for its size.

    >>> [compact(count) for count in (7, 999, 1234, 61234, 1234567, 3.2e9)]
    ['7', '999', '1.2k', '61k', '1.2M', '3.2G']
    """
    if not math.isfinite(count):
        return str(count)
    for letter, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        scaled = count / size
        if abs(scaled) >= 0.9995:
            return f"{scaled:.1f}{letter}" if abs(scaled) < 9.95 else f"{scaled:.0f}{letter}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """Write seconds in their two largest units.

    >>> [duration(seconds) for seconds in (8.41, 484.0, 7260.0)]
    ['8.41 s', '8 min 4 s', '2 h 1 min']
    """
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Write a number with its noun.

    >>> counted(1, "row"), counted(1_024, "row"), counted(2, "micro-batch", "es")
    ('1 row', '1,024 rows', '2 micro-batches')
    """
    return f"{number:,} {noun}{'' if number == 1 else plural}"
