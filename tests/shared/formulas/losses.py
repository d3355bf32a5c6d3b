"""Policy losses, corrections and KLs of the papers, token by token.

Written from the papers and not from the code, slow and without torch on purpose. `new` are the logprobs of the policy
as it is; where a paper stops the gradient, the formula reads `fixed`, the same numbers: differences of a formula by
`new` alone are its gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from rallypoint.testing.cases import Case

Floats = Sequence[float]


def gap(new: float, old: float) -> float:
    """Difference of logprobs, finite for tokens that a policy excludes."""
    return max(new, -1000.0) - max(old, -1000.0)


def ratio(log: float) -> float:
    """Exp of a log-ratio, cut off where no trust region reaches."""
    return math.exp(max(-20.0, min(20.0, log)))


def clamp(x: float, low: float, high: float) -> float:
    """X within bounds."""
    return max(low, min(high, x))


def mean(numbers: Floats) -> float:
    """Their mean."""
    return math.fsum(numbers) / len(numbers)


# Policy losses: the loss of each trained token, or of each row where the paper has one ratio for the row.


def clip(case: Case, new: Floats, fixed: Floats, low: float, high: float, dual: float | None) -> list[float]:
    """PPO, eq. 7 of 1707.06347; with dual clip, eq. 8 of 1912.09729."""
    del fixed
    found: list[float] = []
    for t in itertools.chain(*case.rows):
        a, r = case.advantages[t], ratio(gap(new[t], case.old[t]))
        objective = min(r * a, clamp(r, 1 - low, 1 + high) * a)
        found.append(-(max(objective, dual * a) if dual is not None and a < 0 else objective))
    return found


def decoupled(
    case: Case, new: Floats, fixed: Floats, low: float, high: float, dual: float | None, cap: float | None
) -> list[float]:
    """AReaL, eq. 5 of 2505.24298: pi / behaviour, split into proximal / behaviour times what is clipped."""
    weights = [ratio(gap(case.old[t], case.rollout[t])) for t in itertools.chain(*case.rows)]
    weights = [weight if cap is None else min(weight, cap) for weight in weights]
    return [w * loss for w, loss in zip(weights, clip(case, new, fixed, low, high, dual), strict=True)]


def policy_gradient(case: Case, new: Floats, fixed: Floats) -> list[float]:
    """REINFORCE."""
    del fixed
    return [-case.advantages[t] * max(new[t], -1000.0) for t in itertools.chain(*case.rows)]


def importance_sampling(case: Case, new: Floats, fixed: Floats, anchor: str) -> list[float]:
    """The conservative policy iteration objective, eq. 6 of 1707.06347."""
    del fixed
    before = case.old if anchor == "old" else case.rollout
    return [-ratio(gap(new[t], before[t])) * case.advantages[t] for t in itertools.chain(*case.rows)]


def gspo(case: Case, new: Floats, fixed: Floats, low: float, high: float) -> list[float]:
    """Eq. 5 to 7 of 2507.18071, by row: the geometric mean of the ratios is differentiated as it stands."""
    del fixed
    found: list[float] = []
    for row in filter(None, case.rows):
        a, s = case.advantages[row[0]], ratio(mean([gap(new[t], case.old[t]) for t in row]))
        found.append(-min(s * a, clamp(s, 1 - low, 1 + high) * a))
    return found


def gmpo(case: Case, new: Floats, fixed: Floats, low: float, high: float) -> list[float]:
    """Eq. 4 of 2507.20673, by row."""
    del fixed
    found: list[float] = []
    for row in filter(None, case.rows):
        a, logs = case.advantages[row[0]], [gap(new[t], case.old[t]) for t in row]
        bounded = [min(x, high) if a > 0 else max(x, -low) for x in logs] if a else [0.0]
        # min(r, clip(r)) for a > 0 leaves what is below the lower bound alone, and the other way round for a < 0.
        found.append(-a * ratio(mean(bounded)))
    return found


def cispo(case: Case, new: Floats, fixed: Floats, low: float, high: float, anchor: str) -> list[float]:
    """Eq. 4 and 5 of 2506.13585."""
    before = case.old if anchor == "old" else case.rollout
    return [
        -clamp(ratio(gap(fixed[t], before[t])), 1 - low, 1 + high) * case.advantages[t] * max(new[t], -1000.0)
        for t in itertools.chain(*case.rows)
    ]


def sapo(case: Case, new: Floats, fixed: Floats, tau_positive: float, tau_negative: float) -> list[float]:
    """Eq. 5 and 6 of 2511.20347."""
    del fixed
    found: list[float] = []
    for t in itertools.chain(*case.rows):
        a, r = case.advantages[t], ratio(gap(new[t], case.old[t]))
        tau = tau_positive if a > 0 else tau_negative
        x = tau * (r - 1.0)
        gate = 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0
        found.append(-gate * 4.0 / tau * a)
    return found


def dppo(
    case: Case, new: Floats, fixed: Floats, divergence: str, low: float, high: float, cap: float, anchor: str
) -> list[float]:
    """2602.04879, section 4: the binary total variation and KL between the sampler and the policy."""
    before = case.old if anchor == "old" else case.rollout
    found: list[float] = []
    for t in itertools.chain(*case.rows):
        a, p, q = case.advantages[t], math.exp(max(fixed[t], -1000.0)), math.exp(before[t])
        r = min(ratio(gap(fixed[t], before[t])), cap)
        if divergence == "tv":
            moved = abs(p - q)
        else:
            rest_p, rest_q = max(1 - p, 1e-8), max(1 - q, 1e-8)
            moved = -q * gap(fixed[t], before[t]) + rest_q * math.log(rest_q / rest_p)
        is_dropped = (p > q and moved > high) if a > 0 else (p < q and moved > low)
        found.append(0.0 if is_dropped else -r * a * max(new[t], -1000.0))
    return found


def covariances(case: Case) -> dict[int, float]:
    """Eq. 10 of 2505.22617, of each trained token; by the logprobs of what was sampled."""
    trained = list(itertools.chain(*case.rows))
    if not trained:
        return {}
    logs = {t: max(case.rollout[t], -1000.0) for t in trained}
    middle, mean_advantage = mean(list(logs.values())), mean([case.advantages[t] for t in trained])
    return {t: (logs[t] - middle) * (case.advantages[t] - mean_advantage) for t in trained}


def clip_cov(case: Case, new: Floats, fixed: Floats, low: float, high: float, dual: float | None) -> list[float]:
    """Eq. 12 of 2505.22617: tokens that were drawn have no gradient; which they are is the batch's."""
    trained = list(itertools.chain(*case.rows))
    return [
        0.0 if case.selected[t] else loss
        for t, loss in zip(trained, clip(case, new, fixed, low, high, dual), strict=True)
    ]


def kl_cov(case: Case, new: Floats, fixed: Floats, fraction: float, coef: float) -> list[float]:
    """Eq. 13 and 14 of 2505.22617; the KL of a token is |log r|, as in the authors' code."""
    del fixed
    found = covariances(case)
    ranked = sorted((t for t in found if found[t] > 0), key=lambda t: -found[t])
    held = set(ranked[: max(1, math.floor(fraction * len(found)))])
    losses: list[float] = []
    for t in itertools.chain(*case.rows):
        moved = gap(new[t], case.old[t])
        losses.append(-ratio(moved) * case.advantages[t] + (coef * abs(moved) if t in held else 0.0))
    return losses


# What else is in a loss: of each trained token.


def kl_estimate(new: float, reference: float, estimator: str) -> float:
    """Schulman's k1 to k3, and the size of the log-ratio; `d` is cut off in k3 alone."""
    d = gap(reference, new)
    near = min(d, 20.0)
    return {"k1": -d, "k2": d * d / 2, "k3": math.expm1(near) - near, "abs": abs(d)}[estimator]


def kl(case: Case, new: Floats, fixed: Floats, estimator: str, *, importance_corrected: bool = False) -> list[float]:
    """The estimate; corrected, eq. 7 of 2512.02556, where k1 stops its gradient, so that it has that of k3.

    The reference is the case's sampler: any logprobs do.
    """
    of_estimate = fixed if importance_corrected and estimator == "k1" else new
    return [
        kl_estimate(of_estimate[t], case.rollout[t], estimator)
        * (ratio(gap(new[t], case.old[t])) if importance_corrected else 1.0)
        for t in itertools.chain(*case.rows)
    ]


def value_loss(case: Case, new: Floats, clip: float | None) -> list[float]:
    """Half the squared error, of what is worse: the value, or the value that moved by at most `clip`.

    The old values are the case's rewards, and the returns its advantages: any numbers do.
    """
    found: list[float] = []
    for t in itertools.chain(*case.rows):
        old, wanted = case.rewards[t], case.advantages[t]
        near = new[t] if clip is None else clamp(new[t], old - clip, old + clip)
        found.append(0.5 * max((new[t] - wanted) ** 2, (near - wanted) ** 2))
    return found


def aggregated(case: Case, losses: Floats, name: str, length: float) -> float:
    """The mean of the losses of tokens, [T], as a person would write it: of tokens, rows or prompts."""
    rows = [[losses[t] for t in row] for row in case.rows]
    if name == "token":
        return mean([x for row in rows for x in row])
    if name == "fixed_length":
        return mean([math.fsum(row) / length for row in rows])
    if name == "prompt":
        prompts = sorted(set(case.groups))
        rows = [[x for row, group in zip(rows, case.groups, strict=True) if group == p for x in row] for p in prompts]
    return mean([mean(row) for row in rows if row])


def overlong(num_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """DAPO, eq. 13 of 2503.14476: what a response loses, in its three cases."""
    if num_tokens <= max_tokens - buffer:
        return 0.0
    return factor if num_tokens > max_tokens else factor * (num_tokens - (max_tokens - buffer)) / buffer


# Corrections: the weight of each trained token, with rho = old / rollout.


def rows_of_logs(case: Case) -> list[list[float]]:
    """Log rho of each row's trained tokens."""
    return [[gap(case.old[t], case.rollout[t]) for t in row] for row in case.rows]


def by_row(case: Case, weight: Callable[[list[float]], float]) -> list[float]:
    """The weight that each row's log rho give it, at all its trained tokens."""
    return [w for logs in rows_of_logs(case) if logs for w in [weight(logs)] * len(logs)]


def tis(case: Case, level: str, cap: float) -> list[float]:
    """Rho, or the cap."""
    if level == "token":
        return [min(ratio(x), cap) for logs in rows_of_logs(case) for x in logs]
    return by_row(case, lambda logs: min(ratio(math.fsum(logs)), cap))


def mask(case: Case, level: str, low: float, high: float) -> list[float]:
    """1 within bounds."""
    if level == "token":
        return [float(low <= ratio(x) <= high) for logs in rows_of_logs(case) for x in logs]
    of = math.fsum if level == "product" else mean
    return by_row(case, lambda logs: float(low <= ratio(of(logs)) <= high))


def icepop(case: Case, low: float, high: float) -> list[float]:
    """Rho within bounds, 0 outside."""
    return [ratio(x) if low <= ratio(x) <= high else 0.0 for logs in rows_of_logs(case) for x in logs]


def kl_mask(case: Case, estimator: str, max_kl: float) -> list[float]:
    """1 where the row's mean estimate of KL(rollout || old) is small enough."""

    def estimate(x: float) -> float:
        return x * x / 2 if estimator == "k2" else math.expm1(min(x, 20.0)) - min(x, 20.0)

    return by_row(case, lambda logs: float(mean([estimate(x) for x in logs]) <= max_kl))


def off_policy_mask(case: Case, delta: float) -> list[float]:
    """DeepSeek-V3.2, section 3.1 of 2512.02556."""
    found: list[float] = []
    for row in filter(None, case.rows):
        left = mean([gap(case.rollout[t], case.logprobs[t]) for t in row]) > delta
        found += [0.0 if left and case.advantages[t] < 0 else 1.0 for t in row]
    return found


def of_trained(case: Case, by_token: Floats) -> list[float]:
    """The numbers at trained tokens, row by row."""
    return [by_token[t] for t in itertools.chain(*case.rows)]
