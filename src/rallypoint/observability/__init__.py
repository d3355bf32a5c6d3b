"""What a run measures: spans of time, FLOPs, memory, health.

Must not know: the run's folder, displays; it takes and returns plain numbers and texts.
"""

from rallypoint.observability.health import RULES, Health, Rule, health
from rallypoint.observability.spans import Spans, collect_spans, span

__all__ = ["RULES", "Health", "Rule", "Spans", "collect_spans", "health", "span"]
