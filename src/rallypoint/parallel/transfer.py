"""Copies of small tensors, such as indices, from the CPU to an accelerator, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on a device; on its own device, itself.

    A copy from ordinary memory makes the host wait until the device has done all work before it. A copy from
    page-locked memory is queued, and torch keeps that memory until it is done.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
