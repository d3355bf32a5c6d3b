import pytest
import torch

from rallypoint.algorithms import ADVANTAGES, KL, weigh, weigh_valued
from rallypoint.algorithms.advantages import gae_advantages, group_relative_token_advantages, whiten
from rallypoint.types import JudgedBatch, ValuedBatch

MASK = torch.tensor([False, True, True, False, True, False, True])
OLD = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, 0.0, -1.5])
REFERENCE = torch.tensor([0.0, -1.5, -1.0, 0.0, -0.5, 0.0, -2.0])
REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 3.0])
IN_REWARD = KL(coef=0.5, estimator="k1", placement="reward")
IN_LOSS = KL(coef=0.5, estimator="k3", placement="loss")
SETTINGS = {"discount": 0.9, "gae_lambda": 0.8}


def gae(batch, *, discount, gae_lambda, whiten_advantages, kl):
    settings = {"discount": discount, "gae_lambda": gae_lambda, "value_lambda": None, "length_alpha": None}
    return weigh_valued(batch, ADVANTAGES["gae"](**settings, unit="token", whiten=whiten_advantages), kl=kl)


def group_relative(batch, *, normalize_std, token_discount, kl):
    estimator = ADVANTAGES["grpo" if normalize_std else "dr_grpo"](token_discount=token_discount, whiten=False)
    return weigh(batch, estimator, kl=kl)


def judged(*, reference_logprobs=REFERENCE, token_rewards=REWARDS):
    """Three rows of 3, 2 and 2 tokens; rows 0 and 2 are a group, row 1 lost its companions."""
    return JudgedBatch(
        offsets=torch.tensor([0, 3, 5, 7]),
        tokens=torch.arange(7),
        loss_mask=MASK,
        rollout_logprobs=OLD,
        prompt_index=torch.tensor([8, 3, 8]),
        sample_index=torch.tensor([0, 0, 1]),
        versions=torch.zeros(3, dtype=torch.int64),
        truncated=torch.zeros(3, dtype=torch.bool),
        token_rewards=token_rewards,
        old_logprobs=OLD,
        reference_logprobs=reference_logprobs,
    )


def valued(**kwargs) -> ValuedBatch:
    return judged(**kwargs).valued(torch.tensor([0.0, 0.5, 0.6, 0.0, 0.2, 0.0, 1.0]))


def test_gae_returns_what_actor_and_critic_learn_from():
    batch = valued()
    actor, critic = gae(batch, **SETTINGS, whiten_advantages=False, kl=None)
    advantages, returns = gae_advantages(REWARDS, batch.values, MASK, batch.offsets, **SETTINGS)
    assert torch.equal(actor.advantages, advantages)
    assert torch.equal(critic.returns, returns)
    assert torch.equal(critic.values, batch.values)
    assert torch.equal(actor.old_logprobs, OLD)
    assert actor.reference_logprobs is None


def test_whitening_changes_advantages_and_leaves_returns_alone():
    plain, plain_critic = gae(valued(), **SETTINGS, whiten_advantages=False, kl=None)
    actor, critic = gae(valued(), **SETTINGS, whiten_advantages=True, kl=None)
    assert torch.equal(actor.advantages, whiten(plain.advantages, MASK))
    assert torch.equal(critic.returns, plain_critic.returns)


def test_kl_in_the_reward_is_subtracted_at_every_trained_token():
    batch = valued()
    by_hand = torch.tensor([0.0, -0.25, 1.5, 0.0, 0.0, 0.0, 2.75])  # rewards - 0.5 * (old - reference)
    actor, critic = gae(batch, **SETTINGS, whiten_advantages=False, kl=IN_REWARD)
    advantages, returns = gae_advantages(by_hand, batch.values, MASK, batch.offsets, **SETTINGS)
    assert torch.equal(actor.advantages, advantages)
    assert torch.equal(critic.returns, returns)
    assert actor.reference_logprobs is None


def test_kl_in_the_loss_passes_the_reference_on_and_leaves_rewards_alone():
    plain, _ = gae(valued(), **SETTINGS, whiten_advantages=False, kl=None)
    actor, _ = gae(valued(), **SETTINGS, whiten_advantages=False, kl=IN_LOSS)
    assert torch.equal(actor.advantages, plain.advantages)
    assert actor.reference_logprobs is not None
    assert torch.equal(actor.reference_logprobs, REFERENCE)
    relative = group_relative(judged(), normalize_std=True, token_discount=None, kl=IN_LOSS)
    assert relative.reference_logprobs is not None


def test_group_relative_gives_every_trained_token_the_advantage_of_its_row():
    actor = group_relative(judged(), normalize_std=False, token_discount=None, kl=None)
    assert actor.advantages.tolist() == [0.0, -1.0, -1.0, 0.0, 0.0, 0.0, 1.0]
    assert actor.advantages.dtype == torch.float32


def test_group_relative_with_kl_in_the_reward_compares_penalised_scores():
    actor = group_relative(judged(), normalize_std=False, token_discount=None, kl=IN_REWARD)
    assert actor.advantages.tolist() == [0.0, -0.75, -0.75, 0.0, 0.0, 0.0, 0.75]  # scores 1.25 and 2.75


@pytest.mark.parametrize("token_discount", [None, 1.0])
def test_groups_that_differ_only_by_kl_are_centred_and_not_divided(token_discount):
    """The deviation of the penalties alone would blow them up to the size of rewards."""
    small = KL(coef=1e-3, estimator="k1", placement="reward")
    equal = judged(token_rewards=torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]))
    if token_discount is None:
        equal = judged(token_rewards=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]))
    divided = group_relative(judged(), normalize_std=True, token_discount=token_discount, kl=small)
    actor = group_relative(equal, normalize_std=True, token_discount=token_discount, kl=small)
    centred = group_relative(equal, normalize_std=False, token_discount=token_discount, kl=small)
    assert torch.equal(actor.advantages, centred.advantages)
    assert 0.0 < float(actor.advantages.abs().max()) < 1e-2 < 0.5 < float(divided.advantages.abs().max())


def test_a_reference_that_excludes_a_token_does_not_poison_the_group():
    excluding = torch.where(torch.arange(7) == 2, -torch.inf, REFERENCE)
    kl = KL(coef=1e-3, estimator="k1", placement="reward")
    actor = group_relative(judged(reference_logprobs=excluding), normalize_std=True, token_discount=None, kl=kl)
    assert actor.advantages.isfinite().all()


def test_group_relative_per_token_normalises_token_rewards():
    batch = judged()
    actor = group_relative(batch, normalize_std=True, token_discount=1.0, kl=None)
    expected = group_relative_token_advantages(
        REWARDS, MASK, batch.offsets, batch.prompt_index, normalize_std=True, discount=1.0
    )
    assert torch.equal(actor.advantages, expected)


@pytest.mark.parametrize("kl", [IN_REWARD, IN_LOSS])
def test_kl_without_a_reference_is_an_error_that_names_the_remedy(kl):
    with pytest.raises(ValueError, match="give the run a reference role"):
        gae(valued(reference_logprobs=None), **SETTINGS, whiten_advantages=True, kl=kl)
    with pytest.raises(ValueError, match="give the run a reference role"):
        group_relative(judged(reference_logprobs=None), normalize_std=True, token_discount=None, kl=kl)


def test_a_reward_that_would_be_lost_is_an_error_that_names_its_row():
    stray = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0])
    with pytest.raises(ValueError, match="row 1 has a reward of 2"):
        gae(valued(token_rewards=stray), **SETTINGS, whiten_advantages=False, kl=None)


def test_the_batch_is_not_modified():
    batch = valued()
    before = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    gae(batch, **SETTINGS, whiten_advantages=True, kl=IN_REWARD)
    group_relative(batch, normalize_std=True, token_discount=1.0, kl=IN_REWARD)
    assert all(torch.equal(getattr(batch, name), value) for name, value in before.items())


def test_reference_logprobs_of_untrained_tokens_enter_no_score():
    poisoned = torch.where(MASK, REFERENCE, float("nan"))
    clean = group_relative(judged(), normalize_std=False, token_discount=None, kl=IN_REWARD)
    actor = group_relative(judged(reference_logprobs=poisoned), normalize_std=False, token_discount=None, kl=IN_REWARD)
    assert torch.equal(actor.advantages, clean.advantages)


@pytest.mark.parametrize(("kl", "coef"), [(None, None), (IN_REWARD, None), (IN_LOSS, 0.5)])
def test_the_loss_is_told_the_coefficient_of_the_step(kl, coef):
    actor = group_relative(judged(), normalize_std=False, token_discount=None, kl=kl)
    assert actor.kl_coef == coef
    assert actor.rows([0]).kl_coef == coef, "every part of the batch has it"
