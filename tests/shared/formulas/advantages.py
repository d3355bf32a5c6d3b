"""Advantages of the papers, in plain Python floats. Each returns the advantage of every token, [T]."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from rallypoint.testing.cases import Case


def deviation(numbers: Sequence[float]) -> float:
    """Their population standard deviation; 1 if they are equal, whose differences from their mean are 0."""
    middle = math.fsum(numbers) / len(numbers)
    equal = len(set(numbers)) == 1
    return 1.0 if equal else math.sqrt(math.fsum((x - middle) ** 2 for x in numbers) / len(numbers))


def mates(case: Case, row: int) -> list[int]:
    """The rows of a row's group, itself among them."""
    return [other for other, group in enumerate(case.groups) if group == case.groups[row]]


def spread(case: Case, of_row: Callable[[int], float]) -> list[float]:
    """The number of its row at each trained token, and 0 elsewhere."""
    found = [0.0] * len(case.mask)
    for row, steps in enumerate(case.rows):
        for t in steps:
            found[t] = of_row(row)
    return found


def whitened(case: Case, advantages: Sequence[float]) -> list[float]:
    """Mean 0 and deviation 1 over the trained tokens."""
    counted = [advantages[t] for t in itertools.chain(*case.rows)]
    if not counted:
        return [0.0] * len(advantages)
    middle, std = math.fsum(counted) / len(counted), deviation(counted)
    return [(x - middle) / std if m else 0.0 for x, m in zip(advantages, case.mask, strict=True)]


def centred(case: Case, row: int, scores: Sequence[float]) -> float:
    """A score minus its group's mean; exactly 0 where all of them are equal."""
    peers = [scores[other] for other in mates(case, row)]
    return 0.0 if len(set(peers)) == 1 else scores[row] - math.fsum(peers) / len(peers)


def lambda_of(length: int, gae_lambda: float, length_alpha: float | None) -> float:
    """Return the lambda of a row of so many steps: eq. 12 of 2504.05118, and 0 where that is negative."""
    return gae_lambda if length_alpha is None or not length else max(0.0, 1.0 - 1.0 / (length_alpha * length))


def gae(
    case: Case, discount: float, gae_lambda: float, length_alpha: float | None = None
) -> tuple[list[float], list[float]]:
    """Eq. 16 of 1506.02438, backwards; lambda of VAPO, eq. 12 of 2504.05118."""
    advantages, returns = [0.0] * len(case.mask), [0.0] * len(case.mask)
    for steps in case.rows:
        lam = lambda_of(len(steps), gae_lambda, length_alpha)
        next_value = next_advantage = 0.0
        for t in reversed(steps):
            delta = case.rewards[t] + discount * next_value - case.values[t]
            advantages[t] = delta + discount * lam * next_advantage
            returns[t] = advantages[t] + case.values[t]
            next_value, next_advantage = case.values[t], advantages[t]
    return advantages, returns


def turns_of(steps: Sequence[int]) -> list[list[int]]:
    """Runs of neighbouring trained tokens of a row."""
    turns: list[list[int]] = []
    for t in steps:
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def turn_gae(
    case: Case, discount: float, gae_lambda: float, length_alpha: float | None = None
) -> tuple[list[float], list[float]]:
    """The same with a step for each run of neighbouring trained tokens; a row's length is its number of turns."""
    advantages, returns = [0.0] * len(case.mask), [0.0] * len(case.mask)
    for steps in case.rows:
        turns = turns_of(steps)
        lam = lambda_of(len(turns), gae_lambda, length_alpha)
        next_value = next_advantage = 0.0
        for turn in reversed(turns):
            value = case.values[turn[0]]
            delta = math.fsum(case.rewards[t] for t in turn) + discount * next_value - value
            next_advantage = delta + discount * lam * next_advantage
            next_value = value
            for t in turn:
                advantages[t], returns[t] = next_advantage, next_advantage + value
    return advantages, returns


def reinforce_plus_plus(case: Case, discount: float) -> list[float]:
    """Section 3 of 2501.03262: the return from each token, whitened."""
    found = [0.0] * len(case.mask)
    for steps in case.rows:
        total = 0.0
        for t in reversed(steps):
            total = case.rewards[t] + discount * total
            found[t] = total
    return whitened(case, found)


def returns_of_turns(case: Case, row: int, discount: float) -> list[float]:
    """The rewards of a row from each of its turns on, discounted once a turn."""
    found: list[float] = []
    for turn in reversed(turns_of(case.rows[row])):
        found.insert(0, math.fsum(case.rewards[t] for t in turn) + discount * (found[0] if found else 0.0))
    return found


def reinforce_plus_plus_by_turn(case: Case, discount: float) -> list[float]:
    """The same with turns for steps."""
    found = [0.0] * len(case.mask)
    for row, steps in enumerate(case.rows):
        for turn, earned in zip(turns_of(steps), returns_of_turns(case, row, discount), strict=True):
            for t in turn:
                found[t] = earned
    return whitened(case, found)


def grpo_by_turn(case: Case, discount: float, *, normalize_std: bool) -> list[float]:
    """Each turn against the turns of the same place in its group."""
    found = [0.0] * len(case.mask)
    for row, steps in enumerate(case.rows):
        for place, turn in enumerate(turns_of(steps)):
            returns = {other: returns_of_turns(case, other, discount) for other in mates(case, row)}
            peers = [of_row[place] for of_row in returns.values() if len(of_row) > place]
            if len(set(peers)) > 1:
                centred = returns[row][place] - math.fsum(peers) / len(peers)
                for t in turn:
                    found[t] = centred / (deviation(peers) if normalize_std else 1.0)
    return found


def dr_grpo(case: Case) -> list[float]:
    """Section 3.2 of 2503.20783."""
    return spread(case, lambda row: centred(case, row, case.scores))


def grpo(case: Case) -> list[float]:
    """Section 4.1.2 of 2402.03300."""
    scores = case.scores
    return spread(
        case, lambda row: centred(case, row, scores) / deviation([scores[other] for other in mates(case, row)])
    )


def grpo_by_token(case: Case, discount: float, *, normalize_std: bool) -> list[float]:
    """Section 4.1.3 of 2402.03300; every trained token is a step."""
    found = [0.0] * len(case.mask)
    rows = case.rows
    for row, steps in enumerate(rows):
        peers = [rows[other] for other in mates(case, row) if rows[other]]
        group = [case.rewards[t] for peer in peers for t in peer]
        if len(peers) < 2 or len(set(group)) == 1:
            continue
        middle, std = math.fsum(group) / len(group), deviation(group) if normalize_std else 1.0
        total = 0.0
        for t in reversed(steps):
            total = (case.rewards[t] - middle) / std + discount * total
            found[t] = total
    return found


def lite_ppo(case: Case) -> list[float]:
    """Section 4.1 of 2508.08221: the group's mean, the batch's deviation."""
    scores = case.scores
    return spread(case, lambda row: centred(case, row, scores) / deviation(scores) if len(set(scores)) > 1 else 0.0)


def rloo(case: Case) -> list[float]:
    """Eq. 6 of 2402.14740: the mean of the others is the baseline."""

    def of_row(row: int) -> float:
        others = [case.scores[other] for other in mates(case, row) if other != row]
        return case.scores[row] - math.fsum(others) / len(others) if others else 0.0

    return spread(case, of_row)


def gdpo(case: Case, weights: Mapping[str, float]) -> list[float]:
    """Eq. 4 to 6 of 2601.05242, of the score and the length."""
    components = {"score": case.scores, "length": [float(len(row)) for row in case.rows]}
    totals = [
        math.fsum(
            weight * centred(case, row, components[name]) / deviation([components[name][o] for o in mates(case, row)])
            for name, weight in weights.items()
        )
        for row in range(len(case.lengths))
    ]
    if not totals:
        return []
    middle, std = math.fsum(totals) / len(totals), deviation(totals)
    return spread(case, lambda row: (totals[row] - middle) / std)


def max_rl(case: Case) -> list[float]:
    """Section 3 of 2602.02710."""

    def of_row(row: int) -> float:
        peers = [case.scores[other] for other in mates(case, row)]
        middle = math.fsum(peers) / len(peers)
        return centred(case, row, case.scores) / middle if middle else 0.0

    return spread(case, of_row)


def opo(case: Case) -> list[float]:
    """Eq. 9 of 2505.23585: scores weighed by length are the baseline."""
    rows, scores = case.rows, case.scores

    def of_row(row: int) -> float:
        peers = mates(case, row)
        if len({scores[other] for other in peers}) == 1 or sum(bool(rows[other]) for other in peers) < 2:
            return 0.0
        total = sum(len(rows[other]) for other in peers)
        return scores[row] - math.fsum(scores[other] * len(rows[other]) for other in peers) / total

    return spread(case, of_row)


def pass_at_k(case: Case, k: int) -> list[float]:
    """Section 3.3 of 2508.10751, by going through all sets of k rollouts of the prompt."""

    def of_row(row: int) -> float:
        peers = mates(case, row)
        if len(peers) < k:
            return 0.0
        sets = list(itertools.combinations(peers, k))
        is_right = [float(any(case.scores[other] > 0 for other in chosen)) for chosen in sets]
        own = [x for x, chosen in zip(is_right, sets, strict=True) if row in chosen]
        return (math.fsum(own) / len(own) - math.fsum(is_right) / len(sets)) / deviation(is_right)

    return spread(case, of_row)
