"""A small model of the same kind as a large one, for what can be asked of the kind without the weights.

Ranks of `dp_shard` hold rows of every weight, so that a pass through the model would gather all of it; whether packed
rows give what its own code gives is therefore asked of a sketch, by every rank alone, before its own part has memory.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rallypoint.models.shard import ModelShard, allocate, build
from rallypoint.parallel import DeviceMesh

_MOST = {"vocab_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
"""Widths on which no other size of a config depends."""
_LEAST_LAYERS = 2
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def sketch_of(config: PreTrainedConfig, least_layers: int = _LEAST_LAYERS) -> PreTrainedConfig:
    """Return the config of a model of the same kind with a layer or more of every type, and narrow MLPs.

    Args:
        config: stays as it is.
        least_layers: how many it has at least, if the large one has; of types that the config lists it has all anyway.
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
    """Return a whole model of `sketch_of` a config, with random weights that are the same on every rank.

    Args:
        config: of the large model.
        factory: see `build`.
        dtype: of its weights.
        device: where it will be.
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
            if weight.ndim < 2:  # of a norm or a bias
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(std=1 / math.sqrt(weight.shape[-1]), generator=generator)
    return shard


def _kinds_of_layers(model: PreTrainedModel) -> list[Any]:
    """Return of what modules each layer is made, which a config may say by a number: "the first three are dense"."""
    stacks = [child for child in model.base_model.children() if isinstance(child, nn.ModuleList)]
    layers: Iterable[nn.Module] = max(stacks, key=len, default=())
    return [[(name, type(module)) for name, module in layer.named_modules()] for layer in layers]


def _first_of_every_kind(layers: list[Any]) -> int:
    """Return how many layers, from the first on, have one of every kind.

    >>> _first_of_every_kind(["sliding", "sliding", "full", "sliding", "sliding", "full"])
    3
    """
    return max((layers.index(kind) for kind in layers), default=0) + 1
