"""This machine, or the nodes of a cluster, compared with what a config asks for.

Owns: whether pools and plan fit. Must not know: Ray.

Of a cluster that the run joins, only the requested labels are known before it is joined; then `check_nodes` compares
the devices of its nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rallypoint.cluster.capacity import Node, advice, misfit
from rallypoint.config import LoadedConfig, Problem, RunConfig, shown
from rallypoint.config.fields import values_of
from rallypoint.config.load import THIS_MACHINE
from rallypoint.errors import ConfigError
from rallypoint.install import installed_engines
from rallypoint.observability.devices import find_device
from rallypoint.observability.numbers import counted
from rallypoint.prepare.checkup import gib
from rallypoint.prepare.inventory import OF_TYPES, Accelerator, Machine, find_cores, look_around
from rallypoint.prepare.plan import SAFE, RunPlan, activations_bytes, choose, make_plan, sent_bytes, why_server
from rallypoint.prepare.pools import num_devices, resource_pools
from rallypoint.prepare.step_time import StepTime, step_time

_GIB = 2**30
_TYPE_LABEL = "ray.io/accelerator-type"


def devices_of(machine: Machine, values: Mapping[str, Any]) -> list[str]:
    """Return what a described machine needs and values of a config do not set: its device, and to join its nodes."""
    given, nodes = values.get("cluster") or {}, ["cluster.address=auto"] * (machine.num_nodes > 1)
    wanted = ["cluster.device=cuda"] * bool(machine.accelerators) + nodes
    return [each for each in wanted if each.partition("=")[0].removeprefix("cluster.") not in given]


def choices(config: RunConfig, left_open: tuple[str, ...], *, machine: Machine | None = None) -> dict[str, object]:
    """Return values for automatic keys that are not set, for a run on this machine or on another one."""
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
    cuts = (".mesh.dp_shard", "rollout.mesh.tp")
    sizes = {name: shown(value) for name, value in values_of(config) if name.endswith(cuts)}
    if chosen := [f"{name}={size}" for name, size in sizes.items() if loaded.origins[name] == THIS_MACHINE]:
        yield f"{' '.join(chosen)}: chosen for this machine, where a device has no room for the whole model"
    if config.engine.offload != "nothing" and loaded.origins["engine.offload"] == THIS_MACHINE:
        yield f"engine.offload={config.engine.offload}: chosen for this machine, where a device has no room for more"
    if loaded.origins["cluster.object_store_gib"] == THIS_MACHINE:
        yield f"cluster.object_store_gib={config.cluster.object_store_gib:g}: chosen for the data of a step"
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


def time_on(config: RunConfig, plan: RunPlan, machine: Machine, say: Callable[[str], None]) -> StepTime | None:
    """Return the time of a step on this machine; None where its devices or the model are not known, or cores are few.

    What its cores do is measured, by as many processes as the run has, unless the machine has no room for them; `say`
    is given a line about that.
    """
    if not plan.memory:
        return None
    cluster, accelerator = config.cluster, _device(config, machine)
    device = find_device(accelerator.name) if accelerator is not None else None
    if cluster.device == "cpu" and cluster.address is None and not machine.is_cluster:
        num_processes, num_threads = sum(map(sum, cluster.pools.values())), cluster.num_cpus_per_process
        if num_processes * num_threads <= machine.num_cores:
            device = find_cores(num_processes, num_threads, config.model.dtype, say)
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
    if problem := _cpu_memory(config, plan, machine):
        problems += [] if machine.is_cluster else [Problem(("engine.offload", "cluster.pools"), problem)]
    if problems:
        raise ConfigError(tuple(problem.text for problem in problems))
    return tuple(machine_notes(config, plan, machine))


def machine_problems(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Yield the reasons why a run does not fit on this machine; none for one that joins a cluster elsewhere."""
    device = config.cluster.device
    if config.cluster.address is not None and not machine.is_cluster:
        return
    if device != "cpu" and not machine.accelerators:
        yield Problem.of(
            f"^cluster.device={device}: torch finds no such device on this machine ({machine.complaint}); set "
            "cluster.device=cpu, or join a cluster that has some with cluster.address"
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
        yield Problem.of(f"^cluster.pools: {problem}\n{advice(pools, here, is_local=True)}")


def memory_problems(config: RunConfig, plan: RunPlan, machine: Machine) -> Iterator[Problem]:
    """Yield pools whose weights, gradients and optimizers alone exceed a device."""
    for pool, most, whose in _rooms(config, machine):
        held = plan.held_memory(pool) if plan.memory else 0
        if held > most:
            roles = [role for role, placement in config.roles.items() if placement.pool == pool]
            learns = any(role in config.learners for role in roles)
            cuts = [f"{role}.mesh.dp_shard" for role in roles if role != "rollout"][:1]
            rollout, server = config.rollout, " with rollout.engine=vllm"
            needs_server = rollout.router_replay and rollout.engine == "native"  # see `check_placement`
            may_be_cut = "rollout" in roles and rollout.engine != "hf" and not rollout.exact
            cuts += ["rollout.mesh.tp" + server * needs_server] * may_be_cut
            ways = [f"divide the model ({' and '.join(cuts)} over more processes)"] * bool(cuts)
            ways += ["give roles pools of their own"] * (len(roles) > 1)
            ways += ["keep less there (engine.offload, engine.sleep)"] * (learns and config.engine.offload == "nothing")
            ways += ["train adapters (model.lora)"] * (learns and config.model.lora is None)
            yield Problem(
                ("cluster.pools", "model.dtype"),
                f"pool {pool}: weights, gradients and optimizer of its roles take {gib(held)} in each process, but "
                f"{whose}; {', or '.join(ways) or 'take a smaller model'}",
            )


def machine_notes(config: RunConfig, plan: RunPlan, machine: Machine) -> Iterator[str]:
    """Yield notes on a run that fits: memory that may not suffice, devices that are idle."""
    yield from _peaks(config, plan, machine)
    if machine.is_cluster and (problem := _cpu_memory(config, plan, machine)):
        yield problem
    yield from _room_for_activations(config, machine)
    cluster, sent = config.cluster, sent_bytes(config)
    if cluster.runtime == "ray" and cluster.address is None and sent > cluster.object_store_gib * _GIB:
        yield (
            f"cluster.object_store_gib={cluster.object_store_gib:g}: the data of a step may take {gib(sent)}, and what "
            "does not fit goes through the disk; null chooses it"
        )
    if cluster.address is not None and cluster.device != "cpu" and _device(config, machine) is None:
        yield (
            f"the devices of the cluster at {cluster.address} are not known yet, and compared with the plan when it is "
            "joined; a dry run with --on compares them now, such as --on 2x8xH100"
        )
    if cluster.address is None and cluster.device == "cpu":
        yield from _idle_cores(config, machine)
    if not machine.accelerators:
        return
    names = ", ".join(dict.fromkeys(each.name for each in machine.accelerators))
    if cluster.device == "cpu":
        yield f"{counted(len(machine.accelerators), 'GPU')} here ({names}) lie idle: cluster.device=cuda uses them"
        return
    wanted = num_devices(config)
    if wanted <= len(machine.accelerators) - 1:
        yield (
            f"{wanted:g} of the {len(machine.accelerators)} devices here ({names}) are used: more processes in "
            "cluster.pools use the others, if meshes and rows divide by them"
        )


def _peaks(config: RunConfig, plan: RunPlan, machine: Machine) -> Iterator[str]:
    """Say which pools may need more than a device has."""
    for pool, most, whose in _rooms(config, machine):
        peak = plan.process_memory(pool)
        if peak > most >= plan.held_memory(pool):
            yield (
                f"pool {pool} may need {gib(peak)} in each process when all rows are at their longest, but {whose}; "
                "lower engine.max_tokens_per_micro_batch, rollout.max_batch_rows or rollout.cache_tokens, or set "
                "engine.activations=checkpoint"
            )


def _cpu_memory(config: RunConfig, plan: RunPlan, machine: Machine) -> str:
    """Return why a node has too little memory for what leaves its devices; nothing if it has enough or is not known."""
    if config.cluster.address is not None and not machine.is_cluster:
        return ""
    pools, there = config.cluster.pools, machine.num_bytes // machine.num_nodes
    needed = sum(sum(nodes) * plan.cpu_memory(pool) for pool, nodes in pools.items()) // machine.num_nodes
    needed = max(needed, *(max(nodes) * plan.cpu_memory(pool) for pool, nodes in pools.items()))
    if needed <= there:
        return ""
    keys = [f"engine.offload={config.engine.offload}"] * (config.engine.offload != "nothing")
    keys += ["engine.sleep=true"] * config.engine.sleep
    of_whom = "a node like that often has" if machine.is_cluster else "this machine has"
    return (
        f"{', '.join(keys)}: what leaves the devices takes {gib(needed)} of CPU memory on a node, but {of_whom} "
        f"{gib(there)}; divide the model over more devices and nodes (actor.mesh.dp_shard), or train adapters "
        "(model.lora)"
    )


def check_nodes(config: RunConfig, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Compare a run with the cluster that it has joined, and return notes for the user.

    Ray may place a pool on any node with room for it. What no device of these nodes holds is refused, and what not all
    of them hold is said.

    Raises:
        ConfigError: no device of the cluster holds what a process has to.
    """
    pools, plan = resource_pools(config).values(), make_plan(config)
    usable = [node for node in nodes if any(node.room_for(pool) for pool in pools)]
    notes = list(_small_stores(config, usable))
    if config.cluster.device == "cpu" or not usable:
        return tuple(notes)
    kinds = sorted({_kind(node) for node in usable}, key=lambda kind: OF_TYPES.get(kind, 0))
    found = [Machine(0, 0, (Accelerator(kind, round(OF_TYPES[kind] * _GIB)),)) for kind in kinds if kind in OF_TYPES]
    if len(found) < len(kinds):
        unknown = ", ".join(kind or "not named" for kind in kinds if kind not in OF_TYPES)
        notes += [f"the cluster has devices whose memory is not known here (type: {unknown}): the plan is not compared"]
    refused = [
        [problem.text for problem in memory_problems(config, _within(plan, config, machine), machine)]
        for machine in found
    ]
    if found and refused[-1] and len(found) == len(kinds):
        raise ConfigError(tuple(refused[-1]))
    for machine, problems in zip(found, refused, strict=True):
        elsewhere = f"; cluster.labels={{{_TYPE_LABEL}: {kinds[-1]}}} keeps it off these" if len(kinds) > 1 else ""
        notes += [
            f"{problem}{elsewhere}" for problem in (*problems, *_peaks(config, _within(plan, config, machine), machine))
        ]
    return tuple(notes)


def _kind(node: Node) -> str:
    """Return the type of a node's accelerators as Ray found it; an empty string if it knows none."""
    offered = (name.partition(":") for name in node.resources)
    return node.labels.get(_TYPE_LABEL) or next((kind for key, _, kind in offered if key == "accelerator_type"), "")


def _small_stores(config: RunConfig, nodes: Sequence[Node]) -> Iterator[str]:
    """Say which nodes share too little memory between processes."""
    sent = sent_bytes(config)
    small = {node.name: size for node in nodes if (size := node.resources.get("object_store_memory", sent)) < sent}
    if small:
        name = min(small, key=small.__getitem__)
        yield (
            f"the data of a step may take {gib(sent)}, but the object store of {counted(len(small), 'node')} has less "
            f"({name}: {gib(small[name])}), and what does not fit goes through the disk: start nodes with "
            f"--object-store-memory={sent}"
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
    if config.cluster.address is not None and kind in OF_TYPES:
        return Accelerator(kind, round(OF_TYPES[kind] * _GIB))
    return min(machine.accelerators, key=lambda each: each.num_bytes, default=None)
