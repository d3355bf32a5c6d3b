"""Collectives that gradients pass through.

Every rank of a `cp`, `sp` or `tp` group computes the loss from the same numbers, so each has the whole gradient of
these numbers: backward, `gather_rows` gives a rank its own slice and sums nothing. Gradients are summed where each rank
used a part: of the inputs of a cut matrix (`replicate`), and of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from rallypoint.parallel.collective import Collective


class _Context(FunctionCtx):
    """State that a forward pass leaves for the backward one."""

    group: Collective
    sizes: Sequence[int]
    taken: Sequence[int]


def replicate(tensor: Tensor, group: Collective) -> Tensor:
    """Pass on a tensor that is the same on all ranks; backward sums the gradients of the ranks.

    Before a matrix that is cut by its outputs, of which each rank has some (Megatron's f, arXiv 1909.08053).
    """
    return tensor if group.size == 1 else _Replicate.apply(tensor, group)


def reduce(tensor: Tensor, group: Collective) -> Tensor:
    """Sum what the ranks computed in parts; backward passes the gradient to every part.

    Follows a matrix that is cut by its inputs (Megatron's g).
    """
    return tensor if group.size == 1 else _Reduce.apply(tensor, group)


def gather_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Join the ranks' tensors, [n, ...] each, end to end; backward returns each rank its own slice.

    Args:
        tensor: [n, ...]; ranks may differ in n only.
        group: the ranks.
        sizes: n of every rank.
    """
    return tensor if group.size == 1 else _GatherRows.apply(tensor, group, sizes)


def share_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Join the ranks' tensors as `gather_rows`, for ranks that each compute a term of the loss from all of them.

    Backward sums the ranks' gradients of this rank's slice.
    """
    return _ShareRows.apply(tensor, group, sizes)  # pyright: ignore[reportReturnType] - `apply` is untyped


def sum_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Sum the ranks' terms of this rank's slice: [sum of sizes, ...] -> [n, ...]; backward joins the gradients.

    The ranks' gradients are of tensors of their own, so that both are the other's backward pass:

        rank 0 has   1 2 3      sizes 2 and 1      rank 0 returns   11 22
        rank 1 has   10 20 30                      rank 1 returns   33
    """
    return _SumRows.apply(tensor, group, sizes)  # pyright: ignore[reportReturnType] - `apply` is untyped


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
    return tensor.squeeze(1) if group.size == 1 else _ExchangeForColumns.apply(tensor, group, sizes)


def exchange_for_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    """Undo `exchange_for_columns`: [sum of sizes, ...] -> [n, P, ...]."""
    return tensor.unsqueeze(1) if group.size == 1 else _ExchangeForRows.apply(tensor, group, sizes)


def exchange_rows(tensor: Tensor, group: Collective, given: Sequence[int], taken: Sequence[int]) -> Tensor:
    """Give some rows to each rank, and return what they gave to this one; backward gives the gradients back.

    See `Collective.trade`.
    """
    return _ExchangeRows.apply(tensor, group, given, taken)  # pyright: ignore[reportReturnType] - `apply` is untyped


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce_sum([grad])
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective) -> Tensor:
        del ctx
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce_sum([total])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        del ctx
        return grad, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return torch.cat(group.all_gather(tensor, sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        start = sum(ctx.sizes[: ctx.group.rank])
        return grad[start : start + ctx.sizes[ctx.group.rank]], None, None


class _ShareRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return torch.cat(group.all_gather(tensor, sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        return _summed(grad, ctx.group, ctx.sizes), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _summed(tensor, group, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        return torch.cat(ctx.group.all_gather(grad, ctx.sizes)), None, None


def _own_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> list[Tensor]:
    """Return what each rank has for the rows of this one."""
    return group.exchange(tensor.split(list(sizes)), [sizes[group.rank]] * group.size)


def _summed(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    return torch.stack(_own_rows(tensor, group, sizes)).sum(0)


class _ExchangeForColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return torch.cat(group.exchange(tensor.unbind(1), sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        return _exchange_for_rows(grad, ctx.group, ctx.sizes), None, None


class _ExchangeForRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return _exchange_for_rows(tensor, group, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        return torch.cat(ctx.group.exchange(grad.unbind(1), ctx.sizes)), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, tensor: Tensor, group: Collective, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        ctx.group, ctx.sizes, ctx.taken = group, given, taken
        return group.trade(tensor, given, taken)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch passes one gradient per output
        return ctx.group.trade(grad, ctx.taken, ctx.sizes), None, None, None


def _exchange_for_rows(tensor: Tensor, group: Collective, sizes: Sequence[int]) -> Tensor:
    return torch.stack(_own_rows(tensor, group, sizes), 1)
