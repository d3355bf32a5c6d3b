"""The plan of a run, computed from its config without starting anything: batches, placement, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, TypeAlias

from rallypoint.config.limits import CACHE_MARGIN
from rallypoint.config.recipes import RoleName
from rallypoint.config.shape import ModelShape, role_shapes, shape_of
from rallypoint.config.tree import RunConfig
from rallypoint.plan.role_memory import RoleMemory, role_memory

TransportName: TypeAlias = Literal["shared", "memory", "ipc", "broadcast", "folder"]
"""Transport of weights from the actor to the rollout role; see `rallypoint.weights`."""


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

    def turn_memory(self, role: RoleName) -> int:
        """Return the bytes that a process holds at its peak while a role has its turn, other roles' among them."""
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

        Rollouts keep a whole cache between their turns where every turn of another role has memory beside it.
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
        left = int(rooms[memory.pool] * (1 - CACHE_MARGIN)) - max(map(self.turn_memory, others), default=0)
        return dataclasses.replace(memory, kept_cache=memory.cache if memory.cache <= left else 0)

    def _fitted(self, memory: RoleMemory, room: int | None) -> RoleMemory:
        if room is None or memory.least_cache >= memory.cache:
            return memory
        left = int(room * (1 - CACHE_MARGIN)) - (self.turn_memory(memory.role) - memory.cache)
        return dataclasses.replace(memory, cache=max(memory.least_cache, min(memory.cache, left)))

    def process_memory(self, pool: str) -> int:
        """Return the bytes that a process of a pool holds at its peak: roles that share it take turns."""
        return max((self.turn_memory(memory.role) for memory in self.memory if memory.pool == pool), default=0)


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


def transport_name(config: RunConfig, num_nodes: int | None = None) -> TransportName | None:
    """Return what carries published weights to the rollout role; None if only the placement can tell.

    Args:
        config: the run's.
        num_nodes: nodes that both roles are on together; None: as many as the config says.
    """
    if config.rollout_shares_actor or "rollout" not in config.roles:  # then none are sent
        return "shared"
    if config.rollout.weights != "auto":
        return config.rollout.weights
    if config.rollout.engine == "vllm":
        return "folder"  # a process without our packages can read it
    num_nodes = num_nodes or _num_nodes(config)
    if num_nodes is None:
        return None
    if num_nodes > 1:
        return "broadcast"
    return "memory" if config.cluster.device == "cpu" else "ipc"


def describe_transport(name: TransportName | None) -> str:
    """Return a transport in words; None is one that the placement will tell.

    >>> describe_transport("memory")
    'memory (shared by the processes of a node)'
    """
    if name is None:
        return "memory on one node, broadcast across nodes"
    words = {
        "shared": "rollouts are sampled from the actor's own",
        "memory": "shared by the processes of a node",
        "ipc": "device memory, shared by the processes of a node",
        "broadcast": "to all ranks at once, over the network",
        "folder": "safetensors in the run's folder",
    }
    return f"{name} ({words[name]})"


def is_streamed(config: RunConfig) -> bool:
    """Whether ranks of the actor and of the rollout role meet to pass weights on."""
    return transport_name(config) not in ("shared", "folder")


def _num_nodes(config: RunConfig) -> int | None:
    """Return how many nodes actor and rollout are on together, at least; None when that depends on the cluster."""
    if config.cluster.runtime == "inline" or config.cluster.address is None:
        return 1
    pools = [config.roles[role].pool for role in ("actor", "rollout")]
    num_nodes = max(len(config.cluster.pools[pool]) for pool in pools)
    return num_nodes if num_nodes > 1 or pools[0] == pools[1] else None


def attention_cost(config: RunConfig) -> float:
    """Return what rows are balanced by, see `ModelShape.attention_cost`; 0 while nothing is known of the model.

    The critic is taken to be of the actor's shape.
    """
    shape = shape_of(config)
    return shape.attention_cost if shape else 0.0
