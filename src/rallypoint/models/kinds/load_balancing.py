"""Equal shares of the tokens for the experts of each layer of a mixture: a loss, and biases that follow the loads.

**The loss** is least with equal shares. Switch Transformers (arXiv 2101.03961, equations 4 to 6), for k experts of a
token. A layer has X experts, T tokens:

    loss = X * sum over experts x of f[x] * P[x]

    f[x]    tokens that were sent to expert x, divided by T; together they are k
    P[x]    mean of the router's probability of x over all tokens: a gradient flows through this factor alone; of a
            router by sigmoid, its sigmoid divided by the sum of all

That is `load_balancing_loss_func` of transformers for one layer; layers are averaged. (transformers takes all layers
together, so that an expert with too few tokens makes up for one of another layer.) With equal shares it is k.

T is all tokens of an optimizer step, of all ranks, as if each row were computed alone (global-batch balance, arXiv
2501.11873). So f is counted in a pass of its own, whatever the cut into micro-batches. Once it is known, the loss is a
sum over tokens, whose gradient each router adds to that of its probabilities:

    d loss / d probability of x for a token = X * f[x] / (layers * T)

**Biases** are those of routers like DeepSeek-V3's, which choose but do not weigh, so that no loss is needed (arXiv
2408.15664, algorithm 1; 2412.19437, section 2.1.2). After an optimizer step each moves towards an equal share:

    b[x] <- b[x] + rate * sign(k / X - f[x])
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rallypoint.errors import ModelError
from rallypoint.families import BIASED
from rallypoint.models.kinds.experts import BiasedRouter, routers_of
from rallypoint.parallel import DeviceMesh


class LoadBalancing:
    """The loss for the routers of a model.

    Args of the constructor:
        base: the model without its head; a mixture, if the coefficient is not 0.
        coef: factor of the loss; 0 for none.
        mesh: the ranks that compute an optimizer step together.
    """

    def __init__(self, base: nn.Module, coef: float, mesh: DeviceMesh) -> None:
        self._coef, self._mesh, self._routers = coef, mesh, routers_of(base) if coef else []
        self._weights: Tensor | None = None
        """[T] float64: weight of each token in the pass under way; None outside of `over`."""
        self._is_on = False
        if not coef:
            return
        if not self._routers:
            raise ModelError(
                f"{type(base).__name__} has no experts whose loads could be balanced; leave out "
                "actor.router_aux_loss_coef"
            )
        base.register_forward_pre_hook(self._begin, with_kwargs=True)

    def _begin(self, base: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        del base, args
        self._weights = options["rows"].token_weights if self._is_on else None

    @contextlib.contextmanager
    def over(self, route: Callable[[], object]) -> Iterator[Tensor | None]:
        """Add the loss to all gradients in the block; yield its value before the coefficient, None without one.

        Args:
            route: passes all tokens of this rank's share of an optimizer step through the model once.
        """
        if not self._routers:
            yield None
            return
        self._is_on = True
        try:
            num_experts, device = len(self._routers[0].weight), self._routers[0].weight.device
            sums = torch.zeros(len(self._routers), 2, num_experts, dtype=torch.float64, device=device)
            for router, own in zip(self._routers, sums, strict=True):
                router.balance = functools.partial(self._count, own)
            route()
            self._mesh.everyone.all_reduce_sum([sums])
            sums /= self._mesh.tp.size  # whose ranks have the same tokens
            num_tokens = sums[0, 0].sum() / self._routers[0].top_k
            sent, probability = (sums / num_tokens).unbind(1)
            slopes = sent * (self._coef * num_experts / (len(sums) * num_tokens))
            for router, slope in zip(self._routers, slopes, strict=True):
                router.balance = functools.partial(self._pull, slope)
            yield num_experts * (sent * probability).sum(1).mean()
        finally:
            self._is_on = False
            for router in self._routers:
                router.balance = None

    def _count(self, sums: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Add the tokens that a router sends to each expert, and their probabilities: [2, X] float64."""
        weights = self._weights_of_pass
        sent = torch.zeros_like(shares, dtype=weights.dtype).scatter_add(1, chosen, weights.expand(chosen.shape))
        sums += torch.stack([sent.sum(0), (shares * weights).sum(0)])
        return shares

    def _pull(self, slope: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Have the gradient of the loss added to that of a router's probabilities."""
        del chosen
        added, shares = (self._weights_of_pass * slope).to(shares), shares.view_as(shares)
        if shares.requires_grad:
            shares.register_hook(lambda grad: grad + added)
        return shares

    @property
    def _weights_of_pass(self) -> Tensor:
        """[T, 1]."""
        assert self._weights is not None, "a pass has begun in `over`"
        return self._weights.unsqueeze(1)


class BiasUpdate:
    """The biases of a model's routers, moved once an optimizer step.

    Args of the constructor:
        base: the model without its head; its routers have biases, if the rate is not 0.
        rate: how far a bias moves in a step; 0: biases stay.
        mesh: the ranks that compute an optimizer step together.
    """

    def __init__(self, base: nn.Module, rate: float, mesh: DeviceMesh) -> None:
        self._rate, self._mesh = rate, mesh
        found = routers_of(base) if rate else []
        self._routers = [router for router in found if isinstance(router, BiasedRouter)]
        self._weights: Tensor | None = None
        """[T] float64: weight of each token in the pass under way; None outside, where layers are computed again."""
        self._is_on = False
        if not rate:
            return
        if not self._routers:
            raise ModelError(
                f"{type(base).__name__} has no routers with a bias; models of type {', '.join(BIASED)} have. Leave out "
                "actor.router_bias_update_rate; actor.router_aux_loss_coef balances the experts of any mixture"
            )
        base.register_forward_pre_hook(self._begin, with_kwargs=True)
        base.register_forward_hook(self._end)

    def _begin(self, base: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        del base, args
        self._weights = options["rows"].token_weights if self._is_on else None

    def _end(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del base, args, output
        self._weights = None

    @contextlib.contextmanager
    def after(self) -> Iterator[None]:
        """Count where the tokens of an optimizer step in the block are sent; move the biases if it raises nothing."""
        if not self._routers:
            yield
            return
        counts = [torch.zeros_like(router.e_score_correction_bias, dtype=torch.float64) for router in self._routers]
        self._is_on = True
        try:
            for router, count in zip(self._routers, counts, strict=True):
                router.count = functools.partial(self._count, count)
            yield
        finally:
            self._is_on = False
            for router in self._routers:
                router.count = None
        sums = torch.stack(counts)
        self._mesh.everyone.all_reduce_sum([sums])
        # In whole numbers, which have the same bits on every mesh.
        steps = (sums.sum(1, keepdim=True) - sums.shape[1] * sums).sign() * self._rate
        for router, step in zip(self._routers, steps, strict=True):
            router.e_score_correction_bias += step.to(router.e_score_correction_bias)

    def _count(self, counts: Tensor, chosen: Tensor) -> None:
        """Add the tokens of a pass that a router sends to each expert, [T, k] chosen."""
        if self._weights is not None:
            counts.scatter_add_(0, chosen.flatten(), self._weights.repeat_interleave(chosen.shape[1]))
