"""What a run measures and what a person sees of it: spans, the metrics file, health, displays, the curve.

Knows neither torch nor Ray nor the config; takes plain numbers and texts. Values flow one way:

    span -> Spans ─┐
                   ├─> MetricsLog (metrics.jsonl) -> save_curve, Summary.from_metrics
    scalars ───────┤
                   └─> StepReport -> Progress (LivePanel, PlainLines, Silent)
"""

from rallypoint.observability.curve import save_curve
from rallypoint.observability.health import RULES, Health, Rule, health
from rallypoint.observability.metrics_log import MetricsLog, read_metrics
from rallypoint.observability.panel import LivePanel
from rallypoint.observability.plain import PlainLines
from rallypoint.observability.progress import Progress, Silent, make_progress
from rallypoint.observability.reports import PLOT_HINT, Completion, RunInfo, StepReport, Summary
from rallypoint.observability.spans import Spans, collect_spans, span

__all__ = [
    "PLOT_HINT",
    "RULES",
    "Completion",
    "Health",
    "LivePanel",
    "MetricsLog",
    "PlainLines",
    "Progress",
    "Rule",
    "RunInfo",
    "Silent",
    "Spans",
    "StepReport",
    "Summary",
    "collect_spans",
    "health",
    "make_progress",
    "read_metrics",
    "save_curve",
    "span",
]
