"""Where the time of a training step goes: `span` times a phase, `collect_spans` gathers a step's spans.

A recipe writes `with span("rollout"):` and nothing else. The loop wraps the step in `collect_spans()`.
A span without a collector around it costs nothing and is counted nowhere.

A span inside a span gets a path (`learn/critic`) and stays out of the shares, because its time is
already in its parent. Parents and collectors are context variables: the body of a span may await, and
tasks started inside one (`asyncio.gather`) know it as their parent without seeing each other. A span
belongs to the collector that was current when it began.

>>> ticks = iter([0.0, 0.0, 1.0, 1.0, 3.0, 4.0])
>>> with collect_spans(clock=lambda: next(ticks)) as spans:
...     with span("rollout"):
...         pass
...     with span("learn"):
...         pass
>>> spans.seconds, shares_of(spans.seconds, spans.elapsed_s)
({'rollout': 1.0, 'learn': 2.0}, {'rollout': 0.25, 'learn': 0.5, 'other': 0.25})
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

OTHER = "other"
"""The time of a step that no span covers."""

START = "start"
"""The time from a start of the run to its first step or validation; a resumed run has several."""

TIME_PREFIX = "time_s/"
"""Spans stand in the metrics as `time_s/rollout`, `time_s/learn`, `time_s/learn/critic`."""


class Spans:
    """Seconds by span, for one stretch of work; nested spans are named by their path."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = {}
        """Every span, nested ones too, in the order in which they first began."""
        self.begins: dict[str, float] = {}
        """Span -> seconds after the collector's beginning at which it first began."""
        self._began = clock()
        self._ended: float | None = None

    def begin(self, path: str, began: float) -> None:
        """Keep a place for a span, so that the order is that of the step, and when it began by the clock."""
        self.seconds.setdefault(path, 0.0)
        self.begins.setdefault(path, began - self._began)

    def add(self, path: str, seconds: float) -> None:
        """Add time to a span; the same name may be entered many times."""
        self.seconds[path] = self.seconds.get(path, 0.0) + seconds

    def close(self) -> None:
        """Stop the clock of the whole."""
        self._ended = self.clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the beginning to the end of the collector, or to now while it is open."""
        return (self.clock() if self._ended is None else self._ended) - self._began

    def scalars(self) -> dict[str, float]:
        """Return all spans under their names in the metrics."""
        return {TIME_PREFIX + path: seconds for path, seconds in self.seconds.items()}


def spans_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of spans, by path, from the metrics of a step."""
    return {name.removeprefix(TIME_PREFIX): s for name, s in metrics.items() if name.startswith(TIME_PREFIX)}


def top_level(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the spans that are not inside another."""
    return {path: value for path, value in seconds.items() if "/" not in path}


def shares_of(phases: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Return each phase's share of the time, and what is left as `other`.

    Phases that overlap (two tasks at once) can add up to more than has elapsed; their sum is the whole then.

    >>> shares_of({"rollout": 3.0, "learn": 1.0}, 5.0)
    {'rollout': 0.6, 'learn': 0.2, 'other': 0.2}
    >>> shares_of({"rollout": 3.0, "learn": 1.0}, 3.5)
    {'rollout': 0.75, 'learn': 0.25}
    """
    covered = sum(phases.values())
    whole = max(covered, elapsed_s)
    if whole <= 0:
        return {}
    shares = {name: seconds / whole for name, seconds in phases.items()}
    if whole > covered:
        shares[OTHER] = shares.get(OTHER, 0.0) + (whole - covered) / whole
    return shares


_collector: ContextVar[Spans | None] = ContextVar("collector", default=None)
_path: ContextVar[str] = ContextVar("path", default="")


@contextlib.contextmanager
def collect_spans(clock: Callable[[], float] = time.perf_counter) -> Iterator[Spans]:
    """Gather the spans of the block; an outer collector does not see them."""
    spans = Spans(clock)
    collector, path = _collector.set(spans), _path.set("")
    try:
        yield spans
    finally:
        _path.reset(path)
        _collector.reset(collector)
        spans.close()


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Time the block as one phase of the step, also when it raises.

    Raises:
        ValueError: the name is empty or holds a slash, which is kept for nesting.
    """
    if not name or "/" in name:
        raise ValueError(f"a span's name is one word without a slash, not {name!r}")
    spans, parent = _collector.get(), _path.get()
    if spans is None:
        yield
        return
    path = f"{parent}/{name}" if parent else name
    token = _path.set(path)
    began = spans.clock()
    spans.begin(path, began)
    try:
        yield
    finally:
        spans.add(path, spans.clock() - began)
        _path.reset(token)
