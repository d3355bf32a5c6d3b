"""What holds advantages, losses, corrections and KLs to their papers; for our tests and for yours.

Must not know: processes, models.

    from rallypoint.algorithms import OwnObjective
    from rallypoint.testing import check_objective

    check_objective(OwnObjective(function=my_loss))     # raises ConformanceError, and says what is wrong

Owns: batches that break careless functions, the checks, and a policy whose responses can be enumerated, `POLICY`, on
which expected gradients are exact. The papers' formulas as loops over tokens are in `tests/shared/formulas`.
"""

from rallypoint.testing.cases import CASES, Case
from rallypoint.testing.conformance import check_advantage, check_correction, check_objective
from rallypoint.testing.exact import POLICY, EnumerablePolicy
from rallypoint.testing.rules import ConformanceError
from rallypoint.testing.terms import check_aggregation, check_kl, check_value_loss

__all__ = [
    "CASES",
    "POLICY",
    "Case",
    "ConformanceError",
    "EnumerablePolicy",
    "check_advantage",
    "check_aggregation",
    "check_correction",
    "check_kl",
    "check_objective",
    "check_value_loss",
]
