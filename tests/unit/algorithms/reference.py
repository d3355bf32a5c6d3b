"""The formulas of the papers, token by token, in plain Python floats. No torch on purpose."""

import itertools
import math


def rows_of(offsets, mask):
    """The positions of each row's trained tokens, in order."""
    return [[t for t in range(start, stop) if mask[t]] for start, stop in itertools.pairwise(offsets)]


def gae(rewards, values, mask, offsets, discount, gae_lambda):
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for steps in rows_of(offsets, mask):
        next_value = next_advantage = 0.0
        for t in reversed(steps):
            delta = rewards[t] + discount * next_value - values[t]
            advantages[t] = delta + discount * gae_lambda * next_advantage
            returns[t] = advantages[t] + values[t]
            next_value, next_advantage = values[t], advantages[t]
    return advantages, returns


def whiten(x, mask):
    counted = [v for v, m in zip(x, mask, strict=True) if m]
    if not counted:
        return [0.0] * len(x)
    mean = math.fsum(counted) / len(counted)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in counted) / len(counted))
    return [(v - mean) / max(std, 1e-6) if m else 0.0 for v, m in zip(x, mask, strict=True)]


def normalize(x, others, normalize_std):
    """One number against all numbers of its group, itself among them."""
    if all(other == others[0] for other in others):
        return 0.0
    mean = math.fsum(others) / len(others)
    std = math.sqrt(math.fsum((other - mean) ** 2 for other in others) / len(others))
    return (x - mean) / max(std, 1e-6) if normalize_std else x - mean


def group_relative(scores, groups, normalize_std):
    return [
        normalize(score, [s for s, g in zip(scores, groups, strict=True) if g == group], normalize_std)
        for score, group in zip(scores, groups, strict=True)
    ]


def group_relative_tokens(rewards, mask, offsets, groups, normalize_std, discount):
    advantages = [0.0] * len(rewards)
    rows = rows_of(offsets, mask)
    for b, steps in enumerate(rows):
        peers = [rows[other] for other in range(len(rows)) if groups[other] == groups[b] and rows[other]]
        if len(peers) < 2:
            continue
        group_rewards = [rewards[t] for peer in peers for t in peer]
        total = 0.0
        for t in reversed(steps):
            total = normalize(rewards[t], group_rewards, normalize_std) + discount * total
            advantages[t] = total
    return advantages


def kl(logprob, reference_logprob, estimator):
    d = reference_logprob - logprob
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(min(d, 20.0)) - 1.0 - min(d, 20.0)}[estimator]


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_low, clip_high, dual_clip):
    """(sum, clipped tokens, k3 sum)."""
    total, clipped, moved = 0.0, 0, 0.0
    for new, old, advantage, trained in zip(logprobs, old_logprobs, advantages, mask, strict=True):
        if not trained:
            continue
        ratio = math.exp(max(-20.0, min(20.0, new - old)))
        objective = min(ratio * advantage, max(1 - clip_low, min(1 + clip_high, ratio)) * advantage)
        if dual_clip is not None and advantage < 0:
            objective = max(objective, dual_clip * advantage)
        total -= objective
        clipped += objective != ratio * advantage
        moved += kl(old, new, "k3")
    return total, clipped, moved


def value_loss(values, old_values, returns, mask, clip):
    """(sum, clipped tokens)."""
    total, clipped = 0.0, 0
    for value, old, target, trained in zip(values, old_values, returns, mask, strict=True):
        if not trained:
            continue
        square = (value - target) ** 2
        near = square if clip is None else (old + max(-clip, min(clip, value - old)) - target) ** 2
        total += 0.5 * max(square, near)
        clipped += near > square and abs(value - old) > clip
    return total, clipped
