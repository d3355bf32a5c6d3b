"""GiGPO: turns against those that began in the same state, beside rollouts against those of their prompt."""

import dataclasses

import pytest
import torch

from rallypoint.algorithms import ADVANTAGES, Rewards
from rallypoint.algorithms.advantages import step_group_advantages
from rallypoint.types import Trajectory, Turn, assemble

GIGPO = ADVANTAGES["gigpo"]
USUAL = {"discount": 0.95, "step_weight": 1.0, "normalize_std": False, "whiten": False}


def rewards_of(rows, groups):
    """Return what rows of turns earned; a turn is (state, reward, tokens), behind one token of context."""
    mask, states, earned, offsets = [], [], [], [0]
    for row in rows:
        for state, reward, size in row:
            mask += [False, *[True] * size]
            states += [0, *[state] * size]
            earned += [0.0, *[0.0] * (size - 1), reward]
        offsets.append(len(mask))
    token_rewards = torch.tensor(earned, dtype=torch.float64)
    return Rewards(
        token_rewards=token_rewards,
        earned=token_rewards,
        loss_mask=torch.tensor(mask),
        offsets=torch.tensor(offsets),
        groups=torch.tensor(groups),
        turn_states=torch.tensor(states),
    )


def drawn(seed, num_states=4):
    draw = torch.Generator().manual_seed(seed)

    def whole(low, high):
        return int(torch.randint(low, high, (), generator=draw))

    rows = [
        [(whole(1, num_states + 1), float(whole(0, 3)), whole(1, 4)) for _ in range(whole(1, 6))] for _ in range(12)
    ]
    return rewards_of(rows, [whole(0, 3) for _ in rows]), rows


def by_turn(advantages, rows):
    """Return the number of each turn, which all of its tokens have."""
    found, place = [], 0
    for row in rows:
        found.append([])
        for _, _, size in row:
            (number,) = {float(x) for x in advantages[place + 1 : place + 1 + size]}
            assert advantages[place] == 0
            found[-1].append(number)
            place += 1 + size
    return found


def test_by_hand():
    rows = [[(1, 0.0, 2), (2, 1.0, 1)], [(1, 0.0, 1), (1, 0.0, 3)], [(2, 4.0, 1)]]
    rewards = rewards_of(rows, [0, 0, 0])
    # Scores 1, 0, 4. Returns of state 1: 0.5, 0, 0; of state 2: 1, 4.
    found = GIGPO(**USUAL | {"discount": 0.5, "step_weight": 2.0})(rewards)
    whole, first, second = [1 - 5 / 3, -5 / 3, 4 - 5 / 3], [0.5 - 1 / 6, -1 / 6], [-1.5, 1.5]
    assert by_turn(found, rows) == [
        [pytest.approx(whole[0] + 2 * first[0]), pytest.approx(whole[0] + 2 * second[0])],
        [pytest.approx(whole[1] + 2 * first[1])] * 2,
        [pytest.approx(whole[2] + 2 * second[1])],
    ]


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_a_loop_over_turns_computes(seed, normalize_std):
    rewards, rows = drawn(seed)
    groups, discount, weight = rewards.groups.tolist(), 0.9, 0.7

    def normalized(x, others):
        mean = sum(others) / len(others)
        std = (sum((one - mean) ** 2 for one in others) / len(others)) ** 0.5
        return 0.0 if max(others) == min(others) else (x - mean) / (std if normalize_std else 1.0)

    returns = [
        [sum(discount ** (k - t) * row[k][1] for k in range(t, len(row))) for t in range(len(row))] for row in rows
    ]
    scores = [sum(reward for _, reward, _ in row) for row in rows]
    expected = []
    for number, row in enumerate(rows):
        members = [other for other in range(len(rows)) if groups[other] == groups[number]]
        of_rollout = normalized(scores[number], [scores[other] for other in members])
        expected.append([])
        for turn, (state, _, _) in enumerate(row):
            same = [returns[other][t] for other in members for t, one in enumerate(rows[other]) if one[0] == state]
            expected[-1].append(pytest.approx(of_rollout + weight * normalized(returns[number][turn], same), abs=1e-12))
    estimator = GIGPO(**USUAL | {"discount": discount, "step_weight": weight, "normalize_std": normalize_std})
    assert by_turn(estimator(rewards), rows) == expected
    compared = [any(x != 0 for x in row) for row in by_turn(GIGPO(**USUAL)(rewards), rows)]
    signal = GIGPO(**USUAL).signal(rewards)
    assert all(signal[number] for number, differs in enumerate(compared) if differs)


@pytest.mark.parametrize(("normalize_std", "like"), [(True, "grpo"), (False, "dr_grpo")])
@pytest.mark.parametrize("seed", range(5))
def test_without_step_groups_it_is_grpo_or_dr_grpo(seed, normalize_std, like):
    rewards, _ = drawn(seed)
    expected = ADVANTAGES[like](token_discount=None, whiten=False)
    settings = USUAL | {"normalize_std": normalize_std}
    off = GIGPO(**settings | {"step_weight": 0.0})
    assert torch.equal(off(rewards), expected(rewards))
    assert torch.equal(off.signal(rewards), expected.signal(rewards))
    apart = dataclasses.replace(rewards, turn_states=torch.arange(1, len(rewards.loss_mask) + 1))
    assert torch.equal(GIGPO(**settings)(apart), expected(rewards))


def test_equal_returns_but_for_rounding_are_no_signal_and_missing_states_an_error():
    rewards = rewards_of([[(1, 0.1, 1)]] * 3, [0, 0, 0])
    assert not GIGPO(**USUAL | {"normalize_std": True})(rewards).any()
    assert not GIGPO(**USUAL).signal(rewards).any()
    with pytest.raises(ValueError, match="the batch has no states of turns"):
        GIGPO(**USUAL)(dataclasses.replace(rewards, turn_states=None))
    same = step_group_advantages(
        rewards.token_rewards,
        torch.where(rewards.loss_mask, 1, 0),
        rewards.loss_mask,
        rewards.offsets,
        torch.tensor([0, 1, 2]),
        normalize_std=True,
        discount=1.0,
    )
    assert not same.any(), "states of other prompts are others"


def turn(prompt, *, said=(), state=None):
    zeros = (0.0, 0.0)
    numbers = {"logprobs": zeros, "sampled_logprobs": zeros, "version": 0, "truncated": False}
    return Turn(prompt=prompt, response=(7, 8), said=said, state=state, **numbers)


def test_a_state_is_what_the_environment_names_or_what_was_said_or_else_the_tokens():
    def states(*turns):
        found = assemble(
            [Trajectory(turns=turns)], prompt_index=0, sample_index=[0], is_narrowed=False, has_states=True
        )
        assert found.turn_states is not None
        assert not found.turn_states[~found.loss_mask].any()
        return found.turn_states[found.loss_mask].view(-1, 2)[:, 0].tolist()

    said = (("user", "wall"),)
    a, b, c, d, e, f = states(
        turn((1,), said=said),
        turn((2, 3), said=said),
        turn((2, 3)),
        turn((2, 3), state="wall"),
        turn((1,), said=said, state="wall"),
        turn((1,), said=said, state=""),
    )
    assert a == b
    assert d == e
    assert len({a, c, d, f}) == 4
    assert min(a, c, d, f) > 0
    assert (
        assemble([Trajectory(turns=(turn((1,)),))], prompt_index=0, sample_index=[0], is_narrowed=False).turn_states
        is None
    )
