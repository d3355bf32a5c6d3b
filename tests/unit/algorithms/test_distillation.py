"""Divergences from a teacher: their gradients in expectation over all that a student may sample; streams of loss."""

import pytest
import torch

from rallypoint.algorithms import CrossEntropy, DistillationLoss, LossInputs, LossStreams, TokenOutputs
from rallypoint.algorithms.policy_losses import Clip
from rallypoint.types import DistilledBatch, merge, offsets_from_lengths

CLIP = Clip(clip_low=0.2, clip_high=0.2, dual_clip=None)
VOCABULARY = 7


def batch_of(teacher, old=None, lengths=None):
    """Return rows of one context token and trained ones, with what a teacher says of these."""
    lengths = lengths or [1] * len(teacher)
    mask = torch.tensor([place > 0 for length in lengths for place in range(length + 1)])

    def spread(values):
        field = torch.zeros(len(mask), dtype=torch.float64)
        field[mask] = values.double()
        return field

    return DistilledBatch(
        offsets=offsets_from_lengths(torch.tensor(lengths) + 1),
        tokens=torch.zeros(len(mask), dtype=torch.int64),
        loss_mask=mask,
        prompt_index=torch.arange(len(lengths)),
        sample_index=torch.zeros(len(lengths), dtype=torch.int64),
        rollout_logprobs=spread(torch.zeros(len(teacher)) if old is None else old),
        old_logprobs=None if old is None else spread(old),
        reference_logprobs=None,
        advantages=spread(torch.ones(len(teacher))),
        teacher_logprobs=spread(teacher),
    )


def run(loss, logprobs, batch, *, is_on_policy=True):
    at = batch.loss_mask.nonzero().flatten()
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs))
    return loss(outputs, LossInputs(batch, at, lambda tensor: tensor, is_on_policy))


def divergence(name, student, teacher):
    """Return the divergence over the whole vocabulary."""
    reverse = (student.exp() * (student - teacher)).sum()
    forward = (teacher.exp() * (teacher - student)).sum()
    return {"reverse": reverse, "policy_gradient": reverse, "forward": forward, "mixed": (reverse + forward) / 2}[name]


@pytest.mark.parametrize("name", ["policy_gradient", "reverse", "forward", "mixed"])
@pytest.mark.parametrize("moved", [False, True])
def test_the_expected_gradient_is_that_of_the_divergence(name, moved):
    generator = torch.Generator().manual_seed(3)
    logits, others, sampler = torch.randn(3, VOCABULARY, dtype=torch.float64, generator=generator)
    sampler = logits + 0.05 * sampler if moved else logits
    logits.requires_grad_()
    student, teacher, old = logits.log_softmax(0), others.log_softmax(0), sampler.log_softmax(0).detach()
    (wanted,) = torch.autograd.grad(divergence(name, student, teacher), logits, retain_graph=True)
    loss = DistillationLoss(name=name, objective=CLIP)
    found = torch.zeros_like(wanted)
    for token in range(VOCABULARY):  # every token that may be sampled, as often as it is
        batch = batch_of(teacher[token : token + 1].detach(), old[token : token + 1] if moved else None)
        total, _ = run(loss, student[token : token + 1], batch, is_on_policy=not moved)
        (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
        found += old[token].exp() * gradient
    # The advantage of a policy gradient is that of the policy that sampled: near to it, up to second order.
    torch.testing.assert_close(
        found, wanted, rtol=0.1 if moved and name == "policy_gradient" else 1e-9, atol=1e-2 if moved else 1e-12
    )


def test_rows_without_a_teacher_have_no_part_in_sum_denominator_and_gradient():
    said = torch.tensor([-1.0, torch.nan, -0.5, torch.nan], dtype=torch.float64)
    logprobs = torch.tensor([-0.5, -0.7, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    for name in ("policy_gradient", "reverse", "forward", "mixed"):
        loss, batch = DistillationLoss(name=name, objective=CLIP), batch_of(said)
        assert loss.denominator(batch) == 2
        total, metrics = run(loss, logprobs, batch)
        (gradient,) = torch.autograd.grad(total, logprobs)
        assert gradient[[1, 2, 3]].tolist() == [0, 0, 0], "no teacher, or nothing to learn from it"
        assert gradient[0] > 0, "likelier than to the teacher"
        assert metrics.scalars()["teacher_kl"] == pytest.approx(0.25)


def test_every_stream_is_a_mean_of_its_own_however_rows_are_cut():
    said = torch.tensor([-1.0, -2.0, torch.nan, torch.nan, -0.5], dtype=torch.float64)
    batch = batch_of(said, lengths=[2, 2, 1])
    streams = LossStreams(
        {
            "": (0.5, CrossEntropy()),
            "teacher_": (2.0, DistillationLoss(name="reverse", objective=CLIP)),
        }
    )
    logprobs = torch.tensor([-0.5, -0.7, -0.5, -2.0, -1.5], dtype=torch.float64)
    assert streams.denominator(batch) == (5.0, 3.0)
    expected = 0.5 * 5.2 / 5 + 2.0 * (0.25 + 1.69 + 1.0) / 2 / 3
    for cut in ([[0, 1, 2]], [[0], [1], [2]], [[2, 1], [0]]):
        gradient, total, metrics = torch.zeros(5, dtype=torch.float64), 0.0, []
        for rows in cut:
            part = batch.rows(rows)
            at = batch.row_of_token[batch.loss_mask]
            order = torch.cat([(at == row).nonzero().flatten() for row in rows])
            leaf = logprobs[order].clone().requires_grad_()
            sums, watched = run(streams, leaf, part)
            mean = (sums / torch.tensor(streams.denominator(batch))).sum()
            gradient[order] += torch.autograd.grad(mean, leaf)[0]
            total, metrics = total + float(mean.detach()), [*metrics, watched]
        assert total == pytest.approx(expected)
        assert gradient.tolist() == pytest.approx([-0.1 + 1 / 3, -0.1 + 2 * 1.3 / 3, -0.1, -0.1, -0.1 - 2 / 3])
        found = merge(*metrics).scalars()
        assert found["loss"] == pytest.approx(5.2 / 5)
        assert found["teacher_teacher_kl"] == pytest.approx((0.5 + 1.3 - 1.0) / 3)


def test_a_stream_without_tokens_divides_nothing():
    batch = batch_of(torch.full((2,), torch.nan))
    streams = LossStreams(
        {"": (1.0, CrossEntropy()), "teacher_": (1.0, DistillationLoss(name="forward", objective=CLIP))}
    )
    assert streams.denominator(batch) == (2.0, 1.0)
    sums, _ = run(streams, torch.tensor([-1.0, -2.0]), batch)
    assert sums.tolist() == [3.0, 0.0]
