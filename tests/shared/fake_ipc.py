"""Memory of devices that processes share, by the rules that CUDA documents; processes are threads here."""

import secrets
import threading

import torch
from torch import Tensor


class Driver:
    """What all processes of a node have in common: which memory was exported, and which of their devices reach it."""

    def __init__(self, *, cut_off: tuple[int, ...] = (), exports: bool = True) -> None:
        """Have devices of some processes that reach no other one's memory; or none that can export any."""
        self.cut_off, self.exports = cut_off, exports
        self.exported: dict[bytes, tuple[int, Tensor]] = {}
        self.opened: list[bytes] = []
        self.lock = threading.Lock()

    def process(self, number: int) -> "FakeHandles":
        """Return what a process has of it."""
        return FakeHandles(self, number)


class FakeHandles:
    """See `rallypoint.weights.buffers.TorchHandles`."""

    def __init__(self, driver: Driver, process: int) -> None:
        self.driver, self.process = driver, process

    def export(self, memory: Tensor) -> bytes:
        if not self.driver.exports:
            raise RuntimeError("CUDA error: operation not supported")
        handle = secrets.token_hex(16).encode()
        self.driver.exported[handle] = self.process, memory
        return handle

    def open(self, handle: bytes, device: torch.device) -> Tensor:
        owner, memory = self.driver.exported[handle]
        if owner == self.process:
            raise RuntimeError("CUDA error: invalid device context\nCUDA kernel errors might be reported elsewhere")
        if self.process in self.driver.cut_off or owner in self.driver.cut_off:
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        with self.driver.lock:
            if handle in self.driver.opened:
                raise RuntimeError("this handle was counted for one process, which has opened it")
            self.driver.opened.append(handle)
        return memory
