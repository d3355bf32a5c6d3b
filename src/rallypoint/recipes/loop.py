"""The frame of every recipe: begin, resume, stop; `steps.py` starts the roles and does the steps.

Owns: what a run needs in addition to its roles. Must not know: which algorithm it runs; the recipe's own page says what
a step does.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint.cluster import ResourcePoolManager, Runtime, open_runtime
from rallypoint.config import LoadedConfig, RunConfig
from rallypoint.config.sections.frame import TrackingConfig
from rallypoint.cpu.threads import few_threads
from rallypoint.display import Progress
from rallypoint.engine.determinism import process_as_found
from rallypoint.environments.agents import is_agent
from rallypoint.environments.blocking import is_blocking
from rallypoint.environments.grader import open_grader
from rallypoint.errors import WorkerDiedError
from rallypoint.failpoints import arming
from rallypoint.journal import NUMBERS_OF, Journal, RunEnded, Said
from rallypoint.prepare.machine import check_nodes
from rallypoint.prepare.material import Inputs, Material, prepare, read_inputs
from rallypoint.prepare.pools import pools_of
from rallypoint.recipes.blocking import PlainEpisodes
from rallypoint.recipes.ending import Endings, began_of, draw, open_readers, recorded_end
from rallypoint.recipes.in_processes import num_processes_of
from rallypoint.recipes.interruption import Observer, acknowledged
from rallypoint.recipes.steps import Starts
from rallypoint.roles.placement import SharedFolder, module_of
from rallypoint.run.folder import RunFolder, anchored, launched, write_config
from rallypoint.run.mirror import mirror_of
from rallypoint.run.resume import Beginning
from rallypoint.run.rollouts import RolloutFiles
from rallypoint.sampling.recorded import Recorded

if TYPE_CHECKING:
    from rallypoint.recipes.agents import Agents
    from rallypoint.recipes.endpoint import Endpoint

ResultT = TypeVar("ResultT")


def train(
    loaded: LoadedConfig,
    folder: RunFolder,
    progress: Progress,
    *,
    resume: bool,
    from_step: int | None = None,
    found: Inputs | None = None,
    observer: Observer | None = None,
    recorded: Recorded | None = None,
) -> bool:
    """Run a recipe to its end, or until it is interrupted.

    Args:
        loaded: the checked config.
        folder: of the run.
        progress: display, entered already.
        resume: whether to continue from the newest checkpoint, if there is one.
        from_step: step of the checkpoint to continue from with `resume`; 0 starts anew, None takes the newest.
        found: prompts, tokenizer and limits of the models; None reads them before anything is started.
        observer: hears of each step, and may end the run.
        recorded: the run whose rollouts are taken instead of sampling.

    Returns:
        True when all steps are done, False when the run was interrupted (its state is saved).
    """
    gc.collect()  # an earlier run of this interpreter may have left workers, and device memory, in cycles
    with folder.locked(), process_as_found(), few_threads(), Journal(folder.journal) as journal:
        journal.subscribe(progress.take)
        config = anchored(loaded.config)
        if config.trainer.num_epochs is not None:
            found = found or read_inputs(config)
            config = found.settled(config)
            write_config(folder, config)
        beginning, mirror = Beginning(0, config), mirror_of(folder, config, journal.say)
        if resume:
            journal.say("comparing the checkpoint with its manifest", level="wait")
            beginning = Beginning.resumed(folder, config, from_step)
            write_config(folder, config)
            journal.append(launched(loaded, folder.state().launched.overrides))
            if beginning.adopted is not None:
                journal.append(beginning.adopted)
        began = began_of(beginning, folder)
        if beginning.first == config.trainer.num_steps:
            journal.tell(began)
            journal.tell(Said(text=f"all {beginning.first} steps are done; for more of them raise trainer.num_steps"))
            return True
        is_inline, num_steps = config.cluster.runtime == "inline", config.trainer.num_steps
        ranks = {role: config.num_ranks(role) for role in config.roles}
        failing = arming(folder.path, NUMBERS_OF, ranks, num_steps=num_steps, inline=is_inline, say=journal.say)
        with failing, recorded_end(journal), open_readers(beginning, folder, journal, mirror) as trackers:
            journal.append(began)
            work = _train(beginning, folder, journal, progress, found, observer or Observer(), recorded)
            is_done = asyncio.run(acknowledged(work, journal.say))
            journal.append(RunEnded(how="finished" if is_done else "stopped"))
            if trackers.are_any and (drawn := draw(folder)[0]):
                trackers.picture(folder.state().step, drawn)
            return is_done


async def _train(
    beginning: Beginning,
    folder: RunFolder,
    journal: Journal,
    progress: Progress,
    found: Inputs | None,
    observer: Observer,
    recorded: Recorded | None,
) -> bool:
    config, first, say = beginning.config, beginning.first, journal.say
    began_s, rollouts_gib = time.monotonic(), (config.tracking or TrackingConfig()).rollouts_gib
    async with Endings(say) as at_end:
        files = RolloutFiles(folder.path, max_gib=rollouts_gib, first=first, journal=journal)
        at_end.add(files.close)
        grader = open_grader(config.reward, folder.logs / "reward.log")
        at_end.add(grader.close)
        if (endpoint := _endpoint(config, folder, journal)) is not None:
            at_end.add(endpoint.close)
        for note in beginning.notes:
            say(note)
        if found is None:
            say("reading model and data", level="wait")
            found = await asyncio.to_thread(read_inputs, config)
        say(f"starting {config.cluster.runtime}", level="wait")
        # Two things that take seconds each and do not need each other.
        preparing = _begun(asyncio.to_thread(prepare, config, folder, found, say))
        await asyncio.sleep(0)
        runtime = _open_runtime(config, folder, say)
        at_end.add(runtime.shutdown, after=endpoint and endpoint.close)
        shutil.rmtree(folder.published, ignore_errors=True)  # of a run that was killed
        at_end.add(lambda: shutil.rmtree(folder.published, ignore_errors=True), after=runtime.shutdown)
        pools = pools_of(config)
        material = await _open_and_prepare(_open(pools, runtime, config, say), preparing)
        recording = _begun(asyncio.to_thread(beginning.record, folder))
        agents = _agents(config, folder, material)
        if agents is not None:
            at_end.add(agents.close)
            await agents.open()
        gc.freeze()  # or a full collection, each few steps, takes a quarter of a second for modules alone
        at_end.add(gc.unfreeze)
        starts = Starts(
            beginning,
            folder,
            journal,
            progress,
            files,
            observer,
            endpoint,
            grader,
            agents,
            recorded,
            runtime,
            pools,
            material,
            recording,
            began_s,
            SharedFolder.marked(folder.path),
        )
        at_end.add(starts.close, after=runtime.shutdown)  # workers renew their leases there
        return await starts.run()


def _open_runtime(config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> Runtime:
    return open_runtime(
        config.cluster.runtime,
        log_folder=folder.logs,
        address=config.cluster.address,
        namespace=f"rallypoint-{folder.path.name}-{uuid.uuid4().hex[:8]}",
        object_store_gib=config.cluster.object_store_gib,
        placement_timeout_s=config.cluster.placement_timeout_s,
        silence_s=config.cluster.heartbeat_timeout_s,
        preload=tuple(map(module_of, config.roles)),
        forks=config.cluster.device == "cpu",
        say=say,
    )


def _endpoint(config: RunConfig, folder: RunFolder, journal: Journal) -> Endpoint | None:
    """Take the port of the run's endpoint, if it has one; only then the server is imported."""
    if config.rollout.serve is None:
        return None
    from rallypoint.recipes.endpoint import Endpoint

    return Endpoint(config.rollout.serve, folder, journal)


def _agents(config: RunConfig, folder: RunFolder, material: Material) -> Agents | PlainEpisodes | None:
    """Take what the run's agents or plain episodes need, if it has some; only for agents the server is imported.

    What they print is in logs/.
    """
    spec, num = config.rollout.own_episode, num_processes_of(config)
    if spec is not None and is_blocking(spec):
        return PlainEpisodes(spec, material.tokenizer, log=folder.logs / "episodes.log", num_processes=num)
    if spec is None or not is_agent(spec):
        return None
    from rallypoint.recipes.agents import Agents

    return Agents(
        spec,
        material.tokenizer,
        material.stop_tokens,
        config.max_row_tokens,
        say=folder.try_log,
        log=folder.logs / "agents.log",
        num_processes=num,
        strips_thinking=config.rollout.thinking == "strip",
    )


async def _open(pools: ResourcePoolManager, runtime: Runtime, config: RunConfig, say: Callable[[str], None]) -> None:
    """Start the processes of all pools, on nodes that were compared with what processes hold."""
    if config.cluster.address is not None:
        for note in check_nodes(config, await runtime.nodes()):
            say(note)
    await pools.open(runtime)


async def _open_and_prepare(opening: Coroutine[None, None, None], preparing: asyncio.Task[Material]) -> Material:
    """Wait for both; bad data is reported before the cluster has a place for the run."""
    opened = asyncio.create_task(opening)
    try:
        with suppress(WorkerDiedError):  # its roles start another process
            await asyncio.gather(preparing, opened)
        return await preparing
    finally:
        opened.cancel()
        await asyncio.gather(opened, return_exceptions=True)


def _begun(work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """Begin work whose error asyncio does not log if it comes after another error, so that nobody awaits it."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
