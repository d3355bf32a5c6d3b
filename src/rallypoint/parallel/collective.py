"""How the ranks of a role add up what each of them computed.

Owns: groups of ranks and their collectives. Must not know: models, losses, Ray. The group object is
passed around; there is no global one, so that several roles, and the ranks of an inline run (threads
of one process), each have their own.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


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


class Gloo:
    """Ranks on the CPUs of one machine, connected over loopback.

    Consumes a file that all ranks can see and that did not exist before; waits for all `size` ranks to
    open it; raises when one is missing after `timeout_s` or dies later.
    """

    def __init__(self, rendezvous: Path, rank: int, size: int, timeout_s: float = 600.0) -> None:
        self.rank, self.size = rank, size
        timeout = datetime.timedelta(seconds=timeout_s)
        # Private names, because the public door opens one group for the whole process, on every interface.
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        store = dist.FileStore(str(rendezvous), size)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(timeout)
        self._group = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce_sum(self, tensors: list[Tensor]) -> None:
        """Send all tensors as one flat buffer per type: one latency instead of many."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1).cpu() for tensor in same])
            self._group.allreduce([flat]).wait()  # pyright: ignore[reportAttributeAccessIssue]
            for tensor, total in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(total.view_as(tensor))


def connect(rendezvous: Path, rank: int, size: int) -> Collective:
    """Return the group of `size` ranks that meet at a file; a single rank needs no meeting."""
    return Solo() if size == 1 else Gloo(rendezvous, rank, size)
