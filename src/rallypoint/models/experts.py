"""The experts of a mixture, hooked into transformers by its registry of implementations.

A model built with `experts_implementation=EXPERTS` multiplies the tokens of each expert as one block, in every
precision, and with the same bits for the same tokens. Whose experts a module has is not known here: tokens that are
sent to none of them are left to other ranks, which add their part.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS = "rallypoint_experts"


class Experts(Protocol):
    """What transformers calls the experts of a layer: gated MLPs, each a slice of two tensors."""

    gate_up_proj: Tensor
    """[X, 2 * I, E] of X experts: gate before up."""
    down_proj: Tensor
    """[X, E, I]."""

    def act_fn(self, gate: Tensor) -> Tensor:
        """Return the activation of a gate."""
        ...


def add_up_experts(experts: Experts, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the sum of what the chosen experts make of each token, weighted: [T, E].

    Args:
        experts: X of them.
        states: [T, E].
        chosen: [T, k] int64; those of X and more are not here, and add nothing.
        shares: [T, k] weights.
    """
    num_experts, num_chosen = len(experts.gate_up_proj), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts: list[int] = torch.bincount(chosen.flatten(), minlength=num_experts)[:num_experts].tolist()
    order = order[: sum(counts)]
    # Repeated first, so that the backward pass adds up neighbours, and not whatever thread comes first.
    repeated = states.unsqueeze(1).expand(-1, num_chosen, -1).reshape(chosen.numel(), -1)
    outs: list[Tensor] = []
    # Unbound, so that the backward pass makes each weight's gradient once, and not once for every expert.
    gate_ups, downs = experts.gate_up_proj.unbind(), experts.down_proj.unbind()
    # One at least, so that states and weights have gradients where no token is sent here.
    asked = [expert for expert, count in enumerate(counts) if count] or [0]
    groups = repeated.index_select(0, order).split([counts[expert] for expert in asked])
    for expert, tokens in zip(asked, groups, strict=True):
        gate, up = functional.linear(tokens, gate_ups[expert]).chunk(2, dim=-1)
        outs.append(functional.linear(experts.act_fn(gate) * up, downs[expert]))
    weighted = torch.cat(outs) * shares.flatten().index_select(0, order).unsqueeze(1)
    return torch.zeros_like(repeated).index_copy(0, order, weighted).view(*chosen.shape, -1).sum(1)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, add_up_experts)
