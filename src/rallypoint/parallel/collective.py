"""Collectives of a group of ranks: sums, parts, and agreement.

Owns: groups of ranks and their collectives, without gradients. Must not know: models, losses, Ray. The group object is
passed around; there is no global one, so that several roles, and the ranks of an inline run (threads of one process),
each have their own. Every call has to be made by all ranks of the group, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rallypoint.cluster.rendezvous import Rendezvous
from rallypoint.parallel.process_group import Device, Group, meet


class Collective:
    """Some ranks, of which this is one. By itself it has no other: a sum over the ranks is the tensor itself."""

    rank = 0
    """This rank, from 0."""
    size = 1
    """Number of ranks."""

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place; every rank gets the same bits."""

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace a tensor by its elementwise maximum over the ranks, in place."""

    def all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the tensors of all ranks, in rank order.

        Args:
            tensor: [n, ...]; ranks may differ in n only.
            sizes: n of every rank.
        """
        del sizes
        return [tensor]

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Give part i to rank i, and return what every rank gave to this one (all-to-all).

        Args:
            parts: one [n, ...] for every rank; they may differ in n only, over parts and over ranks.
            sizes: n of what comes from every rank.
        """
        del sizes
        return list(parts)

    def trade(self, tensor: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Exchange parts that are end to end, without a copy of them.

        Args:
            tensor: [sum of given, ...]: what the first rank gets, then what the second gets, and so on.
            given: number of rows for every rank.
            taken: number of rows that come from every rank.

        Returns:
            [sum of taken, ...], in rank order.
        """
        del given, taken
        return tensor


class Grouped(Collective):
    """Ranks that are connected by a process group.

    Raises when a rank is missing after the group's timeout or dies, and then says which one if that is known.
    """

    def __init__(self, group: Group) -> None:
        self.rank, self.size, self.group = group.rank, group.size, group

    def all_reduce_sum(self, tensors: Sequence[Tensor]) -> None:
        """Send all tensors as one flat buffer per type: one latency instead of many."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            if len(same) == 1 and self._travels(same[0]):
                with self.group.watched():
                    self.group.wait(self.group.torch_group.allreduce([same[0]]))
                continue
            flat = torch.cat([tensor.reshape(-1).to(self.group.device) for tensor in same])
            with self.group.watched():
                self.group.wait(self.group.torch_group.allreduce([flat]))
            for tensor, total in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(total.view_as(tensor))

    def all_reduce_max(self, tensor: Tensor) -> None:
        """See `Collective.all_reduce_max`."""
        sent = tensor.to(self.group.device).contiguous()
        with self.group.watched():
            self.group.wait(self.group.torch_group.allreduce([sent], torch.distributed.ReduceOp.MAX))
        if sent is not tensor:
            tensor.copy_(sent)

    def all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Pad to the largest, because gloo gathers equal sizes only."""
        most, rest = max(sizes), tensor.shape[1:]
        sent = tensor.to(self.group.device).contiguous()
        if len(tensor) < most:
            sent = torch.cat([sent, sent.new_zeros(most - len(tensor), *rest)])
        gathered = sent.new_empty(self.size, most, *rest)
        with self.group.watched():
            self.group.wait(self.group.torch_group.allgather([list(gathered.unbind())], [sent]))
        return [part[:size].to(tensor.device) for part, size in zip(gathered, sizes, strict=True)]

    def exchange(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """See `Collective.exchange`."""
        received = self.trade(torch.cat(list(parts)), [len(part) for part in parts], sizes)
        return list(received.split(list(sizes)))

    def trade(self, tensor: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """See `Collective.trade`."""
        sent = tensor.to(self.group.device).contiguous()
        received = sent.new_empty(sum(taken), *sent.shape[1:])
        with self.group.watched():
            self.group.wait(self.group.torch_group.alltoall_base(received, sent, list(taken), list(given)))
        return received.to(tensor.device)

    def _travels(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be reduced where it lies."""
        return tensor.is_contiguous() and tensor.device.type == self.group.device


def least_of(group: Collective, number: int) -> int:
    """Return the least of the numbers that the ranks of a group have.

    >>> least_of(Collective(), 3)
    3
    """
    least = torch.tensor([-number])
    group.all_reduce_max(least)
    return -int(least)


def connect(
    rendezvous: Rendezvous,
    name: str,
    rank: int,
    size: int,
    *,
    timeout_s: float = 600.0,
    device: Device = "cpu",
    generation: int | None = None,
) -> Collective:
    """Return the group of `size` ranks that meet under a name; a single rank needs no meeting.

    Takes and raises what `meet` does; `timeout_s` bounds the wait for the others, and later each operation.
    """
    if size == 1:
        return Collective()
    met = meet(rendezvous, name, rank=rank, world_size=size, timeout_s=timeout_s, device=device, generation=generation)
    return Grouped(met)
