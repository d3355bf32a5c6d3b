"""This machine compared with what a config asks for, in a run that starts its own cluster or needs none.

Owns: the inventory (cores, memory, accelerators) and whether pools and plan fit. Must not know: Ray. A process of its
own asks torch for accelerators, so that this one never holds a context on a GPU that workers need.

Of a cluster that the run joins, only the requested labels are known here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rallypoint.cluster import ResourcePool, ResourcePoolManager
from rallypoint.cluster.capacity import Node, advice, memory_bytes, misfit, num_cores
from rallypoint.config import LoadedConfig, Problem, RunConfig, shown
from rallypoint.config.fields import values_of
from rallypoint.config.load import THIS_MACHINE
from rallypoint.errors import ConfigError
from rallypoint.install import installed_engines
from rallypoint.observability.devices import DEVICES, find_device
from rallypoint.observability.numbers import counted
from rallypoint.prepare.checkup import ask_driver, gib
from rallypoint.prepare.plan import SAFE, RunPlan, activations_bytes, choose, divides, make_plan, why_server
from rallypoint.prepare.step_time import StepTime, step_time

_ASK_TORCH = """
import json, sys, torch
module = torch.get_device_module(torch.device(sys.argv[1]))
devices = []
if module.is_available():
    for index in range(module.device_count()):
        found = module.get_device_properties(index)
        devices.append([found.name, found.total_memory])
print(json.dumps([torch.__version__, devices]))
"""
_PATIENCE_S = 120.0
_GIB = 2**30
_OF_TYPES = {name: device.gib for name, device in DEVICES.items() if " " not in name}
"""Accelerator type as Ray names it -> GiB that torch reports of its largest version."""
_CORES_EACH, _MEMORY_EACH = 16, 128 * 2**30
"""What machines are rented with for each of their devices, or more."""
_MOST_TRIES = 2000
"""Ways to make pools smaller that are looked at for each number of entries."""
_TYPE_LABEL = "ray.io/accelerator-type"


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """A device other than the CPU."""

    name: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """The inventory of this machine."""

    num_cores: int
    num_bytes: int
    """Memory that this process may use."""
    accelerators: tuple[Accelerator, ...] = ()
    """Devices of the configured kind that torch finds; with cluster.device=cpu, GPUs that the driver reports."""
    complaint: str = ""
    """Reason why torch finds none."""
    num_nodes: int = 1
    """Equal computers that it consists of."""


def look_around(config: RunConfig) -> Machine:
    """Return what this machine has for a run."""
    device = config.cluster.device
    if device == "cpu":
        return Machine(num_cores(), memory_bytes(), _ask_driver())
    if config.cluster.address is not None:
        return Machine(num_cores(), memory_bytes())
    accelerators, complaint = _ask_torch(device)
    return Machine(num_cores(), memory_bytes(), accelerators, complaint)


def imagine(text: str) -> Machine:
    """Return a machine that is described, as one that is not here: `H100`, `8xH100`, `2x8xH100` for two nodes.

    >>> machine = imagine("2x8xH100")
    >>> machine.num_nodes, len(machine.accelerators), machine.num_cores, machine.accelerators[0].name
    (2, 16, 256, 'H100')

    Raises:
        ConfigError: it has devices of no known type.
    """
    found = re.fullmatch(r"(?:([1-9]\d{0,3})x)?(?:([1-9]\d{0,3})x)?([\w-]+)", text)
    if found is None or found[3] not in _OF_TYPES:
        raise ConfigError(
            (f"--on {text}: expected a number and a type, such as 8xH100 or 2x8xH100; types: {', '.join(_OF_TYPES)}",)
        )
    num_nodes, kind = int(found[1] or 1) if found[2] else 1, found[3]
    num = num_nodes * int(found[2] or found[1] or 1)
    device = Accelerator(kind, round(_OF_TYPES[kind] * _GIB))
    return Machine(num * _CORES_EACH, num * _MEMORY_EACH, (device,) * num, num_nodes=num_nodes)


def devices_of(machine: Machine, values: Mapping[str, Any]) -> list[str]:
    """Return what a described machine needs and values of a config do not set: its device, and to join its nodes."""
    given, nodes = values.get("cluster") or {}, ["cluster.address=auto"] * (machine.num_nodes > 1)
    wanted = ["cluster.device=cuda"] * bool(machine.accelerators) + nodes
    return [each for each in wanted if each.partition("=")[0].removeprefix("cluster.") not in given]


def choices(config: RunConfig, left_open: tuple[str, ...], *, machine: Machine | None = None) -> dict[str, object]:
    """Return values for automatic keys that nobody set, for a run on this machine or on another one."""
    has_server = machine is None and any(
        (one.name, one.device) == ("vllm", config.cluster.device) for one in installed_engines()
    )
    machine = machine or look_around(config)
    return choose(
        config,
        left_open,
        num_cores=machine.num_cores,
        memory_bytes=machine.num_bytes,
        devices_per_node=(len(machine.accelerators) // machine.num_nodes,) * machine.num_nodes,
        device_bytes=_device_bytes(config, machine),
        has_server=has_server,
    )


def describe_choices(loaded: LoadedConfig, machine: Machine) -> Iterator[str]:
    """Yield what a dry run says of keys that were chosen for this machine, and of those it could have chosen."""
    config, num_bytes = loaded.config, _device_bytes(loaded.config, machine)
    there = counted(machine.num_cores, "core")
    pools = {"cluster.pools": config.cluster.pools, "cluster.num_cpus_per_process": config.cluster.num_cpus_per_process}
    if config.cluster.device != "cpu":
        there, pools = counted(len(machine.accelerators), "device"), {"cluster.pools": config.cluster.pools}
    if loaded.origins["cluster.pools"] == THIS_MACHINE:
        yield f"{' '.join(f'{key}={shown(value)}' for key, value in pools.items())}: chosen for the {there} here"
    sizes = {name: shown(value) for name, value in values_of(config) if name.endswith(".mesh.dp_shard")}
    if chosen := [f"{name}={size}" for name, size in sizes.items() if loaded.origins[name] == THIS_MACHINE]:
        yield f"{' '.join(chosen)}: chosen for this machine, where a device has no room for the whole model"
    if why := loaded.origins.get("rollout.engine") == THIS_MACHINE and why_server(config):
        better = "where vLLM is installed (rally engine install vllm) and has room, it is chosen"
        said = f"chosen for {why}" if config.rollout.engine == "vllm" else f"{better}, for {why}"
        yield f"rollout.engine={config.rollout.engine}: {said}"
    if needed := activations_bytes(config, num_bytes):
        each = ", ".join(f"{way} {gib(need)}" for way, need in needed.items())
        chosen = " (chosen for this machine)" if loaded.origins["engine.activations"] == THIS_MACHINE else ""
        yield (
            f"engine.activations={config.engine.activations}{chosen}: a process would need {each}; a device has "
            f"{gib(num_bytes)}, of which a plan may fill {SAFE:.0%}"
        )


def plan_on(config: RunConfig, machine: Machine) -> RunPlan:
    """Return the plan of a run here; its cache has the size that is left on the devices, where they are known."""
    return _within(make_plan(config), config, machine)


def time_on(config: RunConfig, plan: RunPlan, machine: Machine) -> StepTime | None:
    """Return the time of a step on this machine; None where its devices or the model are not known."""
    accelerator = _device(config, machine)
    device = find_device(accelerator.name) if accelerator is not None else None
    return step_time(config, plan, device) if device is not None else None


def planned_gib(config: RunConfig) -> dict[str, float]:
    """Return the memory that the plan gives to a process of each role here; nothing if it does not know the model."""
    plan = plan_on(config, look_around(config))
    return {memory.role: plan.awake_memory(memory.role) / _GIB for memory in plan.memory}


def _within(plan: RunPlan, config: RunConfig, machine: Machine) -> RunPlan:
    return plan.within({pool: num_bytes for pool, num_bytes, _ in _rooms(config, machine)})


def check_machine(config: RunConfig, plan: RunPlan, machine: Machine | None = None) -> tuple[str, ...]:
    """Compare a run with this machine, and return notes for the user.

    Raises:
        ConfigError: the run does not fit on this machine.
    """
    machine = machine or look_around(config)
    plan = _within(plan, config, machine)
    problems = [*machine_problems(config, machine), *memory_problems(config, plan, machine)]
    if problems:
        raise ConfigError(tuple(problem.text for problem in problems))
    return tuple(machine_notes(config, plan, machine))


def machine_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Yield the reasons why a run does not fit on this machine; none for one that joins a cluster."""
    device = config.cluster.device
    if config.cluster.address is not None and not machine.accelerators:
        return
    if device != "cpu" and not machine.accelerators:
        yield Problem(
            ("cluster.device",),
            f"cluster.device={device}: torch finds no such device on this machine ({machine.complaint}); set "
            "cluster.device=cpu, or join a cluster that has some with cluster.address",
        )
        return
    if config.cluster.runtime == "inline":
        return
    offers = {
        "CPU": machine.num_cores,
        "GPU": len(machine.accelerators) if device != "cpu" else 0,
        "memory": machine.num_bytes - config.cluster.object_store_gib * _GIB * machine.num_nodes,
    }
    # Ray would start a node with none of these labels; that is its own complaint, at once.
    pools = [dataclasses.replace(pool, labels={}) for pool in resource_pools(config).values()]
    each = {name: amount / machine.num_nodes for name, amount in offers.items()}
    here = [Node("this machine", each)] * machine.num_nodes
    if problem := misfit(pools, here):
        yield Problem(("cluster.pools",), f"cluster.pools: {problem}\n{advice(pools, here, is_local=True)}")


def memory_problems(config: RunConfig, plan: RunPlan, machine: Machine) -> Iterator[Problem]:
    """Yield pools whose weights, gradients and optimizers alone exceed a device."""
    for pool, most, whose in _rooms(config, machine):
        held = plan.held_memory(pool) if plan.memory else 0
        if held > most:
            yield Problem(
                ("cluster.pools", "model.dtype"),
                f"pool {pool}: weights, gradients and optimizer of its roles take {gib(held)} in each process, but "
                f"{whose}; divide the model (actor.mesh.dp_shard over more processes), give roles pools of their own, "
                "or train adapters (model.lora)",
            )


def machine_notes(config: RunConfig, plan: RunPlan, machine: Machine) -> Iterator[str]:
    """Yield notes on a run that fits: memory that may not suffice, devices that are idle."""
    for pool, most, whose in _rooms(config, machine):
        peak = plan.process_memory(pool)
        if peak > most >= plan.held_memory(pool):
            yield (
                f"pool {pool} may need {gib(peak)} in each process when all rows are at their longest, but {whose}; "
                "lower engine.max_tokens_per_micro_batch or rollout.cache_tokens, or set engine.activations=checkpoint"
            )
    yield from _room_for_activations(config, machine)
    cluster = config.cluster
    if cluster.address is None and cluster.device == "cpu":
        yield from _idle_cores(config, machine)
    if not machine.accelerators:
        return
    names = ", ".join(dict.fromkeys(each.name for each in machine.accelerators))
    if cluster.device == "cpu":
        yield f"{counted(len(machine.accelerators), 'GPU')} here ({names}) lie idle: cluster.device=cuda uses them"
        return
    wanted = sum(map(sum, cluster.pools.values())) * (
        1 if cluster.runtime == "inline" else cluster.num_gpus_per_process
    )
    if wanted <= len(machine.accelerators) - 1:
        yield (
            f"{wanted:g} of the {len(machine.accelerators)} devices here ({names}) are used: more processes in "
            "cluster.pools use the others"
        )


def _room_for_activations(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Say when a run that computes layers twice would have room for what they keep."""
    most = _device_bytes(config, machine)
    needed = activations_bytes(config, most).get("keep")
    if config.engine.activations != "keep" and needed and needed <= SAFE * most:
        yield (
            f"engine.activations=keep would save the second pass over the layers: {gib(needed)} in each process, of "
            f"{gib(most)}"
        )


def _idle_cores(config: RunConfig, machine: Machine) -> Iterator[str]:
    cluster = config.cluster
    used = sum(map(sum, cluster.pools.values())) * cluster.num_cpus_per_process
    if cluster.runtime == "ray" and used <= machine.num_cores // 2:
        yield f"cores: {used} of {machine.num_cores} here are used; cluster.pools=null uses them"


def _rooms(config: RunConfig, machine: Machine) -> Iterator[tuple[str, int, str]]:
    """Yield every pool with the device bytes of one of its processes, and the device in words."""
    cluster = config.cluster
    if (device := _device(config, machine)) is None:
        return
    share = min(1.0, cluster.num_gpus_per_process)
    part = "" if share == 1 else f" has {gib(device.num_bytes)} and {share:g} of it is"
    whose = f"a {device.name}{part or ' has'} {gib(round(device.num_bytes * share))}"
    for pool in cluster.pools:
        yield pool, round(device.num_bytes * share), whose


def _device_bytes(config: RunConfig, machine: Machine) -> int:
    """Return the device bytes of a process; 0 if they are not known."""
    return next((num_bytes for _, num_bytes, _ in _rooms(config, machine)), 0)


def _device(config: RunConfig, machine: Machine) -> Accelerator | None:
    """Return the device of a process; None if it is not known, as of a cluster that is joined without labels."""
    if config.cluster.device == "cpu":
        return None
    kind = config.cluster.labels.get(_TYPE_LABEL, "")
    if config.cluster.address is not None and kind in _OF_TYPES:
        return Accelerator(kind, round(_OF_TYPES[kind] * _GIB))
    return min(machine.accelerators, key=lambda each: each.num_bytes, default=None)


@functools.cache
def _ask_torch(device: str) -> tuple[tuple[Accelerator, ...], str]:
    """Return the devices of a kind, or the reason why there is none."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
        said = done.stdout.strip().splitlines()[-1:]
        version, devices = json.loads(said[0] if said else "")
    except subprocess.TimeoutExpired:
        return (), f"asking for it took longer than {_PATIENCE_S:g} s: the driver may hang"
    except subprocess.CalledProcessError as error:
        return (), (error.stderr.strip().splitlines() or [f"status {error.returncode}"])[-1]
    except (ValueError, TypeError):
        return (), "torch did not answer"
    if devices:
        return tuple(Accelerator(name, num_bytes) for name, num_bytes in devices), ""
    if driven := _ask_driver():
        return (), f"torch {version} cannot use the {driven[0].name} that is here: install a build of torch for it"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (), f"torch {version}" + (f", CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else "")


@functools.cache
def _ask_driver() -> tuple[Accelerator, ...]:
    """Return the GPUs that NVIDIA's driver reports, unless they are hidden; without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ()
    try:
        driven = ask_driver()
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    return () if driven is None else tuple(Accelerator(name, mebibytes * 2**20) for name, mebibytes in driven.gpus)


def resource_pools(config: RunConfig) -> dict[str, ResourcePool]:
    """Return the pools of a config by their names."""
    cluster = config.cluster
    return {
        name: ResourcePool(
            processes_per_node,
            name=name,
            num_cpus=cluster.num_cpus_per_process,
            num_gpus=0 if cluster.device == "cpu" else cluster.num_gpus_per_process,
            memory_gib=cluster.memory_gib_per_process or 0,
            labels=cluster.labels,
            device=cluster.device,
        )
        for name, processes_per_node in cluster.pools.items()
    }


def shrunk(config: RunConfig, nodes: Sequence[Node]) -> RunConfig | None:
    """Return a config whose pools have places on these nodes: with as few entries and processes less as possible.

    Roles must still divide their models as the config says, and have each at least one rank; the global batch is the
    same. None if no such pools fit, or if those of the config do.
    """
    if misfit(list(resource_pools(config).values()), nodes) is None:
        return None
    entries = [(pool, place) for pool, counts in config.cluster.pools.items() for place in range(len(counts))]
    for num in range(1, len(entries)):
        ways = itertools.islice(itertools.combinations(entries, num), _MOST_TRIES)
        for left_out in sorted(ways, key=lambda way: sum(config.cluster.pools[pool][place] for pool, place in way)):
            pools = {
                name: tuple(count for place, count in enumerate(counts) if (name, place) not in left_out)
                for name, counts in config.cluster.pools.items()
            }
            cluster = config.cluster.model_copy(update={"pools": pools})
            smaller = config.model_copy(update={"cluster": cluster})
            if (
                all(pools.values())
                and divides(smaller)
                and misfit(list(resource_pools(smaller).values()), nodes) is None
            ):
                return smaller
    return None


def pools_of(config: RunConfig) -> ResourcePoolManager:
    """Return the pools of a config, and which role is placed on which."""
    return ResourcePoolManager(
        resource_pools(config), {role: placement.pool for role, placement in config.roles.items()}
    )
