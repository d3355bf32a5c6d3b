"""NCCL itself, without a process group: for weights that go from one set of processes to another.

Calls the library that torch has loaded, through ctypes. The id that all ranks need travels as the payload of rank 0.
Operations are enqueued on torch's current stream; errors of the library are raised at once.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Self

import torch

from rallypoint.cluster.rendezvous import Membership, Rendezvous

_ID_BYTES = 128
_SUM = 0
# The values of ncclDataType_t.
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class NcclCommunicator:
    """A raw communicator; every operation has to be called by all ranks, in the same order."""

    def __init__(self, library: ctypes.CDLL, membership: Membership, handle: ctypes.c_void_p) -> None:
        """See `meet`, which makes them."""
        self.membership, self._library, self._handle = membership, library, handle

    @classmethod
    def meet(
        cls, rendezvous: Rendezvous, name: str, *, rank: int, world_size: int, timeout_s: float
    ) -> NcclCommunicator:
        """Meet the other ranks and make a communicator on torch's current device.

        Raises what `Rendezvous.join` raises, and:

        Raises:
            RuntimeError: NCCL could not be initialised.
            OSError: there is no NCCL.
        """
        library = ctypes.CDLL("libnccl.so.2")
        library.ncclGetErrorString.restype = ctypes.c_char_p
        unique_id = _UniqueId()
        if rank == 0:
            _checked(library, library.ncclGetUniqueId(ctypes.byref(unique_id)))
        payload = bytes(unique_id) if rank == 0 else b""
        membership = rendezvous.join(name, rank=rank, world_size=world_size, payload=payload, timeout_s=timeout_s)
        with contextlib.ExitStack() as unless_connected:
            unless_connected.callback(membership.close)
            unique_id = _UniqueId.from_buffer_copy(membership.members[0].payload)
            handle = ctypes.c_void_p()
            library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int]
            _checked(library, library.ncclCommInitRank(ctypes.byref(handle), world_size, unique_id, rank))
            unless_connected.pop_all()
        return cls(library, membership, handle)

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace a contiguous tensor on the device by its sum over the ranks, in place."""
        data, count, kind, stream = _operand(tensor)
        _checked(self._library, self._library.ncclAllReduce(data, data, count, kind, _SUM, self._handle, stream))

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Replace a contiguous tensor on the device by that of rank `root`, in place."""
        data, count, kind, stream = _operand(tensor)
        _checked(self._library, self._library.ncclBroadcast(data, data, count, kind, root, self._handle, stream))

    def close(self) -> None:
        """Wait for what is enqueued, end the communicator and leave."""
        if self._handle:
            torch.cuda.current_stream().synchronize()
            _checked(self._library, self._library.ncclCommDestroy(self._handle))
            self._handle = ctypes.c_void_p()
            self.membership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _operand(tensor: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t, int, ctypes.c_void_p]:
    if not (tensor.is_cuda and tensor.is_contiguous() and tensor.dtype in _TYPES):
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise ValueError(f"NCCL takes contiguous numbers on a GPU, got {layout} {tensor.dtype} on {tensor.device}")
    stream = ctypes.c_void_p(torch.cuda.current_stream(tensor.device).cuda_stream)
    return ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), _TYPES[tensor.dtype], stream


def _checked(library: ctypes.CDLL, status: int) -> None:
    if status:
        raise RuntimeError(f"NCCL: {library.ncclGetErrorString(status).decode()}")
