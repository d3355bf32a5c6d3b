"""The carriers that travel between roles, and the metrics that come back.

Must not know: who makes or reads them.
"""

from rallypoint.types.batch import (
    ActorBatch,
    CriticBatch,
    DistilledBatch,
    FirstPass,
    JudgedBatch,
    PairBatch,
    PerToken,
    PolicySequences,
    Prompts,
    RolloutBatch,
    ScoredBatch,
    Sequences,
    ValuedBatch,
)
from rallypoint.types.carrier import offsets_from_lengths, token_index
from rallypoint.types.metrics import AtMaximum, Last, Maximum, Mean, Metric, Metrics, Minimum, Sum, merge
from rallypoint.types.trajectory import ROOT, Limit, Trajectory, Turn, assemble

__all__ = [
    "ROOT",
    "ActorBatch",
    "AtMaximum",
    "CriticBatch",
    "DistilledBatch",
    "FirstPass",
    "JudgedBatch",
    "Last",
    "Limit",
    "Maximum",
    "Mean",
    "Metric",
    "Metrics",
    "Minimum",
    "PairBatch",
    "PerToken",
    "PolicySequences",
    "Prompts",
    "RolloutBatch",
    "ScoredBatch",
    "Sequences",
    "Sum",
    "Trajectory",
    "Turn",
    "ValuedBatch",
    "assemble",
    "merge",
    "offsets_from_lengths",
    "token_index",
]
