"""What `pretend_device` holds: its memory, its streams, and what the host waited for. See there."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

NAME = "pretend"
NUM_DEVICES = 2
_EXT_DEVICE = 12
"""kDLExtDev of dlpack.h, which torch reads as the device that a third party has registered."""
WRONG = 0xFF
"""Bytes of memory that nobody has written: NaN as a float of any size, -1 as an integer, True."""
_CPU = torch.device("cpu")


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("index", ctypes.c_int)]


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _DLDevice)]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", _DLTensor)]  # and more, which stays as it is


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class PretendStream:
    """What `torch.Stream` is on this device: a clock of its own, and what it knows of the others'."""

    _ids = itertools.count()
    living: ClassVar[weakref.WeakSet[PretendStream]] = weakref.WeakSet()

    def __init__(self, device: torch.device | str | int | None = None) -> None:
        self.index = index_of(device)
        self.stream_id = next(self._ids)
        self.time = 0
        self.knows: dict[PretendStream, int] = {}
        self._before: list[PretendStream] = []
        self.living.add(self)

    @property
    def device(self) -> torch.device:
        """The device that it is of."""
        return torch.device(NAME, self.index)

    def __enter__(self) -> PretendStream:
        self._before.append(DEVICE.stream(self.index))
        DEVICE.set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        DEVICE.set_stream(self._before.pop())

    def wait_stream(self, other: PretendStream) -> None:
        """Have what follows here begin after what is there now."""
        self.wait_event(other.record_event())

    def wait_event(self, event: PretendEvent) -> None:
        """Have what follows here begin after an event."""
        for stream, time in event.moment.items():
            self.knows[stream] = max(time, self.knows.get(stream, 0))

    def record_event(self, event: PretendEvent | None = None) -> PretendEvent:
        """Mark this moment."""
        event = event or PretendEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Have the host wait for all that is here."""
        DEVICE.synchronised("stream", {**self.knows, self: self.time})

    def query(self) -> bool:
        """Nothing is under way ever."""
        return True

    def has_seen(self, stream: PretendStream, time: int) -> bool:
        """Whether what follows here begins after a moment of a stream."""
        return stream is self or max(self.knows.get(stream, 0), DEVICE.host_knows.get(stream, 0)) >= time


class PretendEvent:
    """What `torch.Event` is on this device."""

    def __init__(self, device: torch.device | str | None = None, **_: Any) -> None:
        self.device = device
        self.moment: dict[PretendStream, int] = {}

    def record(self, stream: PretendStream | None = None) -> None:
        """Mark the moment where a stream is."""
        stream = stream or DEVICE.stream(0)
        self.moment = {**stream.knows, stream: stream.time}

    def wait(self, stream: PretendStream | None = None) -> None:
        """Have a stream wait for it."""
        (stream or DEVICE.stream(0)).wait_event(self)

    def synchronize(self) -> None:
        """Have the host wait for it."""
        DEVICE.synchronised("event", self.moment)

    def query(self) -> bool:
        """Nothing is under way ever."""
        return True


class _Memory:
    """One allocation."""

    def __init__(self, device: int, address: int, num_bytes: int, stream: PretendStream) -> None:
        self.device, self.address, self.num_bytes = device, address, num_bytes
        self.home = stream
        self.written: dict[PretendStream, int] = {}
        self.read: dict[PretendStream, int] = {}
        self.recorded: set[PretendStream] = set()


class _Copy(NamedTuple):
    """One that is under way between the device and page-locked memory."""

    stream: PretendStream
    time: int
    here: Tensor
    copied: Tensor


class Pretend:
    """The device: what it holds, and what was asked of it."""

    def __init__(self) -> None:
        self.limit: int | None = None
        """Bytes of each device."""
        self.syncs: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.faults: list[str] = []
        """What went wrong where nothing could be raised; `check` raises it."""
        self._held, self._peak = [0] * NUM_DEVICES, [0] * NUM_DEVICES
        self._by_end: dict[int, tuple[weakref.ref[Any], _Memory]] = {}
        self._by_address: dict[int, _Memory] = {}
        self._local = threading.local()
        self.host_knows: dict[PretendStream, int] = {}
        """What the host has waited for: whatever it launches from then on begins later."""
        self._defaults = [PretendStream(index) for index in range(NUM_DEVICES)]
        self._pinned: dict[int, int] = {}
        self._coming: list[_Copy] = []
        self._going: list[_Copy] = []
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Forget what was counted, and begin the peaks anew."""
        for counted in (self.syncs, self.copies, self.bytes, self.kernels):
            counted.clear()
        self._peak = list(self._held)

    @contextlib.contextmanager
    def limited(self, num_bytes: int) -> Iterator[None]:
        """Have that much memory inside."""
        before, self.limit = self.limit, num_bytes
        try:
            yield
        finally:
            self.limit = before

    def check(self) -> None:
        """Raise what could not be raised where it happened."""
        faults, self.faults = self.faults, []
        assert not faults, "\n".join(faults)

    # Memory

    def allocated(self, device: Any = None) -> int:
        """Return the bytes that tensors hold."""
        return self._held[index_of(device)]

    def peak(self, device: Any = None) -> int:
        """Return the most that they held since `reset_peak`."""
        return self._peak[index_of(device)]

    def reset_peak(self, device: Any = None) -> None:
        """Begin the peak at what is held."""
        self._peak[index_of(device)] = self._held[index_of(device)]

    def take(self, index: int, num_bytes: int) -> None:
        """Count an allocation before it is made.

        Raises:
            OutOfMemoryError: there is not so much.
        """
        with self._lock:
            if self.limit is not None and self._held[index] + num_bytes > self.limit:
                raise torch.OutOfMemoryError(
                    f"PRETEND out of memory. Tried to allocate {num_bytes} bytes: device {index} has {self.limit}, of "
                    f"which {self._held[index]} are taken"
                )
            self._held[index] += num_bytes
            self._peak[index] = max(self._peak[index], self._held[index])

    def wrap(self, tensor: Tensor, index: int, *, is_written: bool = True) -> Tensor:
        """Return a CPU tensor, which nobody else has, as one of a device."""
        storage, stream = tensor.untyped_storage(), self.stream(index)
        self.take(index, storage.nbytes())
        memory = _Memory(index, storage.data_ptr(), storage.nbytes(), stream)
        if storage.nbytes():
            # An array whose end is heard of, in whatever thread, and whatever is being raised there.
            array = _bytes(storage, keep=True).numpy()
            with self._lock:
                end = weakref.ref(array, self._freed)
                self._by_end[id(end)] = end, memory
                self._by_address[memory.address] = memory
            storage = torch.from_numpy(array).untyped_storage()
            tensor = torch.empty(0, dtype=tensor.dtype).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        capsule = torch._C._to_dlpack(tensor.detach())
        export = _DLManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        export.tensor.device.type, export.tensor.device.index = _EXT_DEVICE, index
        made = torch._C._from_dlpack(capsule)
        if is_written:
            stream.time += 1
            memory.written[stream] = stream.time
        return made

    def _freed(self, end: weakref.ref[Any]) -> None:
        with self._lock:
            _, memory = self._by_end.pop(id(end))
            self._held[memory.device] -= memory.num_bytes
            if self._by_address.get(memory.address) is memory:
                del self._by_address[memory.address]
        for stream, time in [*memory.read.items(), *memory.written.items()]:
            if not memory.home.has_seen(stream, time) and stream not in memory.recorded:
                self.faults.append(
                    f"{memory.num_bytes} bytes are free while stream {stream.stream_id} uses them: record_stream, or "
                    "wait for it"
                )

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Do what `resize_` does for a storage of a device; what is new in it is wrong."""
        index = storage.device.index or 0
        fresh = self.wrap(torch.full((num_bytes,), WRONG, dtype=torch.uint8), index)
        new = fresh.untyped_storage()
        kept = min(storage.nbytes(), num_bytes)
        if kept:
            _bytes(new)[:kept].copy_(_bytes(storage)[:kept])
        storage._swap_data_ptr_(new)

    # Streams

    def stream(self, index: int) -> PretendStream:
        """Return the one of a device that this thread computes on."""
        return self._local.__dict__.setdefault("streams", {}).get(index, self._defaults[index])

    def set_stream(self, stream: PretendStream) -> None:
        """Have this thread compute on another."""
        self._local.__dict__.setdefault("streams", {})[stream.index] = stream

    def used(self, tensor: Tensor, *, is_written: bool, is_new: bool = False) -> None:
        """See to it that a tensor may be read or written where this thread is.

        Raises:
            RuntimeError: another stream has written it, or reads it, and nobody waited.
        """
        memory = self._by_address.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            return
        stream = self.stream(index_of(tensor.device))
        others = list(memory.written.items()) + (list(memory.read.items()) if is_written else [])
        for other, time in others:
            if not is_new and not stream.has_seen(other, time):
                raise RuntimeError(
                    f"stream {stream.stream_id} uses memory that stream {other.stream_id} is using: it has not waited"
                )
        (memory.written if is_written else memory.read)[stream] = stream.time

    def synchronised(self, reason: str, moment: dict[PretendStream, int] | None = None) -> None:
        """Count that the host waits, and have everything arrive that was on its way until then; None: until now."""
        self.syncs[reason] += 1

        def has_come(stream: PretendStream, time: int) -> bool:
            return self.host_knows.get(stream, 0) >= time

        with self._lock:
            for stream, time in (self._everything() if moment is None else moment).items():
                self.host_knows[stream] = max(time, self.host_knows.get(stream, 0))
            coming, self._coming = self._coming, []
            for copy in coming:
                if has_come(copy.stream, copy.time):
                    copy.here.copy_(copy.copied)
                else:
                    self._coming.append(copy)
            going = self._going
            self._going = [copy for copy in going if not has_come(copy.stream, copy.time)]
            self._check_gone(copy for copy in going if has_come(copy.stream, copy.time))

    def _everything(self) -> dict[PretendStream, int]:
        return {stream: stream.time for stream in PretendStream.living}

    def now(self, stream: PretendStream) -> dict[PretendStream, int]:
        """Return all that has happened when a stream has come to its end."""
        return {**stream.knows, stream: stream.time}

    # Page-locked memory

    def pin(self, tensor: Tensor) -> Tensor:
        """Count a CPU tensor's memory as page-locked."""
        storage = tensor.untyped_storage()
        self._pinned[storage.data_ptr()] = storage.nbytes()
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether its memory is."""
        storage = tensor.untyped_storage()
        return self._pinned.get(storage.data_ptr()) == storage.nbytes() > 0

    # Copies

    def copy(self, into: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        """Do what `copy_` does."""
        num_bytes = into.numel() * into.element_size()
        if into.device.type == NAME and source.device.type == NAME:
            way = "on the device" if into.device == source.device else "between devices"
            self._copied(way, num_bytes)
            self.used(source, is_written=False)
            self._write(into)
            unwrap(into).copy_(unwrap(source))
        elif into.device.type == NAME:
            self._copied("to the device", num_bytes)
            stream = self._write(into)
            self._arrive(source, stream)
            unwrap(into).copy_(source)
            if non_blocking and self.is_pinned(source) and source.dtype == into.dtype:
                self._going.append(_Copy(stream, stream.time, source, source.clone()))
            else:
                self.synchronised("copy to the device", self.now(stream))
        else:
            self._copied("to the host", num_bytes)
            self.used(source, is_written=False)
            stream = self.stream(index_of(source.device))
            stream.time += 1
            if non_blocking and self.is_pinned(into):
                self._leave(into, stream)
                _as_bytes(into).fill_(WRONG)
                self._coming.append(_Copy(stream, stream.time, into, unwrap(source).clone()))
            elif non_blocking:  # as on CUDA, where the host may go on, and must not
                raise RuntimeError("a copy to the host with non_blocking=True needs page-locked memory to arrive in")
            else:
                self.synchronised("copy to the host", self.now(stream))
                into.copy_(unwrap(source))
        return into

    def _arrive(self, source: Tensor, stream: PretendStream) -> None:
        """Have arrive in page-locked memory what a stream, which is to copy from it, begins after."""
        address = source.untyped_storage().data_ptr()
        for copy in list(self._coming):
            if copy.here.untyped_storage().data_ptr() == address and stream.has_seen(copy.stream, copy.time):
                copy.here.copy_(copy.copied)
                self._coming = [other for other in self._coming if other is not copy]

    def _leave(self, into: Tensor, stream: PretendStream) -> None:
        """Have left page-locked memory what a stream, which is to copy to it, begins after."""
        address, going = into.untyped_storage().data_ptr(), self._going
        gone = [
            copy for copy in going
            if copy.here.untyped_storage().data_ptr() == address and stream.has_seen(copy.stream, copy.time)
        ]  # fmt: skip
        self._going = [copy for copy in going if not any(copy is one for one in gone)]
        self._check_gone(gone)

    def _check_gone(self, copies: Iterable[_Copy]) -> None:
        for copy in copies:
            if not torch.equal(_as_bytes(copy.here), _as_bytes(copy.copied)):
                self.faults.append("page-locked memory was written while a copy from it was under way")

    def _write(self, into: Tensor) -> PretendStream:
        stream = self.stream(index_of(into.device))
        stream.time += 1
        self.used(into, is_written=True)
        return stream

    def _copied(self, way: str, num_bytes: int) -> None:
        self.copies[way] += 1
        self.bytes[way] += num_bytes


def unwrap(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same memory, for as long as that lives."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _bytes(storage: torch.UntypedStorage, *, keep: bool = False) -> Tensor:
    """Return a storage as bytes of the CPU; `keep`: which keep it alive."""
    if not keep:
        storage = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def index_of(device: Any) -> int:
    if device is None:
        return 0
    return device if isinstance(device, int) else torch.device(device).index or 0


DEVICE = Pretend()
"""Of this process; torch knows of it when `pretend_device.install` has been called."""
