"""Weights in memory that other processes of the node can open, so that they take them without a copy in between.

Owns: how weights get there, and which of them still are. Must not know: who reads them, or when. What trains them
notices nothing: their numbers are elsewhere, and weights that lay behind one another still do. The memory has no name
in the file system; see `memory`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rallypoint.observability.memory import count_shared
from rallypoint.parallel import held
from rallypoint.weights.endpoints import Runs
from rallypoint.weights.manifest import Bucket, Held

_ALIGNMENT = 64
_SEAL_FUTURE_WRITE = 0x10
"""Python 3.11 has no name for it: all but mappings that there are already can only read."""


class SharedWeights:
    """Memory that has what this rank holds of weights."""

    def __init__(self, num_bytes: int) -> None:
        """Make memory for so many bytes; see `share`, which fills it."""
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("rallypoint weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        self.memory = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        # From here on nobody else can write what is trained. Linux before 5.1 knows no such seal.
        with contextlib.suppress(OSError):
            fcntl.fcntl(
                self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
            )

    def exposed(self, held: Mapping[str, Held], tensors: Mapping[str, Tensor]) -> Exposed:
        """Return what others may read here: tensors in the type in which they travel, whose bytes lie end to end."""
        first, starts = self.memory.data_ptr(), dict[str, int]()
        for name, tensor in tensors.items():
            start, last = tensor.data_ptr() - first, self.num_bytes - tensor.nbytes
            if tensor.dtype == held[name].dtype and tensor.is_contiguous() and tensor.nbytes and 0 <= start <= last:
                starts[name] = start
        return Exposed(self.memory.numpy(), starts, self.descriptor)


@dataclasses.dataclass(frozen=True, slots=True)
class Exposed:
    """Weights of one rank that others read where they are."""

    data: npt.NDArray[np.uint8]
    """The memory."""
    starts: Mapping[str, int]
    """Name of a tensor -> its first byte."""
    descriptor: int
    """The open file behind the memory."""

    def told(self, names: Iterable[str]) -> bytes:
        """Return what another process needs beside the file and the names of all tensors that travel; see `opened`."""
        return np.array([len(self.data), *(self.starts.get(name, -1) for name in names)]).tobytes()

    @classmethod
    def opened(cls, told: bytes, names: Iterable[str], descriptor: int) -> Exposed:
        """Return what another process exposes, to be read only."""
        num_bytes, *starts = np.frombuffer(told, dtype=np.int64).tolist()
        memory = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        exposed = {name: start for name, start in zip(names, starts, strict=True) if start >= 0}
        return cls(np.frombuffer(memory, dtype=np.uint8), exposed, descriptor)

    def runs(self, bucket: Bucket) -> Runs | None:
        """Return the bytes of each rectangle of a bucket; None where they are not all here."""
        found: list[npt.NDArray[np.uint8]] = []
        for rectangle in bucket.rectangles:
            start, run = self.starts.get(rectangle.name), rectangle.source.run
            if start is None or run is None:
                return None
            found.append(self.data[start + run.start : start + run.stop])
        return found

    def addresses(self) -> dict[str, int]:
        """Return where the tensors are in this process."""
        first = self.data.ctypes.data
        return {name: first + start for name, start in self.starts.items()}


def share(tensors: Iterable[Tensor]) -> SharedWeights | None:
    """Move tensors on the CPU to memory that other processes can open; None where the system has no such.

    To be called before anybody else has views of them: those would stay where they are.
    """
    return _moved((tensor, functools.partial(setattr, tensor, "data")) for tensor in tensors)


def share_trained(model: nn.Module) -> SharedWeights | None:
    """Move all that training changes of a model; see `share`. To be called before the first pass of a sharded one.

    Until that pass torch keeps what was there before. Parts smaller than others stay: it would move them again.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and not _is_smaller(weight):
                places.setdefault(weight, []).append((module, name))  # tied weights stay one
    return _moved((held(weight), _putting(weight, where)) for weight, where in places.items())


def _is_smaller(weight: Tensor) -> bool:
    """Say whether another rank has more of a sharded weight."""
    return isinstance(weight, DTensor) and held(weight).numel() * weight.device_mesh.size() < weight.numel()


def _putting(weight: nn.Parameter, places: Sequence[tuple[nn.Module, str]]) -> Callable[[Tensor], None]:
    """Return what makes memory that of a weight: torch takes other memory for a sharded one as another parameter."""
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
    """Copy tensors, each with what replaces it, one after another to memory of the same layout, and let theirs go."""
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
