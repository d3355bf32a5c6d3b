"""What a config amounts to before anything starts: batches, placement, memory.

Must not know: torch, Ray.
"""

from rallypoint.plan.plan import Plan, make_plan
from rallypoint.plan.role_memory import RoleMemory

__all__ = ["Plan", "RoleMemory", "make_plan"]
