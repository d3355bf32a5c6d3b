"""The record of a run: its folder, how it was started, its metrics, its reports, what a resume compares.

Must not know: roles, recipes, displays.

Values flow one way:

    span -> Spans ─┐
                   ├─> MetricsLog (metrics.jsonl) -> save_curve, Summary.measured
    scalars ───────┤
                   └─> StepReport -> Progress (LivePanel, PlainLines, Silent)
"""

from rallypoint.run.metrics_log import MetricsLog as MetricsLog
from rallypoint.run.reports import (
    Completion as Completion,
    RunInfo as RunInfo,
    StepReport as StepReport,
    Summary as Summary,
    why_no_plot as why_no_plot,
)
