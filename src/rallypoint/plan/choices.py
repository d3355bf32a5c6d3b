"""Values for automatic keys that nobody set, from the numbers of a machine.

Owns: how many processes share the cores of a machine, and what layers keep on an accelerator. Must not know: how a
machine is asked. Invariant: a function of its arguments, so that the dry run shows what a run gets.

Several processes with a core each are as fast as one process with several cores, or faster, wherever models are small
enough for CPUs (`benchmarks/scaling.py`); but each holds weights and optimizer of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from rallypoint.config import Activations, RunConfig
from rallypoint.plan.run_plan import make_plan

SAFE = 0.8
"""Share of a device's memory that a plan may fill; plans are estimates."""
_SAFE_ON_CPU = 0.6
"""Likewise, of a machine on which other programs run."""
_PROCESS_BYTES = 2**29
"""Python, torch, transformers and Ray in a process, before it has a model (benchmarks/README.md, "rest")."""
_MOST_PROCESSES = 16
"""More are hardly faster: each start and each sum of gradients takes longer."""
_LEAST_ROWS = 2
"""Rows of a mini-batch that a process should have."""
_GIB = 2**30


def choose(
    config: RunConfig,
    left_open: tuple[str, ...],
    *,
    num_cores: int,
    memory_bytes: int,
    device_bytes: Mapping[str, int],
) -> dict[str, object]:
    """Return values for those of the automatic keys that a machine has something to say on.

    Args:
        config: with its defaults.
        left_open: automatic keys that nobody set.
        num_cores: cores of this machine.
        memory_bytes: main memory of this machine.
        device_bytes: pool -> what one of its processes has of an accelerator; empty if that is not known, or none.
    """
    chosen: dict[str, object] = {}
    cluster = config.cluster
    if "cluster.pools" in left_open and cluster.device == "cpu" and cluster.address is None:
        fixed = None if "cluster.num_cpus_per_process" in left_open else cluster.num_cpus_per_process
        num_processes, num_each = _layout(config, num_cores, memory_bytes, fixed)
        chosen |= {"cluster.pools": {"main": (num_processes,)}}
        chosen |= {} if fixed else {"cluster.num_cpus_per_process": num_each}
    if "engine.activations" in left_open and cluster.device != "cpu":
        for way, needed in activations_bytes(config, device_bytes).items():
            if all(num_bytes <= SAFE * device_bytes[pool] for pool, num_bytes in needed.items()):
                return {**chosen, "engine.activations": way}
    return chosen


def activations_bytes(config: RunConfig, device_bytes: Mapping[str, int]) -> dict[Activations, dict[str, int]]:
    """Return what a process of each pool needs with every setting of engine.activations, the fastest first.

    Empty while the model or the device is not known.
    """
    needed: dict[Activations, dict[str, int]] = {}
    for way in get_args(Activations):
        plan = make_plan(_changed(config, "engine", activations=way))
        if plan.memory and device_bytes:
            least = plan.within(dict.fromkeys(device_bytes, 0))  # a cache takes what is left, down to one row's
            needed[way] = {pool: least.process_memory(pool) for pool in device_bytes}
    return needed


def _layout(config: RunConfig, num_cores: int, num_bytes: int, fixed: int | None) -> tuple[int, int]:
    """Return how many processes a machine gets, and how many cores each of them."""
    alone = 1, fixed or num_cores
    if config.cluster.runtime == "inline" or config.rollout.engine == "vllm":
        return alone  # threads of one process share Python's lock; a server has threads of its own
    layouts = [(num, fixed or num_cores // num) for num in _possible(config, num_cores // (fixed or 1))]
    layouts.sort(key=lambda layout: (math.prod(layout), layout[0]), reverse=True)
    for num, each in layouts:
        trial = _changed(config, "cluster", pools={"main": (num,)})
        if _divides(trial) and _fits(trial, num, num_bytes):
            return num, each
    return alone


def _possible(config: RunConfig, num_cores: int) -> Iterator[int]:
    """Yield numbers of processes that all have something to do in every part of a step."""
    learners = [getattr(config, role) for role in ("actor", "critic") if role in config.roles]
    rows = min((config.num_rows // learner.num_mini_batches for learner in learners), default=config.num_rows)
    yield from range(1, 1 + min(num_cores, _MOST_PROCESSES, config.num_examples, rows // _LEAST_ROWS))


def _divides(config: RunConfig) -> bool:
    """Whether the mesh of every role has as many cells as the role has ranks."""
    return all(
        placement.pool in config.cluster.pools
        and config.num_ranks(role) <= sum(config.cluster.pools[placement.pool])
        and (role == "rollout" or math.prod(config.mesh(role).values()) == config.num_ranks(role))
        for role, placement in config.roles.items()
    )


def _fits(config: RunConfig, num_processes: int, num_bytes: int) -> bool:
    """Whether the memory of a machine holds several processes; one is always tried, more only if the plan knows."""
    plan, cluster = make_plan(config), config.cluster
    if num_processes == 1:
        return True
    each = _PROCESS_BYTES + plan.process_memory("main")
    each = max(each, round((cluster.memory_gib_per_process or 0) * _GIB))
    return bool(plan.memory) and num_processes * each + cluster.object_store_gib * _GIB <= _SAFE_ON_CPU * num_bytes


def _changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
