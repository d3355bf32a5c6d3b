"""Random numbers that depend on what they are for and on nothing else.

The number for a token is a hash of (seed, prompt, sample, position). So it does not matter which worker
samples a rollout, when, beside which others, or for the how-manieth time after a crash. The hash is
splitmix64's finaliser (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """Return the 64 bits as the signed integer that torch holds them in."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift would repeat the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """Hash 64 bits to 64 bits, one to one; int64 products wrap around, as they should."""
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def rollout_keys(seed: int | Tensor, prompt_index: Tensor, sample_index: Tensor) -> Tensor:
    """Return one key for each rollout: one seed for all or [B], [B], [B] -> [B] int64."""
    key = _mix(torch.zeros_like(prompt_index) + seed + _GOLDEN)
    key = _mix((key ^ prompt_index) + _GOLDEN)
    return _mix((key ^ sample_index) + _GOLDEN)


def uniform(keys: Tensor, position: int | Tensor) -> Tensor:
    """Return a number in [0, 1) for each rollout's token at a position of its response: [B] float64.

    The position is the same for all, or [B] int64.

    >>> keys = rollout_keys(0, torch.tensor([3, 4]), torch.tensor([0, 0]))
    >>> both, alone = uniform(keys, 7), uniform(keys[1:], 7)
    >>> bool(both[1] == alone[0])
    True
    """
    step = torch.as_tensor(position + 1, device=keys.device) * _GOLDEN
    return _shifted(_mix(keys + step), 11).to(torch.float64) * 2.0**-53
