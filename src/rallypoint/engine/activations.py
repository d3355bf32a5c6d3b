"""Activations that a forward pass keeps for the backward pass: all of them, or only the inputs of decoder layers.

Owns: checkpoints of layers, and their way to CPU memory and back beside the computation. Must not know: losses, rows,
optimizers. Invariant: gradients are the same bits whatever is kept, because a layer that is computed again computes
the same.

    keep          forward  L0 L1 L2    backward           L2'          L1'          L0'
    checkpoint    forward  L0 L1 L2    backward       L2  L2'      L1  L1'      L0  L0'
    offload       forward  L0 L1 L2    backward       L2  L2'      L1  L1'      L0  L0'
                  copies      out out out         in      in           in
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rallypoint.config import Activations
from rallypoint.errors import ModelError

HostT = TypeVar("HostT")
DeviceT = TypeVar("DeviceT")


class Copies(Protocol[HostT, DeviceT]):
    """Copies that go on while the device computes."""

    def out(self, tensor: Tensor) -> HostT:
        """Begin to copy a tensor of the device to CPU memory."""
        ...

    def back(self, held: HostT) -> DeviceT:
        """Begin to copy it back."""
        ...

    def wait(self, coming: DeviceT) -> Tensor:
        """Return what is coming back; what is computed with it starts when it is there."""
        ...


@dataclasses.dataclass(slots=True)
class _Held(Generic[HostT, DeviceT]):
    """A tensor in CPU memory, perhaps on its way back."""

    host: HostT
    before: _Held[HostT, DeviceT] | None
    """The tensor saved before it, which is needed after it."""
    coming: DeviceT | None = None


class Offload(Generic[HostT, DeviceT]):
    """Hooks that hold saved tensors in CPU memory, and fetch each one while the one needed before it is used."""

    def __init__(self, copies: Copies[HostT, DeviceT]) -> None:
        self._copies = copies
        self._last: _Held[HostT, DeviceT] | None = None

    def pack(self, tensor: Tensor) -> _Held[HostT, DeviceT] | Tensor:
        """Send a tensor away, unless it is empty, as is one that torch 2.11 keeps beside a layer's input."""
        if not tensor.numel():
            return tensor
        self._last = _Held(self._copies.out(tensor), before=self._last)
        return self._last

    def unpack(self, held: _Held[HostT, DeviceT] | Tensor) -> Tensor:
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

    def _fetch(self, held: _Held[HostT, DeviceT]) -> DeviceT:
        if held.coming is None:
            held.coming = self._copies.back(held.host)
        return held.coming


class SideStream:
    """Copies on a stream of their own, through page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.Stream(device)

    def out(self, tensor: Tensor) -> Tensor:
        """See `Copies.out`."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with self._stream:
            held.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not used again before it is copied
        return held

    def back(self, held: Tensor) -> tuple[Tensor, torch.Event]:
        """See `Copies.back`."""
        with self._stream:
            tensor = held.to(self._device, non_blocking=True)
        return tensor, self._stream.record_event()

    def wait(self, coming: tuple[Tensor, torch.Event]) -> Tensor:
        """See `Copies.wait`."""
        tensor, ready = coming
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(ready)
        tensor.record_stream(computing)
        return tensor


class Checkpoints:
    """Has a model's decoder layers keep their inputs only, during passes inside `recorded`."""

    def __init__(
        self, model: PreTrainedModel, activations: Activations, copies: Copies[Any, Any] | None = None
    ) -> None:
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
    run: Callable[..., Tensor], offload: Offload[Any, Any], layer: Callable[..., Tensor], *inputs: Any, **options: Any
) -> Tensor:
    """Checkpoint a layer, with its inputs in CPU memory until it is computed again."""
    with saved_tensors_hooks(offload.pack, offload.unpack):
        return run(layer, *inputs, **options)
