"""The experts of a mixture and their router, hooked into transformers by its registry of implementations.

A model built with `experts_implementation=EXPERTS` multiplies the tokens of each expert as one block, in every
precision, with the same bits for the same tokens: on accelerators all blocks in one call, elsewhere one by one. Tokens
that are sent to experts of other ranks are left out here; those ranks add their part.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rallypoint.cpu.forms import computes_in_pieces
from rallypoint.families import FAMILIES
from rallypoint.models.kinds.expert_adapters import MATRICES, Factors, LoRAExperts, merged_updates, update_of
from rallypoint.parallel import Collective

EXPERTS, OWN_CODE = "rallypoint_experts", "rallypoint_own_code"
"""Names of our implementation, and of that which a family's class has itself."""

_LEAST_ROWS: contextvars.ContextVar[int] = contextvars.ContextVar("least rows", default=0)
"""Fewest rows that an expert multiplies."""


class Experts(Protocol):
    """The experts of a layer in transformers: gated MLPs, each a slice of two tensors, and maybe of two biases."""

    gate_up_proj: Tensor
    """[X, 2 * I, E] of X experts."""
    gate_up_proj_bias: Tensor
    """[X, 2 * I], if they have biases."""
    down_proj: Tensor
    """[X, E, I]."""
    down_proj_bias: Tensor
    """[X, E]."""
    has_bias: bool
    is_transposed: bool
    """Whether both matrices lie the other way: [X, E, 2 * I] and [X, I, E]."""
    _parameters: Mapping[str, Tensor]
    """All of the above."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """[..., 2 * I] -> [..., I]."""
        ...


Balance: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(shares of all experts [T, X], chosen ones [T, k]) -> the shares with another gradient; see `load_balancing`."""


class Router(nn.Module):
    """Mixed in before one of transformers' routers: the same computation, but in float64 where the model is float64.

    The original rounds probabilities to float32, so that gradients in float64 depend on the other tokens in the batch.
    """

    weight: Tensor
    """[X, E]."""
    top_k: int
    norm_topk_prob = True
    """Whether the shares of a token's experts add up to 1, as after a softmax over their scores alone."""
    load: Tensor | None = None
    """Tokens that were sent to each expert so far, [X] int64; None while they are not counted."""
    recorded: list[Tensor] | None = None
    """Choices of the pass under way, [T, k] of each router so far; None while they are not recorded."""
    replayed: Tensor | None = None
    """Choices to be made in the pass under way, [T, k] int64, counted from 1; 0 where it is up to the router."""
    balance: Balance | None = None
    """What is done so that experts get equal shares of the tokens; None: nothing."""
    count: Callable[[Tensor], None] | None = None
    """Takes the experts that the tokens of a pass are sent to, [T, k]; None while it is not wanted."""

    def settled(self, chosen: Tensor) -> Tensor:
        """Return the experts that tokens are sent to, [T, k], after the router has chosen some, and take note."""
        if self.replayed is not None:
            chosen = torch.where(self.replayed > 0, self.replayed - 1, chosen)
        if self.recorded is not None:
            self.recorded.append(chosen)
        if self.count is not None:
            self.count(chosen)
        if self.load is not None:
            numbers = torch.arange(len(self.load), device=chosen.device)
            self.load += (chosen.reshape(-1, 1) == numbers).sum(0)
        return chosen


class _BySoftmax(Router):
    """The router of Qwen3-MoE, gpt-oss and similar families."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., E] -> scores before the softmax [T, X], shares of the chosen experts [T, k], and these [T, k]."""
        states = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = functional.linear(states, self.weight, self._parameters.get("bias"))
        every = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        shares, chosen = every.topk(self.top_k, dim=-1)
        chosen = self.settled(chosen)
        if self.balance is not None:
            every = self.balance(every, chosen)
        if self.replayed is not None or self.balance is not None:
            shares = every.gather(-1, chosen)
        if self.norm_topk_prob:
            shares = shares / shares.sum(-1, keepdim=True)
        return scores, shares.to(scores.dtype), chosen


class BiasedRouter(Router):
    """The router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and GLM-4.5."""

    e_score_correction_bias: Tensor
    """[X] float32: chooses, but does not weigh."""
    routed_scaling_factor: float
    num_group: int
    topk_group: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., E] -> scores before the sigmoid [T, X], weights of the chosen experts [T, k], and these [T, k].

        The experts with the largest sums of sigmoid and bias are chosen, of the groups whose best two have the largest
        sums together. Weights follow from the sigmoid alone.
        """
        states = hidden_states.reshape(-1, hidden_states.shape[-1])
        wide = torch.promote_types(states.dtype, torch.float32)
        scores = functional.linear(states.to(wide), self.weight.to(wide))
        every = scores.sigmoid()
        chosen = self.settled(_best_of_groups(self, every.detach() + self.e_score_correction_bias))
        if self.balance is not None:
            total = every.sum(-1, keepdim=True)
            every = self.balance(every / total, chosen) * total
        weights = every.gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return scores, (weights * self.routed_scaling_factor).to(states.dtype), chosen


def _best_of_groups(router: BiasedRouter, sums: Tensor) -> Tensor:
    """[T, X] -> the largest of the best groups: [T, k]."""
    if router.topk_group < router.num_group:
        groups = sums.unflatten(-1, (router.num_group, -1))
        best = groups.topk(2, dim=-1).values.sum(-1).topk(router.topk_group, dim=-1).indices
        is_left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
        sums = groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(-2)
    return sums.topk(router.top_k, dim=-1).indices


_MIXED_IN = {name: _BySoftmax for family in FAMILIES.values() for name in family.routers}
_MIXED_IN |= {name: BiasedRouter for family in FAMILIES.values() for name in family.biased_routers}
"""Classes of transformers that compute the same as ours, but always in float32."""


def replace_routers(model: nn.Module) -> None:
    """Have the routers of a transformers model compute in at least the model's own precision.

    In float32 and below the bits stay the same.
    """
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _MIXED_IN and kind.__module__.startswith("transformers."):
            module.__class__ = _in_precision(kind)


def routers_of(model: nn.Module) -> list[Router]:
    """Return the routers that `replace_routers` has replaced, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


class ExpertLoads:
    """How evenly the routers of a model send tokens to experts; on a device it is asked once for all layers."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = routers_of(model)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count tokens in the block. Layers that are computed again count twice, and filler counts, too."""
        for router in self._routers:
            router.load = torch.zeros(router.weight.shape[0], dtype=torch.int64, device=router.weight.device)
        try:
            yield
        finally:
            self._counts = [router.load for router in self._routers if router.load is not None]
            for router in self._routers:
                router.load = None

    def extremes(self, ranks: Collective) -> tuple[float, float] | None:
        """Return the smallest and the largest load of an expert of a layer; 1 if all are equal. None without experts.

        Args:
            ranks: those that counted; they ask together.
        """
        if not self._counts:
            return None
        counts = torch.stack(self._counts)
        ranks.all_reduce_sum([counts])
        relative = counts * counts.shape[1] / counts.sum(1, keepdim=True).clamp(min=1)
        least, most = torch.stack([relative.min(), relative.max()]).tolist()
        return least, most


@functools.cache
def _in_precision(router: type[nn.Module]) -> type[nn.Module]:
    return type(f"{router.__name__}InPrecision", (_MIXED_IN[router.__name__], router), {})


def add_up_experts(experts: Experts, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Return the weighted sum of the outputs of each token's chosen experts: [T, E].

    Args:
        experts: X of them.
        states: [T, E].
        chosen: [T, k] int64; experts from X on are on other ranks and add nothing.
        shares: [T, k] weights.
    """
    num_chosen, order = chosen.shape[1], chosen.flatten().argsort(stable=True)
    # Repeated first, so that the backward pass adds up neighbours in a fixed order.
    repeated = states.unsqueeze(1).expand(-1, num_chosen, -1).reshape(chosen.numel(), -1)
    compute = _at_once if _has_grouped_products(experts) and not _LEAST_ROWS.get() else _one_by_one
    outs = compute(experts, repeated, chosen.flatten(), order)
    order = order[: len(outs)]
    weighted = outs * shares.flatten().index_select(0, order).unsqueeze(1)
    return torch.zeros_like(repeated).index_copy(0, order, weighted).view(*chosen.shape, -1).sum(1)


def _one_by_one(experts: Experts, tokens: Tensor, chosen: Tensor, order: Tensor) -> Tensor:
    """Return the outputs of the tokens of all experts that are here, in their order: [n, E]."""
    num_experts, least = len(experts.gate_up_proj), _LEAST_ROWS.get()
    counts: list[int] = torch.bincount(chosen, minlength=num_experts)[:num_experts].tolist()
    outs: list[Tensor] = []
    # Unbound, so that the backward pass allocates each weight's gradient once, not once per expert.
    gate_ups, downs = (matrix.unbind() for matrix in _by_outputs(experts))
    up_biases, down_biases = ([None] * num_experts if bias is None else bias.unbind() for bias in _biases(experts))
    of_ups, of_downs = ([None] * num_experts if update is None else update.factors() for update in _updates(experts))
    # At least one, so that states and weights have gradients even if no token is sent here.
    active = [expert for expert, count in enumerate(counts) if count] or [0]
    groups = tokens.index_select(0, order[: sum(counts)]).split([counts[expert] for expert in active])
    for expert, group in zip(active, groups, strict=True):
        missing = max(0, least - len(group))
        filled = functional.pad(group, (0, 0, 0, missing)) if missing else group
        gate_up = _product(filled, gate_ups[expert], up_biases[expert], of_ups[expert])
        gated = experts._apply_gate(gate_up)
        outs.append(_product(gated, downs[expert], down_biases[expert], of_downs[expert])[: len(group)])
    return torch.cat(outs)


def _product(states: Tensor, weight: Tensor, bias: Tensor | None, update: Factors | None) -> Tensor:
    """Return what a matrix, and its update if it has one, make of the tokens of an expert: [n, M] -> [n, N]."""
    out = functional.linear(states, weight, bias)
    if update is None:
        return out
    a, b, scaling = update
    return out.addmm_(states @ a.T, b.T, alpha=scaling)


def _by_outputs(experts: Experts) -> Sequence[Tensor]:
    """Return both matrices of all experts: [X, 2 * I, E] and [X, E, I]."""
    matrices = experts.gate_up_proj, experts.down_proj
    return [matrix.transpose(1, 2) for matrix in matrices] if experts.is_transposed else matrices


def _updates(experts: Experts) -> Sequence[LoRAExperts | None]:
    """Return the updates of both matrices, if they have any."""
    return [update_of(cast("nn.Module", experts), matrix) for matrix in MATRICES]


def _biases(experts: Experts) -> Sequence[Tensor | None]:
    """Return the biases of all experts, [X, 2 * I] and [X, E], if they have any."""
    return (experts.gate_up_proj_bias, experts.down_proj_bias) if experts.has_bias else (None, None)


def _at_once(experts: Experts, tokens: Tensor, chosen: Tensor, order: Tensor) -> Tensor:
    """Return the outputs of all tokens in their order, [T, E], zero for experts elsewhere; the host waits for nothing.

    What a grouped product leaves behind its last group is not defined, nor is its gradient there.
    """
    numbers = torch.arange(len(experts.gate_up_proj), device=chosen.device)
    ends = torch.searchsorted(chosen.index_select(0, order), numbers, right=True, out_int32=True)
    is_here = (torch.arange(len(tokens), device=chosen.device) < ends[-1]).unsqueeze(1)
    tokens = torch.where(is_here, tokens.index_select(0, order), 0.0)
    gate_ups, downs = (matrix.transpose(1, 2) for matrix in _by_outputs(experts))
    (up_bias, down_bias), (of_up, of_down) = _biases(experts), _updates(experts)
    # A product gives each token the bias of its expert, and its gradient is a sum in a fixed order.
    sent = (chosen.index_select(0, order).unsqueeze(1) == numbers).to(tokens.dtype)
    gate_up = _products(tokens, gate_ups, of_up, ends)
    if up_bias is not None:
        gate_up = torch.where(is_here, gate_up + sent @ up_bias, 0.0)
    gated = experts._apply_gate(gate_up)
    outs = _products(gated, downs, of_down, ends)
    return torch.where(is_here, outs if down_bias is None else outs + sent @ down_bias, 0.0)


def _products(states: Tensor, weights: Tensor, update: LoRAExperts | None, ends: Tensor) -> Tensor:
    """Do as `_product` for all experts, [T, M] -> [T, N], without biases; see `LoRAExperts.grouped`."""
    out = functional.grouped_mm(states, weights, offs=ends)
    return out if update is None else out.add_(update.grouped(states, ends), alpha=update.scaling)


def _has_grouped_products(experts: Experts) -> bool:
    """Return whether one call multiplies all experts: on accelerators, in float32 and below, by rows of whole words."""
    weights = (experts.gate_up_proj, experts.down_proj)
    device, is_wide = weights[0].device, weights[0].dtype == torch.float64
    widths = [width for weight in weights for width in weight.shape[1:]]
    if computes_in_pieces(device) or is_wide or any(width * weights[0].itemsize % 16 for width in widths):
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


@contextlib.contextmanager
def same_shapes(num_tokens: int) -> Iterator[None]:
    """Have every expert multiply so many tokens, filled up with zeros, in passes of so many tokens in this thread.

    A product rounds by its size: a token's bits then do not depend on where others are sent.
    """
    before = _LEAST_ROWS.set(num_tokens)
    try:
        yield
    finally:
        _LEAST_ROWS.reset(before)


def by_own_code(experts: Experts, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """Do as `add_up_experts` by transformers' own code, which in some families knows no experts on other ranks."""
    foreign = chosen >= len(experts.gate_up_proj)
    forward, plain = cast("Any", type(experts)).forward.__wrapped__, experts
    if merged := merged_updates(cast("nn.Module", experts)):
        plain = copy.copy(experts)  # what knows no updates has the sums of them and their matrices
        plain._parameters = {**experts._parameters, **merged}
    return forward(plain, states, chosen.masked_fill(foreign, 0), shares.masked_fill(foreign, 0.0))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, add_up_experts)
ALL_EXPERTS_FUNCTIONS.register(OWN_CODE, by_own_code)
