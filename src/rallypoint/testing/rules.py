"""What all checks share: their error, the orders and cuts that they try, and how two results are compared.

Owns: the bounds of these comparisons. Must not know: what is checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

ResultT = TypeVar("ResultT")

TOLERANCE = 1e-9
"""Tolerance for float64 numbers that were added up in another order, relative to their size, or absolute below 1."""
STEP = 1e-6
"""Step of differences that stand for a derivative."""
FINITE = "; divide by x.clamp(min=1e-6), and take tokens.ratio, which is cut off, for an exp of your own"
"""Remedy for numbers that are not finite."""

Outcome = tuple[float, dict[int, list[float]]]
"""A loss, and the gradient of each row's trained tokens."""


class ConformanceError(ValueError):
    """What is checked breaks a rule; the rule and the batch are named."""


def orders(num_rows: int) -> list[list[int]]:
    """Return other orders of so many rows."""
    backwards = list(reversed(range(num_rows)))
    return [backwards, backwards[::2] + backwards[1::2]] if num_rows > 1 else []


def cuts(num_rows: int) -> list[list[list[int]]]:
    """Return ways to cut so many rows into two micro-batches."""
    rows = list(range(num_rows))
    return [[rows[:1], rows[1:]], [rows[::2], rows[1::2]]] if num_rows > 1 else []


def derivative(
    formula: Callable[[Sequence[float], Sequence[float]], list[float]], numbers: Sequence[float], t: int
) -> float | None:
    """Return the derivative of a formula's sum by number t, from differences.

    Args:
        formula: (numbers, the same where the gradient is stopped) -> losses.
        numbers: [T] what it depends on.
        t: position of the number.

    Returns:
        The derivative; None at a corner, or where the number is not finite.
    """
    if not math.isfinite(numbers[t]):
        return None

    def total(x: float) -> float:
        return math.fsum(formula([*numbers[:t], x, *numbers[t + 1 :]], numbers))

    x, middle = numbers[t], total(numbers[t])
    up, down = (total(x + STEP) - middle) / STEP, (middle - total(x - STEP)) / STEP
    is_corner = not math.isclose(up, down, rel_tol=1e-3, abs_tol=1e-4 * max(1.0, abs(middle)))
    return None if is_corner else (up + down) / 2


def unmodified(call: Callable[[], ResultT], read: Callable[[], dict[str, Tensor]], name: str) -> ResultT:
    """Call, and expect that the arguments, which `read` returns by name, are the same afterwards."""
    before = {argument: x.detach().clone() for argument, x in read().items()}
    result = call()
    after = read()
    for argument in before | after:
        same = argument in before and argument in after and _equal(before[argument], after[argument].detach())
        expect(
            same, name, f"the argument {argument} was modified; write x * 2 for x.mul_(2), and clone before x[0] = 1"
        )
    return result


def _equal(x: Tensor, y: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))


class About:
    """A context in which an error that is not a ConformanceError gets a note that names the batch."""

    def __init__(self, name: str) -> None:
        """Take the name of the batch."""
        self._name = name

    def __enter__(self) -> None:
        """Begin to check the batch."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Add the note; the error goes on."""
        if error is not None and not isinstance(error, ConformanceError):
            error.add_note(f"(batch: {self._name})")


def expect(holds: bool, name: str, otherwise: str) -> None:
    """Raise a ConformanceError about a batch if something does not hold."""
    if not holds:
        raise ConformanceError(f"{otherwise} (batch: {name})")


def expect_shape(x: Tensor, num_tokens: int, name: str, what: str) -> None:
    """Expect one number for each token."""
    right = tuple(x.shape) == (num_tokens,)
    expect(right, name, f"the {what} must be a tensor of shape [{num_tokens}], found {list(x.shape)}")


def expect_again(found: Tensor, again: Tensor, name: str, what: str) -> None:
    """Expect the same bits from two calls."""
    same = found.shape == again.shape and torch.equal(torch.nan_to_num(found), torch.nan_to_num(again))
    expect(
        same, name, f"the same batch has other {what} the second time: keep nothing between calls, and draw no numbers"
    )


def expect_close(found: Sequence[float], wanted: Sequence[float], name: str, what: str) -> None:
    """Expect the numbers of a formula."""
    pairs = zip(found, wanted, strict=True)
    close = all(math.isclose(x, y, rel_tol=1e-7, abs_tol=1e-7) for x, y in pairs)
    expect(close, name, f"{what} should be {list(wanted)}, found {list(found)}")


def expect_gradient(found: float, wanted: float | None, loss: float, name: str, t: int) -> None:
    """Expect the derivative that differences give, if they give one.

    Args:
        found: gradient of a token.
        wanted: what differences give.
        loss: the sum whose gradient it is: its size bounds how exact differences are.
        name: of the batch.
        t: position of the token.
    """
    if wanted is not None:
        close = math.isclose(found, wanted, rel_tol=1e-4, abs_tol=1e-5 * max(1.0, abs(loss)))
        expect(close, name, f"the gradient of token {t} is {found}, where differences give {wanted}")


def expect_same(whole: Outcome, other: Outcome, name: str, when: str) -> None:
    """Expect the same loss and the same gradients, but for rounding."""

    def close(x: float, y: float) -> bool:
        return math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

    expect(close(whole[0], other[0]), name, f"the loss is {whole[0]}, but {other[0]} when {when}")
    for row, gradient in whole[1].items():
        same = all(map(close, gradient, other[1][row]))
        expect(same, name, f"the gradient of row {row} is {gradient}, but {other[1][row]} when {when}")
