"""Weights of one rank that other processes of the node read from where they are, and how these find them.

Must not know: how weights got there. Imported where only torch is certain.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from rallypoint.weights.endpoints import Runs
from rallypoint.weights.manifest import Bucket


@dataclasses.dataclass(frozen=True, slots=True)
class Exposed:
    """Weights of one rank that others read in place."""

    data: npt.NDArray[np.uint8]
    """Bytes of the memory."""
    starts: Mapping[str, int]
    """Name of a tensor -> its first byte."""
    descriptor: int
    """The open file behind the memory."""

    def told(self, names: Iterable[str]) -> bytes:
        """Return what another process needs in addition to the open file and the names of the tensors; see `opened`."""
        return np.array([len(self.data), *(self.starts.get(name, -1) for name in names)]).tobytes()

    @classmethod
    def opened(cls, told: bytes, names: Iterable[str], descriptor: int) -> Exposed:
        """Map read-only what another process exposes."""
        num_bytes, *starts = np.frombuffer(told, dtype=np.int64).tolist()
        memory = mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ)
        exposed = {name: start for name, start in zip(names, starts, strict=True) if start >= 0}
        return cls(np.frombuffer(memory, dtype=np.uint8), exposed, descriptor)

    def runs(self, bucket: Bucket) -> Runs | None:
        """Return the bytes of each rectangle of a bucket; None if one of them is not here."""
        found: list[npt.NDArray[np.uint8]] = []
        for rectangle in bucket.rectangles:
            start, run = self.starts.get(rectangle.name), rectangle.source.run
            if start is None or run is None:
                return None
            found.append(self.data[start + run.start : start + run.stop])
        return found

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tensors in this process."""
        first = self.data.ctypes.data
        return {name: first + start for name, start in self.starts.items()}
