import pytest
import torch
from formulas import losses as formulas
from hypothesis import given, strategies as st

from rallypoint.algorithms import KL, kl_penalty

POLICY = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.3, 0.3, 0.2, 0.2], dtype=torch.float64)
TRUE_KL = float((POLICY * (POLICY.log() - REFERENCE.log())).sum())
logprobs = st.lists(st.tuples(st.floats(-15, 0), st.floats(-15, 0)), max_size=8)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@given(pairs=logprobs)
def test_every_estimator_equals_its_formula(estimator, pairs):
    new, ref = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2).unbind(1)
    expected = torch.tensor([formulas.kl_estimate(*pair, estimator) for pair in pairs], dtype=torch.float64)
    torch.testing.assert_close(kl_penalty(new, ref, estimator), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_true_divergence_as_expectation(estimator):
    expectation = (POLICY * kl_penalty(POLICY.log(), REFERENCE.log(), estimator)).sum()
    assert float(expectation) == pytest.approx(TRUE_KL, abs=1e-12)


def test_k2_is_biased_but_close_when_the_policies_are_close():
    near = POLICY + 0.001 * (REFERENCE - POLICY)
    true = (POLICY * (POLICY.log() - near.log())).sum()
    k2 = (POLICY * kl_penalty(POLICY.log(), near.log(), "k2")).sum()
    assert float(k2) == pytest.approx(float(true), rel=0.01)
    assert float((POLICY * kl_penalty(POLICY.log(), REFERENCE.log(), "k2")).sum()) != pytest.approx(TRUE_KL, rel=0.001)


@pytest.mark.parametrize(("estimator", "pulls"), [("k1", 0.0), ("k2", 1.0)])
def test_in_the_loss_k1_has_no_gradient_in_expectation_and_k2_that_of_the_divergence(estimator, pulls):
    logits = POLICY.log().requires_grad_()
    (of_divergence,) = torch.autograd.grad(
        (logits.softmax(0) * (logits.log_softmax(0) - REFERENCE.log())).sum(), logits
    )
    penalty = kl_penalty(logits.log_softmax(0), REFERENCE.log(), estimator)
    (expected_gradient,) = torch.autograd.grad((POLICY * penalty).sum(), logits)
    torch.testing.assert_close(expected_gradient, pulls * of_divergence)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_tokens_that_a_model_excludes_have_finite_penalties_and_gradients(estimator):
    nothing = -torch.inf
    new = torch.tensor([-1.0, nothing, nothing], requires_grad=True)
    penalty = kl_penalty(new, torch.tensor([nothing, -1.0, nothing]), estimator)
    penalty.sum().backward()
    assert penalty.isfinite().all()
    assert float(penalty[2].detach()) == 0.0
    assert new.grad.isfinite().all()
    assert estimator == "k1" or float(new.grad[0]) > 0.0, "a token that the reference excludes is made less likely"


def test_an_estimator_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="expected 'k1', 'k2', 'k3' or 'abs', found 'k4'"):
        kl_penalty.__wrapped__(torch.zeros(1), torch.zeros(1), "k4")


def test_k1_in_the_loss_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="k2 or k3"):
        KL(coef=0.1, estimator="k1", placement="loss")


@given(st.floats(-1e4, 1e4, width=32))
def test_k3_is_finite_and_not_negative_for_any_distance(distance):
    k3 = kl_penalty(torch.zeros(1), torch.tensor([distance]), "k3")
    assert k3.isfinite().all()
    assert float(k3) >= 0.0


def test_k3_keeps_its_digits_for_tiny_distances():
    k3 = kl_penalty(torch.zeros(1), torch.tensor([1e-3]), "k3")
    assert float(k3) == pytest.approx(0.5e-6, rel=1e-3)


def test_the_gradient_of_k3_points_to_the_reference():
    new = torch.tensor([0.0, 0.0], requires_grad=True)
    kl_penalty(new, torch.tensor([1.0, -1.0]), "k3").sum().backward()
    assert new.grad is not None
    assert new.grad.sign().tolist() == [-1.0, 1.0]
