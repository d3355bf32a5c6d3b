"""How long steps wait for their longest response with rollout.over_sampling; lengths are drawn, nothing is trained.

    python benchmarks/over_sampling.py

A group ends with the longest of its 8 responses, whose lengths are 1000 tokens times e to a normal number, at most
16384. All responses of a step are sampled side by side, a token a step of the engine. Printed is the mean number of
these steps that a training step takes, compared with a run without over-sampling. "at once" is what it would be if
prompts that were overtaken were sampled again in the very next step.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

from rallypoint.sampling.groups import OverSampledGroups, PromptsDone

NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 32, 8, 2000


def group_length(index: int, deviation: float) -> float:
    """Return the tokens of the longest response of a prompt."""
    draws = random.Random(index)
    return max(min(16384.0, 1000 * draws.lognormvariate(0, deviation)) for _ in range(GROUP_SIZE))


def with_steps_of_their_own(num_sampled: int, deviation: float) -> Iterator[float]:
    """Yield the length of each step."""
    groups = OverSampledGroups(num_prompts=NUM_PROMPTS, num_sampled=num_sampled, done=PromptsDone())
    for step in range(NUM_STEPS):
        groups.loaded(step)
        lengths = {index: group_length(index, deviation) for index in groups.admit()}
        for index in sorted(lengths, key=lengths.__getitem__):
            groups.complete(index)
        taken = groups.next() or ()
        groups.abort(taken)
        groups.take(dict.fromkeys(taken, step))
        yield max(lengths[index] for index in taken)


def at_once(num_sampled: int, deviation: float) -> Iterator[float]:
    """Yield the length of each step if overtaken prompts were sampled again in the next one."""
    lengths: list[float] = []
    index = 0
    for _ in range(NUM_STEPS):
        while len(lengths) < num_sampled:
            lengths.append(group_length(index, deviation))
            index += 1
        lengths.sort()
        yield lengths[NUM_PROMPTS - 1]
        lengths = lengths[NUM_PROMPTS:]


def main() -> None:
    print(f"rollout.num_prompts={NUM_PROMPTS}, rollout.group_size={GROUP_SIZE}, {NUM_STEPS} steps")
    print(f"{'deviation':>9} {'over_sampling':>13} {'time':>6} {'at once':>7}")
    for deviation in (0.5, 1.0):
        plain = statistics.mean(at_once(NUM_PROMPTS, deviation))
        for num_sampled in (36, 40, 48, 64):
            own = statistics.mean(with_steps_of_their_own(num_sampled, deviation)) / plain
            again = statistics.mean(at_once(num_sampled, deviation)) / plain
            print(f"{deviation:>9} {num_sampled:>13} {own:>6.2f} {again:>7.2f}")


if __name__ == "__main__":
    main()
