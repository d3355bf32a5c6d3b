"""FSDP2 over a group of our own: one copy of a model, cut over ranks that have different rows.

Owns: how torch's `fully_shard` is given a group that met through the rendezvous, and where a pass begins and ends for
it. Must not know: which modules a model has, losses, optimizers. Invariant: all ranks of the group make the same passes
in the same order; a rank without rows makes an empty pass.

torch wants a `DeviceMesh`, and that wants a default process group and groups by name, both global to the process. A
process of ours may have ranks of several roles, each with groups of its own, so that none of them can be the default.
FSDP2 asks its mesh for sizes and for the group: a mesh that already has it is all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rallypoint.parallel.process_group import Group

ResultT = TypeVar("ResultT")


class GroupMesh(TorchMesh):
    """torch's mesh of one dimension, over a group that it neither made nor finds by name."""

    def __init__(self, group: Group) -> None:
        super().__init__(
            group.device,
            torch.arange(group.size),
            mesh_dim_names=("dp_shard",),
            _init_backend=False,  # neither a default group nor new ones
            _rank=group.rank,
        )
        self._group = group.torch_group

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group."""
        assert mesh_dim in (None, 0, "dp_shard"), "there is one dimension"
        return self._group


class ShardedRoot(nn.Module):
    """The root of a sharded model: code that runs within a pass sees whole weights.

    Layers are gathered when they run and freed afterwards. Everything else, embeddings and head, stays gathered for the
    whole pass, so that a loss may use the head's weight freely.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], group: Group, *, frozen: bool) -> None:
        """Shard a model in place, on the meta device or with its weights.

        What is trained in half precision is kept in float32 and computed in half precision: the shards are the masters.

        Args:
            model: whole, or cut for tensor parallelism; its parameters become DTensors.
            units: modules that are gathered one at a time, in the order in which they run.
            group: the ranks that share it.
            frozen: whether it will never be trained, and needs no masters.
        """
        super().__init__()
        self.model, self._group = model, group
        self.half_dtype: torch.dtype | None = None
        """Precision that the model computes in, if its weights here are float32 masters."""
        policy = MixedPrecisionPolicy()
        dtype = next(model.parameters()).dtype
        trained = [] if frozen else [weight for weight in model.parameters() if weight.requires_grad]
        if torch.finfo(dtype).bits < 32 and trained:
            self.half_dtype = dtype
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for weight in trained:
                weight.data = weight.data.float()
        of_units = {weight for unit in units for weight in unit.parameters()}
        self._root_weights = [name for name, weight in model.named_parameters() if weight not in of_units]
        mesh = GroupMesh(group)
        for module in (*units, self):
            fully_shard(module, mesh=mesh, mp_policy=policy)
            assert isinstance(module, FSDPModule), "fully_shard has made it one"
            # Losses are sums over a global count: gradients add up, and are not averaged. gloo can do nothing else.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def forward(self, call: Callable[[], ResultT]) -> ResultT:
        """Call a function while the weights are gathered; FSDP2's hooks wrap this method."""
        return call()

    def run(self, call: Callable[[], ResultT]) -> ResultT:
        """Make a forward pass: all ranks at the same time, each with a call of its own.

        Raises what `Group.watched` raises.
        """
        with self._group.watched():
            result: ResultT = self(call)
        if not torch.is_grad_enabled():
            assert isinstance(self, FSDPModule), "fully_shard has made it one"
            self.reshard()  # what a backward pass would do: weights may change before the next one
        return result

    @torch.no_grad()
    def settle(self) -> None:
        """Make an empty pass: before its first one FSDP2 moves weights that do not divide evenly to new memory."""
        self.run(lambda: None)

    def backward(self, total: Tensor) -> None:
        """Run backward from the result of a pass, on all ranks at the same time.

        Raises what `Group.watched` raises.
        """
        with self._group.watched():
            total.backward()

    def touch(self) -> Tensor:
        """Return a zero that depends on all trained weights outside the units, within a pass.

        FSDP2 sends gradients only for weights that were used, so a rank without rows must use all of them.
        """
        weights = (self.model.get_parameter(name) for name in self._root_weights)
        return sum((w.flatten()[:0].sum().float() for w in weights if w.requires_grad), start=torch.zeros(()))


def held(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that may be sharded, sharing its memory, without gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def shard_rows(num_rows: int, index: int, count: int) -> tuple[int, int]:
    """Return the first row and the one after the last of a weight that FSDP2 gives to one rank.

    >>> [shard_rows(5, index, count=4) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-num_rows // count)
    return min(num_rows, index * size), min(num_rows, (index + 1) * size)
