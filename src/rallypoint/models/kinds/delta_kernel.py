"""The scan of linear attention in one call: `chunk_gated_delta_rule` of flash-linear-attention, on CUDA devices.

Owns: when that kernel is used, and its call. Its Triton programs are tuned by the clock when they first run, so two
runs may add in different orders: passes that promise equal bits (`engine.deterministic`) do without it. Before it is
used for the first time it is compared with our own scan, and a line in the log says what came of it. Where it is not
installed or differs, and in float32, ours does all. Rows begin without a state here, as in training.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rallypoint.models.kinds.linear_attention import DeltaHeads, DeltaInputs, Recurrence, normed
from rallypoint.models.prefix import Copies, SharedPrefixes
from rallypoint.parallel.transfer import sent

_TOLERANCE = 3e-2
"""Largest difference in half precision, relative to the largest number."""

_LOG = logging.getLogger(__name__)


class RowScan:
    """The rows of a stream, end to end, for the kernel."""

    def __init__(self, offsets: Tensor, device: torch.device, shared: SharedPrefixes) -> None:
        """Lay rows out; the arguments are those of `PackedRows`."""
        kept, place = shared.kept, shared.place
        self._of_stream, self._of_rows = Copies.of(place, len(kept), device), Copies.of(kept, len(place), device)
        self._borders = sent(offsets[offsets.diff(prepend=offsets[:1] - 1) > 0], device)  # no row is empty

    def run(self, kernel: Callable[..., Any], inputs: DeltaInputs, recurrence: Recurrence) -> Tensor:
        """Return what tokens read, [T, Hv, Dv], with zeros for filler.

        Args:
            kernel: `chunk_gated_delta_rule`.
            inputs: of the stream, filler included.
            recurrence: of the same rows.
        """
        heads, exact, half = inputs.heads, inputs.decay.dtype, inputs.mixed.dtype
        tokens, _ = recurrence.convolved(inputs, recurrence.blank(inputs))
        num_channels, num_filler = inputs.mixed.shape[1], len(inputs.mixed) - len(tokens)
        rows = self._of_stream.of_rows(tokens).unsqueeze(0)
        mixed, decay, strength = rows.split([num_channels, heads.num_values, heads.num_values], 2)
        query, key, value = heads.split(mixed)
        share = heads.num_values // heads.num_keys
        out, _ = kernel(
            *(part.to(half).contiguous() for part in (normed(query, share), normed(key, share), value)),
            g=decay.contiguous(),
            beta=strength.contiguous(),
            scale=heads.key_dim**-0.5,
            output_final_state=False,
            cu_seqlens=self._borders,
        )
        return functional.pad(self._of_rows.of_rows(out.squeeze(0).to(exact)), (0, 0, 0, 0, 0, num_filler))


def find_kernel(like: Tensor, heads: DeltaHeads) -> Callable[..., Any] | None:
    """Return the kernel for such activations and heads; None: our own scan must do."""
    is_half = like.dtype in (torch.bfloat16, torch.float16)
    if like.device.type != "cuda" or not is_half or torch.are_deterministic_algorithms_enabled():
        return None
    return checked_kernel(like.device, like.dtype, heads, "fla.ops.gated_delta_rule")


@functools.cache
def checked_kernel(
    device: torch.device, dtype: torch.dtype, heads: DeltaHeads, module: str
) -> Callable[..., Any] | None:
    """Return the kernel of a module if it computes what our scan does there; None, and a line in the log, if not."""
    try:
        kernel: Callable[..., Any] = importlib.import_module(module).chunk_gated_delta_rule
        if is_right(kernel, device, dtype, heads):
            _LOG.warning("flash-linear-attention scans rows of linear attention on %s", device)
            return kernel
        reason = "it computes something else there"
    except ModuleNotFoundError:
        reason = "it is not installed (pip install flash-linear-attention)"
    except (ImportError, RuntimeError, TypeError, ValueError, AttributeError, AssertionError) as error:
        reason = f"{type(error).__name__}: {error}"
    _LOG.warning("flash-linear-attention is not used on %s, linear attention is slower: %s", device, reason)
    return None


def is_right(kernel: Callable[..., Any], device: torch.device, dtype: torch.dtype, heads: DeltaHeads) -> bool:
    """Say whether outputs and gradients are those of our scan in float32, for rows of several lengths."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 73, 202])
    sizes = (202, sum(heads.widths) * heads.num_keys), (sum(heads.widths) * heads.num_keys, 4)
    mixed, taps = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    decay, strength = (torch.rand(202, heads.num_values, generator=generator).to(device) for _ in range(2))
    weights = torch.randn(202, heads.num_values, heads.value_dim, generator=generator).to(device)
    recurrence, found = Recurrence(offsets, device), list[tuple[Tensor, ...]]()
    for kind, is_ours in ((dtype, False), (torch.float32, True)):
        with torch.enable_grad():
            leaves = [part.to(kind).detach().requires_grad_() for part in (mixed, taps)]
            leaves += [part.detach().requires_grad_() for part in (-decay, strength)]
            inputs = DeltaInputs(leaves[0], leaves[1], leaves[2], leaves[3], heads)
            if is_ours:
                out, _ = recurrence.run(inputs, recurrence.blank(inputs))
            else:
                out = RowScan(offsets, device, SharedPrefixes.none(offsets)).run(kernel, inputs, recurrence)
            found.append((out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)))
    return all(
        float((one.float() - other).abs().max()) <= _TOLERANCE * float(other.abs().max())
        for one, other in zip(*found, strict=True)
    )
