"""Expert parallelism: the experts of every layer dealt over ranks that have different tokens.

Owns: which experts a rank has, and the exchanges around them. Must not know: how an expert computes, who routes, or how
tensor parallelism has cut the experts before. Invariant: a layer returns, for this rank's tokens, the sum over all
experts; the gradient of an expert is that of the tokens of all ranks along `ep`.

A rank needs the tokens that others send to its experts. How many they are is only known when a layer has routed them,
and a device would have to be waited for in every layer. So every rank gets all tokens of all ranks, and returns the
terms of its experts: two ranks with two experts each, tokens a b of rank 0 and c of rank 1

    rank 0    a b          a b c    experts 0 1 of a b c          terms of a b: own + rank 1's
    rank 1    c            a b c    experts 2 3 of a b c          terms of c: rank 0's + own
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.families import MIXTURES
from rallypoint.models.tensor_parallel import Cutter, TensorParts, renumbered
from rallypoint.parallel import Collective, share_rows, sum_rows

Compute: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(states [T, E], chosen [T, k], shares [T, k]) -> the sums of the outputs of some experts: [T, E]."""


def deal_experts(model: PreTrainedModel, ep: Collective, parts: TensorParts) -> TensorParts:
    """Deal the experts of a model over ranks, in place, and return the parts that this rank has.

    Args:
        model: whole, or cut by tensor parallelism; on the meta device or any other.
        ep: the ranks.
        parts: what the rank has so far.

    Raises:
        ModelError: the model has no experts, or their number does not divide by the number of ranks.
    """
    family = MIXTURES.get(str(model.config.model_type))
    if family is None:
        raise ModelError(
            f"{type(model).__name__} has no experts to deal over ranks (ep > 1); models of type "
            f"{', '.join(MIXTURES)} have"
        )
    cutter, counts = Cutter(type(model).__name__, ep, "ep"), _Counts(ep)
    for layer in cast("nn.ModuleList", model.base_model.layers):
        experts = dict(layer.named_modules()).get(str(family.experts))
        if experts is not None:  # a mixture may have dense layers, too
            experts.forward = _DealtExperts(experts.forward, cutter.narrow_experts(experts), counts)
    names, found = {weight: name for name, weight in model.named_parameters()}, dict(parts.parts)
    for weight, part in cutter.parts.items():
        found[names[weight]] = found[names[weight]].narrow(0, part.starts[0], part.sizes[0])
    model.base_model.register_forward_pre_hook(counts.learn, with_kwargs=True)
    return dataclasses.replace(parts, parts=found, dealt=frozenset(names[weight] for weight in cutter.parts))


class _Counts:
    """The number of tokens of every rank in the pass under way; its layers are computed again before the next one."""

    def __init__(self, ep: Collective) -> None:
        self.ep, self.now = ep, (0,) * ep.size

    def learn(self, model: nn.Module, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        """Exchange the counts where a pass begins: the only time that the host waits."""
        del model
        tokens: Tensor = args[0] if args else options["input_ids"]
        counts = self.ep.all_gather(torch.tensor([tokens.numel()]), [1] * self.ep.size)
        self.now = tuple(torch.cat(counts).tolist())


@dataclasses.dataclass(frozen=True, slots=True)
class _DealtExperts:
    """The pass of a layer's experts."""

    compute: Compute
    """This rank's experts, numbered from 0; tokens for those after them get nothing."""
    own: range
    """The experts of this rank, as the layer numbers them."""
    counts: _Counts

    def __call__(self, states: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of all experts for this rank's tokens; see `Compute`."""
        ep, sizes = self.counts.ep, self.counts.now
        num_states, num_shares = states.shape[1], shares.shape[1]
        both = share_rows(torch.cat([states, shares.to(states)], 1), ep, sizes)
        states, shares = both.split([num_states, num_shares], 1)
        chosen = renumbered(torch.cat(ep.all_gather(chosen, sizes)), self.own)
        return sum_rows(self.compute(states, chosen, shares), ep, sizes)
