"""How the ranks of a role add up what each of them computed.

Owns: groups of ranks and their collectives. Must not know: models, losses, Ray. The group object is
passed around; there is no global one, so that several roles, and the ranks of an inline run (threads
of one process), each have their own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.parallel.process_group import Device, Group, meet


class Collective(Protocol):
    """The ranks that hold copies of one model."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce_sum(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place; every rank gets the same bits."""
        ...


class Solo:
    """One rank: a sum over the ranks is the tensor itself."""

    rank = 0
    size = 1

    def all_reduce_sum(self, tensors: list[Tensor]) -> None:
        """Leave everything as it is."""


class Grouped:
    """Ranks that are connected by a process group, gloo or NCCL.

    Raises when a rank is missing after the group's timeout or dies, and then says which one if that is known.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self._group = group.rank, group.size, group

    def all_reduce_sum(self, tensors: list[Tensor]) -> None:
        """Send all tensors as one flat buffer per type: one latency instead of many."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1).to(self._group.device) for tensor in same])
            try:
                self._group.torch_group.allreduce([flat]).wait()
            except RuntimeError:
                self._group.check()  # raises with the name of a rank that is known to be gone
                raise
            for tensor, total in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(total.view_as(tensor))


def connect(
    rendezvous: Rendezvous, name: str, rank: int, size: int, *, timeout_s: float = 600.0, device: Device = "cpu"
) -> Collective:
    """Return the group of `size` ranks that meet under a name; a single rank needs no meeting.

    Raises what `meet` raises; `timeout_s` bounds the wait for the others, and later each operation.
    """
    if size == 1:
        return Solo()
    return Grouped(meet(rendezvous, name, rank=rank, world_size=size, timeout_s=timeout_s, device=device))
