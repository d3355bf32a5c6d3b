"""What a config amounts to before anything starts: batches, placement, memory.

Must not know: torch, Ray.
"""

from rallypoint.plan.role_memory import RoleMemory
from rallypoint.plan.run_plan import RunPlan, make_plan

__all__ = ["RoleMemory", "RunPlan", "make_plan"]
