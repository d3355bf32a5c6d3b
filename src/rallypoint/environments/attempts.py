r"""Several attempts at each prompt of a validation: pass@k, best@k, majority@n and mean@n, by data source.

Owns: what these mean. Must not know: how attempts were sampled. All are exact: expectations over which of n attempts
one would have had, not draws. Attempts without a score do not count; a prompt with fewer than k is left out of @k.

    mean@n      mean score of the n attempts
    pass@k      chance that one of k attempts is right: 1 - C(n - c, k) / C(n, k) with c right ones (arXiv 2107.03374)
    best@k      expected best score of k attempts; of scores 0 and 1 it is pass@k
    majority@n  score of the answer that most attempts give; of several such answers the mean

Four attempts, of which one is right:

>>> [round(pass_at(4, 1, k), 3) for k in (1, 2, 4)]
[0.25, 0.5, 1.0]
>>> [round(best_at([0.2, 1.0, 0.0, 0.2], k), 3) for k in (1, 2, 4)]
[0.35, 0.6, 1.0]
>>> majority([1.0, 0.0, 1.0, 0.0, 0.0], ["7", "8", "7", "8", "9"])
0.5
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rallypoint.types import Mean, Metric, Metrics

_RIGHT, _ROUNDING = 1.0, 1e-6
"""Score of a right response, as shipped rewards give it, if the reward does not return `acc`; it may be a sum."""
_ANSWERS = (re.compile(r"####\s*([^\n]+)"), re.compile(r"<answer>(.*?)</answer>", re.DOTALL))


class Attempt(NamedTuple):
    """One response to a prompt that has a score."""

    source: str
    """`data_source` of the prompt."""
    prompt: int
    """Index of the prompt."""
    score: float
    acc: float | None
    """Whether it is right (0 or 1) by what the reward returned as `acc`; None if it did not."""
    answer: str
    """What is voted on."""

    @property
    def is_right(self) -> bool:
        """Whether it is right: by `acc`, or else by a full score."""
        return self.score >= _RIGHT - _ROUNDING if self.acc is None else self.acc >= 0.5

    @property
    def is_judged(self) -> bool:
        """Whether it is known if it is right: 2 may be a little of 10, or more than enough of 1."""
        return self.acc is not None or self.score <= _RIGHT + _ROUNDING


def pass_at(num: int, num_right: int, k: int) -> float:
    """Return the chance that one of k of these attempts is right, without bias (arXiv 2107.03374, equation 1)."""
    return 1 - math.comb(num - num_right, k) / math.comb(num, k)


def best_at(scores: Sequence[float], k: int) -> float:
    """Return the expected best score of k of these attempts: the mean of the best over all choices of k."""
    ways = (math.comb(place, k - 1) for place in range(len(scores)))  # in which others of the k are not better
    return math.fsum(way * score for way, score in zip(ways, sorted(scores), strict=True)) / math.comb(len(scores), k)


def majority(scores: Sequence[float], answers: Sequence[str]) -> float:
    """Return the score of the answer that most attempts give; where several do, the mean of theirs."""
    votes: dict[str, list[float]] = {}
    for score, answer in zip(scores, answers, strict=True):
        votes.setdefault(answer, []).append(score)
    most = max(map(len, votes.values()))
    chosen = [score for found in votes.values() if len(found) == most for score in found]
    return math.fsum(chosen) / len(chosen)


def answer_in(text: str) -> str:
    r"""Return the answer that a response ends with: in its last `\boxed{}`, `####` or `<answer>`; else all of it.

    >>> answer_in(r"so \boxed{\frac{1}{2}}."), answer_in("6*7 is\n#### 42"), answer_in(" Paris ")
    ('\\frac{1}{2}', '42', 'Paris')
    """
    _, box, inside = text.rpartition("\\boxed{")
    if box:
        depth = 1
        for place, character in enumerate(inside):
            depth += (character == "{") - (character == "}")
            if not depth:
                return inside[:place].strip()
    found = next((all_of[-1] for pattern in _ANSWERS if (all_of := pattern.findall(text))), text)
    return str(found).strip()


def measure_attempts(attempts: Sequence[Attempt], num_samples: int) -> Metrics:
    """Return `validation/mean@8/SOURCE` and the others; one attempt each has a mean only.

    Args:
        attempts: those that have a score, in any order.
        num_samples: n, attempts at each prompt that were sampled.
    """
    by_source: dict[str, dict[int, list[Attempt]]] = {}
    for one in attempts:
        by_source.setdefault(one.source, {}).setdefault(one.prompt, []).append(one)
    found: dict[str, Metric] = {}
    for source, prompts in by_source.items():
        for name, values in _values(list(prompts.values()), num_samples).items():
            if values:
                found[f"validation/{name}/{source}"] = Mean(math.fsum(values), len(values))
    return Metrics(found)


def _values(prompts: Sequence[Sequence[Attempt]], num_samples: int) -> Mapping[str, list[float]]:
    """Return one value for each prompt, by the name of the metric."""
    scores = [[one.score for one in group] for group in prompts]
    values = {f"mean@{num_samples}": [math.fsum(group) / len(group) for group in scores]}
    if num_samples == 1:
        return values
    pairs = [(group, [one.answer for one in of_prompt]) for group, of_prompt in zip(scores, prompts, strict=True)]
    values[f"majority@{num_samples}"] = [majority(group, answers) for group, answers in pairs]
    are_judged = all(one.is_judged for group in prompts for one in group)
    for k in sizes(num_samples):
        right = [(len(group), sum(one.is_right for one in group)) for group in prompts if len(group) >= k]
        values[f"pass@{k}"] = [pass_at(num, num_right, k) for num, num_right in right] if are_judged else []
        if k > 1:
            values[f"best@{k}"] = [best_at(group, k) for group in scores if len(group) >= k]
    return values


def sizes(num_samples: int) -> list[int]:
    """Return the k of pass@k: powers of two up to n, and n.

    >>> sizes(8), sizes(6)
    ([1, 2, 4, 8], [1, 2, 4, 6])
    """
    return [*(2**power for power in range(num_samples.bit_length()) if 2**power < num_samples), num_samples]
