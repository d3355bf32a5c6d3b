"""Whether packed rows give what the model's own code gives: asked once, of every model that is loaded, or its sketch.

The engine and the generator run the backbone and the head by themselves, so that whatever a family does
beside that (soft caps, attention sinks, scaled logits, attention in both directions) would be left out
in silence. Two rows of a few tokens show it; what they cannot show (a window that is longer than they are) is tested
with tiny models, or refused by `load` from the config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.models.attention import ATTENTION, PackedRows
from rallypoint.models.experts import EXPERTS
from rallypoint.models.families import FAMILIES, is_mixture, logit_softcap
from rallypoint.models.head import soft_capped
from rallypoint.parallel import Collective

_LENGTHS = (7, 3)
_LONGEST = 64
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""As a part of the largest logit."""


@torch.no_grad()
def check_agreement(path: str, model: PreTrainedModel, head: nn.Module) -> None:
    """Compare a packed pass with one eager pass per row.

    Args:
        path: of the model's folder, for the error.
        model: as loaded, with our attention.
        head: what we compute its logits with.

    Raises:
        ModelError: the two differ, or the model cannot run on packed rows.
    """
    num_ids = int(model.config.vocab_size)  # pyright: ignore[reportArgumentType]
    lengths = _lengths(model)
    rows = [(torch.arange(length, device=model.device) + 1) % num_ids for length in lengths]
    # A classifier of sequences looks for the last token that is no padding.
    padding = model.config.pad_token_id
    rows = [torch.where(row == padding, (row + 1) % num_ids, row) if padding is not None else row for row in rows]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packed = PackedRows(offsets, model.device)
    try:
        output = model.base_model(
            input_ids=torch.cat(rows).unsqueeze(0), position_ids=packed.position_ids, use_cache=False, rows=packed
        )
        ours = head(output.last_hidden_state.squeeze(0))
        if head is model.get_output_embeddings():
            ours = soft_capped(ours, logit_softcap(model.config))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path}: {type(model).__name__} cannot run on packed rows: {error}") from error
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        theirs = torch.cat([model(input_ids=row.unsqueeze(0), use_cache=False).logits.flatten(0, -2) for row in rows])
    finally:
        model.set_attn_implementation(ATTENTION)
        model.set_experts_implementation(EXPERTS)
    if len(theirs) == len(rows):  # one number a row
        ours = ours[offsets[1:] - 1]
    differences, scale = (ours - theirs).abs().amax(-1), float(theirs.abs().max())
    if theirs.shape[-1] == 1:  # so few numbers may all be near zero by chance, where rounding is not
        scale = max(scale, _usual_size(head, output.last_hidden_state))
    # A router may choose another of two experts whose scores are equal but for rounding: for some tokens, not for most.
    difference = float(differences.median() if is_mixture(model.config) else differences.max())
    if not math.isfinite(scale) or math.isnan(difference):
        raise ModelError(
            f"{path}: its logits are not finite, though its weights are: they are damaged, or sums are too large for "
            f"{model.dtype}; copy or download the folder again, or set model.dtype=float32"
        )
    if not difference <= _TOLERANCES[model.dtype] * scale:
        raise ModelError(
            f"{path}: {type(model).__name__} on packed rows differs from its own code by {difference:.2g} in logits of "
            f"up to {scale:.2g}: it does something that is not supported yet; models of type {', '.join(FAMILIES)} are"
        )


def check_finite(path: str, tensors: Mapping[str, Tensor], tp: Collective) -> None:
    """Refuse weights that are no numbers.

    Args:
        path: of the model's folder, for the error.
        tensors: the weights, or this rank's part of them.
        tp: the ranks that make passes together, which have the same names and all say the same.

    Raises:
        ModelError: there are some; their tensors are named.
    """
    flags = torch.tensor([not _is_finite(tensor) for tensor in tensors.values()], dtype=torch.int32)
    tp.all_reduce_max(flags)
    if wrong := [name for name, flag in zip(tensors, flags.tolist(), strict=True) if flag]:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ModelError(
            f"{path}: its weights are not finite (NaN or infinite) in {', '.join(wrong[:5])}{more}; copy or download "
            "the folder again, or use an older checkpoint"
        )


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or not tensor.numel() or all(end.isfinite() for end in tensor.aminmax())


def _usual_size(head: nn.Module, states: Tensor) -> float:
    """Return how large a number of a head with one output is for states of that size, in no direction of its own."""
    weight = head.weight if isinstance(head, nn.Linear) else torch.zeros(1)
    return float(weight.float().norm() * states.float().square().mean().sqrt())


def _lengths(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the lengths of rows that show most, longer than the window if there is a short one."""
    window = getattr(model.config, "sliding_window", None)
    return (window + 3, *_LENGTHS) if window is not None and window < _LONGEST else _LENGTHS
