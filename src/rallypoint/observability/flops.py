"""The arithmetic that a model does, and the peak of its device.

Owns: the count of floating-point operations (a multiplication and an addition are two), by torch's own counter on
the meta device, and the peak of a device. Must not know: configs and roles. What a run reports as
`mfu`, model-FLOP utilisation, is operations / (seconds x peak), over all ranks.

Counted is what the model needs, whatever the code really does: no recomputation, no padding, no gradients of frozen
weights, what rows of a prompt begin with once, and a head for the trained tokens only. Attention counts every pair of
a row's tokens, causal or not, as is usual.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, PreTrainedModel

from rallypoint.families import FAMILIES
from rallypoint.observability.devices import find_device

_ATTENTION = "rallypoint_counted"
_LINEAR_ATTENTIONS = frozenset(name for family in FAMILIES.values() for name in family.linear_attentions)

_KNOWN_TYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
_MEASURE_S = 0.1
_MEASURE_SIZE = 768
_SHORT = 8


@dataclasses.dataclass(frozen=True, slots=True)
class PassFlops:
    """Operations of one pass, exact for rows of any lengths."""

    per_token: int
    """Operations of the backbone for each computed token: products with weights."""
    per_pair: int
    """Operations of the backbone for each pair of a computed token and a token of its row: attention of all layers."""
    per_output: int
    """Operations of the head (logits or value) for one token."""

    def of(self, lengths: Sequence[int], num_outputs: int, computed: Sequence[int] | None = None) -> int:
        """Count the pass of some rows.

        >>> PassFlops(per_token=10, per_pair=1, per_output=0).of([3, 4], 0, computed=[3, 2])
        67

        Args:
            lengths: tokens of each row.
            num_outputs: tokens that the head is computed for.
            computed: tokens of each row that are computed, where a row begins as another one does; None for all.
        """
        computed = lengths if computed is None else computed
        num_pairs = sum(own * length for own, length in zip(computed, lengths, strict=True))
        return self.per_token * sum(computed) + self.per_pair * num_pairs + self.per_output * num_outputs

    def minus(self, other: PassFlops) -> PassFlops:
        """Return what this pass does beyond another one."""
        return PassFlops(
            self.per_token - other.per_token, self.per_pair - other.per_pair, self.per_output - other.per_output
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFlops:
    """Operations of one model's passes."""

    forward: PassFlops
    backward: PassFlops
    """A product has two in the backward pass, for either factor; one where the weight is frozen."""

    @property
    def attention_cost(self) -> float:
        """Work of one pair of tokens, where the products with weights of one token are 1."""
        return self.forward.per_pair / self.forward.per_token

    def forward_backward(self, lengths: Sequence[int], num_outputs: int, computed: Sequence[int] | None = None) -> int:
        """Count a forward and a backward pass; see `PassFlops.of`."""
        return self.forward.of(lengths, num_outputs, computed) + self.backward.of(lengths, num_outputs, computed)


def flops_of(model: PreTrainedModel, adapt: Callable[[PreTrainedModel], None] | None = None) -> ModelFlops:
    """Count the operations of a model; takes some tenths of a second, and runs nothing on the model's own device.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=10)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> flops_of(model).forward  # 2 x (4 x 8 x 8 + 3 x 8 x 16), 2 x 2 x 8, 2 x 8 x 10
    PassFlops(per_token=1280, per_pair=32, per_output=160)

    Args:
        model: of which this rank may hold a part. What does not require a gradient has none in the backward pass.
        adapt: gives a copy, made from the config, what the model was given since, such as adapters.
    """
    shadow = _on_meta(model)
    if adapt is not None:
        adapt(shadow)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    for name, weight in shadow.named_parameters():
        weight.data = weight.data.bfloat16()  # products of experts exist in it only, and the type changes no count
        weight.requires_grad_(name in trained)
    forward = _measured(shadow, backward=False)
    return ModelFlops(forward, _measured(shadow, backward=True).minus(forward))


def _on_meta(model: PreTrainedModel) -> PreTrainedModel:
    """Make the whole model again without numbers, with an attention that asks for nothing but queries, keys and values.

    From its config, because what a rank holds may be a part of it.
    """
    whole = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config = copy.deepcopy(model.config)
    config._attn_implementation = _ATTENTION
    config._experts_implementation = "batched_mm"  # the only one that the counter knows
    with torch.device("meta"):
        shadow = whole(config)
    for module in shadow.modules():
        if type(module).__name__ in _LINEAR_ATTENTIONS:
            module.forward = functools.partial(_remember, module)
    return shadow


def _measured(model: PreTrainedModel, *, backward: bool) -> PassFlops:
    """Count passes of rows of two lengths: forward, or both."""
    backbone = model.base_model
    short, long = (_flops(backbone, length, backward=backward) for length in (_SHORT, 2 * _SHORT))
    # a L + b L^2, from its values at L and 2 L.
    per_pair = (long - 2 * short) // (2 * _SHORT**2)
    return PassFlops(
        per_token=short // _SHORT - per_pair * _SHORT,
        per_pair=per_pair,
        per_output=(_flops(model, _SHORT, backward=backward) - short) // _SHORT,
    )


def _flops(model: nn.Module, length: int, *, backward: bool) -> int:
    """Count the passes of one row."""
    tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
    with (
        FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _add_product}) as counter,
        torch.set_grad_enabled(backward),
    ):
        result: Tensor = model(
            input_ids=tokens, position_ids=torch.arange(length, device="meta").unsqueeze(0), use_cache=False
        )[0]
        if result.requires_grad:
            result.sum().backward()
    return counter.get_total_flops()


def _add_product(into: torch.Size, left: torch.Size, right: torch.Size, **options: Any) -> int:
    """Count what the counter knows as `addmm`, but not in place, as the update of an adapter is; from shapes."""
    del into, options
    return 2 * left[0] * left[1] * right[1]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Do the two products of attention, [1, H, T, D] x [1, K, T, D] -> [1, T, H, D]; the numbers do not matter."""
    del module, attention_mask, options
    share = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(share, dim=1).transpose(-1, -2)
    return (scores @ value.repeat_interleave(share, dim=1)).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attend)


def _remember(layer: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    """Do the products of linear attention, [1, T, E] -> [1, T, E]: for each token a state is written and read twice."""
    del options
    heads, num_tokens = layer.num_v_heads, hidden_states.shape[1]
    widths = layer.key_dim, layer.key_dim, layer.value_dim
    products = [part(hidden_states) for name, part in layer.named_children() if name.startswith("in_proj")]
    query, key, value, gate, small = torch.cat(products, -1).split([*widths, layer.value_dim, 2 * heads], -1)
    query, key = (
        part.view(num_tokens, layer.num_k_heads, 1, -1).repeat_interleave(heads // layer.num_k_heads, 1)
        for part in (query, key)
    )
    memory = key.transpose(-1, -2) @ value.view(num_tokens, heads, 1, -1)
    out = (query @ memory + key @ memory).view(1, num_tokens, -1)
    return layer.out_proj(out * gate * small.sum(-1, keepdim=True))


def device_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second that a device could do at best in matrix products of a type.

    Known for common GPUs from their vendors; measured otherwise, once per process and number of threads, in a tenth
    of a second. While another process computes, the measurement is of what that leaves to this one.
    """
    if device.type == "cpu":
        return _measured_peak(device, dtype, torch.get_num_threads())
    name = str(torch.get_device_module(device).get_device_name(device))
    return known_peak(name, dtype) or _measured_peak(device, dtype, 0)


def known_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the dense peak of a GPU in operations per second; None when its name or the type is not in the table.

    >>> known_peak("H100 80GB HBM3", torch.bfloat16)
    989000000000000.0
    """
    device = find_device(name)
    return None if device is None or dtype not in _KNOWN_TYPES else device.peak(dtype.itemsize)


@functools.cache
def _measured_peak(device: torch.device, dtype: torch.dtype, num_threads: int) -> float:
    """Measure the best of some matrix products; the result also depends on `num_threads`."""
    del num_threads
    size = _MEASURE_SIZE if device.type == "cpu" else 8 * _MEASURE_SIZE
    factor = torch.ones(size, size, dtype=dtype, device=device)
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began < _MEASURE_S:
        start = time.perf_counter()
        (factor @ factor)[0, 0].item()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
