"""What runs that nobody ran have measured, in journals."""

from collections.abc import Callable, Mapping
from pathlib import Path

from rallypoint.journal import Journal, RunBegan, StepDone


class Measured(Journal):
    """The journal of a start, which takes numbers by their step."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(path, clock=clock)
        self.append(RunBegan(first=0, config={}, software={}, machine=""))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append(StepDone(step=step, metrics=metrics, digests={}))
