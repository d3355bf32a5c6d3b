"""A comparison of packed rows with the model's own code, once for every model that is loaded, or for a sketch of it.

The engine and the generator run the backbone and the head themselves, so that anything else a family computes (soft
caps, attention sinks, scaled logits, attention in both directions) would be silently left out. Two rows of a few tokens
show it; what they cannot show (a window longer than the rows) is tested with tiny models, or refused by `load`.

Ranks of `dp_shard` hold rows of every weight, and a pass would gather the whole model. There every rank checks a sketch
by itself: a small model of the same kind with random weights, before its own part is allocated.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES
from rallypoint.models.attention import ATTENTION, PackedRows
from rallypoint.models.experts import EXPERTS
from rallypoint.models.head import logit_softcap, soft_capped
from rallypoint.models.shard import ModelShard, allocate, build
from rallypoint.parallel import Collective, DeviceMesh

_LENGTHS = (7, 3)
_LONGEST = 64
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 1e-1}
"""Allowed difference, relative to the largest logit."""


@torch.no_grad()
def check_agreement(path: str, model: PreTrainedModel, head: nn.Module) -> None:
    """Compare a packed pass with one eager pass per row.

    Args:
        path: of the model, for errors.
        model: loaded, with our attention.
        head: its output layer.

    Raises:
        ModelError: they differ, or the model cannot run on packed rows.
    """
    num_ids = int(model.config.vocab_size)  # pyright: ignore[reportArgumentType]
    lengths = _lengths(model)
    rows = [(torch.arange(length, device=model.device) + 1) % num_ids for length in lengths]
    # Sequence classifiers look for the last token that is not padding.
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
    if theirs.shape[-1] == 1:  # so few numbers may all be near zero by chance, but their rounding errors are not
        scale = max(scale, _usual_size(head, output.last_hidden_state))
    # A router may choose another of two experts with nearly equal scores: for some tokens, but not for most.
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
    """Refuse weights that are NaN or infinite.

    Args:
        path: of the model, for errors.
        tensors: the weights, or this rank's part of them.
        tp: the tensor-parallel ranks, which have the same names and raise the same error.

    Raises:
        ModelError: some are not finite; their tensors are named.
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
    """Return the expected size of a one-output head's results for random states of this size."""
    weight = head.weight if isinstance(head, nn.Linear) else torch.zeros(1)
    return float(weight.float().norm() * states.float().square().mean().sqrt())


def _lengths(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the lengths of the rows to compare, one of them longer than a short window."""
    window = getattr(model.config, "sliding_window", None)
    return (window + 3, *_LENGTHS) if window is not None and window < _LONGEST else _LENGTHS


_MOST = {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
"""Bounds on widths on which no other size of a config depends."""
_LEAST_LAYERS = 2
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def sketch_of(config: PreTrainedConfig, least_layers: int = _LEAST_LAYERS) -> PreTrainedConfig:
    """Return the config of a small model of the same kind, with narrow MLPs and at least one layer of every type.

    Args:
        config: of the large model; it is not changed.
        least_layers: lower bound on the number of layers, if the large model has as many.
    """
    sketch = copy.deepcopy(config)
    text: Any = sketch.get_text_config()
    values = dict(vars(text))
    for name, most in _MOST.items():
        if type(values.get(name)) is int:
            setattr(text, name, min(values[name], most))
    for name in _SPECIAL_TOKENS:
        if name in values:
            setattr(text, name, None)
    num_layers = values.get("num_hidden_layers")
    if type(num_layers) is not int:
        return sketch
    per_layer = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == num_layers}
    kept = min(num_layers, max([least_layers, *map(_first_of_every_kind, per_layer.values())]))
    text.num_hidden_layers = kept
    for name, value in per_layer.items():
        setattr(text, name, value[:kept])
    return sketch


def make_sketch(
    config: PreTrainedConfig, factory: Any, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> ModelShard:
    """Return a small model of the kind of a config, with random weights that are equal on every rank.

    Args:
        config: of the large model.
        factory: see `build`.
        dtype: of its weights.
        device: of its weights.
        trust_remote_code: see `build`.
    """

    def built(config: PreTrainedConfig) -> ModelShard:
        return build(config, factory, dtype=dtype, mesh=DeviceMesh.solo(), trust_remote_code=trust_remote_code)

    kinds = _kinds_of_layers(built(copy.deepcopy(config)).model)
    shard = built(sketch_of(config, max(_LEAST_LAYERS, _first_of_every_kind(kinds))))
    allocate(shard, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in shard.model.parameters():
            if weight.ndim < 2:  # norms and biases
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(std=1 / math.sqrt(weight.shape[-1]), generator=generator)
    return shard


def _kinds_of_layers(model: PreTrainedModel) -> list[Any]:
    """Return the modules of each layer; a config may distinguish layers by a number ("the first three are dense")."""
    stacks = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    layers: Iterable[nn.Module] = max(stacks, key=len, default=())
    return [[(name, type(module)) for name, module in layer.named_modules()] for layer in layers]


def _first_of_every_kind(layers: list[Any]) -> int:
    """Return the number of first layers that include every kind.

    >>> _first_of_every_kind(["sliding", "sliding", "full", "sliding", "sliding", "full"])
    3
    """
    return max((layers.index(kind) for kind in layers), default=0) + 1


def is_mixture(config: PreTrainedConfig) -> bool:
    """Return whether a model is a mixture of experts."""
    family = FAMILIES.get(str(config.model_type))
    return family is not None and family.experts is not None
