"""What holds an advantage, a loss or a correction to its paper; for our tests and for yours.

Must not know: processes, models.

    from rallypoint.algorithms import OwnObjective
    from rallypoint.testing import check_objective

    check_objective(OwnObjective(function=my_loss))     # raises ConformanceError, and says what is wrong

Owns: batches that break careless functions, the checks, the papers' formulas as loops over tokens, and a policy
whose responses can be enumerated; and the learning suite, `learning`, of tasks whose optimum is known.
"""

from rallypoint.testing.cases import CASES, Case
from rallypoint.testing.conformance import ConformanceError, check_advantage, check_correction, check_objective

__all__ = ["CASES", "Case", "ConformanceError", "check_advantage", "check_correction", "check_objective"]
