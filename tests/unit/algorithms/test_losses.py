import itertools

import pytest
import torch
from formulas import losses as formulas
from hypothesis import given, strategies as st
from random_cases import random_cases

from rallypoint.algorithms import explained_variance
from rallypoint.algorithms.critic_losses import value_loss
from rallypoint.algorithms.losses import entropy_bonus, kl_loss, policy_loss
from rallypoint.types import merge

numbers = st.floats(-4, 4, width=32)
dual_clips = st.sampled_from([None, 1.5, 3.0])
clips = st.sampled_from([None, 0.2, 1.0])
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}


@st.composite
def columns(draw, num_columns=3):
    """T of 0 to 12 tokens: that many columns of numbers, and a mask."""
    num_tokens = draw(st.integers(0, 12))
    column = st.lists(numbers, min_size=num_tokens, max_size=num_tokens)
    mask = draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    return *(draw(column) for _ in range(num_columns)), mask


def tensors(parts):
    *numbers_of, mask = parts
    return *(torch.tensor(x, dtype=torch.float64) for x in numbers_of), torch.tensor(mask, dtype=torch.bool)


@given(random_cases(), dual_clips)
def test_the_policy_loss_watches_how_many_tokens_are_clipped_and_how_far_they_moved(cases, dual_clip):
    case, tokens = cases["random"], cases["random"].tokens()
    result = policy_loss(
        tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.loss_mask, **BOUNDS, dual_clip=dual_clip
    )
    bounded = formulas.clip(case, case.logprobs, case.logprobs, 0.2, 0.28, dual_clip)
    free = formulas.importance_sampling(case, case.logprobs, case.logprobs, "old")
    moved = [formulas.kl_estimate(case.old[t], case.logprobs[t], "k3") for t in itertools.chain(*case.rows)]
    assert float(result.sum) == pytest.approx(sum(bounded), rel=1e-9, abs=1e-9)
    assert int(result.watched["clip_fraction"]) == sum(x != y for x, y in zip(bounded, free, strict=True))
    assert float(result.kl_sum) == pytest.approx(sum(moved), rel=1e-9, abs=1e-9)
    assert int(result.num_tokens) == sum(case.mask)


@given(random_cases(), clips)
def test_the_value_loss_watches_how_many_tokens_are_clipped(cases, clip):
    case, rewards = cases["random"], cases["random"].earned()
    result = value_loss(rewards.values, rewards.token_rewards, case.tokens().advantages, rewards.loss_mask, clip=clip)
    clipped, free = (formulas.value_loss(case, case.values, bound) for bound in (clip, None))
    assert int(result.num_clipped) == sum(x != y for x, y in zip(clipped, free, strict=True))


LOSSES = [
    lambda x, y, z, mask: policy_loss(x, y, z, mask, **BOUNDS, dual_clip=3.0),
    lambda x, y, z, mask: value_loss(x, y, z, mask, clip=0.5),
    lambda x, y, z, mask: kl_loss(x, y, mask, estimator="k3"),
    lambda x, y, z, mask: entropy_bonus(x, mask),
]


@pytest.mark.parametrize("loss", LOSSES)
@given(parts=columns(), data=st.data())
def test_any_cut_has_the_same_loss_gradient_and_metrics(loss, parts, data):
    *inputs, mask = tensors(parts)
    cut = data.draw(st.integers(0, len(mask)))

    def run(slices):
        x = inputs[0].clone().requires_grad_()
        results = [loss(x[s], inputs[1][s], inputs[2][s], mask[s]) for s in slices]
        total = sum(result.sum for result in results)
        total.backward()
        return float(total.detach()), x.grad, merge(*(result.metrics() for result in results)).scalars()

    whole = run([slice(None)])
    parted = run([slice(0, cut), slice(cut, None)])
    assert parted[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-12)
    assert torch.equal(parted[1], whole[1])
    assert parted[2] == pytest.approx(whole[2], rel=1e-12, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("loss", LOSSES)
@given(parts=columns())
def test_the_whole_stream_and_the_gathered_tokens_agree(loss, parts):
    *inputs, mask = tensors(parts)
    whole = loss(*inputs, mask)
    gathered = loss(*(x[mask] for x in inputs), torch.ones(int(mask.sum()), dtype=torch.bool))
    assert float(gathered.sum) == pytest.approx(float(whole.sum), rel=1e-12, abs=1e-12)
    assert gathered.metrics().scalars() == pytest.approx(whole.metrics().scalars(), rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nothing_outside_the_mask_reaches_loss_gradient_or_metrics(loss, poison):
    x = torch.tensor([-1.0, poison, -2.0], requires_grad=True)
    other = torch.tensor([-1.5, poison, -1.5])
    result = loss(x, other, other, torch.tensor([True, False, True]))
    result.sum.backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad[1] == 0.0
    assert all(value == value and abs(value) < 100 for value in result.metrics().scalars().values())


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_inside_the_mask_stays_visible(loss):
    x = torch.tensor([float("nan"), -1.0])
    assert loss(x, x, x, torch.tensor([True, True])).sum.isnan()


@given(columns(num_columns=2))
def test_at_ratio_one_the_gradient_is_that_of_minus_advantage_times_logprob(parts):
    old, advantages, mask = tensors(parts)
    logprobs = old.clone().requires_grad_()
    result = policy_loss(logprobs, old, advantages, mask, **BOUNDS, dual_clip=3.0)
    result.sum.backward()
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -advantages, 0.0), rtol=0, atol=0)
    assert float(result.kl_sum) == int(result.watched["clip_fraction"]) == 0


def test_clip_higher_leaves_more_room_above_than_below():
    ratio = torch.tensor([1.25, 1.25, 0.75, 0.75])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    logprobs = ratio.log().requires_grad_()
    result = policy_loss(
        logprobs, torch.zeros(4), advantages, torch.ones(4).bool(), clip_low=0.2, clip_high=0.28, dual_clip=None
    )
    result.sum.backward()
    assert float(result.sum.detach()) == pytest.approx(-1.25 + 1.25 - 0.75 + 0.8)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.25, 1.25, -0.75, 0.0]))


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    logprobs = torch.tensor([2.0, 2.0], requires_grad=True)
    result = policy_loss(
        logprobs, torch.zeros(2), torch.tensor([-1.0, 1.0]), torch.ones(2).bool(), **BOUNDS, dual_clip=3.0
    )
    result.sum.backward()
    assert float(result.sum.detach()) == pytest.approx(3.0 - 1.28)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]
    assert int(result.watched["clip_fraction"]) == 2


@pytest.mark.parametrize("distance", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_huge_log_ratio_overflows_neither_loss_nor_gradient(distance, advantage):
    logprobs = torch.tensor([distance], requires_grad=True)
    result = policy_loss(
        logprobs, torch.zeros(1), torch.tensor([advantage]), torch.ones(1).bool(), **BOUNDS, dual_clip=None
    )
    result.sum.backward()
    assert result.sum.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_the_sum_alone_carries_gradient():
    x = torch.tensor([0.5, 0.1], requires_grad=True)
    still = torch.tensor([0.4, 0.2])
    for loss in LOSSES:
        result = loss(x, still, still, torch.ones(2).bool())
        fields = {name: getattr(result, name) for name in result.__dataclass_fields__}
        fields |= fields.pop("watched", {})
        carrying = [name for name, number in fields.items() if number.requires_grad]
        assert carrying == ["sum"]


def test_losses_of_half_precision_inputs_are_summed_in_double():
    x = torch.full((3,), 0.5, dtype=torch.bfloat16)
    for loss in LOSSES:
        assert loss(x, x, x, torch.ones(3).bool()).sum.dtype == torch.float64


@given(columns(num_columns=2), st.integers(0, 12))
def test_explained_variance_of_merged_parts_is_that_of_the_whole(parts, cut):
    values, returns, mask = tensors(parts)
    slices = [slice(0, cut), slice(cut, None)]
    parted = merge(*(value_loss(values[s], values[s], returns[s], mask[s], clip=None).metrics() for s in slices))
    scalars = parted.scalars()
    actual = explained_variance(
        error_mean=scalars["error"],
        error_square_mean=scalars["error_square"],
        return_mean=scalars["return"],
        return_square_mean=scalars["return_square"],
    )
    trained, predicted = returns[mask], values[mask]
    if len(trained) == 0 or float(trained.var(correction=0)) < 1e-6:
        return
    expected = 1 - (trained - predicted).var(correction=0) / trained.var(correction=0)
    assert actual == pytest.approx(float(expected), rel=1e-6, abs=1e-6)


def test_explained_variance_of_equal_returns_is_not_a_number():
    constant = explained_variance(error_mean=0.1, error_square_mean=0.02, return_mean=0.7, return_square_mean=0.7**2)
    assert constant != constant


def test_a_ratio_beyond_the_cut_has_no_gradient_and_counts_as_clipped():
    logprobs = torch.tensor([0.0, -25.0, 25.0, 0.0], requires_grad=True)
    result = policy_loss(
        logprobs,
        torch.tensor([0.0, 0.0, 0.0, -torch.inf]),
        torch.tensor([1.0, 1.0, -1.0, -1.0]),
        torch.tensor([True] * 4),
        **BOUNDS,
        dual_clip=None,
    )
    result.sum.backward()
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert int(result.watched["clip_fraction"]) == 3


def test_a_token_that_both_policies_exclude_has_a_ratio_of_one():
    nothing = torch.tensor([-torch.inf])
    result = policy_loss(nothing, nothing, torch.tensor([2.0]), torch.tensor([True]), **BOUNDS, dual_clip=None)
    assert (float(result.sum), int(result.watched["clip_fraction"]), float(result.kl_sum)) == (-2.0, 0, 0.0)
