"""Weights in memory that other processes of the node can read, so that they need no copy in between.

Owns: how weights get there, and which of them are still there. Must not know: who reads them, or when. Training notices
nothing: only the addresses change, and neighbouring weights stay neighbours. The memory has no name in the file system;
see `same_node`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rallypoint.observability.memory import count_shared
from rallypoint.parallel import held
from rallypoint.weights.exposed import Exposed
from rallypoint.weights.manifest import Held

_ALIGNMENT = 64
_SEAL_FUTURE_WRITE = 0x10
"""Seal that makes all but existing mappings read-only; Python 3.11 has no name for it."""


class SharedWeights:
    """Memory that holds this rank's weights."""

    def __init__(self, num_bytes: int) -> None:
        """Make memory of a size; see `share`, which fills it."""
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("rallypoint weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        self.memory = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        # From here on no other process can write the weights. Linux before 5.1 has no such seal.
        with contextlib.suppress(OSError):
            fcntl.fcntl(
                self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
            )

    def exposed(self, held: Mapping[str, Held], tensors: Mapping[str, Tensor]) -> Exposed:
        """Return the tensors that others may read here: contiguous ones, in the type in which they are sent."""
        first, starts = self.memory.data_ptr(), dict[str, int]()
        for name, tensor in tensors.items():
            start, last = tensor.data_ptr() - first, self.num_bytes - tensor.nbytes
            if tensor.dtype == held[name].dtype and tensor.is_contiguous() and tensor.nbytes and 0 <= start <= last:
                starts[name] = start
        return Exposed(self.memory.numpy(), starts, self.descriptor)


def share(tensors: Iterable[Tensor]) -> SharedWeights | None:
    """Move tensors on the CPU to memory that other processes can open; None if the system has no such memory.

    Call it before anything else has views of the tensors: views would stay at the old addresses.
    """
    return _moved((tensor, functools.partial(setattr, tensor, "data")) for tensor in tensors)


def share_trained(model: nn.Module) -> SharedWeights | None:
    """Move the trained weights of a model, see `share`; of a sharded model, before its first pass.

    Until that pass torch keeps the old memory. Weights of which another rank has a larger part stay where they are,
    because torch would move them again.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and not _is_smaller(weight):
                places.setdefault(weight, []).append((module, name))  # tied weights stay one
    return _moved((held(weight), _putting(weight, where)) for weight, where in places.items())


def _is_smaller(weight: Tensor) -> bool:
    """Return whether another rank has a larger part of a sharded weight."""
    return isinstance(weight, DTensor) and held(weight).numel() * weight.device_mesh.size() < weight.numel()


def _putting(weight: nn.Parameter, places: Sequence[tuple[nn.Module, str]]) -> Callable[[Tensor], None]:
    """Return a function that gives a weight other memory; a sharded weight needs a new parameter for that."""
    if not isinstance(weight, DTensor):
        return functools.partial(setattr, weight, "data")

    def put(local: Tensor) -> None:
        mesh, placements, shape, stride = weight.device_mesh, weight.placements, weight.shape, weight.stride()
        whole = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        parameter = nn.Parameter(whole)
        for module, name in places:
            setattr(module, name, parameter)

    return put


@torch.no_grad()
def _moved(tensors: Iterable[tuple[Tensor, Callable[[Tensor], None]]]) -> SharedWeights | None:
    """Copy tensors to shared memory of the same layout, one by one, and have each replaced by its copy."""
    storages: dict[int, list[tuple[Tensor, Callable[[Tensor], None]]]] = {}
    for tensor, put in tensors if sys.platform == "linux" else ():
        if tensor.nbytes:
            storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((tensor, put))
    starts, end = dict[int, int](), 0
    for address, users in storages.items():
        starts[address] = end
        end += -(-users[0][0].untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
    if not end:
        return None
    shared = SharedWeights(end)
    for address, start in starts.items():
        for tensor, put in storages.pop(address):
            flat = shared.memory[start + tensor.data_ptr() - address :]
            numbers = flat[: flat.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
            put(numbers.as_strided(tensor.shape, tensor.stride()).copy_(tensor))
    count_shared(shared, end)
    return shared
