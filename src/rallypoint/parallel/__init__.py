"""Groups of ranks and their collectives, with torch.distributed only.

Must not know: models, roles, Ray.
"""

from rallypoint.parallel.autograd import (
    exchange_for_columns,
    exchange_for_rows,
    exchange_rows,
    gather_rows,
    reduce,
    replicate,
    share_rows,
    sum_rows,
)
from rallypoint.parallel.collective import Collective, least_of
from rallypoint.parallel.fsdp import held, shard_rows
from rallypoint.parallel.mesh import DeviceMesh
from rallypoint.parallel.process_group import Device, Group, meet
from rallypoint.parallel.sharding import Sharding, TensorCuts

__all__ = [
    "Collective",
    "Device",
    "DeviceMesh",
    "Group",
    "Sharding",
    "TensorCuts",
    "exchange_for_columns",
    "exchange_for_rows",
    "exchange_rows",
    "gather_rows",
    "held",
    "least_of",
    "meet",
    "reduce",
    "replicate",
    "shard_rows",
    "share_rows",
    "sum_rows",
]
