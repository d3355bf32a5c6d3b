"""KL, value loss and aggregation keep to every rule and to their papers, and what is broken is found."""

import functools

import pytest
import torch
from enumerable_policy import POLICY
from formulas import losses as formulas
from hypothesis import given, settings
from loss_terms import check_aggregation, check_kl, check_value_loss
from random_cases import random_cases

from rallypoint.algorithms import ADVANTAGES, KL, Weights, aggregate, kl_penalty, weigh
from rallypoint.algorithms.critic_losses import value_loss
from rallypoint.algorithms.kl import log_ratio
from rallypoint.algorithms.losses import kl_loss
from rallypoint.testing import ConformanceError

KLS = {
    "k1 in the reward": (KL(coef=1.0, estimator="k1", placement="reward"), "reverse"),
    "k2": (KL(coef=1.0, estimator="k2", placement="loss"), "reverse"),
    "k3": (KL(coef=1.0, estimator="k3", placement="loss"), "forward"),
    "abs": (KL(coef=1.0, estimator="abs", placement="loss"), "variation"),
    "k1, corrected": (KL(coef=1.0, estimator="k1", placement="loss", importance_corrected=True), "reverse"),
    "k3, corrected": (KL(coef=1.0, estimator="k3", placement="loss", importance_corrected=True), "reverse"),
}
RULES = ["token", "sequence", "fixed_length", "prompt"]
CLIPS = [None, 0.2, 1.0]


def checked(which, **changes):
    """Check a KL of the package, or another one in its place."""
    kl, divergence = KLS[which]
    corrected = kl.importance_corrected

    def of_the_package(logprobs, reference, old, mask):
        corrected_from = old if corrected else None
        return kl_loss(logprobs, reference, mask, estimator=kl.estimator, corrected_from=corrected_from).sum

    check_kl(
        **{
            "kl": of_the_package,
            "divergence": divergence,
            "placement": kl.placement,
            "is_corrected": corrected,
            "formula": functools.partial(formulas.kl, estimator=kl.estimator, importance_corrected=corrected),
            **changes,
        }
    )


@pytest.mark.parametrize("which", KLS)
def test_a_kl_keeps_to_every_rule_to_its_formula_and_to_its_divergence(which):
    checked(which)


@settings(max_examples=5)
@pytest.mark.parametrize("which", KLS)
@given(cases=random_cases())
def test_a_kl_of_any_batch_keeps_to_its_formula(which, cases):
    checked(which, cases=cases)


@pytest.mark.parametrize("clip", CLIPS)
def test_the_value_loss_keeps_to_every_rule_and_to_its_formula(clip):
    loss = lambda *tokens: value_loss(*tokens, clip=clip).sum  # noqa: E731
    check_value_loss(loss, formula=functools.partial(formulas.value_loss, clip=clip))


@settings(max_examples=5)
@pytest.mark.parametrize("clip", CLIPS)
@given(cases=random_cases())
def test_the_value_loss_of_any_batch_keeps_to_its_formula(clip, cases):
    loss = lambda *tokens: value_loss(*tokens, clip=clip).sum  # noqa: E731
    check_value_loss(loss, formula=functools.partial(formulas.value_loss, clip=clip), cases=cases)


def rule_of(name):
    return functools.partial(aggregate, name, length=10.0), functools.partial(
        formulas.aggregated, name=name, length=10.0
    )


@pytest.mark.parametrize("name", RULES)
def test_an_aggregation_keeps_to_every_rule_and_to_its_mean(name):
    rule, formula = rule_of(name)
    check_aggregation(rule, formula=formula)


@settings(max_examples=10)
@pytest.mark.parametrize("name", RULES)
@given(cases=random_cases())
def test_an_aggregation_of_any_batch_keeps_to_its_mean(name, cases):
    rule, formula = rule_of(name)
    check_aggregation(rule, formula=formula, cases=cases)


def k2(logprobs, reference, old, mask):
    del old
    gap = log_ratio(torch.where(mask, logprobs, 0.0), torch.where(mask, reference, 0.0))
    return 0.5 * gap.square().sum()


def unmasked(logprobs, reference, old, mask):
    del old, mask
    return 0.5 * log_ratio(logprobs, reference).square().sum()


def mean(logprobs, reference, old, mask):
    return k2(logprobs, reference, old, mask) / mask.sum().clamp(min=1)


def in_place(logprobs, reference, old, mask):
    reference.nan_to_num_(0.0).add_(0.0).clamp_(min=-5.0)
    return k2(logprobs, reference, old, mask)


def by_position(logprobs, reference, old, mask):
    del old
    gap = log_ratio(torch.where(mask, logprobs, 0.0), torch.where(mask, reference, 0.0))
    return 0.5 * (torch.arange(len(gap)) * gap.square()).sum()


BROKEN_KLS = {
    "flipped": (lambda *tokens: -k2(*tokens), "in expectation the gradient in the loss"),
    "doubled": (lambda *tokens: 2 * k2(*tokens), "in expectation the gradient in the loss"),
    "unmasked": (unmasked, "NaN stands where none is trained|not finite|leaves the mask"),
    "a mean": (mean, "cut into the micro-batches"),
    "of one place": (by_position, "in the order"),
    "in place": (in_place, "the argument rollout was modified"),
    "without gradient": (lambda logprobs, *others: k2(logprobs.detach(), *others), "it has no gradient"),
    "by token": (lambda logprobs, *others: logprobs, "must be a scalar"),
    "infinite": (lambda new, ref, old, mask: torch.where(mask, new - ref, 0.0).square().sum(), "not finite"),
}


@pytest.mark.parametrize("which", BROKEN_KLS)
def test_a_broken_kl_is_found_without_a_formula(which):
    broken, complaint = BROKEN_KLS[which]
    check_kl(k2, divergence="reverse")
    with pytest.raises(ConformanceError, match=complaint):
        check_kl(broken, divergence="reverse")


@pytest.mark.parametrize("which", KLS)
@pytest.mark.parametrize("factor", [-1.0, 0.5])
def test_a_wrong_sign_or_factor_of_any_kl_is_found_by_its_divergence_alone(which, factor):
    kl, _ = KLS[which]

    def scaled(logprobs, reference, old, mask):
        corrected_from = old if kl.importance_corrected else None
        return factor * kl_loss(logprobs, reference, mask, estimator=kl.estimator, corrected_from=corrected_from).sum

    with pytest.raises(ConformanceError, match="in expectation the gradient"):
        checked(which, kl=scaled, formula=None)


@pytest.mark.parametrize(
    ("estimator", "placement", "divergence"),
    [("k1", "loss", "reverse"), ("k3", "loss", "reverse"), ("k2", "reward", "reverse"), ("k3", "reward", "forward")],
)
def test_an_estimator_in_the_wrong_place_is_found(estimator, placement, divergence):
    """The pairs that `KL` refuses, or another divergence than a name has."""

    def kl(logprobs, reference, old, mask):
        return kl_loss(logprobs, reference, mask, estimator=estimator).sum

    with pytest.raises(ConformanceError, match="in expectation the gradient"):
        check_kl(kl, divergence=divergence, placement=placement)


def test_a_correction_without_its_gradient_is_found():
    def stopped(logprobs, reference, old, mask):
        logprobs, reference, old = (torch.where(mask, x, 0.0) for x in (logprobs, reference, old))
        weight = log_ratio(logprobs, old).clamp(-20, 20).exp().detach()
        return (weight * kl_penalty(logprobs, reference, "k3")).sum()

    with pytest.raises(ConformanceError, match="in expectation the gradient"):
        checked("k3, corrected", kl=stopped, formula=None)


def test_a_kl_that_is_right_on_policy_alone_is_not_taken_for_a_corrected_one():
    with pytest.raises(ConformanceError, match="sampled by another one"):
        check_kl(k2, divergence="reverse", is_corrected=True)


def test_another_estimator_than_the_formulas_is_found_where_the_gradient_is_the_same():
    def shifted(logprobs, reference, old, mask):
        return k2(logprobs, reference, old, mask) + mask.sum()

    check_kl(shifted, divergence="reverse")
    with pytest.raises(ConformanceError, match="the loss should be"):
        checked("k2", kl=shifted)


BROKEN_VALUE_LOSSES = {
    "flipped": (lambda *tokens: -value_loss(*tokens, clip=0.2).sum, "pull values to their returns"),
    "a smaller clip": (lambda *tokens: value_loss(*tokens, clip=0.1).sum, "the loss should be"),
    "without its half": (lambda *tokens: 2 * value_loss(*tokens, clip=0.2).sum, "the loss should be"),
    "the smaller error": (
        lambda values, old, returns, mask: (
            torch.minimum(
                *(torch.where(mask, x - returns, 0.0).square() for x in (values, values.clamp(old - 0.2, old + 0.2)))
            ).sum()
            / 2
        ),
        "the loss should be",
    ),
    "unmasked": (
        lambda values, old, returns, mask: value_loss(values, old, returns, mask | True, clip=0.2).sum,
        "NaN stands|not finite|leaves the mask",
    ),
    "without gradient": (lambda values, *others: value_loss(values.detach(), *others, clip=0.2).sum, "no gradient"),
    "a mean": (lambda *tokens: value_loss(*tokens, clip=0.2).sum / tokens[-1].sum().clamp(min=1), "cut into"),
}


@pytest.mark.parametrize("which", BROKEN_VALUE_LOSSES)
def test_a_broken_value_loss_is_found(which):
    broken, complaint = BROKEN_VALUE_LOSSES[which]
    with pytest.raises(ConformanceError, match=complaint):
        check_value_loss(
            broken, formula=None if "pull" in complaint else functools.partial(formulas.value_loss, clip=0.2)
        )


def changed(name, change):
    """A rule whose weights or denominator are other ones."""

    def rule(mask, offsets, groups):
        return change(aggregate(name, mask, offsets, groups, length=10.0), mask, groups)

    return rule


BROKEN_RULES = {
    "flipped": ("token", lambda w, *_: Weights(by_row=-w.by_row, denominator=w.denominator), "0 or more"),
    "half": ("sequence", lambda w, *_: Weights(by_row=w.by_row / 2, denominator=w.denominator), "the mean of rows"),
    "one row too many": (
        "sequence",
        lambda w, *_: Weights(by_row=w.by_row, denominator=w.denominator + 1),
        "the mean of rows",
    ),
    "every token": ("token", lambda w, m, _: Weights(by_row=w.by_row, denominator=float(len(m))), "passed alone"),
    "empty rows": ("sequence", lambda w, _, g: Weights(by_row=w.by_row, denominator=float(len(g))), "the mean of rows"),
    "by name": ("token", lambda w, _, g: Weights(by_row=g.double().abs(), denominator=w.denominator), "other names"),
    "by place": (
        "token",
        lambda w, _, g: Weights(by_row=torch.arange(len(g)).double(), denominator=w.denominator),
        "in the order",
    ),
}


@pytest.mark.parametrize("which", BROKEN_RULES)
def test_a_broken_aggregation_is_found(which):
    name, change, complaint = BROKEN_RULES[which]
    with pytest.raises(ConformanceError, match=complaint):
        check_aggregation(changed(name, change), formula=rule_of(name)[1])


@pytest.mark.parametrize("other", RULES)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_told_from_every_other_one(name, other):
    rule, formula = rule_of(name)[0], rule_of(other)[1]
    if name == other:
        return
    with pytest.raises(ConformanceError, match="the mean of rows"):
        check_aggregation(rule, formula=formula)


def test_any_loss_has_an_exact_expected_gradient_on_the_enumerable_policy():
    """The example of `enumerable_policy`."""
    rloo = ADVANTAGES["rloo"](whiten=False)
    found = POLICY.expected_gradient(
        lambda logprobs, batch: -(logprobs * weigh(batch, rloo, kl=None).advantages).sum(), group_size=2
    )
    torch.testing.assert_close(found, -POLICY.gradient_of(POLICY.mean_reward))
