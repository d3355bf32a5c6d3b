"""Tensors that leave their device while they are not needed, and come back as they were.

Owns: the memory behind tensors, whole storages at a time. Must not know: models, optimizers, roles. Invariant: tensors
stay the same objects, so that all references to them hold (tied weights, the optimizer, a generator that samples from
the same model); in between they must not be touched.

Storages lie end to end in a few large pieces of page-locked memory. torch's allocator rounds each block of that up to a
power of two: a block for every weight would take half as much again, and pieces that are powers of two take nothing:

    storages   | w0 | w1   | w2          | w3 |
    pieces     | 0        | 1        | 2    |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_PIECE_BYTES = 2**28
"""A power of two."""
_SMALLEST_BYTES = 2**20
"""Smallest size of the last piece; a larger one is the next power of two."""


class Sleeper:
    """Holds the memory of some tensors in CPU memory while they sleep.

    >>> weight = torch.arange(3.0)
    >>> sleeper = Sleeper()
    >>> sleeper.sleep([weight, weight.view(3, 1)])
    >>> weight.untyped_storage().nbytes(), sleeper.num_bytes
    (0, 12)
    >>> sleeper.wake()
    >>> weight
    tensor([0., 1., 2.])
    """

    def __init__(self, piece_bytes: int = _PIECE_BYTES) -> None:
        """Hold memory in pieces of `piece_bytes`, a power of two."""
        self._piece_bytes = piece_bytes
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._pieces: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that sleep now."""
        return sum(size for _, size in self._storages)

    @torch.no_grad()
    def sleep(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory behind some tensors to page-locked CPU memory, and free it; does nothing while any sleep."""
        if self._storages:
            return
        storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        on_accelerator = any(storage.device.type != "cpu" for storage, _ in self._storages)
        self._pieces = [
            torch.empty(size, dtype=torch.uint8, pin_memory=on_accelerator)
            for size in piece_sizes(self.num_bytes, self._piece_bytes)
        ]
        for held, part in self._parts():
            held.copy_(part, non_blocking=on_accelerator)
        self._synchronize()
        for storage, _ in self._storages:
            storage.resize_(0)

    @torch.no_grad()
    def wake(self) -> None:
        """Bring everything back; nothing happens when nothing sleeps."""
        for storage, size in self._storages:
            storage.resize_(size)
        for held, part in self._parts():
            part.copy_(held, non_blocking=True)
        self._synchronize()
        self._storages.clear()
        self._pieces.clear()

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every part of a storage that lies in one piece, there and where it belongs."""
        place = 0
        for storage, size in self._storages:
            whole, begin = _bytes_of(storage), 0
            while begin < size:
                index, within = divmod(place + begin, self._piece_bytes)
                step = min(size - begin, self._piece_bytes - within)
                yield self._pieces[index][within : within + step], whole[begin : begin + step]
                begin += step
            place += size

    def _synchronize(self) -> None:
        for device in {storage.device for storage, _ in self._storages if storage.device.type != "cpu"}:
            torch.accelerator.synchronize(device)


def piece_sizes(num_bytes: int, piece_bytes: int) -> list[int]:
    """Return the sizes of pieces that hold so many bytes: powers of two, all alike but for the last.

    >>> piece_sizes(2**30 + 5, 2**29)
    [536870912, 536870912, 1048576]
    """
    whole, rest = divmod(num_bytes, piece_bytes)
    last = max(min(_SMALLEST_BYTES, piece_bytes), 1 << (rest - 1).bit_length()) if rest else 0
    return [piece_bytes] * whole + [last] * bool(rest)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
