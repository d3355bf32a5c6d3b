"""The plan of a run, computed from its config without starting anything: batches, placement, memory.

Owns also the values of automatic keys that nobody set, from the numbers of a machine: how many processes share its
cores or devices, how many of them share a model, what layers keep on an accelerator, and what samples there.
They are a function of their arguments, so that the dry run shows what a run gets. Several processes with a core each
are as fast as one process with several cores, or faster, wherever models are small enough for CPUs
(`benchmarks/scaling.py`); but each holds weights and optimizer of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from rallypoint.config.check import contradictions, vllm_problems
from rallypoint.config.fields import changed
from rallypoint.config.limits import CACHE_MARGIN
from rallypoint.config.recipes import RoleName
from rallypoint.config.sections.learning import Activations, Offload
from rallypoint.config.shape import ModelShape, role_shapes, shape_of
from rallypoint.config.tree import RunConfig
from rallypoint.prepare.role_memory import RoleMemory, role_memory


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlan:
    """Work of a step, its placement, and its memory."""

    num_prompts: int
    group_size: int
    num_rows: int
    max_tokens: int
    """Most tokens that a step can have, prompts included."""
    updates: Mapping[RoleName, tuple[int, int, int]]
    """Learner -> (optimizer steps a training step, rows of a mini-batch, most micro-batches of one on a rank)."""
    num_parameters: int | None
    """None when nothing is known of the model yet, as it is on the hub."""
    memory: tuple[RoleMemory, ...]
    """Empty when one of the models is not known."""

    def awake_memory(self, role: RoleName) -> int:
        """Return the bytes that a process holds at its peak while a role is awake, other roles' among them."""
        mine = next(memory for memory in self.memory if memory.role == role)
        others = (memory.held for memory in self.memory if memory.pool == mine.pool and memory.role != role)
        return mine.total + mine.borrowed + sum(others)

    def held_memory(self, pool: str) -> int:
        """Return the bytes of weights, gradients and optimizers that a process of a pool holds, however short rows are.

        Of the roles that sleep, only one at a time counts.
        """
        roles = [memory for memory in self.memory if memory.pool == pool]
        awake = max((m.weights + m.gradients + m.optimizer + m.borrowed - m.held for m in roles), default=0)
        return sum(memory.held for memory in roles) + awake

    def within(self, rooms: Mapping[str, int]) -> RunPlan:
        """Return the plan where processes of pools have so many bytes of a device: with the cache that is left then.

        Rollouts keep a whole cache while they sleep where every other role that is awake has room in addition to it.
        """
        fitted = dataclasses.replace(
            self, memory=tuple(self._fitted(role, rooms.get(role.pool)) for role in self.memory)
        )
        return dataclasses.replace(self, memory=tuple(fitted._with_kept_cache(role, rooms) for role in self.memory))

    def _with_kept_cache(self, before: RoleMemory, rooms: Mapping[str, int]) -> RoleMemory:
        memory = next(memory for memory in self.memory if memory.role == before.role)
        if not memory.may_keep_cache or memory.pool not in rooms or memory.cache < before.cache:
            return memory
        others: list[RoleName] = [
            other.role for other in self.memory if other.pool == memory.pool and other.role != memory.role
        ]
        left = int(rooms[memory.pool] * (1 - CACHE_MARGIN)) - max(map(self.awake_memory, others), default=0)
        return dataclasses.replace(memory, kept_cache=memory.cache if memory.cache <= left else 0)

    def _fitted(self, memory: RoleMemory, room: int | None) -> RoleMemory:
        if room is None or memory.least_cache >= memory.cache:
            return memory
        left = int(room * (1 - CACHE_MARGIN)) - (self.awake_memory(memory.role) - memory.cache)
        return dataclasses.replace(memory, cache=max(memory.least_cache, min(memory.cache, left)))

    def cpu_memory(self, pool: str) -> int:
        """Return the bytes in CPU memory of what leaves the device in a process of a pool: offloaded, or asleep.

        Who sleeps has no gradients.
        """
        mine = (memory for memory in self.memory if memory.pool == pool)
        return sum(m.in_cpu + m.sleeps * (m.weights + m.optimizer) for m in mine)

    def process_memory(self, pool: str) -> int:
        """Return the bytes that a process of a pool holds at its peak: one of its roles is awake at a time."""
        return max((self.awake_memory(memory.role) for memory in self.memory if memory.pool == pool), default=0)


def make_plan(config: RunConfig) -> RunPlan:
    """Compute the plan of a checked config."""
    cap, row = config.engine.max_tokens_per_micro_batch, config.max_row_tokens
    rows_per_micro_batch = max(1, cap // row)
    updates: dict[RoleName, tuple[int, int, int]] = {}
    for role, learner in config.learners.items():
        rows = -(-config.num_rows // learner.num_mini_batches)
        rows_of_rank = -(-rows // config.num_parts(role))
        num_micro_batches = -(-rows_of_rank // rows_per_micro_batch)
        updates[role] = (learner.num_epochs * learner.num_mini_batches, rows, num_micro_batches)
    shape = shape_of(config)
    shapes: dict[RoleName, tuple[ModelShape | None, ...]] = {role: role_shapes(config, role) for role in config.roles}
    memory = tuple(
        role_memory(config, role, *(shape for shape in of_role if shape is not None))
        for role, of_role in shapes.items()
        if None not in of_role
    )
    return RunPlan(
        num_prompts=config.num_examples,
        group_size=config.group_size,
        num_rows=config.num_rows,
        max_tokens=config.num_rows * row,
        updates=updates,
        num_parameters=shape.num_parameters if shape else None,
        memory=memory if len(memory) == len(shapes) else (),
    )


def attention_cost(config: RunConfig) -> float:
    """Return what rows are balanced by, see `ModelShape.attention_cost`; 0 while nothing is known of the model.

    The critic is taken to be of the actor's shape.
    """
    shape = shape_of(config)
    return shape.attention_cost if shape else 0.0


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
SENT_BYTES = _ACTOR_BYTES, _STALE_BYTES, _CRITIC_BYTES, _TOP_BYTES = 39, 8, 18, 12
"""Bytes that processes send of a token: to an actor, more if it is ahead, to a critic, of each of the likeliest."""
_MOST_OF_MEMORY = 0.3
"""Part of a machine's memory that Ray's object store may have."""
_MOST_FOR_NATIVE, _LONG_RESPONSE = 5e9, 8192
"""Parameters of a dense model, and tokens of its responses, that our own engine is as fast for as a server."""


def choose(
    config: RunConfig,
    left_open: tuple[str, ...],
    *,
    num_cores: int,
    memory_bytes: int,
    devices_per_node: Sequence[int],
    device_bytes: int,
    has_server: bool = False,
) -> dict[str, object]:
    """Return values for those of the automatic keys that a machine has something to say on.

    Args:
        config: with its defaults.
        left_open: automatic keys that nobody set.
        num_cores: cores of this machine.
        memory_bytes: main memory of this machine.
        devices_per_node: accelerators of each node of the machine.
        device_bytes: what a process has of an accelerator; 0 if that is not known, or if there is none.
        has_server: whether vLLM is installed for the device.
    """
    cluster = config.cluster
    chosen: dict[str, object] = {}
    if "cluster.object_store_gib" in left_open and cluster.runtime == "ray" and cluster.address is None:
        most, wanted = _MOST_OF_MEMORY * memory_bytes / _GIB, math.ceil(10 * sent_bytes(config) / _GIB) / 10
        if (size := min(wanted, round(most, 1))) > cluster.object_store_gib:
            chosen["cluster.object_store_gib"] = size
    if cluster.device != "cpu":
        return chosen | _off_cpu(config, left_open, devices_per_node, device_bytes, has_server=has_server)
    if "cluster.pools" in left_open and cluster.address is None:
        fixed = None if "cluster.num_cpus_per_process" in left_open else cluster.num_cpus_per_process
        num_processes, num_each = _layout(config, num_cores, memory_bytes, fixed)
        chosen |= {"cluster.pools": {"main": (num_processes,)}}
        chosen |= {} if fixed else {"cluster.num_cpus_per_process": num_each}
    return chosen


def _off_cpu(
    config: RunConfig,
    left_open: tuple[str, ...],
    devices_per_node: Sequence[int],
    device_bytes: int,
    *,
    has_server: bool,
) -> dict[str, object]:
    """Return the engine of rollouts, over how many devices one is cut, the layout, and what layers keep.

    A server, then our own engine; cut over as few devices as have room. Without room in any way, it is not cut.
    """
    pools_there = ("main",) if "cluster.pools" in left_open else config.cluster.pools
    if any(placement.pool not in pools_there for placement in config.roles.values()):
        return {}  # it is refused
    is_open = "rollout.engine" in left_open and why_server(config)
    engines = ("vllm", "native") if is_open and has_server else ("native",) if is_open else (config.rollout.engine,)
    whole, pools = dict[str, object](), [config.roles["rollout"].pool] if "rollout" in config.roles else []
    for engine in engines:
        for tp in _cuts(config, left_open, devices_per_node):
            own: dict[str, object] = {"rollout.engine": engine} if is_open else {}
            own |= {"rollout.mesh.tp": tp} if tp is not None else {}
            way = own | _for_devices(changed(config, own), left_open, devices_per_node, device_bytes)
            trial = changed(config, way)
            whole = way if tp is None else whole
            if _has_room(trial, False, device_bytes, *pools) and (tp is None or _may_be_cut(trial)):
                return way
    return whole


def _cuts(config: RunConfig, left_open: tuple[str, ...], devices_per_node: Sequence[int]) -> Iterator[int | None]:
    """Yield values for `rollout.mesh.tp`: the one that stands, and those that divide the processes of a node."""
    yield None
    if "rollout" in config.roles and "rollout.mesh.tp" in left_open:
        pools = config.cluster.pools.get(config.roles["rollout"].pool, ())
        most = max(devices_per_node if "cluster.pools" in left_open else pools, default=1)
        yield from (tp for tp in range(2, most + 1) if most % tp == 0)


def _may_be_cut(config: RunConfig) -> bool:
    """Whether the pools have a rollout's ranks or devices, and nothing speaks against its size."""
    problems = contradictions(config, {})
    is_here = divides(config) and config.devices_of_rollout == 1  # a server alone has devices beyond its processes
    return is_here and not any("rollout.mesh.tp" in problem.keys for problem in problems)


def sent_bytes(config: RunConfig) -> int:
    """Return the bytes that a step may pass between processes at a time: rows at their longest, to actor and critic."""
    each = _ACTOR_BYTES + _STALE_BYTES * bool(config.rollout.max_staleness) + _CRITIC_BYTES * ("critic" in config.roles)
    if "teacher" in config.roles:
        each += 4 + _TOP_BYTES * (config.teachers.top_k or 0)
    return each * config.num_rows * config.max_row_tokens


def why_server(config: RunConfig) -> str:
    """Return what a vLLM server samples faster than our own engine off the CPU; nothing if it does not, or cannot."""
    shape, roles = shape_of(config), config.roles
    if config.cluster.device == "cpu" or "rollout" not in roles or any(vllm_problems(config)):
        return ""
    if changed(config, {"rollout.engine": "vllm"}).devices_of_rollout > 1:  # processes have one for our own engine
        return ""
    found = ["its adapters"] if config.model.lora is not None else []
    if shape is not None and (faster := [kind.served_faster for kind in shape.kinds if kind.served_faster]):
        found += faster
    elif shape is not None and shape.num_parameters > _MOST_FOR_NATIVE:
        found += [f"its {shape.num_parameters / 1e9:.1f}B parameters"]
    if config.rollout.max_response_tokens >= _LONG_RESPONSE:
        found += [f"responses of {config.rollout.max_response_tokens:,} tokens"]
    return ", ".join(found)


def activations_bytes(config: RunConfig, device_bytes: int, *pools: str) -> dict[Activations, int]:
    """Return what the fullest process needs with every setting of engine.activations, the fastest first.

    It is one of some pools, or of all. Empty while the model or the device is not known.
    """
    needed: dict[Activations, int] = {}
    for way in get_args(Activations):
        plan = make_plan(changed(config, {"engine.activations": way}))
        if plan.memory and device_bytes:
            least = plan.within(dict.fromkeys(config.cluster.pools, 0))  # a cache takes what is left, down to one row's
            needed[way] = max(map(least.process_memory, pools or config.cluster.pools))
    return needed


def _for_devices(
    config: RunConfig, left_open: tuple[str, ...], devices_per_node: Sequence[int], device_bytes: int
) -> dict[str, object]:
    """Return the layout over devices, and what layers and optimizers keep there."""
    chosen = _over_devices(config, left_open, devices_per_node, device_bytes)
    for offload in get_args(Offload) if "engine.offload" in left_open else ():
        trial, any_way = changed(config, {**chosen, "engine.offload": offload}), "engine.activations" in left_open
        is_cut = any(trial.mesh(role)["dp_shard"] > 1 for role in trial.learners)
        if not (is_cut and offload == "optimizer_and_gradients") and _has_room(trial, any_way, device_bytes):
            chosen |= {"engine.offload": offload} if offload != "nothing" else {}
            break
    if "engine.activations" in left_open:
        for way, needed in activations_bytes(changed(config, chosen), device_bytes).items():
            if needed <= SAFE * device_bytes:
                return {**chosen, "engine.activations": way}
    return chosen


def _over_devices(
    config: RunConfig, left_open: tuple[str, ...], devices_per_node: Sequence[int], device_bytes: int
) -> dict[str, object]:
    """Return pools that use all devices, and how many ranks share a model if a device has no room for a whole one.

    Those of a node, whose links are fast, then all; models that learn before the others. If there is room in no way,
    all ranks share all models.
    """
    num_each = math.floor(min(devices_per_node, default=0) / config.cluster.num_gpus_per_process)
    layouts: list[dict[str, object]] = [{}]
    is_alone = config.cluster.runtime == "inline" or config.cluster.num_gpus_per_process < 1  # see `check_placement`
    if "cluster.pools" in left_open and num_each and not is_alone:
        num_nodes = len(devices_per_node)
        nums = [num for num in _possible(config, num_nodes * num_each) if num % num_nodes == 0] or [1]
        layouts = [
            {"cluster.pools": {"main": (num // num_nodes or 1,) * min(num, num_nodes)}} for num in reversed(nums)
        ]
    open_roles: list[RoleName] = [role for role in config.roles if f"{role}.mesh.dp_shard" in left_open]
    learn: list[RoleName] = [role for role in open_roles if role in config.learners]
    chosen: dict[str, object] = {}
    for layout in layouts:
        laid_out = changed(config, layout)
        if any(placement.pool not in laid_out.cluster.pools for placement in config.roles.values()):
            continue
        of_nodes = [laid_out.cluster.pools[config.roles[role].pool] for role in learn]
        sizes = [1] if config.cluster.runtime == "inline" else [1, *map(max, of_nodes), *map(sum, of_nodes)]
        for num in sorted(set(sizes)):
            for roles in (learn, open_roles):
                shards = {f"{role}.mesh.dp_shard": num for role in roles if num > 1}
                trial = changed(laid_out, shards)
                if not divides(trial):
                    continue
                chosen = {**layout, **shards}
                if _has_room(trial, "engine.activations" in left_open, device_bytes):
                    return chosen
        if chosen:
            break
    return chosen


def _has_room(config: RunConfig, any_way: bool, device_bytes: int, *pools: str) -> bool:
    """Whether a device has room for the fullest process, of some pools or of all; True while that is not known."""
    needed = activations_bytes(config, device_bytes, *pools)
    of_ways = [needed[way] for way in needed if any_way or way == config.engine.activations]
    return not of_ways or min(of_ways) <= SAFE * device_bytes


def _layout(config: RunConfig, num_cores: int, num_bytes: int, fixed: int | None) -> tuple[int, int]:
    """Return how many processes a machine gets, and how many cores each of them."""
    alone = 1, fixed or num_cores
    if config.cluster.runtime == "inline" or config.rollout.engine == "vllm":
        return alone  # threads of one process share Python's lock; a server has threads of its own
    layouts = [
        (num, fixed or num_cores // num) for num in _possible(config, min(_MOST_PROCESSES, num_cores // (fixed or 1)))
    ]
    layouts.sort(key=lambda layout: (math.prod(layout), layout[0]), reverse=True)
    for num, each in layouts:
        trial = changed(config, {"cluster.pools": {"main": (num,)}})
        if divides(trial) and _fits(trial, num, num_bytes):
            return num, each
    return alone


def _possible(config: RunConfig, most: int) -> Iterator[int]:
    """Yield numbers of processes that all have something to do in every part of a step."""
    learners = [getattr(config, role) for role in ("actor", "critic") if role in config.roles]
    rows = min((config.num_rows // learner.num_mini_batches for learner in learners), default=config.num_rows)
    yield from range(1, 1 + min(most, config.num_examples, rows // _LEAST_ROWS))


def divides(config: RunConfig) -> bool:
    """Whether every role has the ranks that it asks for, and a whole number of copies of its model."""
    return all(
        placement.pool in config.cluster.pools
        and config.num_ranks(role) <= sum(config.cluster.pools[placement.pool])
        and math.prod(config.mesh(role).values()) == config.num_ranks(role)
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
