"""What else is in a loss: a KL to the reference, a critic's loss, and the rule by which losses become one mean.

A KL and a value loss are functions that return a sum over trained tokens, and are held to what
`rallypoint.testing.conformance` says of policy losses: repetition, arguments, mask, order, cuts, packing, gradient,
formula. And to what they are for:

    divergence  in expectation over its samples, a KL has the gradient of the divergence that it is said to be, on a
                policy whose responses can be enumerated; in the reward, that of what rewards to go give
    direction   a critic's loss pulls each value to its return
    weights     a rule of aggregation gives weights of 0 or more, which depend neither on the order of rows, nor on
                names of prompts, nor on untrained tokens; sums of micro-batches over its denominator are the mean

Owns: these checks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from enumerable_policy import POLICY, Divergence, EnumerablePolicy
from torch import Tensor

from rallypoint.algorithms import OBJECTIVES, Weights
from rallypoint.testing.cases import CASES, Case
from rallypoint.testing.rules import (
    Outcome,
    cuts,
    derivative,
    expect,
    expect_close,
    expect_gradient,
    expect_same,
    expect_shape,
    orders,
    unmodified,
)
from rallypoint.types import JudgedBatch

Total = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Three numbers of each token, the first with gradient, and the mask, [T] each -> their sum over trained tokens."""
Formula = Callable[[Case, Sequence[float]], list[float]]
"""(batch, the numbers that have a gradient) -> the number of each trained token."""
StoppedFormula = Callable[[Case, Sequence[float], Sequence[float]], list[float]]
"""Likewise, with the same numbers where the gradient is stopped behind them."""
Aggregation = Callable[[Tensor, Tensor, Tensor], Weights]
"""(loss_mask [T], offsets [B+1], groups [B]) -> weights and denominator."""

SAMPLER = EnumerablePolicy.random(num_tokens=3, seed=21).logprobs
"""Another policy than `POLICY`: what it samples is off-policy."""


def check_kl(
    kl: Total,
    *,
    divergence: Divergence,
    placement: Literal["reward", "loss"] = "loss",
    is_corrected: bool = False,
    formula: StoppedFormula | None = None,
    cases: Mapping[str, Case] = CASES,
) -> None:
    """Hold a KL to the reference to the rules above.

    Args:
        kl: (logprobs, reference_logprobs, old_logprobs, loss_mask) -> the sum of its estimates, which is minimised.
        divergence: whose gradient it has; in the reward that of whole responses, in the loss token by token.
        placement: where it acts. In the reward it is called for one token at a time, and needs no gradient.
        is_corrected: whether it has that gradient for what another policy sampled, too.
        formula: (batch, logprobs, the same where the gradient is stopped) -> the estimate of each trained token;
            `rollout` is the reference. None if there is none.
        cases: batches by name.

    Raises:
        ConformanceError: it breaks one.
    """
    has_gradient = placement == "loss"
    _check_total(kl, ("logprobs", "rollout", "old"), formula, cases, has_gradient=has_gradient)
    in_place = functools.partial(_in_the_loss if has_gradient else _in_the_reward, kl)
    for sampler in [None, SAMPLER] if is_corrected else [None]:
        found = POLICY.expected_gradient(in_place, sampler=sampler)
        of_tokens = functools.partial(POLICY.token_divergence, kind=divergence, sampler=sampler)
        of_responses = functools.partial(POLICY.response_divergence, kind=divergence)
        wanted = POLICY.gradient_of(of_tokens if has_gradient else of_responses)
        expect(
            torch.allclose(found, wanted, rtol=1e-7, atol=1e-9),
            "all responses of an enumerable policy" + ("" if sampler is None else ", sampled by another one"),
            f"in expectation the gradient in the {placement} is {found.tolist()}, but that of the {divergence} "
            f"divergence is {wanted.tolist()}: see the table in rallypoint/algorithms/kl.py",
        )


def check_value_loss(
    loss: Total,
    *,
    formula: Formula | None = None,
    cases: Mapping[str, Case] = CASES,
) -> None:
    """Hold a critic's loss to the rules above.

    Args:
        loss: (values, old_values, returns, loss_mask) -> the sum of the tokens' losses.
        formula: (batch, values) -> the loss of each trained token, if there is one; the batch's `rewards` are the old
            values, its `advantages` the returns.
        cases: batches by name.

    Raises:
        ConformanceError: it breaks one.
    """
    stopped = formula and functools.partial(_unstopped, formula)
    _check_total(loss, ("values", "rewards", "advantages"), stopped, cases, has_gradient=True)
    values, returns = (torch.tensor(x, dtype=torch.float64) for x in ([0.0, 0.0, 2.0, 1.0], [1.0, -2.0, 0.5, 1.0]))
    leaf = values.clone().requires_grad_()
    loss(leaf, values, returns, torch.ones(4, dtype=torch.bool)).backward()
    assert leaf.grad is not None, "as expected of every case"
    expect(
        torch.equal(leaf.grad.sign(), (values - returns).sign()),
        "values 0, 0, 2, 1 with returns 1, -2, 0.5, 1",
        f"the loss does not pull values to their returns: its gradient is {leaf.grad.tolist()}",
    )


def check_aggregation(
    rule: Aggregation,
    *,
    formula: Callable[[Case, Sequence[float]], float] | None = None,
    cases: Mapping[str, Case] = CASES,
) -> None:
    """Hold a rule of aggregation to the rules above.

    Args:
        rule: (loss_mask, offsets, groups) of a whole mini-batch -> weights of its rows, and the denominator.
        formula: (batch, loss of every token [T]) -> the mean, if there is one. It is not asked for the mean of nothing.
        cases: batches by name.

    Raises:
        ConformanceError: it breaks one.
    """
    for name, case in cases.items():
        found = _weights(rule, case, name)
        expect_shape(found.by_row, len(case.lengths), name, "weights of rows")
        right = bool((found.by_row.isfinite() & (found.by_row >= 0)).all()) and math.isfinite(found.denominator)
        expect(right, name, f"a weight or the denominator is not 0 or more: {found}")
        renamed = Case(**{**vars(case), "groups": tuple(1000 - 7 * group for group in case.groups)})
        others = {
            "it is called again": (case, range(len(case.lengths))),
            "prompts have other names": (renamed, range(len(case.lengths))),
            "its trained tokens are passed alone": (case.trained(), range(len(case.lengths))),
            **{
                f"its rows are in the order {order}": (case.picked(order), order) for order in orders(len(case.lengths))
            },
        }
        for when, (other, rows) in others.items():
            again = _weights(rule, other, name)
            wanted = [*found.by_row[list(rows)].tolist(), found.denominator]
            expect_close([*again.by_row.tolist(), again.denominator], wanted, name, f"when {when}, the weights")
        if formula is not None and any(case.rows):
            _check_mean(found, formula, case, name)


def _weights(rule: Aggregation, case: Case, name: str) -> Weights:
    rewards = case.earned()
    arguments = {"loss_mask": rewards.loss_mask, "offsets": rewards.offsets, "groups": rewards.groups}
    return unmodified(lambda: rule(*arguments.values()), lambda: arguments, name)


def _check_mean(weights: Weights, formula: Callable[[Case, Sequence[float]], float], case: Case, name: str) -> None:
    """Compare sums of micro-batches with the mean of a formula, and the share of each token with its differences."""
    objective = OBJECTIVES["policy_gradient"]()
    losses = objective.by_token(case.tokens().masked())[0].tolist()
    mean = formula(case, losses)
    for parts in [[list(range(len(case.lengths)))], *cuts(len(case.lengths))]:
        tokens = [(rows, case.picked(rows).tokens()) for rows in parts]
        sums = [float(objective(part, weights=weights.by_row[rows][part.rows]).sum) for rows, part in tokens]
        found = math.fsum(sums) / weights.denominator
        expect_close([found], [mean], name, f"the mean of rows that are cut into the micro-batches {parts}")
    for row, at in enumerate(case.rows):
        for t in at:
            share = float(weights.by_row[row]) / weights.denominator
            wanted = derivative(lambda new, _: [formula(case, new)], losses, t)
            expect_gradient(share, wanted, mean, name, t)


def _check_total(
    total: Total,
    columns: tuple[str, str, str],
    formula: StoppedFormula | None,
    cases: Mapping[str, Case],
    *,
    has_gradient: bool,
) -> None:
    """Hold a sum over trained tokens to the rules of sums."""
    for name, case in cases.items():
        rows = list(range(len(case.lengths)))
        run = functools.partial(_run, total, columns, name=name, has_gradient=has_gradient)
        whole, trained = run(case, rows), [t for row in case.rows for t in row]
        numbers = [whole[0], *(x for gradient in whole[1].values() for x in gradient)]
        expect(all(map(math.isfinite, numbers)), name, f"the loss or a gradient is not finite: {numbers}")
        expect(whole == run(case, rows), name, "the same batch has another loss the second time")
        poisoned = {
            c: tuple(x if m else math.nan for x, m in zip(vars(case)[c], case.mask, strict=True)) for c in columns
        }
        expect_same(whole, run(Case(**{**vars(case), **poisoned}), rows), name, "NaN stands where none is trained")
        for order in orders(len(rows)):
            expect_same(whole, run(case, order), name, f"its rows are in the order {order}")
        for parts in cuts(len(rows)):
            cut = [run(case, part) for part in parts]
            together = math.fsum(loss for loss, _ in cut), {row: g for _, by_row in cut for row, g in by_row.items()}
            expect_same(whole, together, name, f"rows are cut into the micro-batches {parts}")
        expect_same(whole, run(case.trained(), rows), name, "its trained tokens are passed alone")
        if formula is None:
            continue
        numbers = vars(case)[columns[0]]
        expect_close([whole[0]], [math.fsum(formula(case, numbers, numbers))], name, "the loss")
        of_case = functools.partial(formula, case)
        for t, got in zip(trained, (x for gradient in whole[1].values() for x in gradient), strict=True):
            if has_gradient:
                expect_gradient(got, derivative(of_case, numbers, t), whole[0], name, t)


def _unstopped(formula: Formula, case: Case, new: Sequence[float], fixed: Sequence[float]) -> list[float]:
    """Return what a formula says that stops no gradient."""
    del fixed
    return formula(case, new)


def _run(
    total: Total, columns: tuple[str, str, str], case: Case, rows: Sequence[int], *, name: str, has_gradient: bool
) -> Outcome:
    """Return what a sum is of some rows of a batch, in this order."""
    part = case.picked(rows)
    numbers = {column: torch.tensor(vars(part)[column], dtype=torch.float64) for column in columns}
    mask = torch.tensor(part.mask, dtype=torch.bool)
    leaf, second, third = numbers.values()
    leaf.requires_grad_()
    found = unmodified(lambda: total(leaf, second, third, mask), lambda: {**numbers, "loss_mask": mask}, name)
    expect(found.dim() == 0, name, f"the sum must be a scalar, found shape {list(found.shape)}")
    expect(
        found.requires_grad or not has_gradient, name, f"the loss does not depend on {columns[0]}: it has no gradient"
    )
    if found.requires_grad:
        found.backward()
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    expect(not bool(gradient[~mask].any()), name, "the gradient leaves the mask")
    return float(found.detach()), {row: gradient[at].tolist() for row, at in zip(rows, part.rows, strict=True)}


def _in_the_loss(kl: Total, logprobs: Tensor, batch: JudgedBatch) -> Tensor:
    """Return the sum that is added to a loss."""
    assert batch.old_logprobs is not None, "the batch is judged"
    assert batch.reference_logprobs is not None, "the batch has a reference"
    return kl(logprobs, batch.reference_logprobs, batch.old_logprobs, batch.loss_mask)


def _in_the_reward(kl: Total, logprobs: Tensor, batch: JudgedBatch) -> Tensor:
    """Return the loss whose gradient is the policy gradient of estimates, summed from each token to the end."""
    assert batch.old_logprobs is not None, "the batch is judged"
    assert batch.reference_logprobs is not None, "the batch has a reference"
    old, reference, num = batch.old_logprobs, batch.reference_logprobs, len(batch.loss_mask)
    only = torch.eye(num, dtype=torch.bool) & batch.loss_mask
    costs = torch.stack([kl(old, reference, old, only[t]).detach() for t in range(num)])
    to_go = costs.flip(0).cumsum(0).flip(0)
    return (torch.where(batch.loss_mask, logprobs, 0.0) * to_go).sum()
