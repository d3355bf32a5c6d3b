"""What a config amounts to, computed without starting anything: batches, placement, memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

from rallypoint.config.memory import RoleMemory, role_memory
from rallypoint.config.shape import shape_of
from rallypoint.config.tree import RoleName, RunConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do in a step, where, and with how much memory."""

    num_prompts: int
    group_size: int
    num_rows: int
    max_tokens: int
    """Most tokens that a step can have, prompts included."""
    updates: Mapping[str, tuple[int, int, int]]
    """Learner -> (optimizer steps a training step, rows of a mini-batch, most micro-batches of one on a rank)."""
    num_parameters: int | None
    """None when nothing is known of the model yet, as it is on the hub."""
    memory: tuple[RoleMemory, ...]
    """Empty when the model is not known."""

    def turn_memory(self, role: RoleName) -> int:
        """Return the bytes that a process holds at its peak while a role has its turn, other roles' among them."""
        mine = next(memory for memory in self.memory if memory.role == role)
        others = (memory.held for memory in self.memory if memory.pool == mine.pool and memory.role != role)
        return mine.total + mine.borrowed + sum(others)

    def process_memory(self, pool: str) -> int:
        """Return the bytes that a process of a pool holds at its peak: roles that share it take turns."""
        return max((self.turn_memory(memory.role) for memory in self.memory if memory.pool == pool), default=0)


def make_plan(config: RunConfig) -> Plan:
    """Compute the plan of a checked config."""
    learners = {"actor": config.actor, **({"critic": config.critic} if config.recipe == "ppo" else {})}
    cap, row = config.engine.max_tokens_per_micro_batch, config.max_row_tokens
    rows_per_micro_batch = max(1, cap // row)
    updates: dict[str, tuple[int, int, int]] = {}
    for role, learner in learners.items():
        rows = -(-config.num_rows // learner.num_mini_batches)
        rows_of_rank = -(-rows // config.num_parts(cast("RoleName", role)))
        num_micro_batches = -(-rows_of_rank // rows_per_micro_batch)
        updates[role] = (learner.num_epochs * learner.num_mini_batches, rows, num_micro_batches)
    shape = shape_of(config)
    return Plan(
        num_prompts=config.rollout.num_prompts,
        group_size=config.rollout.group_size,
        num_rows=config.num_rows,
        max_tokens=config.num_rows * row,
        updates=updates,
        num_parameters=shape.num_parameters if shape else None,
        memory=tuple(role_memory(config, role, shape) for role in config.roles) if shape else (),
    )


def attention_cost(config: RunConfig) -> float:
    """Return what rows are balanced by, see `ModelShape.attention_cost`; 0 while nothing is known of the model.

    The critic is taken to be of the actor's shape.
    """
    shape = shape_of(config)
    return shape.attention_cost if shape else 0.0
