"""Losses of given answers, compared with loops over tokens: numbers, gradients, and every cut of a batch."""

import itertools
import pickle

import pytest
import torch
from formulas import supervised as formulas
from hypothesis import given, settings, strategies as st

from rallypoint.algorithms import BradleyTerry, CrossEntropy, LossInputs, PreferenceLoss, TokenOutputs
from rallypoint.types import PairBatch, merge, offsets_from_lengths

STEP = 1e-6
PREFERENCES = [("sigmoid", 0.1), ("sigmoid", 3.0), ("sigmoid_norm", 2.0), ("ipo", 0.4)]
numbers = st.floats(-4, 2, allow_nan=False, width=32)
shapes_of_rows = st.tuples(st.integers(1, 4), st.integers(1, 5))
"""Tokens of a prompt and of an answer."""


def batch_of(shapes, draw):
    """Return pairs with (prompt tokens, answer tokens) for each row, and random logprobs by policy and reference."""
    generator = torch.Generator().manual_seed(draw)
    lengths = torch.tensor([sum(shape) for shape in shapes])
    mask = torch.tensor([place >= prompt for prompt, answer in shapes for place in range(prompt + answer)])
    said = [-3 * torch.rand(answer, generator=generator, dtype=torch.float64) for _, answer in shapes]
    before = [-3 * torch.rand(answer, generator=generator, dtype=torch.float64) for _, answer in shapes]
    batch = PairBatch(
        offsets=offsets_from_lengths(lengths),
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        loss_mask=mask,
        prompt_index=torch.arange(len(shapes)) // 2,
        sample_index=torch.arange(len(shapes)) % 2,
        reference_logprobs=torch.stack([row.sum() for row in before]),
    )
    return batch, said, before


def run(loss, outputs, batch):
    """Return loss / denominator and metrics."""
    at = batch.loss_mask.nonzero().flatten()
    said = outputs if isinstance(loss, BradleyTerry) else TokenOutputs(outputs, torch.zeros_like(outputs))
    total, metrics = loss(said, LossInputs(batch, at, lambda tensor: tensor, is_first_step=True))
    assert total.dtype == torch.float64
    assert total.shape == ()
    return total / loss.denominator(batch), metrics


def differences(formula, values):
    """Return the gradient of a loop over numbers, by central differences."""
    gradient = []
    for place in range(len(values)):
        up, down = list(values), list(values)
        up[place] += STEP
        down[place] -= STEP
        gradient.append((formula(up) - formula(down)) / (2 * STEP))
    return torch.tensor(gradient, dtype=torch.float64)


def in_rows(values, lengths):
    found = iter(values)
    return [list(itertools.islice(found, length)) for length in lengths]


def check(loss, outputs, batch, formula):
    """Compare the number and the gradient with a loop's."""
    leaf = outputs.clone().requires_grad_()
    mean, metrics = run(loss, leaf, batch)
    (gradient,) = torch.autograd.grad(mean, leaf)
    assert float(mean.detach()) == pytest.approx(formula(outputs.tolist()), rel=1e-9, abs=1e-12)
    assert metrics.scalars()["loss"] == pytest.approx(float(mean.detach()))
    torch.testing.assert_close(gradient, differences(formula, outputs.tolist()), rtol=1e-6, atol=1e-8)
    return gradient


def cuts_agree(loss, outputs_of, batch):
    """Pairs in micro-batches of their own have the loss and the metrics of the whole batch."""
    whole, watched = run(loss, outputs_of(range(len(batch))), batch)
    parts = batch.split(len(batch) // 2)
    assert [len(part) for part in parts] == [2] * len(parts)
    found = [run(loss, outputs_of(range(2 * i, 2 * i + 2)), part) for i, part in enumerate(parts)]
    total = sum(mean * loss.denominator(part) for (mean, _), part in zip(found, parts, strict=True))
    assert float(total / loss.denominator(batch)) == pytest.approx(float(whole))
    assert merge(*(metrics for _, metrics in found)).scalars() == pytest.approx(watched.scalars())


@given(st.lists(shapes_of_rows, min_size=1, max_size=4), st.integers(0, 99))
def test_cross_entropy_is_the_mean_over_all_trained_tokens(shapes, draw):
    batch, said, _ = batch_of(shapes, draw)
    lengths = [answer for _, answer in shapes]
    gradient = check(CrossEntropy(), torch.cat(said), batch, lambda v: formulas.cross_entropy(in_rows(v, lengths)))
    torch.testing.assert_close(gradient, torch.full_like(gradient, -1 / sum(lengths)))


@pytest.mark.parametrize(("name", "beta"), PREFERENCES)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(shapes_of_rows, shapes_of_rows), min_size=1, max_size=3), st.integers(0, 99))
def test_preferences_are_those_of_their_papers(name, beta, pairs, draw):
    shapes = [shape for pair in pairs for shape in pair]
    batch, said, before = batch_of(shapes, draw)
    lengths = [answer for _, answer in shapes]
    reference = [row.tolist() for row in before]
    loss = PreferenceLoss(name=name, beta=beta)
    check(loss, torch.cat(said), batch, lambda v: formulas.preference(name, beta, in_rows(v, lengths), reference))
    cuts_agree(loss, lambda rows: torch.cat([said[row] for row in rows]), batch)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5))
def test_a_reward_model_learns_the_order_of_scores(scores):
    batch, _, _ = batch_of([(2, 3)] * (2 * len(scores)), 0)
    outputs = torch.tensor(scores, dtype=torch.float64).flatten()
    check(BradleyTerry(), outputs, batch, formulas.bradley_terry)
    cuts_agree(BradleyTerry(), lambda rows: outputs[list(rows)], batch)


def test_numbers_by_hand():
    batch, _, _ = batch_of([(1, 1)] * 4, 0)
    mean, metrics = run(BradleyTerry(), torch.tensor([2.0, 0.0, 0.0, 1.0]), batch)
    assert float(mean) == pytest.approx((0.126928 + 1.313262) / 2, abs=1e-6)
    assert metrics.scalars() == pytest.approx(
        {"loss": float(mean), "accuracy": 0.5, "margin": 0.5, "chosen": 1.0, "rejected": 0.5}
    )
    unmoved = PreferenceLoss(name="sigmoid", beta=0.1)
    mean, metrics = run(unmoved, batch.reference_logprobs, batch)
    assert float(mean) == pytest.approx(0.693147, abs=1e-6), "log 2, before anything is learned"
    assert metrics.scalars()["accuracy"] == 0, "a tie is no win"
    assert pickle.loads(pickle.dumps(unmoved)) == unmoved


@pytest.mark.parametrize("gap", [-800.0, 800.0])
def test_far_apart_answers_have_a_finite_loss_and_gradient(gap):
    batch, _, _ = batch_of([(1, 1)] * 2, 0)
    scores = torch.tensor([gap, 0.0], dtype=torch.float32, requires_grad=True)
    mean, _ = run(BradleyTerry(), scores, batch)
    (gradient,) = torch.autograd.grad(mean, scores)
    assert float(mean.detach()) == pytest.approx(max(0.0, -gap))
    assert gradient.tolist() == pytest.approx([-1.0, 1.0] if gap < 0 else [0.0, 0.0])
