"""What the record of a run costs: events that are appended, and digests of weights, batches and responses.

    python benchmarks/digests.py digits --steps 20
    python benchmarks/digests.py digits-grpo model.create.hidden_size=320 model.create.num_layers=6 \
        model.create.intermediate_size=1280 model.create.num_heads=10 model.create.num_key_value_heads=10  # 10M
    python benchmarks/digests.py digits-grpo "cluster.pools={main: [1], side: [1]}" rollout.placement.pool=side

Trains a recipe in this process, and measures every call that records something in the step which it is part of. Both
are processor seconds, which other programs on the machine hardly change; figures are medians over steps, without the
first two. Weights are loaded, and have a digest there, only where the roles do not share them, as in the last line.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import yaml

import rallypoint
from rallypoint.journal import Journal, StepDone
from rallypoint.recipes import steps
from rallypoint.roles import actor, connections
from rallypoint.sampling import in_flight

NUM_WARMUP_STEPS = 2
RECORDED: tuple[tuple[str, Any, str], ...] = (
    ("events, appended", Journal, "append"),
    ("digest of published weights", actor, "digested"),
    ("digest of loaded weights", connections, "digested"),
    ("digests of the batch", steps, "digests_of"),
    ("digests of responses", in_flight, "turns_of"),
)
"""What is recorded, and where the function that does it is called."""


class Stopwatch:
    """Processor seconds of each kind of record, step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, collections.Counter[str]]] = []
        """Seconds of each step, and those of its records."""
        self._now, self._began = collections.Counter[str](), time.process_time()

    def wrap(self, what: str, owner: Any, name: str) -> None:
        """Time the calls of a function from here on."""
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            found = function(*arguments, **options)
            found = list(found) if isinstance(found, Iterator) else found
            self._now[what] += time.thread_time() - began
            if arguments and isinstance(arguments[-1], StepDone):
                self.steps.append(((now := time.process_time()) - self._began, self._now))
                self._now, self._began = collections.Counter[str](), now
            return found

        setattr(owner, name, timed)


def show(stopwatch: Stopwatch) -> None:
    """Print what the record of a step takes of it."""
    counted = stopwatch.steps[NUM_WARMUP_STEPS:]
    step_s = statistics.median(seconds for seconds, _ in counted)
    print(f"a step: {1e3 * step_s:.0f} ms of the processor, the median of {len(counted)}")
    for what in (*(what for what, *_ in RECORDED), "all of it"):
        took = [sum(parts.values()) if what == "all of it" else parts[what] for _, parts in counted]
        shares = [one / seconds for one, (seconds, _) in zip(took, counted, strict=True)]
        print(f"{what:28} {1e3 * statistics.median(took):8.2f} ms {statistics.median(shares):7.2%}")


def main() -> None:
    """Train, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="key=value of the config")
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    keys = {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in asked.overrides)}
    config = {"cluster.runtime": "inline", "cluster.pools": {"main": [1]}, "validation.every_steps": 10**6} | keys
    stopwatch = Stopwatch()
    for what, owner, name in RECORDED:
        stopwatch.wrap(what, owner, name)
    with tempfile.TemporaryDirectory() as folder:
        rallypoint.train(asked.recipe, config=config, num_steps=asked.steps, runs_dir=folder, display=False)
    show(stopwatch)


if __name__ == "__main__":
    main()
