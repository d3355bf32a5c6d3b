"""Which example is admitted when: a pure function of the admission's number.

Owns: the order of the prompts. Must not know: what a prompt is. There is no state to save: a run that
has admitted 130 prompts goes on with `example_index(130)`.

Two epochs over three examples:

>>> stream = PromptStream(num_examples=3, seed=0)
>>> [stream.example_index(admission) for admission in range(6)]
[2, 1, 0, 1, 2, 0]
>>> stream.epoch(3)
1
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray


@dataclasses.dataclass(frozen=True, slots=True)
class PromptStream:
    """Every example exactly once an epoch, each epoch in an order of its own."""

    num_examples: int
    seed: int
    shuffle: bool = True
    """False: every epoch goes through the examples in the order of the file."""

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
        return int(_permutation(self.num_examples, self.seed, epoch)[place]) if self.shuffle else place


# Two epochs are in use at once where a step straddles their border.
@functools.lru_cache(maxsize=4)
def _permutation(num_examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorted random keys and not `Generator.permutation`: numpy promises that the raw bits stay the same in
    # all its versions, and promises nothing for the methods built on them.
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_examples)
    return np.argsort(keys, kind="stable")
