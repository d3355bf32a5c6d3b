"""Divergences from a teacher: their gradients in expectation over all that a student may sample; streams of loss."""

import dataclasses
import math

import pytest
import torch

from rallypoint.algorithms import CrossEntropy, DistillationLoss, LossInputs, LossStreams, TokenOutputs
from rallypoint.algorithms.corrections import TIS, IcePop
from rallypoint.algorithms.distillation import top_divergence
from rallypoint.algorithms.policy_losses import Clip
from rallypoint.types import DistilledBatch, merge, offsets_from_lengths

CLIP = Clip(clip_low=0.2, clip_high=0.2, dual_clip=None)
VOCABULARY = 7


def batch_of(teacher, old=None, lengths=None, sampler=None):
    """Return rows of one context token and trained ones, with what a teacher says of these; `old` sampled them, if no
    `sampler` is given."""
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
        rollout_logprobs=spread(next((one for one in (sampler, old) if one is not None), torch.zeros(len(teacher)))),
        old_logprobs=None if old is None else spread(old),
        reference_logprobs=None,
        advantages=spread(torch.ones(len(teacher))),
        teacher_logprobs=spread(teacher),
    )


def run(loss, logprobs, batch, *, is_first_step=True):
    at = batch.loss_mask.nonzero().flatten()
    outputs = TokenOutputs(logprobs, torch.zeros_like(logprobs))
    return loss(outputs, LossInputs(batch, at, lambda tensor: tensor, is_first_step))


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
        total, _ = run(loss, student[token : token + 1], batch, is_first_step=not moved)
        (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
        found += old[token].exp() * gradient
    # The advantage of a policy gradient is that of the policy that sampled: near to it, up to second order.
    torch.testing.assert_close(
        found, wanted, rtol=0.1 if moved and name == "policy_gradient" else 1e-9, atol=1e-2 if moved else 1e-12
    )


@pytest.mark.parametrize("name", ["policy_gradient", "reverse", "forward", "mixed"])
@pytest.mark.parametrize("moved", [False, True])
def test_with_a_correction_the_expected_gradient_is_that_of_the_divergence_though_older_weights_sampled(name, moved):
    generator = torch.Generator().manual_seed(3)
    logits, others, update, older = torch.randn(4, VOCABULARY, dtype=torch.float64, generator=generator)
    begun = logits + 0.05 * update if moved else logits.clone()
    logits.requires_grad_()
    student, teacher = logits.log_softmax(0), others.log_softmax(0)
    old, sampler = begun.log_softmax(0).detach(), (begun + older).log_softmax(0).detach()
    (wanted,) = torch.autograd.grad(divergence(name, student, teacher), logits, retain_graph=True)
    found = {}
    for corrections in ((), (TIS(level="token", cap=100.0),), (IcePop(low=0.0, high=100.0),)):
        loss, found[corrections] = DistillationLoss(name=name, objective=CLIP, corrections=corrections), 0.0
        for token in range(VOCABULARY):
            at = slice(token, token + 1)
            batch = batch_of(teacher[at], old[at], sampler=sampler[at])
            total, _ = run(loss, student[at], batch, is_first_step=not moved)
            (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
            found[corrections] += sampler[token].exp() * gradient
    without, *corrected = found.values()
    for one in corrected:
        torch.testing.assert_close(
            one, wanted, rtol=0.1 if moved and name == "policy_gradient" else 1e-9, atol=1e-2 if moved else 1e-12
        )
    assert (without - wanted).abs().max() > 0.05, "this sampler is far enough to tell"


@pytest.mark.parametrize("name", ["reverse", "forward", "mixed"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_corrected_divergence_is_that_of_loops_over_tokens_with_its_gradient(name, level):
    generator = torch.Generator().manual_seed(7)
    lengths, num = [3, 1, 4], 8
    new, old, sampler, teacher = -torch.rand(4, num, dtype=torch.float64, generator=generator) * 3
    teacher[5] = torch.nan
    batch = batch_of(teacher, old, lengths, sampler)
    loss = DistillationLoss(name=name, objective=CLIP, corrections=(TIS(level=level, cap=1.5),))

    def by_tokens(now):
        """Return the loss, whose ratio stays that of `new`: it has no gradient."""
        found, first = 0.0, 0
        for length in lengths:
            row = [t for t in range(first, first + length) if not math.isnan(teacher[t])]
            of_row = sum(float(old[t] - sampler[t]) for t in row)
            for t in row:
                gap = float(old[t] - sampler[t]) if level == "token" else of_row
                weight = math.exp(float(new[t] - old[t])) * min(math.exp(gap), 1.5)
                d = now[t] - float(teacher[t])
                lost = {"reverse": d * d / 2, "forward": math.exp(-d) - 1 + d}
                lost["mixed"] = (lost["reverse"] + lost["forward"]) / 2
                found += weight * lost[name]
            first += length
        return found

    leaf = new.clone().requires_grad_()
    total, _ = run(loss, leaf, batch, is_first_step=False)
    assert float(total.detach()) == pytest.approx(by_tokens(new.tolist()), rel=1e-12)
    (gradient,) = torch.autograd.grad(total, leaf)
    for t in range(num):
        up, down = (
            [x + (step if place == t else 0.0) for place, x in enumerate(new.tolist())] for step in (1e-6, -1e-6)
        )
        assert float(gradient[t]) == pytest.approx((by_tokens(up) - by_tokens(down)) / 2e-6, abs=1e-8)


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


@pytest.mark.parametrize("name", ["policy_gradient", "reverse", "forward", "mixed"])
def test_the_gap_to_the_teacher_is_that_of_the_student_that_sampled(name):
    """Mini-batches after the first see a student that has learned, but its samples are those of the old one."""
    said = torch.tensor([-1.0, torch.nan, -0.5], dtype=torch.float64)
    old = torch.tensor([-0.25, -0.7, -1.5], dtype=torch.float64)
    for moved in (0.0, 0.3):
        logprobs = (old + moved).requires_grad_()
        _, metrics = run(
            DistillationLoss(name=name, objective=CLIP), logprobs, batch_of(said, old), is_first_step=not moved
        )
        assert metrics.scalars()["teacher_kl"] == pytest.approx((0.75 - 1.0) / 2)


def test_a_part_without_a_teacher_says_nothing_of_the_gap_and_takes_none_away():
    logprobs = torch.tensor([-0.5, -0.7], dtype=torch.float64, requires_grad=True)
    for name in ("policy_gradient", "reverse"):
        loss = DistillationLoss(name=name, objective=CLIP)
        total, alone = run(loss, logprobs, batch_of(torch.full((2,), torch.nan, dtype=torch.float64)))
        assert (float(total.detach()), alone.scalars()) == (0.0, {"teacher_judged": 0.0})
        _, other = run(loss, logprobs, batch_of(torch.tensor([-1.0, torch.nan], dtype=torch.float64)))
        whole = merge(alone, other).scalars()
        assert whole == {**other.scalars(), "teacher_judged": 0.25}
        assert not any(map(math.isnan, whole.values()))


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
        assert found["teacher_kl"] == pytest.approx((0.5 + 1.3 - 1.0) / 3)


def test_a_stream_without_tokens_divides_nothing():
    batch = batch_of(torch.full((2,), torch.nan))
    streams = LossStreams(
        {"": (1.0, CrossEntropy()), "teacher_": (1.0, DistillationLoss(name="forward", objective=CLIP))}
    )
    assert streams.denominator(batch) == (2.0, 1.0)
    sums, _ = run(streams, torch.tensor([-1.0, -2.0]), batch)
    assert sums.tolist() == [3.0, 0.0]


def by_loops(name, student, teacher, tokens):
    """Return the divergence over some tokens, each a class of its own, and one class of all others; of one state."""
    classes = [(math.exp(student[token]), math.exp(teacher[token])) for token in tokens]
    others = [token for token in range(len(student)) if token not in tokens]
    classes.append(tuple(sum(math.exp(one[token]) for token in others) for one in (student, teacher)))
    forward = sum(t * (math.log(t) - math.log(s)) for s, t in classes if t)
    reverse = sum(s * (math.log(s) - math.log(t)) for s, t in classes if s)
    return {"forward": forward, "reverse": reverse, "mixed": (forward + reverse) / 2}[name]


@pytest.mark.parametrize("name", ["reverse", "forward", "mixed"])
@pytest.mark.parametrize("num", [1, 3, VOCABULARY])
def test_the_divergence_over_the_teachers_likeliest_tokens_is_that_of_loops_with_its_gradient(name, num):
    generator = torch.Generator().manual_seed(5)
    logits, others = torch.randn(2, 4, VOCABULARY, dtype=torch.float64, generator=generator)
    teacher = others.log_softmax(1)
    top = teacher.topk(num, dim=1)

    def value_of(logits):
        said = zip(logits.log_softmax(1).tolist(), teacher.tolist(), top.indices.tolist(), strict=True)
        return [by_loops(name, *one) for one in said]

    leaf = logits.clone().requires_grad_()
    student = leaf.log_softmax(1)
    found = top_divergence(name, student.gather(1, top.indices), top.values)
    assert found.tolist() == pytest.approx(value_of(logits), abs=1e-10)
    whole = torch.stack([divergence(name, one, other) for one, other in zip(student, teacher, strict=True)])
    assert (found <= whole + 1e-12).all(), "a lower bound"
    if num == VOCABULARY:
        torch.testing.assert_close(found, whole)
    found.sum().backward()
    for row in range(4):
        for token in range(VOCABULARY):
            step = torch.zeros_like(logits)
            step[row, token] = 1e-6
            slope = (value_of(logits + step)[row] - value_of(logits - step)[row]) / 2e-6
            assert float(leaf.grad[row, token]) == pytest.approx(slope, abs=1e-8)


def test_tokens_that_a_teacher_did_not_name_are_among_the_others():
    student, teacher = torch.randn(2, 1, VOCABULARY, dtype=torch.float64).log_softmax(2)
    at = torch.tensor([[2, 5, 0]])
    said = teacher.gather(1, at)
    said[0, 2] = -torch.inf
    leaf = student.gather(1, at).requires_grad_()
    found = top_divergence("mixed", leaf, said)
    assert float(found.detach()) == pytest.approx(by_loops("mixed", student[0].tolist(), teacher[0].tolist(), [2, 5]))
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert gradient.isfinite().all()
    assert gradient[0, 2] == 0


def test_rows_with_likeliest_tokens_are_a_mean_over_what_was_judged():
    said = torch.tensor([-1.0, torch.nan, -0.5], dtype=torch.float64)
    batch, mask = batch_of(said), torch.tensor([False, True] * 3)
    top = torch.full((6, 2), torch.nan)
    top[mask] = torch.tensor([[0.6, 0.3], [torch.nan, torch.nan], [0.5, 0.5]]).log()
    batch = dataclasses.replace(batch, top_logprobs=top, top_tokens=torch.zeros(6, 2, dtype=torch.int64))
    beside = torch.tensor([[0.2, 0.3], [0.1, 0.2], [0.5, 0.5]], dtype=torch.float64).log().requires_grad_()
    loss, at = DistillationLoss(name="forward", objective=CLIP), mask.nonzero().flatten()
    outputs = TokenOutputs(torch.zeros(3, dtype=torch.float64), torch.zeros(3), beside)
    total, metrics = loss(outputs, LossInputs(batch, at, lambda tensor: tensor, True))
    assert loss.denominator(batch) == 2
    assert float(total.detach()) == pytest.approx(0.6 * math.log(3) + 0.1 * math.log(0.1 / 0.5), abs=1e-6)
    (gradient,) = torch.autograd.grad(total, beside)
    assert gradient[1].tolist() == [0, 0], "no teacher"
    assert metrics.scalars()["teacher_mass"] == pytest.approx(0.95)
