"""What advantages, policy losses and a KL give in expectation, on the policy of `enumerable_policy`.

It is compared with the gradient of what each is said to pursue. A KL by itself is checked in tests/unit/testing.
"""

import dataclasses
import functools
import itertools

import pytest
import torch
from enumerable_policy import POLICY

from rallypoint.algorithms import ADVANTAGES, KL, OBJECTIVES, PolicyTokens, correct, kl_penalty, weigh, weigh_valued
from rallypoint.algorithms.corrections import TIS
from rallypoint.algorithms.critic_losses import value_loss
from rallypoint.algorithms.losses import kl_loss, policy_loss

NUM_TOKENS = 3
COEF = 0.7
BOUNDS = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
LOGITS, REFERENCE, REWARDS = POLICY.logits, POLICY.reference, POLICY.rewards


def random(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def right_or_wrong():
    """The same policy, with a reward of 1 for the responses that had one above 0, and 0 for the others."""
    return dataclasses.replace(POLICY, rewards=(REWARDS > 0).double())


def by_gae(batch, kl):
    responses = [tuple(row) for row in batch.tokens.reshape(-1, 3)[:, 1:].tolist()]
    estimator = ADVANTAGES["gae"](
        discount=1.0, gae_lambda=1.0, value_lambda=None, length_alpha=None, unit="token", whiten=False
    )
    return weigh_valued(batch.valued(POLICY.state_values(responses)), estimator, kl=kl)[0]


def by_estimator(estimator):
    return lambda batch, kl: weigh(batch, estimator, kl=kl)


def by_group(*, normalize_std=False, token_discount=None):
    return by_estimator(ADVANTAGES["grpo" if normalize_std else "dr_grpo"](token_discount=token_discount, whiten=False))


def expected_gradient(weigh, group_size, *, kl=None, policy=POLICY):
    """Gradient of minus the loss, a rollout, over all groups of responses weighed by their probability."""

    def loss(logprobs, group):
        batch = weigh(group, kl)
        policy_part = policy_loss(logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, **BOUNDS).sum
        if batch.reference_logprobs is None:
            return policy_part
        pull = kl_loss(
            logprobs,
            batch.reference_logprobs,
            batch.loss_mask,
            estimator=kl.estimator,
            corrected_from=batch.old_logprobs if kl.importance_corrected else None,
        )
        return policy_part + kl.coef * pull.sum

    return -policy.expected_gradient(loss, group_size=group_size)


IN_REWARD = KL(coef=COEF, estimator="k1", placement="reward")
ESTIMATORS = {"gae": (by_gae, 1, 1.0), "group of two": (by_group(), 2, 1 / 2), "group of three": (by_group(), 3, 2 / 3)}
"""Weigh, group size, and by how much a baseline that contains the rollout itself shrinks the gradient."""
CLIMBED = POLICY.gradient_of(POLICY.mean_reward)


@pytest.mark.parametrize(("weigh", "size", "shrunk"), ESTIMATORS.values(), ids=ESTIMATORS)
def test_every_estimator_climbs_the_mean_reward(weigh, size, shrunk):
    torch.testing.assert_close(expected_gradient(weigh, size), shrunk * CLIMBED)


@pytest.mark.parametrize(("weigh", "size", "shrunk"), ESTIMATORS.values(), ids=ESTIMATORS)
def test_k1_in_the_reward_has_the_gradient_of_the_divergence_of_whole_responses(weigh, size, shrunk):
    wanted = CLIMBED - COEF * POLICY.gradient_of(POLICY.response_divergence)
    torch.testing.assert_close(expected_gradient(weigh, size, kl=IN_REWARD), shrunk * wanted)


IN_LOSS = {"k2": "reverse", "k3": "forward", "abs": "variation", "k1, corrected": "reverse", "k3, corrected": "reverse"}


@pytest.mark.parametrize("name", IN_LOSS)
@pytest.mark.parametrize(("weigh", "size", "shrunk"), list(ESTIMATORS.values())[:2], ids=list(ESTIMATORS)[:2])
def test_in_the_loss_a_kl_has_the_gradient_of_its_divergence_beside_that_of_the_reward(weigh, size, shrunk, name):
    estimator, *corrected = name.split(", ")
    kl = KL(coef=COEF, estimator=estimator, placement="loss", importance_corrected=bool(corrected))
    pull = POLICY.gradient_of(functools.partial(POLICY.token_divergence, kind=IN_LOSS[name]))
    torch.testing.assert_close(expected_gradient(weigh, size, kl=kl), shrunk * CLIMBED - COEF * pull)


@pytest.mark.parametrize(
    ("placement", "estimator"), [("reward", "k1"), ("reward", "k3"), ("loss", "k2"), ("loss", "abs")]
)
def test_what_importance_weights_do_not_make_right_is_refused(placement, estimator):
    with pytest.raises(ValueError, match="cannot be corrected by importance weights"):
        KL(coef=COEF, estimator=estimator, placement=placement, importance_corrected=True)


GROUPED = {
    "dr_grpo": ({"token_discount": None}, 1 - 1 / 3),
    "rloo": ({}, 1.0),
    "reinforce_plus_plus_baseline": ({}, 1 - 1 / 3),
}
"""Estimators by their parameters, and by how much a baseline of three with the rollout itself shrinks the gradient."""


@pytest.mark.parametrize("name", GROUPED)
def test_estimators_that_only_subtract_a_baseline_climb_the_mean_reward(name):
    parameters, shrunk = GROUPED[name]
    estimator = ADVANTAGES[name](**parameters, whiten=False)
    torch.testing.assert_close(expected_gradient(by_estimator(estimator), 3), shrunk * CLIMBED)


def test_reinforce_plus_plus_before_whitening_climbs_the_mean_reward():
    estimator = ADVANTAGES["reinforce_plus_plus"](discount=1.0, whiten=False)
    torch.testing.assert_close(expected_gradient(by_estimator(estimator), 1), CLIMBED)


def test_with_responses_of_one_length_opo_climbs_the_mean_reward():
    estimator = ADVANTAGES["opo"](whiten=False)
    torch.testing.assert_close(expected_gradient(by_estimator(estimator), 3), (1 - 1 / 3) * CLIMBED)


@pytest.mark.parametrize(("name", "parameters"), [("max_rl", {}), ("pass_at_k", {"k": 2}), ("lite_ppo", {})])
def test_estimators_that_rescale_prompts_climb_the_share_of_right_answers(name, parameters):
    right = right_or_wrong()
    estimator = ADVANTAGES[name](**parameters, whiten=False)
    found = expected_gradient(by_estimator(estimator), 3, policy=right).flatten()
    wanted = right.gradient_of(right.mean_reward).flatten()
    assert torch.cosine_similarity(found, wanted, dim=0) == pytest.approx(1.0, abs=1e-12)


def test_max_rl_has_the_gradient_of_the_first_terms_of_the_logarithm_of_the_pass_rate():
    """With a group of N, log p = -sum over k of (1 - p)**k / k is followed up to its term N - 1 (2602.02710)."""
    right = right_or_wrong()
    estimator = ADVANTAGES["max_rl"](whiten=False)

    def objective(table):
        wrong = 1 - right.mean_reward(table)
        return -(wrong + wrong**2 / 2)

    torch.testing.assert_close(
        expected_gradient(by_estimator(estimator), 3, policy=right), POLICY.gradient_of(objective)
    )


OLD = random(4, NUM_TOKENS, seed=21).log_softmax(-1)
"""The sampler's, of rollouts that are of another policy."""
OFF_POLICY = {
    "importance_sampling": ({"anchor": "old"}, []),
    "cispo": ({"clip_low": 1.0, "clip_high": 1e6, "anchor": "old"}, []),
    "dppo": ({"divergence": "tv", "clip_low": 1.0, "clip_high": 1.0, "max_ratio": 1e6, "anchor": "old"}, []),
    "decoupled": ({"clip_low": 1.0, "clip_high": 1e6, "dual_clip": None, "max_weight": None}, []),
    "policy_gradient": ({}, [TIS(level="token", cap=1e6)]),
}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_without_their_bounds_off_policy_losses_climb_the_mean_advantage_of_the_policy(name):
    """One token, sampled by another policy; `decoupled` and the correction have the policy itself for the old one."""
    parameters, corrections = OFF_POLICY[name]
    objective, advantages = OBJECTIVES[name](**parameters), REWARDS[0]
    logits = LOGITS[0].clone().requires_grad_()
    total = 0.0
    for token in range(NUM_TOKENS):
        one, sampled = logits.log_softmax(-1)[token : token + 1], OLD[0][token : token + 1]
        own_old = name in {"decoupled", "policy_gradient"}
        tokens = PolicyTokens(
            logprobs=one,
            old_logprobs=one.detach() if own_old else sampled,
            rollout_logprobs=sampled,
            advantages=advantages[token : token + 1],
            loss_mask=torch.tensor([True]),
            rows=torch.zeros(1, dtype=torch.int64),
            num_rows=1,
        )
        total = total - OLD[0][token].exp() * objective(tokens, correction=correct(corrections, tokens)[0]).sum
    wanted = POLICY.gradient_of(lambda table: (table[0].exp() * advantages).sum())[0]
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], wanted)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_loss_has_the_gradient_of_minus_advantage_times_logprob(name):
    parameters = {
        "clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
        "decoupled": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "max_weight": None},
        "importance_sampling": {"anchor": "old"},
        "gspo": {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": None},
        "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
        "cispo": {"clip_low": 1.0, "clip_high": 0.2, "anchor": "old"},
        "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
        "dppo": {"divergence": "kl", "clip_low": 0.1, "clip_high": 0.1, "max_ratio": 20.0, "anchor": "rollout"},
        "clip_cov": {**BOUNDS, "fraction": 1e-3, "covariance_low": 1.0, "covariance_high": 5.0},
        "kl_cov": {"fraction": 1e-3, "coef": 1.0},
    }
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    tokens = PolicyTokens(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        rollout_logprobs=logprobs.detach(),
        advantages=advantages,
        loss_mask=torch.ones(4, dtype=torch.bool),
        rows=torch.tensor([0, 0, 1, 1]),
        num_rows=2,
        selected=torch.tensor([name == "kl_cov", False, False, False]),
    )
    loss = OBJECTIVES[name](**parameters.get(name, {}))(tokens)
    loss.sum.backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize("kl", [None, IN_REWARD], ids=["rewards", "rewards and k1"])
def test_rewards_by_token_in_a_group_climb_what_comes_after_each_token(kl):
    """The mean over all tokens of the group is subtracted: a token's own share of it shrinks its rewards to go."""
    size = 2

    def objective(table):
        total = 0.0
        for response in POLICY.responses:
            now, fixed = POLICY.token_logprobs(table, response), POLICY.token_logprobs(POLICY.logprobs, response)
            rewards = torch.stack([REWARDS[response] * 0, REWARDS[response]])
            if kl is not None:
                rewards = rewards - COEF * (fixed - POLICY.token_logprobs(REFERENCE, response))
            to_go = rewards.flip(0).cumsum(0).flip(0)
            shrunk = 1 - torch.tensor([2.0, 1.0]) / (2 * size)
            total = total + fixed.sum().exp() * (now * shrunk * to_go).sum()
        return total

    torch.testing.assert_close(
        expected_gradient(by_group(token_discount=1.0), size, kl=kl), POLICY.gradient_of(objective)
    )


def test_standardised_groups_climb_the_share_of_right_answers():
    right = right_or_wrong()
    found = expected_gradient(by_group(normalize_std=True), 3, policy=right).flatten()
    wanted = right.gradient_of(right.mean_reward).flatten()
    assert torch.cosine_similarity(found, wanted, dim=0) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_are_refused_in_the_reward_where_their_gradient_is_no_divergences(estimator):
    with pytest.raises(ValueError, match="only k1 has the gradient of the divergence there: use the estimator k1"):
        KL(coef=COEF, estimator=estimator, placement="reward")
    fixed = LOGITS[0].log_softmax(-1)
    penalty = kl_penalty(fixed, REFERENCE[0], estimator)
    score_function = POLICY.gradient_of(lambda table: (fixed.exp() * penalty * table[0]).sum())
    reverse = POLICY.gradient_of(lambda table: (table[0].exp() * (table[0] - REFERENCE[0])).sum())
    forward = POLICY.gradient_of(lambda table: (REFERENCE[0].exp() * (REFERENCE[0] - table[0])).sum())
    assert not any(torch.cosine_similarity(score_function[0], g[0], dim=0) > 0.99 for g in (reverse, forward))
    if estimator == "k3":
        torch.testing.assert_close(score_function, reverse - forward)


@pytest.mark.parametrize("signs", [*itertools.product([-1.0, 1.0], repeat=NUM_TOKENS)])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_the_policy_loss_has_the_gradient_of_the_bounded_surrogate_off_policy(dual_clip, signs):
    """One token, sampled by another policy: what is not clipped climbs the mean advantage of the current policy."""
    old, advantages = random(NUM_TOKENS, seed=12).log_softmax(-1), REWARDS[0].abs() * torch.tensor(signs)
    logits = LOGITS[0].clone().requires_grad_()
    total = 0.0
    for token in range(NUM_TOKENS):
        one = logits.log_softmax(-1)[token : token + 1]
        loss = policy_loss(
            one,
            old[token : token + 1],
            advantages[token : token + 1],
            torch.tensor([True]),
            clip_low=0.2,
            clip_high=0.3,
            dual_clip=dual_clip,
        )
        total = total - old[token].exp() * loss.sum
    ratio = (LOGITS[0].log_softmax(-1) - old).exp()
    free = torch.where(advantages > 0, ratio <= 1.3, ratio >= 0.8)
    if dual_clip is not None:
        free &= (advantages > 0) | (ratio <= dual_clip)
    wanted = POLICY.gradient_of(lambda table: (table[0].exp() * advantages * free).sum())[0]
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], wanted)
    assert ratio.min() < 0.8
    assert ratio.max() > 1.5


def test_the_value_loss_ends_at_the_mean_return():
    returns = torch.tensor([1.0, 4.0, 7.0], dtype=torch.float64)
    probabilities = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    value = (probabilities * returns).sum().requires_grad_()
    losses = [
        value_loss(value.reshape(1), value.detach().reshape(1), r.reshape(1), torch.tensor([True]), clip=None).sum
        for r in returns
    ]
    (gradient,) = torch.autograd.grad((probabilities * torch.stack(losses)).sum(), value)
    assert float(gradient) == pytest.approx(0.0, abs=1e-12)
