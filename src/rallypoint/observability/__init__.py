"""What a run measures: spans of time, FLOPs, memory, health.

Must not know: the run's folder, displays; it takes and returns plain numbers and texts.
"""

from rallypoint.observability.health import Health, Rule, health, rules
from rallypoint.observability.spans import Spans, collect_spans, span

__all__ = ["Health", "Rule", "Spans", "collect_spans", "health", "rules", "span"]
