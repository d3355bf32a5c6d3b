"""Groups of ranks and their collectives; torch.distributed only."""

from rallypoint.parallel.autograd import exchange_for_columns, exchange_for_rows, gather_rows, reduce, replicate
from rallypoint.parallel.collective import Collective, Grouped, Solo, connect
from rallypoint.parallel.mesh import DeviceMesh
from rallypoint.parallel.process_group import Device, Group, meet

__all__ = [
    "Collective",
    "Device",
    "DeviceMesh",
    "Group",
    "Grouped",
    "Solo",
    "connect",
    "exchange_for_columns",
    "exchange_for_rows",
    "gather_rows",
    "meet",
    "reduce",
    "replicate",
]
