"""How long a step takes on accelerators, predicted from the config: by phase, from operations, bytes and launches.

Owns: the arithmetic of a step's time. Must not know: how a phase is done. Its constants are shares of what a device's
vendor prints, as they were measured on an H100 and an H200 with a model of 0.6B (docs/gpu.md). Each phase has two
bounds: responses half as long as they may be, and rows of one length; or responses as long as they may be, and rows of
many lengths. Rewards, tools and agents are not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from rallypoint.config.recipes import RoleName
from rallypoint.config.shape import ModelShape, role_shapes
from rallypoint.config.transport import transport_name
from rallypoint.config.tree import RunConfig
from rallypoint.observability.devices import Device
from rallypoint.prepare.plan import RunPlan
from rallypoint.prepare.pools import num_devices
from rallypoint.prepare.role_memory import RoleMemory, cache_bytes_per_token

_OF_RAGGED_ROWS, _OF_EQUAL_ROWS = 0.28, 0.42
"""Shares of the peak that passes over whole rows reach."""
_PREFILL, _DECODING = 0.15, 0.6
"""Shares of the peak that prompts reach while they are read, and products of one token a row."""
_WEIGHTS, _CACHE, _STATES = 0.8, 0.4, 0.7
"""Shares of the bandwidth at which decoding reads weights and cache, and an optimizer its states."""
_LAUNCH_S = 3.6e-6
_LAUNCHES_OF_A_LAYER, _LAUNCHES_OF_A_TOKEN = 11, 20
"""Kernels of a layer, and of head and sampling, in a step of decoding."""
_GATHERED_PER_S = 1.5e11
"""Bytes a second in which ranks of dp_shard get each other's weights, within a node."""
_LINKS: Mapping[str, float] = {"memory": 4e9, "ipc": 2e10, "broadcast": 8e9, "folder": 7e8}
"""Transport of published weights -> bytes a second; what an H100's ranks were seen or estimated to get."""


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step."""

    name: str
    pool: str
    least_s: float
    most_s: float
    limit: str
    """What takes the largest part of it at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTime:
    """The phases of a step, one after another but for those of pools that do not wait for each other."""

    phases: tuple[Phase, ...]
    num_devices: int
    is_ahead: bool
    """Whether pools work at the same time, as rollouts may be older than the actor."""

    @property
    def seconds(self) -> tuple[float, float]:
        """Bounds of a whole step."""
        pools = {phase.pool for phase in self.phases}
        of_pools = [
            (
                sum(phase.least_s for phase in self.phases if phase.pool == pool),
                sum(phase.most_s for phase in self.phases if phase.pool == pool),
            )
            for pool in pools
        ]
        together = max if self.is_ahead else sum
        return together(least for least, _ in of_pools), together(most for _, most in of_pools)


def step_time(config: RunConfig, plan: RunPlan, device: Device) -> StepTime | None:
    """Predict the time of a step; None while a model is not known.

    Args:
        config: checked.
        plan: its plan, with the cache that a device has room for.
        device: of each process.
    """
    if not plan.memory:
        return None
    found: list[Phase] = []
    for memory in plan.memory:
        shapes = [shape for shape in role_shapes(config, memory.role) if shape is not None]
        for name in ("rollout",) if memory.role == "rollout" else ("pass", "update"):
            bounds = [_terms(config, plan, memory, shapes, name, device, share) for share in (0.5, 1.0)]
            least, most = (sum(terms.values()) for terms in bounds)
            if most:
                title = memory.role if name == "rollout" else f"{memory.role} {name}"
                found.append(Phase(title, memory.pool, least, most, max(bounds[1], key=bounds[1].__getitem__)))
    found += _publishing(config, plan)
    return StepTime(tuple(found), round(num_devices(config)), is_ahead=config.rollout.max_staleness > 0)


def _terms(
    config: RunConfig,
    plan: RunPlan,
    memory: RoleMemory,
    shapes: list[ModelShape],
    name: str,
    device: Device,
    share: float,
) -> dict[str, float]:
    """Return what a phase spends its time on, where responses are a share of their longest -> seconds."""
    if name == "rollout":
        return _sampling(config, memory, shapes[0], device, share)
    num_passes = _num_updates(config, memory.role) if name == "update" else _num_passes(config, memory.role)
    if not num_passes:
        return {}
    size = 2 if config.model.dtype == "bfloat16" else 4
    reached = (_OF_EQUAL_ROWS if share < 1 else _OF_RAGGED_ROWS) * device.peak(size)
    operations = sum(_forward(config, shape, share) for shape in shapes)
    terms = {"arithmetic": num_passes * operations / memory.num_ranks / reached}
    if config.mesh(memory.role)["dp_shard"] > 1:
        num_updates, _, num_micro_batches = plan.updates.get(memory.role, (1, 0, 1))
        whole = sum(shape.num_parameters for shape in shapes) * size
        gathers = 2 * num_updates * num_micro_batches if name == "update" else num_micro_batches
        terms["gathering weights"] = max(0.0, gathers * whole / _GATHERED_PER_S - terms["arithmetic"])
    if name == "update":
        num_bytes = memory.weights + memory.gradients + memory.optimizer
        terms["the optimizer's states"] = 2 * plan.updates[memory.role][0] * num_bytes / (_STATES * device.bandwidth)
    return terms


def _num_passes(config: RunConfig, role: RoleName) -> int:
    """Return how often a role computes the rows of a step forward, outside its updates."""
    if role == "actor":
        return 0 if config.judges_in_update or config.trains_on_files else 1
    return 1


def _num_updates(config: RunConfig, role: RoleName) -> int:
    """Return how many forward passes the updates of a step are worth: a backward pass is two."""
    learner = config.learners.get(role)
    return 0 if learner is None else learner.num_epochs * (3 if config.engine.activations == "keep" else 4)


def _lengths(config: RunConfig, share: float) -> tuple[float, float]:
    """Return tokens of a prompt, and of what is trained of a row."""
    if config.trains_on_files:
        return 0.0, share * config.data.max_row_tokens
    return config.data.max_prompt_tokens, share * config.rollout.max_response_tokens


def _forward(config: RunConfig, shape: ModelShape, share: float) -> float:
    """Return the operations of one pass over the rows of a step; each prompt is computed once."""
    prompt, response = _lengths(config, share)
    tokens = config.num_examples * prompt + config.num_rows * response
    pairs = config.num_examples * prompt**2 / 2 + config.num_rows * response * (prompt + response / 2)
    head = 2 * shape.hidden_size * shape.vocab_size * config.num_rows * response
    return 2.0 * shape.token_cost * (tokens + shape.attention_cost * pairs) + head


def _sampling(
    config: RunConfig, memory: RoleMemory, shape: ModelShape, device: Device, share: float
) -> dict[str, float]:
    """Return what sampling spends its time on, in waves of as many rows as the cache has room for."""
    prompt, response = _lengths(config, share)
    size = 2 if config.model.dtype == "bfloat16" else 4
    tp = config.rollout.mesh.tp  # devices of a server do their parts at the same time
    per_token, cached = 2.0 * shape.token_cost / tp, cache_bytes_per_token(config, shape.part(tp, None))
    num_copies = config.num_parts("rollout")
    num_rows = -(-config.num_rows // num_copies)
    at_once = max(1, min(num_rows, config.rollout.max_batch_rows, int(memory.cache / cached / (prompt + response))))
    num_waves, context = num_rows / at_once, prompt + response / 2
    head = 2 * shape.hidden_size * shape.vocab_size / tp
    one = per_token * (1 + shape.attention_cost * context) + head
    steps = num_waves * response
    of_layer = _LAUNCHES_OF_A_LAYER + (2 if tp > 1 else 0)  # with the sums over devices
    launches = of_layer * shape.num_layers + _LAUNCHES_OF_A_TOKEN
    num_prompts = config.num_examples / num_copies
    return {
        "arithmetic": num_prompts * prompt * per_token / (_PREFILL * device.peak(size))
        + steps * at_once * one / (_DECODING * device.peak(size)),
        "reading weights": steps * shape.num_parameters / tp * size / (_WEIGHTS * device.bandwidth),
        "reading the cache": steps * at_once * context * cached / (_CACHE * device.bandwidth),
        "launches": steps * launches * _LAUNCH_S,
    }


def _publishing(config: RunConfig, plan: RunPlan) -> Iterator[Phase]:
    name = transport_name(config) or "broadcast"
    if name != "shared" and plan.num_parameters is not None:
        seconds = plan.num_parameters * (2 if config.model.dtype == "bfloat16" else 4) / _LINKS[name]
        yield Phase("publish", config.roles["rollout"].pool, seconds, seconds, name)
