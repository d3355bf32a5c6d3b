"""Groups of ranks and their collectives, with torch.distributed only.

Must not know: models, roles, Ray.
"""

from rallypoint.parallel.autograd import (
    exchange_for_columns as exchange_for_columns,
    exchange_for_rows as exchange_for_rows,
    exchange_rows as exchange_rows,
    gather_rows as gather_rows,
    reduce as reduce,
    replicate as replicate,
    share_rows as share_rows,
    sum_rows as sum_rows,
)
from rallypoint.parallel.collective import Collective as Collective, connect as connect, least_of as least_of
from rallypoint.parallel.fsdp import held as held, shard_rows as shard_rows
from rallypoint.parallel.mesh import DeviceMesh as DeviceMesh
from rallypoint.parallel.process_group import Device as Device, Group as Group, meet as meet
from rallypoint.parallel.sharding import Sharding as Sharding, TensorCuts as TensorCuts
