"""Rules that every advantage, policy loss and correction must keep to, those of users included.

    shape       one number for each token; finite where tokens are trained, and so is the gradient
    repetition  the same batch gives the same numbers again
    arguments   not modified
    mask        numbers outside the mask, even NaN, change nothing; advantages there are 0
    order       rows in another order give the same numbers in that order
    cuts        a loss of rows in two micro-batches is the sum of both losses, and so is its gradient; what is watched
                adds up to the same, too
    packing     the trained tokens alone give what the whole rows give
    gradient    reaches logprobs, and nothing else
    signal      a loss that needs advantages has no loss and no gradient where they are 0: such rows are not computed
    formula     the numbers are those of a loop over tokens, and the gradient that of its differences

Owns: these checks. All but the last need nothing but the function
itself, and take a fraction of a second: a function of your own is held to them when a run starts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from rallypoint.algorithms import (
    Advantage,
    Correction,
    OwnAdvantage,
    PolicyObjective,
    PolicyTokens,
    Rewards,
    aggregate,
    correct,
    tensors_of,
)
from rallypoint.testing.cases import CASES, Case
from rallypoint.testing.rules import (
    FINITE,
    About,
    ConformanceError,
    Outcome,
    cuts,
    derivative,
    expect,
    expect_again,
    expect_close,
    expect_gradient,
    expect_same,
    expect_shape,
    orders,
    unmodified,
)
from rallypoint.types import Metrics, merge

BatchT = TypeVar("BatchT", PolicyTokens, Rewards)

Formula = Callable[[Case, Sequence[float], Sequence[float]], list[float]]
"""(batch, logprobs, the same where the gradient is stopped) -> the loss of each trained token, or of each row."""


def check_objective(
    objective: PolicyObjective,
    *,
    formula: Formula | None = None,
    by_row: bool = False,
    cases: Mapping[str, Case] = CASES,
) -> None:
    """Hold a policy loss to the rules above.

    Args:
        objective: the loss; `OwnObjective(function=...)` for a function.
        formula: what it is compared with, if there is one.
        by_row: whether the formula has one loss for each row: then aggregation is by sequence.
        cases: batches by name.

    Raises:
        ConformanceError: it breaks one.
    """
    for name, case in cases.items():
        with About(name):
            _check_objective(objective, formula, case.with_selected(objective), name, by_row=by_row)


def check_advantage(
    advantage: Advantage, *, formula: Callable[[Case], list[float]] | None = None, cases: Mapping[str, Case] = CASES
) -> None:
    """Hold an advantage to the rules above; those about gradients, cuts and packing do not apply.

    A function is not called for a batch without rows: a step always has some.

    Args:
        advantage: the estimator; `OwnAdvantage(function=..., whiten=False)` for a function.
        formula: (batch) -> the advantage of every token, if there is one.
        cases: batches by name.

    Raises:
        ConformanceError: it breaks one.
    """
    for name, case in cases.items():
        if isinstance(advantage, OwnAdvantage) and not case.lengths:
            continue
        with About(name):
            _check_advantage(advantage, formula, case, name)


def check_correction(
    correction: Correction, *, formula: Callable[[Case], list[float]] | None = None, cases: Mapping[str, Case] = CASES
) -> None:
    """Hold a correction to the rules above.

    Args:
        correction: the correction.
        formula: (batch) -> the weight of each trained token, if there is one.
        cases: batches by name.

    Raises:
        ConformanceError: it breaks one.
    """
    for name, case in cases.items():
        with About(name):
            _check_correction(correction, formula, case, name)


_BY_ROW = "; what a token loses may depend on the tokens of its own row alone: see row_means and row_totals"
_MASKED = "; read rewards.scores and lengths, or torch.where(rewards.loss_mask, x, 0), where they are left out"
"""Remedies."""
_NUMBERS = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages")


def _check_objective(
    objective: PolicyObjective, formula: Formula | None, case: Case, name: str, *, by_row: bool
) -> None:
    """Hold a policy loss to the rules on one batch."""
    _check_tokens(objective, case, name)
    rows = range(len(case.lengths))
    whole, watched = _run(objective, case, rows), _watched(objective, case, rows)
    for order in orders(len(rows)):
        expect_same(whole, _run(objective, case, order), name, f"its rows are in the order {order}{_BY_ROW}")
    for parts in cuts(len(rows)):
        cut = [_run(objective, case, part) for part in parts]
        together = sum(loss for loss, _ in cut), {row: g for _, by_row in cut for row, g in by_row.items()}
        expect_same(whole, together, name, f"rows are cut into the micro-batches {parts}{_BY_ROW}")
        merged = merge(*(_watched(objective, case, part) for part in parts)).scalars()
        for metric, x in watched.scalars().items():
            same = math.isclose(x, merged.get(metric, math.nan), rel_tol=1e-7, abs_tol=1e-7) or math.isnan(x)
            expect(same, name, f"the metric {metric} is {x}, but {merged.get(metric)} when rows are cut {parts}")
    expect_same(whole, _run(objective, case.trained(), rows), name, "its trained tokens are passed alone")
    if objective.needs_advantage:
        _check_signal(objective, case, name)
    if formula is not None:
        _check_formula(objective, formula, case, name, by_row=by_row)


def _check_advantage(
    advantage: Advantage, formula: Callable[[Case], list[float]] | None, case: Case, name: str
) -> None:
    """Hold an advantage to the rules on one batch."""
    rewards = case.earned()
    found = unmodified(lambda: advantage(rewards), lambda: tensors_of(rewards), name)
    expect_shape(found, len(case.mask), name, "advantages")
    expect_again(found, advantage(rewards), name, "advantages")
    mask = rewards.loss_mask
    expect(bool(found[mask].isfinite().all()), name, f"an advantage is not finite: {found.tolist()}{FINITE}")
    expect(not bool(found[~mask].any()), name, "an advantage of a token that is not trained is not 0")
    poisoned = advantage(_poisoned(rewards, mask, ("token_rewards", "earned", "values")))
    same = torch.equal(poisoned, found)
    expect(same, name, f"NaN where no token is trained changes the advantages{_MASKED}")
    for rows in orders(len(case.lengths)):
        shuffled = advantage(case.picked(rows).earned())
        expected = found[_tokens_of(case, rows)]
        same = torch.allclose(shuffled, expected, rtol=1e-7, atol=1e-7)
        expect(
            same,
            name,
            f"rows in the order {rows} have other advantages: {shuffled.tolist()} instead of {expected.tolist()}; "
            "compare rows by `groups`, never by where they stand",
        )
    if formula is not None:
        expect_close(found.tolist(), formula(case), name, "the advantages")


def _check_correction(
    correction: Correction, formula: Callable[[Case], list[float]] | None, case: Case, name: str
) -> None:
    """Hold a correction to the rules on one batch."""
    tokens = case.tokens()
    mask = tokens.loss_mask
    weights = unmodified(lambda: correct([correction], tokens)[0], lambda: tensors_of(tokens), name)
    expect_shape(weights, len(case.mask), name, "weights")
    trained = weights[mask]
    expect(bool((trained.isfinite() & (trained >= 0)).all()), name, f"a weight is not 0 or more: {weights}")
    poisoned, _ = correct([correction], _poisoned(tokens, mask, _NUMBERS))
    expect(torch.equal(poisoned[mask], trained), name, "NaN where no token is trained changes the weights")
    for rows in [*orders(len(case.lengths)), *itertools.chain(*cuts(len(case.lengths)))]:
        part = case.picked(rows).tokens()
        same = torch.allclose(correct([correction], part)[0][part.loss_mask], weights[_trained(case, rows)])
        expect(same, name, f"rows {rows} by themselves have other weights")
    if formula is not None:
        expect_close(trained.tolist(), formula(case), name, "the weights")


def _check_tokens(objective: PolicyObjective, case: Case, name: str) -> None:
    """Shapes, finite numbers, arguments and the mask."""
    tokens = case.tokens()
    masked = tokens.masked()
    losses, watched = unmodified(lambda: objective.by_token(masked), lambda: tensors_of(masked), name)
    expect_again(losses, objective.by_token(masked)[0], name, "losses")
    numbers = {what: x for what, x in watched.items() if isinstance(x, Tensor)}
    for what, found in {"losses": losses, **numbers}.items():
        expect_shape(found, len(case.mask), name, what)
        trained = found[tokens.loss_mask]
        expect(bool(trained.isfinite().all()), name, f"one of the {what} is not finite: {trained.tolist()}{FINITE}")
    loss, gradient = _backward(objective, _poisoned(tokens, tokens.loss_mask, _NUMBERS))
    expect(
        gradient is not None,
        name,
        "the loss does not depend on logprobs: it has no gradient",
    )
    assert gradient is not None, "as expected"
    inside, outside = gradient[tokens.loss_mask], gradient[~tokens.loss_mask]
    expect(bool(inside.isfinite().all()), name, f"a gradient is not finite: {inside.tolist()}{FINITE}")
    expect(not bool(outside.any()), name, "the gradient leaves the mask")
    poisoned = loss, {row: gradient[at].tolist() for row, at in enumerate(case.rows)}
    expect_same(_run(objective, case, range(len(case.rows))), poisoned, name, "NaN stands where none is trained")


def _check_signal(objective: PolicyObjective, case: Case, name: str) -> None:
    """Advantages of 0."""
    tokens = case.tokens()
    loss, gradient = _backward(objective, dataclasses.replace(tokens, advantages=torch.zeros_like(tokens.advantages)))
    is_nothing = loss == 0 and gradient is not None and not bool(gradient.any())
    expect(
        is_nothing,
        name,
        f"without an advantage the loss is {loss}, and its gradient {gradient}: set needs_advantage to False",
    )


def _run(objective: PolicyObjective, case: Case, rows: Sequence[int], weights: Tensor | None = None) -> Outcome:
    """Return what a loss says of some rows of a batch, in this order."""
    part = case.picked(rows)
    loss, gradient = _backward(objective, part.tokens(), weights)
    if gradient is None:
        raise ConformanceError(f"the rows {list(rows)} by themselves have no gradient: a loss of 0 needs one of 0")
    return loss, {row: gradient[at].tolist() for row, at in zip(rows, part.rows, strict=True)}


def _watched(objective: PolicyObjective, case: Case, rows: Sequence[int]) -> Metrics:
    """Return what a loss wants to be watched of some rows of a batch."""
    with torch.no_grad():
        found = objective(case.picked(rows).tokens())
        return found.noted(float(found.num_tokens))


def _backward(
    objective: PolicyObjective, tokens: PolicyTokens, weights: Tensor | None = None
) -> tuple[float, Tensor | None]:
    logprobs = tokens.logprobs.clone().requires_grad_()
    loss = objective(dataclasses.replace(tokens, logprobs=logprobs), weights=weights)
    if loss.sum.requires_grad:
        loss.sum.backward()
    return float(loss.sum.detach()), logprobs.grad


def _check_formula(objective: PolicyObjective, formula: Formula, case: Case, name: str, *, by_row: bool) -> None:
    weights = None
    if by_row:
        tokens, rewards = case.tokens(), case.earned()
        of_row = aggregate("sequence", rewards.loss_mask, rewards.offsets, rewards.groups, length=1.0).by_row
        weights = of_row[tokens.rows]
    found, gradients = _run(objective, case, range(len(case.rows)), weights)
    expect_close([found], [math.fsum(formula(case, case.logprobs, case.logprobs))], name, "the loss")
    for row, at in enumerate(case.rows):
        for t, got in zip(at, gradients[row], strict=True):
            wanted = derivative(functools.partial(formula, case), case.logprobs, t)
            expect_gradient(got, wanted, found, name, t)


def _tokens_of(case: Case, rows: Sequence[int]) -> list[int]:
    offsets = case.offsets
    return [t for row in rows for t in range(offsets[row], offsets[row + 1])]


def _trained(case: Case, rows: Sequence[int]) -> list[int]:
    return [t for row in rows for t in case.rows[row]]


def _poisoned(batch: BatchT, mask: Tensor, names: Sequence[str]) -> BatchT:
    values = {name: getattr(batch, name) for name in names}
    poisoned = {name: x if x is None else torch.where(mask, x, math.nan) for name, x in values.items()}
    return dataclasses.replace(batch, **poisoned)
