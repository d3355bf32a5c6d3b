"""A rollout of several sequences counts as one of a single sequence: in baselines, in advantages and in the loss."""

import dataclasses
import itertools

import pytest
import torch

from rallypoint.algorithms import (
    ADVANTAGES,
    OBJECTIVES,
    ActorLoss,
    ClippedValueLoss,
    LossInputs,
    OverlongPenalty,
    RowMask,
    TokenOutputs,
    weigh,
    weigh_valued,
)
from rallypoint.roles.learner import MiniBatches
from rallypoint.types import ValuedBatch

ESTIMATORS = {
    "grpo": {"token_discount": None},
    "grpo by token": {"token_discount": 0.9},
    "dr_grpo": {"token_discount": None},
    "turn_grpo": {"discount": 0.9, "normalize_std": True},
    "gigpo": {"discount": 0.9, "step_weight": 0.5, "normalize_std": True},
    "reinforce_plus_plus by turn": {"discount": 0.9, "unit": "turn"},
    "lite_ppo": {},
    "rloo": {},
    "reinforce_plus_plus": {"discount": 0.9},
    "reinforce_plus_plus_baseline": {},
    "gdpo": {"weights": {"right": 1.0, "short": 0.5}},
    "max_rl": {},
    "opo": {},
    "pass_at_k": {"k": 2},
    "gae": {"discount": 0.95, "gae_lambda": 0.9, "value_lambda": None, "length_alpha": None, "unit": "token"},
    "gae by turn": {"discount": 0.95, "gae_lambda": 0.9, "value_lambda": 1.0, "length_alpha": 0.5, "unit": "turn"},
}
AGGREGATIONS = ("token", "sequence", "fixed_length", "prompt")
MASKS = {"all": RowMask(), "some": RowMask(truncated=True, zero_variance=True)}
"""By which rows are trained."""


def estimator(name):
    return ADVANTAGES[name.partition(" ")[0]](whiten="baseline" in name, **ESTIMATORS[name])


def rollouts(seed):
    """Three prompts of three rollouts each, of turns with context between; and borders before the context of turns."""
    draw = torch.Generator().manual_seed(seed)

    def whole(low, high):
        return int(torch.randint(low, high, (), generator=draw))

    mask, starts, offsets = [], [], [0]
    for _ in range(9):
        for turn in range(whole(1, 5)):
            context, said = whole(1, 4), whole(1, 6)
            mask += [False] * context + [True] * said
            starts += [turn > 0 and whole(0, 3) > 0] + [False] * (context + said - 1)
        offsets.append(len(mask))
    loss_mask = torch.tensor(mask)
    last = torch.tensor(offsets[1:]) - 1
    old, values, rewards = torch.rand(3, len(mask), generator=draw).double() * loss_mask
    rewards = (rewards > 0.99).double()  # on other tokens than the last, too
    rewards[last] += torch.randint(0, 3, (9,), generator=draw) // 2
    batch = ValuedBatch(
        offsets=torch.tensor(offsets),
        tokens=torch.arange(len(mask)),
        loss_mask=loss_mask,
        sequence_starts=torch.tensor(starts),
        rollout_logprobs=-old,
        prompt_index=torch.arange(9) // 3,
        sample_index=torch.arange(9) % 3,
        versions=torch.zeros(9, dtype=torch.int64),
        truncated=torch.arange(9) % 4 == 1,
        turn_states=(1 + torch.arange(len(mask)) % 3) * loss_mask,
        token_rewards=rewards,
        reward_parts=torch.randint(0, 3, (9, 2), generator=draw).double(),
        part_names=("right", "short"),
        old_logprobs=-old,
        reference_logprobs=None,
        values=values,
    )
    assert int(batch.num_sequences.max()) > 1
    return batch


def weighed(batch, name, aggregation, mask):
    if name.startswith("gae"):
        return weigh_valued(batch, estimator(name), kl=None, aggregation=aggregation, mask=mask)
    return weigh(batch, estimator(name), kl=None, aggregation=aggregation, mask=mask), None


@dataclasses.dataclass
class Learner:
    """What a config says of one."""

    num_mini_batches: int
    num_epochs: int = 1


def gradient(loss, batch, num_tokens, num_mini_batches):
    """The loss and its gradient by each token's output, over passes of one sequence each, as two ranks have them."""
    outputs = torch.linspace(-0.8, -0.1, num_tokens, dtype=torch.float64, requires_grad=True)
    cut = MiniBatches.cut(batch, Learner(num_mini_batches), loss.denominator, seed=1, step=2, attention_cost=0.0)
    total = torch.zeros((), dtype=torch.float64)
    for rank in cut.split(2):
        for part, denominator in zip(rank.parts, rank.denominators, strict=True):
            for row in range(len(part)):
                rows = part.rows([row])
                at = rows.loss_mask.nonzero().flatten()
                own = outputs[rows.tokens[at]]
                given = TokenOutputs(own, -own) if isinstance(loss, ActorLoss) else own
                inputs = LossInputs(rows, at, lambda tensor: tensor, is_first_step=False)
                total = total + loss(given, inputs)[0] / denominator
    total.backward()
    return total.detach(), outputs.grad


def combinations():
    """Every two of estimator, aggregation, number of mini-batches and rows left out; all four are slow."""
    for place, (name, aggregation) in enumerate(itertools.product(ESTIMATORS, AGGREGATIONS)):
        row = place // len(AGGREGATIONS)
        for num, (seed, masked) in itertools.product((1, 2), enumerate(MASKS)):
            is_kept = (row + place + num) % 2 and (row + place // 2 + seed) % 2
            marks = () if is_kept else pytest.mark.slow
            yield pytest.param(name, aggregation, num, masked, marks=marks, id=f"{name}-{aggregation}-{num}-{masked}")


@pytest.mark.parametrize(("name", "aggregation", "num_mini_batches", "masked"), [*combinations()])
def test_a_rollout_cut_into_sequences_has_the_loss_and_gradient_of_the_whole(
    name, aggregation, num_mini_batches, masked
):
    actor_loss = ActorLoss(
        objective=OBJECTIVES["clip"](clip_low=0.2, clip_high=0.3, dual_clip=None),
        corrections=(),
        aggregation=aggregation,
        length=20.0,
        entropy_coef=0.01,
        kl=None,
        is_single_update=False,
    )

    def learned(batch, mask):
        actor, critic = weighed(batch, name, aggregation, mask)
        of_critic = [] if critic is None else [(ClippedValueLoss(clip=0.2), critic)]
        return [
            gradient(loss, part, batch.num_tokens, num_mini_batches) for loss, part in [(actor_loss, actor), *of_critic]
        ]

    cut, mask = rollouts(list(MASKS).index(masked)), MASKS[masked]
    found, whole = learned(cut, mask), learned(dataclasses.replace(cut, sequence_starts=None), mask)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-15)
    assert all(bool(by_token.abs().sum() > 0) for _, by_token in found)


def test_every_estimator_is_tried():
    assert {name.partition(" ")[0] for name in ESTIMATORS} == set(ADVANTAGES)


def test_a_rollout_of_three_sequences_weighs_as_one_of_a_single_sequence():
    batch = rollouts(3)
    actor = weigh(batch, estimator("grpo"), kl=None, aggregation="sequence")
    apart = actor.by_sequence()
    of_rollout = torch.zeros(3, 3, dtype=torch.float64)
    weights = apart.loss_weights[apart.row_of_token] * apart.loss_mask
    of_token = apart.prompt_index[apart.row_of_token], apart.sample_index[apart.row_of_token]
    of_rollout.index_put_(of_token, weights, accumulate=True)
    torch.testing.assert_close(of_rollout, torch.ones_like(of_rollout))


def test_a_penalty_for_length_counts_all_sequences_and_stands_at_the_end_of_the_last():
    batch = rollouts(4)
    batch = dataclasses.replace(batch, token_rewards=batch.token_rewards.float())
    shaped, _ = OverlongPenalty(max_tokens=30, buffer=29, factor=1.0)(batch)
    lost = batch.token_rewards - shaped.token_rewards
    assert set(lost.nonzero().flatten().tolist()) <= set((batch.offsets[1:] - 1).tolist())
    assert len(lost.nonzero()) == 9
