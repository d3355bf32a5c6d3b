"""The record of a run: its folder, how it was started, its metrics, its reports, what a resume compares.

Must not know: roles, recipes, displays.

Values flow one way:

    span -> Spans ─┐
                   ├─> MetricsLog (metrics.jsonl) -> save_curve, Summary.measured
    scalars ───────┤
                   └─> StepReport -> Progress (LivePanel, PlainLines, Silent)
"""

from rallypoint.run.metrics_log import MetricsLog, read_metrics
from rallypoint.run.reports import PLOT_HINT, Completion, RunInfo, StepReport, Summary

__all__ = [
    "PLOT_HINT",
    "Completion",
    "MetricsLog",
    "RunInfo",
    "StepReport",
    "Summary",
    "read_metrics",
]
