"""One process of a pool, and the workers that live in it.

Colocated roles are workers of one host: they take turns on its cores, and may share objects by name
(`WorkerContext.shared`), which is how a rollout worker samples from the very weights that the actor
trains.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import platform
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from rallypoint.errors import PeerFailedError, RallyError, WorkerError


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerContext:
    """Who a worker is; the first argument of every worker's constructor."""

    role: str
    rank: int
    num_ranks: int
    num_cpus: int
    device: str
    """"cpu" or "cuda"."""
    shared: dict[str, Any]
    """Objects that the workers of one process leave for each other, by a name both know."""


class WorkerHost:
    """Holds the workers of one process by role and calls their methods."""

    def __init__(self, num_cpus: int, device: str, preload: Sequence[str] = ()) -> None:
        """Import what workers will need while the driver is busy with other things; `preload` names modules."""
        for module in preload:
            importlib.import_module(module)
        self._num_cpus, self._device = num_cpus, device
        self._workers: dict[str, Any] = {}
        self._contexts: dict[str, WorkerContext] = {}
        self._shared: dict[str, Any] = {}

    def create(
        self, role: str, kind: type, rank: int, num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Make the worker of a role.

        Raises:
            WorkerError: its constructor raised.
        """
        context = WorkerContext(role, rank, num_ranks, self._num_cpus, self._device, self._shared)
        self._contexts[role] = context
        try:
            self._workers[role] = kind(context, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is must reach the driver with its traceback
            raise _report(context, "__init__", error) from None

    def call(self, role: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the worker of a role.

        Raises:
            WorkerError: the method raised.
        """
        try:
            return getattr(self._workers[role], method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as above
            raise _report(self._contexts[role], method, error) from None


def _report(context: WorkerContext, call: str, error: Exception) -> WorkerError:
    cause = str(error) if isinstance(error, RallyError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    return WorkerError(
        context.role,
        context.rank,
        call,
        cause,
        trace,
        pid=os.getpid(),
        node=platform.node(),
        is_consequence=isinstance(error, PeerFailedError),
    )
