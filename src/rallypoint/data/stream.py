"""Which example is admitted when: a pure function of the admission's number.

Owns: the order of the prompts, and of data sets in a mixture. Must not know: what a prompt is. There is no state to
save: a run that has admitted 130 prompts goes on with `example_index(130)`.

Two epochs over three examples:

>>> stream = PromptStream(num_examples=3, seed=0)
>>> [stream.example_index(admission) for admission in range(6)]
[2, 1, 0, 1, 2, 0]
>>> stream.epoch(3)
1

A mixture of three examples and two, of which the two have a quarter of the admissions:

>>> mixture = Mixture(parts=(0, 0, 0, 1, 1), weights=(3.0, 1.0), seed=0)
>>> [mixture.example_index(admission) for admission in range(8)]
[4, 2, 1, 0, 3, 1, 2, 0]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class PromptStream:
    """Every example exactly once an epoch, each epoch in an order of its own."""

    num_examples: int
    seed: int
    shuffle: bool = True
    """False: every epoch goes through the examples in the order of the file."""
    part: int = 0
    """Number of this stream among those of a run: each has orders of its own."""

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise ValueError(f"num_examples: expected at least 1, found {self.num_examples}")
        if self.seed < 0:
            raise ValueError(f"seed: expected 0 or more, found {self.seed}")

    def epoch(self, admission: int) -> int:
        """Return how often all the examples were admitted before this admission."""
        if admission < 0:
            raise ValueError(f"admission: expected 0 or more, found {admission}")
        return admission // self.num_examples

    def example_index(self, admission: int) -> int:
        """Return the example that the admission with this number (from 0) admits."""
        epoch = self.epoch(admission)
        place = admission % self.num_examples
        return int(_permutation(self.num_examples, self.seed, epoch, self.part)[place]) if self.shuffle else place


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Data sets with weights: at any moment each has its share of the admissions so far, within one for each set."""

    parts: Sequence[int]
    """Place of the data set of each example; those of one set need not be neighbours."""
    weights: Sequence[float]
    """Weights of the data sets, in any unit."""
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if missing := set(range(len(self.weights))) - set(self.parts):
            raise ValueError(f"parts: expected examples of all {len(self.weights)} data sets, found none of {missing}")

    def example_index(self, admission: int) -> int:
        """Return the example that the admission with this number (from 0) admits."""
        part, number = share_of(self.weights, admission)
        members = self._members[part]
        stream = PromptStream(len(members), self.seed, self.shuffle, part)
        return int(members[stream.example_index(number)])

    @functools.cached_property
    def _members(self) -> list[NDArray[np.int64]]:
        """The examples of each data set."""
        import numpy as np

        parts = np.asarray(self.parts)
        return [np.flatnonzero(parts == part) for part in range(len(self.weights))]


def share_of(weights: Sequence[float], admission: int) -> tuple[int, int]:
    """Return the data set of an admission, and how many of that set were admitted before.

    The first set takes its share of all admissions, evenly spread, the second its share of what is left, and so on.
    Fractions are exact: a rounded share would be off by whole prompts after enough of them.
    """
    left, number = [Fraction(weight) for weight in weights], admission
    for part, weight in enumerate(left[:-1]):
        share = weight / sum(left[part:])
        taken = math.floor(share * number)
        if math.floor(share * (number + 1)) > taken:
            return part, taken
        number -= taken
    return len(left) - 1, number


# Two epochs are in use at once where a step straddles their border, of as many sets as there are.
@functools.lru_cache(maxsize=64)
def _permutation(num_examples: int, seed: int, epoch: int, part: int) -> NDArray[np.int64]:
    return permutation(num_examples, [seed, epoch] if part == 0 else [seed, epoch, part])


def permutation(num: int, entropy: Sequence[int]) -> NDArray[np.int64]:
    """Return an order of so many things that follows from some numbers."""
    # Sorted random keys and not `Generator.permutation`: numpy promises that the raw bits stay the same in
    # all its versions, and promises nothing for the methods built on them.
    import numpy as np

    keys = np.random.PCG64(np.random.SeedSequence(list(entropy))).random_raw(num)
    return np.argsort(keys, kind="stable")
