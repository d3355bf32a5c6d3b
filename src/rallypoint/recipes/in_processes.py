"""Rollouts that functions of the user's make in processes of their own, which end with the run.

Owns: the processes, and which time of them is a rollout's own. Must not know: how such a function samples.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic

from rallypoint.config import RunConfig
from rallypoint.environments.failures import EpisodeFailed
from rallypoint.environments.in_process import Returned, RolloutCallT, RolloutTask
from rallypoint.environments.pool import MAX_WAITING, Pool
from rallypoint.errors import ConfigError, RewardError
from rallypoint.sampling.client import EpisodeClient


def num_processes_of(config: RunConfig) -> int | None:
    """Return how many processes there are for functions of a run; None: as many as they make use of.

    In a run that is repeated a turn may be due only after one of another rollout, so all must be under way together.
    """
    return min(config.max_groups * config.rollout.group_size, MAX_WAITING) if config.rollout.schedule else None


class InProcesses(Generic[RolloutCallT]):
    """Calls a function for each rollout, in a process."""

    def __init__(self, task: RolloutTask[RolloutCallT], log: Path | None, num_processes: int | None = None) -> None:
        """Start nothing yet.

        Args:
            task: the function.
            log: receives what it prints; None for standard error.
            num_processes: see `num_processes_of`.
        """
        self._spec = task.spec
        self._pool = Pool(task, num_processes=num_processes, log=log, on_begin=self._hear)
        self._begun: dict[str, Callable[[], object]] = {}
        """Called when a process has begun to work on a rollout, by its key."""

    async def load(self) -> None:
        """Import the function in a first process.

        Raises:
            ConfigError: it cannot be imported, or is none.
        """
        try:
            await asyncio.to_thread(self._pool.load)
        except RewardError as error:
            raise ConfigError((f"rollout.episode={self._spec!r}: {error}",)) from None

    async def run(self, client: EpisodeClient, call: RolloutCallT) -> Returned | EpisodeFailed:
        """Call the function for one rollout; its process is ended if this is cancelled."""
        assert client.own_time is not None, "it has just begun"
        loop, has_begun = asyncio.get_running_loop(), asyncio.Event()
        self._begun[call.key] = functools.partial(loop.call_soon_threadsafe, has_begun.set)
        running = asyncio.wrap_future(self._pool.begin(call))
        try:
            with client.own_time.paused():  # until there is a process for it
                begun = asyncio.create_task(has_begun.wait())
                await asyncio.wait({running, begun}, return_when=asyncio.FIRST_COMPLETED)
                begun.cancel()
            return await running
        finally:
            self._begun.pop(call.key, None)
            running.cancel()  # which ends the process, if it still works

    def close(self) -> None:
        """End all processes."""
        self._pool.close()

    def _hear(self, calls: Sequence[RolloutCallT]) -> None:
        for call in calls:
            if (begun := self._begun.get(call.key)) is not None:
                begun()
