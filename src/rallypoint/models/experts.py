"""The experts of a mixture and their router, hooked into transformers by its registry of implementations.

A model built with `experts_implementation=EXPERTS` multiplies the tokens of each expert as one block, in every
precision, with the same bits for the same tokens. Tokens that are sent to experts of other ranks are left out here;
those ranks add their part.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rallypoint.families import FAMILIES

EXPERTS = "rallypoint_experts"

_ROUTERS = frozenset(name for family in FAMILIES.values() for name in family.routers)
"""Classes of transformers that compute the same as ours, but always in float32."""


class Experts(Protocol):
    """The experts of a layer in transformers: gated MLPs, each a slice of two tensors."""

    gate_up_proj: Tensor
    """[X, 2 * I, E] of X experts: gate before up."""
    down_proj: Tensor
    """[X, E, I]."""

    def act_fn(self, gate: Tensor) -> Tensor:
        """Return the activation of a gate."""
        ...


class Router(Protocol):
    """The router of Qwen3-MoE and similar families in transformers."""

    weight: Tensor
    """[X, E]."""
    top_k: int
    norm_topk_prob: bool


class _RouterInPrecision:
    """Mixed in before one of transformers' routers: the same computation, but in float64 where the model is float64.

    The original rounds probabilities to float32, so that gradients in float64 depend on the other tokens in the batch.
    """

    def forward(self: Router, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., E] -> scores before the softmax [T, X], shares of the chosen experts [T, k], and these [T, k]."""
        scores = functional.linear(hidden_states.reshape(-1, hidden_states.shape[-1]), self.weight)
        shares = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        shares, chosen = shares.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        return scores, shares.to(scores.dtype), chosen


def replace_routers(model: nn.Module) -> None:
    """Have the routers of a transformers model compute in at least the model's own precision.

    In float32 and below the bits stay the same.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _ROUTERS and kind.__module__.startswith("transformers."):
            module.__class__ = _in_precision(kind)


@functools.cache
def _in_precision(router: type[nn.Module]) -> type[nn.Module]:
    return type(f"{router.__name__}InPrecision", (_RouterInPrecision, router), {})


def add_up_experts(experts: Experts, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's chosen experts: [T, E].

    Args:
        experts: X of them.
        states: [T, E].
        chosen: [T, k] int64; experts from X on are on other ranks and add nothing.
        shares: [T, k] weights.
    """
    num_experts, num_chosen = len(experts.gate_up_proj), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts: list[int] = torch.bincount(chosen.flatten(), minlength=num_experts)[:num_experts].tolist()
    order = order[: sum(counts)]
    # Repeated first, so that the backward pass adds up neighbours in a fixed order.
    repeated = states.unsqueeze(1).expand(-1, num_chosen, -1).reshape(chosen.numel(), -1)
    outs: list[Tensor] = []
    # Unbound, so that the backward pass allocates each weight's gradient once, not once per expert.
    gate_ups, downs = experts.gate_up_proj.unbind(), experts.down_proj.unbind()
    # At least one, so that states and weights have gradients even if no token is sent here.
    active = [expert for expert, count in enumerate(counts) if count] or [0]
    groups = repeated.index_select(0, order).split([counts[expert] for expert in active])
    for expert, tokens in zip(active, groups, strict=True):
        gate, up = functional.linear(tokens, gate_ups[expert]).chunk(2, dim=-1)
        outs.append(functional.linear(experts.act_fn(gate) * up, downs[expert]))
    weighted = torch.cat(outs) * shares.flatten().index_select(0, order).unsqueeze(1)
    return torch.zeros_like(repeated).index_copy(0, order, weighted).view(*chosen.shape, -1).sum(1)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, add_up_experts)
