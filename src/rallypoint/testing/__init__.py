"""What holds advantages, losses and corrections to the rules that every one keeps to; for our tests and for yours.

Must not know: processes, models.

    from rallypoint.algorithms import OwnObjective
    from rallypoint.testing import check_objective

    check_objective(OwnObjective(function=my_loss))     # raises ConformanceError, which says what is wrong

Owns: batches that break careless functions, and the checks. What a run cannot take from a user is checked by our tests
alone: a KL, a value loss and an aggregation in `tests/shared/loss_terms.py`. The papers' formulas as loops over tokens
are in `tests/shared/formulas`.
"""

from rallypoint.testing.cases import CASES, Case
from rallypoint.testing.conformance import check_advantage, check_correction, check_objective
from rallypoint.testing.rules import ConformanceError

__all__ = [
    "CASES",
    "Case",
    "ConformanceError",
    "check_advantage",
    "check_correction",
    "check_objective",
]
