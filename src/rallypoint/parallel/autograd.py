"""Collectives that gradients pass through.

Every rank of a `cp`, `sp` or `tp` group computes the loss from the same numbers, so each has the whole gradient of
these numbers: backward, `gather_rows` gives a rank its own slice and sums nothing. Gradients are summed where each rank
used a part: of the inputs of a cut matrix (`replicate`), and of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rallypoint.parallel.collective import Collective


def replicate(tensor: Tensor, group: Collective) -> Tensor:
    """Pass on a tensor that is the same on all ranks; backward sums the gradients of the ranks.

    Before a matrix that is cut by its outputs, of which each rank has some (Megatron's f, arXiv 1909.08053).
    """
    return tensor if group.size == 1 else _passed(tensor, _as_it_is, lambda grad: _total(grad, group))


def reduce(tensor: Tensor, group: Collective) -> Tensor:
    """Sum what the ranks computed in parts; backward passes the gradient to every part.

    Follows a matrix that is cut by its inputs (Megatron's g).
    """
    return tensor if group.size == 1 else _passed(tensor, lambda part: _total(part, group), _as_it_is)


def gather_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Join the ranks' tensors, [n, ...] each, end to end; backward returns each rank its own slice.

    Args:
        tensor: [n, ...]; ranks may differ in n only.
        group: the ranks.
        sizes: n of every rank.
    """
    if group.size == 1:
        return tensor
    return _passed(tensor, lambda part: _joined(part, group, sizes), lambda grad: grad.split(list(sizes))[group.rank])


def share_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Join the ranks' tensors as `gather_rows`, for ranks that each compute a term of the loss from all of them.

    Backward sums the ranks' gradients of this rank's slice.
    """
    return _passed(tensor, lambda part: _joined(part, group, sizes), lambda grad: _summed(grad, group, sizes))


def sum_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Sum the ranks' terms of this rank's slice: [sum of sizes, ...] -> [n, ...]; backward joins the gradients.

    The ranks' gradients are of tensors of their own, so that both are the other's backward pass:

        rank 0 has   1 2 3      sizes 2 and 1      rank 0 returns   11 22
        rank 1 has   10 20 30                      rank 1 returns   33
    """
    return _passed(tensor, lambda terms: _summed(terms, group, sizes), lambda grad: _joined(grad, group, sizes))


def exchange_for_columns(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Trade some rows with all columns for all rows with some columns; backward trades back.

    Rank 0 of two that have a row each, of two columns, keeps a and receives c:

        a b                     a | b
        ---         becomes     c | d
        c d

    Args:
        tensor: [n, P, ...]: this rank's rows, with the columns of each of the P ranks.
        group: the ranks.
        sizes: n of every rank.

    Returns:
        [sum of sizes, ...]: all rows, with this rank's columns.
    """
    if group.size == 1:
        return tensor.squeeze(1)
    return _passed(tensor, lambda rows: _columns(rows, group, sizes), lambda grad: _rows(grad, group, sizes))


def exchange_for_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Undo `exchange_for_columns`: [sum of sizes, ...] -> [n, P, ...]."""
    if group.size == 1:
        return tensor.unsqueeze(1)
    return _passed(tensor, lambda columns: _rows(columns, group, sizes), lambda grad: _columns(grad, group, sizes))


def exchange_rows(tensor: Tensor, group: Collective, given: Sequence[int], taken: Sequence[int]) -> Tensor:
    """Give some rows to each rank, and return what they gave to this one; backward gives the gradients back.

    See `Collective.trade`.
    """
    return _passed(tensor, lambda rows: group.trade(rows, given, taken), lambda grad: group.trade(grad, taken, given))


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        return ctx.back(grad), None, None


def _passed(tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what a collective makes of a tensor; another one makes its gradient of that of the result."""
    return _Passed.apply(tensor, forward, backward)  # pyright: ignore[reportReturnType] - `apply` is untyped


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _total(tensor: Tensor, group: Collective) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce_sum([total])
    return total


def _joined(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    return torch.cat(group.all_gather(tensor, sizes))


def _own_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> list[Tensor]:
    """Return what each rank has for the rows of this one."""
    return group.exchange(tensor.split(list(sizes)), [sizes[group.rank]] * group.size)


def _summed(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    return torch.stack(_own_rows(tensor, group, sizes)).sum(0)


def _columns(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    return torch.cat(group.exchange(tensor.unbind(1), sizes))


def _rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    return torch.stack(_own_rows(tensor, group, sizes), 1)
