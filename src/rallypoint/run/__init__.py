"""The record of a run: its folder, how it was started, its metrics, its reports, what a resume compares.

Must not know: roles, recipes, displays.

Values flow one way:

    span -> Spans ─┐
                   ├─> MetricsLog (metrics.jsonl) -> save_curve, Summary.measured
    scalars ───────┤
                   └─> StepReport -> Progress (LivePanel, PlainLines, Silent)
"""

from rallypoint.run.metrics_log import MetricsLog
from rallypoint.run.reports import Completion, RunInfo, StepReport, Summary, why_no_plot
from rallypoint.run.trace import otlp, trace
from rallypoint.run.troubles import Trouble, troubles, troubles_of

__all__ = [
    "Completion",
    "MetricsLog",
    "RunInfo",
    "StepReport",
    "Summary",
    "Trouble",
    "otlp",
    "trace",
    "troubles",
    "troubles_of",
    "why_no_plot",
]
