"""Whether a run learns at all: the reward of its last steps compared with that of its first.

A run that does not learn looks healthy in every other number. A rise counts if it is neither chance nor negligible: if
it exceeds 4 standard errors of the difference of both means, and 0.15 of the deviation of single rewards. With a
learning rate of 1e-6 the digits recipe rose by 6 standard errors in 150 steps, but by at most a fourteenth of that
deviation; with its own rate it passes both.

>>> flat, rising = RewardTrend(), RewardTrend()
>>> for step in range(100):
...     flat.add({"reward/mean": 0.1 + 0.01 * (step % 2), "reward/std": 0.3})
...     rising.add({"reward/mean": 0.1 + 0.005 * step, "reward/std": 0.3})
>>> flat.num_flat_steps, rising.num_flat_steps
(100, 0)
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.observability.numbers import finite_mean, number

REWARD, SPREAD = "reward/mean", "reward/std"
FLAT_STEPS = "reward/flat_steps"
"""The name under which `health` finds it."""
WINDOW = 20
"""Steps in each mean: enough to average out noise, few enough that a slow rise is not in both."""
STANDARD_ERRORS, PART_OF_SPREAD = 4.0, 0.15


class RewardTrend:
    """The reward since the beginning of the run, in memory that does not grow."""

    def __init__(self, rewards: Iterable[float] = (), *, num_warmup_steps: int = 0) -> None:
        self._num_warmup_steps = num_warmup_steps
        self._num_steps = 0
        self._first: list[float] = []
        self._last: collections.deque[float] = collections.deque(maxlen=WINDOW)
        self._spread_sum, self._num_spreads = 0.0, 0
        self._has_learned = False
        for reward in rewards:
            self.add({REWARD: reward})

    def add(self, scalars: Mapping[str, float]) -> None:
        """Add a step; one without a reward is skipped."""
        self._num_steps += 1
        reward, spread = scalars.get(REWARD, math.nan), scalars.get(SPREAD, math.nan)
        if math.isfinite(spread):
            self._spread_sum, self._num_spreads = self._spread_sum + spread, self._num_spreads + 1
        if not math.isfinite(reward):
            return
        if len(self._first) < WINDOW:
            self._first.append(reward)
            return
        self._last.append(reward)
        if len(self._last) == WINDOW and self.rise > max(STANDARD_ERRORS * self._error, PART_OF_SPREAD * self.spread):
            self._has_learned = True

    @property
    def num_flat_steps(self) -> int:
        """Steps since the warmup without a rise; 0 once there was one, and where nothing is rewarded."""
        return 0 if self._has_learned or not self._first else max(0, self._num_steps - self._num_warmup_steps)

    @property
    def rise(self) -> float:
        """The reward of the last steps minus that of the first."""
        return finite_mean(list(self._last)) - finite_mean(self._first)

    @property
    def spread(self) -> float:
        """Mean deviation of the rewards of a step; 0 if it is not known."""
        return self._spread_sum / self._num_spreads if self._num_spreads else 0.0

    @property
    def _error(self) -> float:
        """Standard error of the difference of two windows; from neighbours, so that a trend does not count as noise."""
        return error_of_means(self._first, WINDOW)

    def __str__(self) -> str:
        return (
            f"not learning: in {self._num_steps} steps the reward rose by {number(self.rise)}, where single rewards "
            f"differ by {number(self.spread)}. Usual causes: actor.optimizer.lr is too low (1e-6 is for models that "
            "can nearly do it; random weights want about 1e-3), rewards that are all equal in each group, prompts that "
            "are far too hard, a reward.function that looks for a form that the model never writes (see rollouts/)"
        )


def jump(values: Sequence[float]) -> int:
    """Return the place that parts values into two of which each is nearest to its mean.

    >>> jump([1.0, 1.0, 1.1, 1.0, 5.0, 5.0, 5.1])
    4
    """
    sums = list(itertools.accumulate(values))
    places = range(3, len(values) - 2)  # three on either side: one outlier is not a jump
    return max(places, key=lambda at: sums[at - 1] ** 2 / at + (sums[-1] - sums[at - 1]) ** 2 / (len(values) - at))


def error_of_means(values: Sequence[float], width: int) -> float:
    """Return the standard error of the difference of two means of that many, from neighbours."""
    gaps = [(b - a) ** 2 / 2 for a, b in itertools.pairwise(values)]
    return math.sqrt(statistics.fmean(gaps) * 2 / width) if gaps else 0.0
