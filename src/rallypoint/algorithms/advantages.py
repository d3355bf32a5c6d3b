"""How much better each sampled token was than expected: GAE with a critic, group-relative without.

Owns: advantages and returns from rewards. Must not know: who computed values and logprobs, or what the
loss does with the result. Only tokens with `loss_mask` True are time steps; in a multi-turn row the first
token of a turn follows the last trained token of the turn before. Everything else gets 0. Arithmetic is
float64, results have the type of the input. The carrier-level functions stand in `weigh`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rallypoint.algorithms._rows import (
    Turns,
    differing,
    normalized_in_groups,
    numbered,
    put_back,
    sums_to_row_end,
    trained_tokens,
)


def gae_advantages(
    token_rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    *,
    discount: float,
    gae_lambda: float,
    length_alpha: float | None = None,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Return (advantages, returns) by generalised advantage estimation (arXiv 1506.02438).

        delta[t]      = token_rewards[t] + discount * values[t+1] - values[t]
        advantages[t] = delta[t] + discount * gae_lambda * advantages[t+1]
        returns[t]    = advantages[t] + values[t]

    t+1 is the next trained token of the row; after the last one value and advantage are 0.

    One row of two turns, with an observation of one token between them, after a prompt of one token:

    >>> advantages, returns = gae_advantages(
    ...     token_rewards=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
    ...     values=torch.tensor([9.0, 0.5, 0.25, 9.0, 0.5, 0.75]),
    ...     loss_mask=torch.tensor([False, True, True, False, True, True]),
    ...     offsets=torch.tensor([0, 6]),
    ...     discount=1.0,
    ...     gae_lambda=0.5,
    ... )
    >>> advantages.tolist()
    [0.0, -0.03125, 0.4375, 0.0, 0.375, 0.25]
    >>> returns.tolist()
    [0.0, 0.46875, 0.6875, 0.0, 0.875, 1.0]

    Args:
        token_rewards: [T] the reward that arrives with each token.
        values: [T] of the state in which token t was chosen.
        loss_mask: [T] True at trained tokens, which are the time steps.
        offsets: [B+1] where rows begin and end; a row without trained tokens is legal.
        discount: gamma in the paper.
        gae_lambda: lambda in the paper; 1 is Monte Carlo, 0 is one-step temporal difference.
        length_alpha: replaces lambda by 1 - 1 / (length_alpha * n) in a row of n trained tokens, and by 0 where that
            is negative (VAPO, arXiv 2504.05118).
    """
    positions, rows = trained_tokens(loss_mask, offsets)
    rewards, state_values = token_rewards[positions].double(), values[positions].double()
    next_values = torch.zeros_like(state_values)
    next_values[:-1] = torch.where(rows[1:] == rows[:-1], state_values[1:], 0.0)
    deltas = rewards + discount * next_values - state_values
    decay = discount * (gae_lambda if length_alpha is None else _lambda_by_length(rows, offsets, length_alpha))
    advantages = sums_to_row_end(deltas, rows, decay=decay)
    return put_back(advantages, positions, values), put_back(advantages + state_values, positions, values)


def _lambda_by_length(rows: Int[Tensor, " N"], offsets: Int[Tensor, " B1"], alpha: float) -> Float[Tensor, " N"]:
    lengths = torch.bincount(rows, minlength=len(offsets) - 1).double()
    return (1.0 - 1.0 / (alpha * lengths)).clamp_min(0.0)[rows]


def turn_gae_advantages(
    token_rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    *,
    discount: float,
    gae_lambda: float,
    length_alpha: float | None = None,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Return (advantages, returns) of `gae_advantages` with turns for time steps, for agents of many turns.

    A turn is a run of neighbouring trained tokens of a row. Its reward is the sum over its tokens, its value that of
    its first token, and all its tokens get its advantage and its return. So discount and lambda act once a turn,
    however long it is.

    The example of `gae_advantages`: two turns of two tokens, with values 0.5 and 0.5.

    >>> advantages, returns = turn_gae_advantages(
    ...     token_rewards=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0]),
    ...     values=torch.tensor([9.0, 0.5, 0.25, 9.0, 0.5, 0.75]),
    ...     loss_mask=torch.tensor([False, True, True, False, True, True]),
    ...     offsets=torch.tensor([0, 6]),
    ...     discount=1.0,
    ...     gae_lambda=0.5,
    ... )
    >>> advantages.tolist()
    [0.0, 0.25, 0.25, 0.0, 0.5, 0.5]
    >>> returns.tolist()
    [0.0, 0.75, 0.75, 0.0, 1.0, 1.0]
    """
    turns = Turns.of(loss_mask, offsets)
    found = gae_advantages(
        turns.sums(token_rewards),
        values[turns.positions][turns.firsts].double(),
        torch.ones(len(turns.rows), dtype=torch.bool),
        torch.searchsorted(turns.rows, torch.arange(len(offsets))),
        discount=discount,
        gae_lambda=gae_lambda,
        length_alpha=length_alpha,
    )
    advantages, returns = (turns.spread(by_turn, values) for by_turn in found)
    return advantages, returns


def turn_returns(
    token_rewards: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    *,
    discount: float,
) -> Float[Tensor, " T"]:
    """Return what is earned from each turn to the row's end, at all its tokens.

        returns[k] = rewards[k] + discount * returns[k+1]

    rewards[k] is the sum over the tokens of turn k, see `turn_gae_advantages`; so the discount acts once a turn.

    A reward of 1 for the first of two turns and of 2 for the second:

    >>> turn_returns(
    ...     token_rewards=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 2.0]),
    ...     loss_mask=torch.tensor([False, True, True, False, True, True]),
    ...     offsets=torch.tensor([0, 6]),
    ...     discount=0.5,
    ... ).tolist()
    [0.0, 2.0, 2.0, 0.0, 2.0, 2.0]
    """
    turns = Turns.of(loss_mask, offsets)
    return turns.spread(sums_to_row_end(turns.sums(token_rewards), turns.rows, decay=discount), token_rewards)


def group_relative_turn_advantages(
    token_rewards: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    groups: Int[Tensor, " B"],
    *,
    normalize_std: bool,
    discount: float,
) -> Float[Tensor, " T"]:
    """Return how much better each turn went on than the same turn of the group's other rollouts.

        advantages[k] = (returns[k] - mean) / std     over the rollouts of the group that have a turn k

    with the returns of `turn_returns`. What was earned before a turn is in neither, and the mean is that of rollouts
    that had come as far. With one turn a rollout it is GRPO. MT-GRPO (arXiv 2505.11821) adds up rewards that were
    normalised turn by turn instead; dividing each turn by its own deviation would give one that hardly varies as much
    weight as all others.
    A turn that only one rollout has, and turns whose returns differ by rounding alone, get exactly 0.

    Two rollouts of a group, of two turns and one:

    >>> group_relative_turn_advantages(
    ...     token_rewards=torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0]),
    ...     loss_mask=torch.tensor([True, False, True, False, True]),
    ...     offsets=torch.tensor([0, 3, 5]),
    ...     groups=torch.tensor([4, 4]),
    ...     normalize_std=False,
    ...     discount=1.0,
    ... ).tolist()
    [1.0, 0.0, 0.0, 0.0, -1.0]

    Args:
        token_rewards: [T] the reward that arrives with each token.
        loss_mask: [T] True at trained tokens.
        offsets: [B+1] where rows begin and end.
        groups: [B] int64 which prompt.
        normalize_std: divide by the standard deviation.
        discount: of the rewards of later turns.
    """
    turns, (group, _) = Turns.of(loss_mask, offsets), numbered(groups)
    same_turn = group[turns.rows] + len(groups) * turns.places
    return _compared(token_rewards, turns, same_turn, normalize_std=normalize_std, discount=discount)


def step_group_advantages(
    token_rewards: Float[Tensor, " T"],
    turn_states: Int[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    groups: Int[Tensor, " B"],
    *,
    normalize_std: bool,
    discount: float,
) -> Float[Tensor, " T"]:
    """Return how much better each turn went on than the group's other turns that began in the same state.

        advantages[k] = (returns[k] - mean) / std     over all turns of the group's rollouts that began in that state

    with the returns of `turn_returns`: the step-level advantages of GiGPO (arXiv 2505.10978, section 4.3). Turns of one
    rollout that came to a state twice are compared, too. A turn whose state no other one had, and turns whose returns
    differ by rounding alone, get exactly 0.

    Both rollouts of a group begin in state 7; the first one comes back to it:

    >>> step_group_advantages(
    ...     token_rewards=torch.tensor([0.0, 0.0, 2.0, 0.0, 1.0, 0.0, 0.0]),
    ...     turn_states=torch.tensor([7, 0, 7, 0, 7, 0, 8]),
    ...     loss_mask=torch.tensor([True, False, True, False, True, False, True]),
    ...     offsets=torch.tensor([0, 3, 7]),
    ...     groups=torch.tensor([4, 4]),
    ...     normalize_std=False,
    ...     discount=0.5,
    ... ).tolist()
    [-0.3333333432674408, 0.0, 0.6666666865348816, 0.0, -0.3333333432674408, 0.0, 0.0]

    Args:
        token_rewards: [T] the reward that arrives with each token.
        turn_states: [T] int64 the state in which the turn of each token began; that of its first token counts.
        loss_mask: [T] True at trained tokens.
        offsets: [B+1] where rows begin and end.
        groups: [B] int64 which prompt.
        normalize_std: divide by the standard deviation.
        discount: of the rewards of later turns, gamma in the paper.
    """
    turns, (group, _) = Turns.of(loss_mask, offsets), numbered(groups)
    state, num_states = numbered(turn_states[turns.positions][turns.firsts])
    same_state = state + num_states * group[turns.rows]
    return _compared(token_rewards, turns, same_state, normalize_std=normalize_std, discount=discount)


def _compared(
    token_rewards: Float[Tensor, " T"], turns: Turns, peers: Int[Tensor, " K"], *, normalize_std: bool, discount: float
) -> Float[Tensor, " T"]:
    """Return how much more than its peers' mean is earned from each turn on."""
    returns, sizes = (
        sums_to_row_end(turns.sums(x), turns.rows, decay=discount) for x in (token_rewards, token_rewards.abs())
    )
    return turns.spread(normalized_in_groups(returns, peers, normalize_std=normalize_std, sizes=sizes), token_rewards)


def whiten(x: Float[Tensor, " T"], mask: Bool[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Return x with mean 0 and (population) standard deviation 1 over the mask, and 0 elsewhere.

    Numbers that differ by rounding alone, see `differing`, become 0. Mean and std are those of what is passed in: pass
    the whole step's batch, not one rank's part.

    >>> mask = torch.tensor([True, False, True, True, False, True])
    >>> whiten(torch.tensor([1.0, 50.0, 1.0, 5.0, 50.0, 5.0]), mask).tolist()
    [-1.0, 0.0, -1.0, 1.0, 0.0, 1.0]

    Args:
        x: [T].
        mask: [T] True where x counts; all False is legal.
    """
    positions = mask.nonzero().squeeze(-1)
    whole = x[positions].double()
    if not bool(differing(whole, torch.zeros_like(positions)).any()):
        return torch.zeros_like(x)
    centered = whole - whole.mean()
    return put_back(centered / centered.square().mean().sqrt(), positions, x)


def group_relative_token_advantages(
    token_rewards: Float[Tensor, " T"],
    loss_mask: Bool[Tensor, " T"],
    offsets: Int[Tensor, " B1"],
    groups: Int[Tensor, " B"],
    *,
    normalize_std: bool,
    discount: float,
) -> Float[Tensor, " T"]:
    """Return group-relative advantages under process supervision (DeepSeekMath, section 4.1.3).

        normalized[t] = (token_rewards[t] - mean) / std     over all trained tokens of the group's rollouts
        advantages[t] = normalized[t] + discount * advantages[t+1]      to the end of the row

    The paper has a discount of 1. With less, a token answers less for the rewards after it, and with 0 only
    for its own, which is right where every token earns its reward by itself. The paper normalises over
    reasoning steps; here every trained token is a step, and one without a reward
    of its own counts as a reward of 0. Std and equal rewards are treated as in `normalized_in_groups`,
    and so is a group in which only one rollout has trained tokens: it gets exactly 0.

    One group of two rows, each with a prompt of one token:

    >>> group_relative_token_advantages(
    ...     token_rewards=torch.tensor([0.0, 3.0, 1.0, 0.0, 1.0, 3.0]),
    ...     loss_mask=torch.tensor([False, True, True, False, True, True]),
    ...     offsets=torch.tensor([0, 3, 6]),
    ...     groups=torch.tensor([4, 4]),
    ...     normalize_std=True,
    ...     discount=1.0,
    ... ).tolist()
    [0.0, 0.0, -1.0, 0.0, 0.0, 1.0]

    Args:
        token_rewards: [T] the reward that arrives with each token.
        loss_mask: [T] True at trained tokens.
        offsets: [B+1] where rows begin and end.
        groups: [B] int64 which prompt.
        normalize_std: divide by the group's standard deviation.
        discount: of the rewards that come after a token.
    """
    positions, rows = trained_tokens(loss_mask, offsets)
    normalized = normalized_in_groups(token_rewards[positions], groups[rows], normalize_std=normalize_std)
    group, num_groups = numbered(groups)
    has_tokens = torch.zeros_like(groups).index_fill(0, rows, 1)
    num_members = groups.new_zeros(num_groups).index_add(0, group, has_tokens)
    alone = (num_members == 1)[group]
    advantages = sums_to_row_end(torch.where(alone[rows], 0.0, normalized), rows, decay=discount)
    return put_back(advantages, positions, token_rewards)
