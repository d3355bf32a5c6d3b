"""What a run measures: spans of time, FLOPs, memory, health.

Must not know: the run's folder, displays; it takes and returns plain numbers and texts.
"""

from rallypoint.observability.spans import collect_spans, span

__all__ = [
    "collect_spans",
    "span",
]
