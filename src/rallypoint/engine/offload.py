"""Tensors that leave their device while they are not needed: activations, and what belongs to a role that sleeps.

Owns: checkpoints of layers, and their copies to CPU memory and back during the computation; the memory behind tensors,
whole storages at a time. Must not know: losses, rows, optimizers, roles.

A forward pass keeps all activations for the backward pass, or only the inputs of decoder layers. Gradients are the same
bits whatever is kept, because a layer that is computed again computes
the same.

    keep          forward  L0 L1 L2    backward           L2'          L1'          L0'
    checkpoint    forward  L0 L1 L2    backward       L2  L2'      L1  L1'      L0  L0'
    offload       forward  L0 L1 L2    backward       L2  L2'      L1  L1'      L0  L0'
                  copies      out out out         in      in           in

What sleeps comes back as it was. Tensors stay the same objects, so that all references to them hold (tied weights, the
optimizer, a generator that samples from the same model); in between they must not be touched. Storages lie end to end
in a few large pieces of page-locked memory. torch's allocator rounds each block of that up to a power of two: a block
for every weight would take half as much again, and pieces that are powers of two take nothing:

    storages   | w0 | w1   | w2          | w3 |
    pieces     | 0        | 1        | 2    |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rallypoint.config.sections.learning import Activations
from rallypoint.errors import ModelError


@dataclasses.dataclass(slots=True)
class _Held:
    """A tensor in CPU memory, perhaps on its way back."""

    host: Any
    before: _Held | None
    """The tensor saved before it, which is needed after it."""
    coming: Any = None


class Offload:
    """Hooks that hold saved tensors in CPU memory, and fetch each one while the one needed before it is used."""

    def __init__(self, copies: SideStream) -> None:
        self._copies = copies
        self._last: _Held | None = None

    def pack(self, tensor: Tensor) -> _Held | Tensor:
        """Send a tensor away, unless it is empty, as is one that torch 2.11 keeps beside a layer's input."""
        if not tensor.numel():
            return tensor
        self._last = _Held(self._copies.out(tensor), before=self._last)
        return self._last

    def unpack(self, held: _Held | Tensor) -> Tensor:
        """Get it back, and have the next one come."""
        if isinstance(held, Tensor):
            return held
        self._last = None  # the next forward pass begins a row of its own
        tensor = self._copies.wait(self._fetch(held))
        held.coming = None
        if held.before is not None:
            self._fetch(held.before)
            held.before = None
        return tensor

    def _fetch(self, held: _Held) -> Any:
        if held.coming is None:
            held.coming = self._copies.back(held.host)
        return held.coming


class SideStream:
    """Copies that go on while the device computes: on a stream of their own, through page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)

    def out(self, tensor: Tensor) -> Tensor:
        """Begin to copy a tensor of the device to CPU memory."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self._stream:
            held.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not used again before it is copied
        return held

    def back(self, held: Tensor) -> tuple[Tensor, torch.Event]:
        """Begin to copy it back."""
        with self._stream:
            tensor = held.to(self._device, non_blocking=True)
        return tensor, self._stream.record_event()

    def wait(self, coming: tuple[Tensor, torch.Event]) -> Tensor:
        """Return what is coming back; what is computed with it starts when it is there."""
        tensor, ready = coming
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(ready)
        tensor.record_stream(computing)
        return tensor


class Checkpoints:
    """Has a model's decoder layers keep their inputs only, during passes inside `recorded`."""

    def __init__(self, model: PreTrainedModel, activations: Activations, copies: SideStream | None = None) -> None:
        """Prepare a model.

        Args:
            model: on its device.
            activations: what its layers keep for the backward pass.
            copies: how inputs are offloaded; None for a stream of the device.

        Raises:
            ModelError: its layers are of a kind that transformers cannot compute again.
        """
        self._layers: list[GradientCheckpointingLayer] = []
        if activations == "keep":
            return
        self._layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
        if not self._layers:
            raise ModelError(
                f"{type(model).__name__} has no layers that transformers can checkpoint: use engine.activations=keep"
            )
        # There is no dropout in our passes, so there are no random numbers to repeat.
        run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        if activations == "offload":
            run = functools.partial(_run_offloaded, run, Offload(copies or SideStream(model.device)))
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Checkpoint the layers of every forward pass inside; others, such as decoding, go without the detour."""
        # transformers asks the layer's own flag. What is inside a layer stays in evaluation, free of dropout.
        for layer in self._layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.training = False


def _run_offloaded(
    run: Callable[..., Tensor], offload: Offload, layer: Callable[..., Tensor], *inputs: Any, **options: Any
) -> Tensor:
    """Checkpoint a layer, with its inputs in CPU memory until it is computed again."""
    with saved_tensors_hooks(offload.pack, offload.unpack):
        return run(layer, *inputs, **options)


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
