"""Tensors that leave their device while nobody needs them, and come back as they were.

Owns: the memory behind tensors, whole storages at a time. Must not know: models, optimizers, roles. Invariant: tensors
stay the same objects, so that whoever refers to them (tied weights, the optimizer, a generator that samples from the
same model) finds them again; in between they must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


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

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """What sleeps now."""
        return sum(len(held) for _, held in self._held)

    @torch.no_grad()
    def sleep(self, tensors: Iterable[Tensor]) -> None:
        """Copy the memory behind some tensors to page-locked CPU memory, and free it; who sleeps sleeps on."""
        if self._held:
            return
        storages = {storage.data_ptr(): storage for tensor in tensors if (storage := tensor.untyped_storage()).nbytes()}
        for storage in storages.values():
            on_accelerator = storage.device.type != "cpu"
            held = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_accelerator)
            held.copy_(_bytes_of(storage), non_blocking=on_accelerator)
            self._held.append((storage, held))
        self._synchronize()
        for storage, _ in self._held:
            storage.resize_(0)

    @torch.no_grad()
    def wake(self) -> None:
        """Bring everything back; nothing happens when nothing sleeps."""
        for storage, held in self._held:
            storage.resize_(len(held))
            _bytes_of(storage).copy_(held, non_blocking=True)
        self._synchronize()
        self._held.clear()

    def _synchronize(self) -> None:
        for device in {storage.device for storage, _ in self._held if storage.device.type != "cpu"}:
            torch.accelerator.synchronize(device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
