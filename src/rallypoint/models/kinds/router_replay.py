"""Router replay: the experts that a sampler chose, recorded by token, and chosen again when the tokens are trained.

Sampler and trainer compute the same numbers up to rounding. Where two experts are nearly as likely, rounding decides
which one a token is sent to, and from there on the numbers differ by much more (arXiv 2510.11370). With the sampler's
choices the trainer's experts are the same; their shares are the trainer's own, so that gradients reach its routers.

Owns: how choices are written down, and how they reach the routers of a pass. Must not know: who samples, or rows.

A choice is the number of an expert plus 1, so that zeros, as of filler, leave it to the router: a byte, or two in
models with more than 255 experts. A token has one for each router and each of its experts, end to end.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rallypoint.errors import ModelError
from rallypoint.models.kinds.experts import Router, routers_of


def take_replays(base: nn.Module) -> None:
    """Let passes of a model take the option `experts`: choices to be made, [T, bytes] uint8. Other passes choose."""
    if routers := routers_of(base):
        base.register_forward_pre_hook(functools.partial(_replay, routers), with_kwargs=True)


def _replay(routers: Sequence[Router], base: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Give routers their choices for a pass, and for layers that are computed again before the next one."""
    del base
    experts: Tensor | None = options.pop("experts", None)
    chosen = [None] * len(routers) if experts is None else _read(routers, experts)
    for router, replayed in zip(routers, chosen, strict=True):
        router.replayed = replayed
    return args, options


def _read(routers: Sequence[Router], experts: Tensor) -> Sequence[Tensor]:
    num_routers, num_chosen, kind = len(routers), routers[0].top_k, _type_of(routers)
    expected = num_routers * num_chosen * kind.itemsize
    if experts.shape[1] != expected:
        raise ModelError(
            f"the experts of a token were recorded in {experts.shape[1]} bytes, but this model has {num_routers} "
            f"routers that choose {num_chosen} experts each, which take {expected}; the rollouts are another model's"
        )
    return experts.view(kind).view(-1, num_routers, num_chosen).long().unbind(1)


@contextlib.contextmanager
def recorded(routers: Sequence[Router]) -> Iterator[list[Tensor]]:
    """Record what routers choose in a pass: [T, k] of each, see `written`."""
    found: list[Tensor] = []
    for router in routers:
        router.recorded = found
    try:
        yield found
    finally:
        for router in routers:
            router.recorded = None


def written(routers: Sequence[Router], chosen: Sequence[Tensor]) -> Tensor:
    """Return recorded choices as bytes: [T, bytes] uint8."""
    return (torch.stack(list(chosen), 1) + 1).to(_type_of(routers)).flatten(1).view(torch.uint8)


def _type_of(routers: Sequence[Router]) -> torch.dtype:
    return torch.uint8 if routers[0].weight.shape[0] < 256 else torch.int16
