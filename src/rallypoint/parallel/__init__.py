"""Groups of ranks and their collectives; torch.distributed only."""

from rallypoint.parallel.collective import Collective, Grouped, Solo, connect
from rallypoint.parallel.process_group import Device, Group, meet

__all__ = ["Collective", "Device", "Group", "Grouped", "Solo", "connect", "meet"]
