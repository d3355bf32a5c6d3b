"""Turns that roles take on the process they share: awake while they work, and measured."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from rallypoint.cluster import WorkerContext, collect
from rallypoint.cpu.pages import give_back
from rallypoint.engine import TrainingEngine
from rallypoint.observability.memory import MemoryMeter, resident_bytes
from rallypoint.types import Metrics

TakerT = TypeVar("TakerT", bound="TurnTaker")
Params = ParamSpec("Params")
ResultT = TypeVar("ResultT")

_BASELINE, _NEIGHBOUR = "memory/baseline", "memory/neighbour"


def make_room_for_neighbour(context: WorkerContext) -> None:
    """Have the roles of this process leave its accelerator's memory to another process whenever they sleep.

    Without a neighbour torch's allocator keeps what is freed, for the next of them.
    """
    context.shared[_NEIGHBOUR] = True
    _let_go(context)


def _let_go(context: WorkerContext) -> None:
    if context.device != "cpu" and _NEIGHBOUR in context.shared:
        torch.accelerator.empty_cache()


class Turns:
    """When a role holds the memory of its process, and how much."""

    def __init__(self, context: WorkerContext) -> None:
        """Begin before the role loads anything: what is there now counts for none of the roles of the process."""
        self._context, self._device = context, torch.device(context.device)
        baseline = context.shared.setdefault(_BASELINE, resident_bytes(self._device))
        self._meter = MemoryMeter(self._device, baseline)
        self._sleeper: TrainingEngine[Any] | None = None

    def sleep_between(self, engine: TrainingEngine[Any]) -> None:
        """Put an engine to sleep now, and whenever a turn is over."""
        engine.sleep()
        self._sleeper = engine
        _let_go(self._context)

    @contextlib.contextmanager
    def turn(self, *, to_train: bool = False) -> Iterator[None]:
        """Hold the process for a call; what the optimizer remembers wakes `to_train` only."""
        with self._meter.measured():
            if self._sleeper is not None:
                self._sleeper.wake(to_train=to_train)
            try:
                yield
            finally:
                if self._sleeper is not None:
                    self._sleeper.sleep()
        give_back(self._device)
        _let_go(self._context)

    def metrics(self, beside_bytes: int = 0) -> Metrics:
        """Return the peak of the turns since this was last asked.

        Args:
            beside_bytes: private memory of another process that works for the role; on a CPU it is the role's, too.
        """
        return self._meter.take(beside_bytes if self._device.type == "cpu" else 0)


class TurnTaker:
    """A worker whose memory is measured."""

    turns: Turns

    @collect
    def memory(self) -> Metrics:
        """Return `memory_gib`, the peak of the calls since this was last asked."""
        return self.turns.metrics()


def in_turn(
    *, to_train: bool = False
) -> Callable[[Callable[Concatenate[TakerT, Params], ResultT]], Callable[Concatenate[TakerT, Params], ResultT]]:
    """Run a worker's method as a turn of its role."""

    def decorate(
        method: Callable[Concatenate[TakerT, Params], ResultT],
    ) -> Callable[Concatenate[TakerT, Params], ResultT]:
        @functools.wraps(method)
        def run(self: TakerT, /, *args: Params.args, **kwargs: Params.kwargs) -> ResultT:
            with self.turns.turn(to_train=to_train):
                return method(self, *args, **kwargs)

        return run

    return decorate
