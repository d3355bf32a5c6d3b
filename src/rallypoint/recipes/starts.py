"""The starts of a run: its roles, from the newest state, and again after a loss that no role can make good alone.

Owns: when a run starts again, ends, or goes on with fewer processes. Must not know: which algorithm it runs, what a
step does, or how a role is made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.checkpoint import checkpoint_name
from rallypoint.cluster import ResourcePoolManager, Runtime
from rallypoint.display import Progress
from rallypoint.environments.grader import Grader, open_grader
from rallypoint.errors import DivergedError, NoPlaceError, WorkerDiedError, first_line
from rallypoint.journal import InputsRead, Journal, PoolShrunk
from rallypoint.prepare.machine import pools_of, shrunk
from rallypoint.prepare.material import Material
from rallypoint.recipes.blocking import PlainEpisodes
from rallypoint.recipes.ending import began_of
from rallypoint.recipes.interruption import Observer
from rallypoint.recipes.recipe import Setup, page_of
from rallypoint.recipes.saving import Saver, newest_state
from rallypoint.recipes.steps import Steps
from rallypoint.roles.placement import Placement, SharedFolder, rendezvous_of
from rallypoint.roles.supervisor import Supervisor
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import Record
from rallypoint.run.resume import Beginning
from rallypoint.run.rollouts import RolloutFiles
from rallypoint.sampling.recorded import Recorded

if TYPE_CHECKING:
    from rallypoint.recipes.agents import Agents
    from rallypoint.recipes.endpoint import Endpoint


@dataclasses.dataclass(slots=True)
class Starts:
    """The starts of a run, each with all of its steps that are still to do."""

    beginning: Beginning
    folder: RunFolder
    journal: Journal
    progress: Progress
    files: RolloutFiles
    observer: Observer
    endpoint: Endpoint | None
    grader: Grader
    agents: Agents | PlainEpisodes | None
    recorded: Recorded | None
    runtime: Runtime
    pools: ResourcePoolManager
    material: Material
    recording: asyncio.Task[Record]
    began_s: float
    shared: SharedFolder
    _placement: Placement | None = None
    _is_smaller: bool = False
    """Whether the pools are no longer those that have places."""

    async def run(self) -> bool:
        """Do all steps; return whether they were done.

        Raises:
            WorkerDiedError: a process was lost once too often.
            DivergedError: numbers were not finite, again.
            NoPlaceError: there is no place for the pools, and none for fewer processes.
        """
        first, supervisor, steps = self.beginning.first, Supervisor(self.journal), None
        saved = self.folder.checkpoints / checkpoint_name(first) if first else None
        shutil.rmtree(self.folder.snapshots, ignore_errors=True)  # of a run that was killed
        while True:
            last = None
            try:
                steps = await self._begin(supervisor, saved)
                return await steps.take(first)
            except WorkerDiedError as error:
                if error.is_final:
                    raise
                if steps is not None and steps.is_ending:
                    self.journal.say(f"{first_line(error)}; what is not saved is repeated by --resume")
                    await steps.saver.rescue()
                    return False
                supervisor.lost(error)
            except DivergedError as error:
                last = supervisor.diverged(error)
            except NoPlaceError as error:
                if steps is None:  # nothing was lost: it never had one
                    raise
                await self._shrink(error)
            await self._end()
            first, saved = await asyncio.to_thread(newest_state, self.folder, self.journal.say, last)
            self.journal.append(began_of(dataclasses.replace(self.beginning, first=first), self.folder))

    async def _shrink(self, error: NoPlaceError) -> None:
        """Go on with fewer processes, as nodes were lost and none came in their place.

        Raises:
            NoPlaceError: the given one, if the roles cannot do with fewer.
        """
        was, smaller = self.beginning.config, shrunk(self.beginning.config, await self.runtime.nodes())
        if smaller is None:
            raise error
        for pool, now in smaller.cluster.pools.items():
            if (before := was.cluster.pools[pool]) != now:
                self.journal.append(PoolShrunk(pool=pool, was=before, now=now))
                self.journal.say(
                    f"{first_line(error)}; pool {pool!r} goes on with {list(now)} of {list(before)} processes"
                )
        self.beginning = dataclasses.replace(self.beginning, config=smaller)
        self._is_smaller = True

    async def _begin(self, supervisor: Supervisor, saved: Path | None) -> Steps:
        self.journal.say("starting the roles", level="wait")
        config, material = self.beginning.config, self.material
        where = rendezvous_of(config, self.runtime)
        self._placement = Placement(
            config, self.runtime, self.pools, material.model_path, self.shared, where, supervisor
        )
        setup = Setup(self._placement, material, self.grader, self.journal, self.agents, self.recorded)
        recipe = await page_of(config).create(setup)
        record = await self.recording
        self.journal.append(InputsRead(files=record.inputs))
        saver = Saver(setup, recipe, record, self.folder, self.files)
        if saved is not None:
            await saver.restore(saved)
        return Steps(setup, recipe, saver, self.endpoint, self.progress, self.observer, self.began_s)

    async def _end(self) -> None:
        """End all roles, whatever they do."""
        if self.endpoint is not None:
            await self.endpoint.reopen()
        assert self._placement is not None, "it began"
        await self._placement.close()
        if self._is_smaller:
            self.pools, self._is_smaller = pools_of(self.beginning.config), False
            await self.runtime.give_back_places()
        self.close()
        self.grader = open_grader(self.beginning.config.reward, self.folder.logs / "reward.log")
        self.began_s = time.monotonic()

    def close(self) -> None:
        """End the reward functions of the newest start, and leave no place to meet behind."""
        self.grader.close()
        if self._placement is not None and self._placement.rendezvous is not None:
            self._placement.rendezvous.close()
