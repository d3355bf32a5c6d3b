"""Weights on their way from the actor to the rollout role, with a version and a fingerprint.

Colocated roles share one model in memory and send nothing. Split roles send a snapshot: all weights as
one flat buffer a type, which crosses processes without pickling tensors one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from rallypoint.errors import WeightsMismatchError


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a digest of names, shapes, types and bits of all weights."""
    digest = xxhash.xxh3_128()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All weights of one version."""

    version: int
    """Optimizer steps completed when these weights were made."""
    fingerprint: str
    weights: Mapping[str, Tensor]

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes in numpy arrays, which the object store takes without a copy; bfloat16 has no numpy type.
        arrays = {
            name: (tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.weights.items()
        }
        return (_rebuild, (self.version, self.fingerprint, arrays))


def take(version: int, weights: Mapping[str, Tensor]) -> Snapshot:
    """Copy weights, so that training may go on while they travel."""
    copied = {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}
    return Snapshot(version, fingerprint(copied), copied)


def load(snapshot: Snapshot, into: Mapping[str, Tensor]) -> None:
    """Copy a snapshot into a model's weights; all or nothing.

    Raises:
        WeightsMismatchError: names, types or shapes differ, or the bits are not those that were taken.
    """
    if fingerprint(snapshot.weights) != snapshot.fingerprint:
        raise WeightsMismatchError(f"version {snapshot.version} was damaged on its way: its fingerprint differs")
    wrong = sorted(set(snapshot.weights) ^ set(into)) or [
        f"{name}: {tensor.dtype} {list(tensor.shape)} instead of {into[name].dtype} {list(into[name].shape)}"
        for name, tensor in snapshot.weights.items()
        if (tensor.dtype, tensor.shape) != (into[name].dtype, into[name].shape)
    ]
    if wrong:
        raise WeightsMismatchError(f"version {snapshot.version} is of another model: {', '.join(wrong[:5])}")
    with torch.no_grad():
        for name, tensor in snapshot.weights.items():
            into[name].copy_(tensor)


def _rebuild(version: int, digest: str, arrays: Mapping[str, tuple[Any, torch.dtype, tuple[int, ...]]]) -> Snapshot:
    weights = {name: torch.from_numpy(data).view(dtype).view(shape) for name, (data, dtype, shape) in arrays.items()}
    return Snapshot(version, digest, weights)
