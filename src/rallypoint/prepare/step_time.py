"""How long a step takes, predicted from the config: by phase, from operations, bytes and launches.

Owns: the arithmetic of a step's time. Must not know: how a phase is done. What accelerators do is known from their
vendors, and their constants are shares of it, as they were measured on an H100 and an H200 with a model of 0.6B
(docs/gpu.md). What cores do is measured on the machine itself (docs/cpu.md). Each phase has two bounds: responses half
as long as they may be, and rows of one length; or responses as long as they may be, and rows of many lengths. Rewards,
tools and agents are not in it.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import TypeAdapter

from rallypoint.config.recipes import RoleName
from rallypoint.config.shape import ModelShape, role_shapes
from rallypoint.config.transport import transport_kind
from rallypoint.config.tree import RunConfig
from rallypoint.families import FAMILIES, MIXTURES
from rallypoint.observability.devices import Cores, Device
from rallypoint.prepare.plan import RunPlan
from rallypoint.prepare.pools import num_devices
from rallypoint.prepare.role_memory import RoleMemory, cache_bytes_per_token
from rallypoint.transport_kinds import BROADCAST, SHARED


class _Passes(NamedTuple):
    """What passes need beside their products."""

    launches_of_layer: int
    other_launches: int
    numbers: float
    """Numbers that a layer reads and writes between its products for each hidden number of a token."""
    launches_of_row: float
    """Launches for each row of the step: the driver packs and unpacks it, and one of the ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Costs:
    """What a kind of device reaches, and what the code for it needs."""

    of_rows: tuple[float, float]
    """Shares of the peak that passes over whole rows reach: of one length, and of many."""
    prefill: float
    """Likewise, prompts while they are read."""
    decoding: float
    """Likewise, products of one token a row."""
    weights: float
    """Share of the bandwidth at which decoding reads weights."""
    cache: float
    """Likewise, the cache."""
    states: float
    """Likewise, an optimizer its states."""
    hides_sums: bool
    """Whether sums of gradients are over when their backward pass is."""
    forward: _Passes
    update: _Passes
    decode: _Passes
    own_code: int
    """Launches of a layer that decodes by its model's own code, or with adapters, beyond those of plain arithmetic."""
    experts: int
    """Launches beyond these of a layer of experts."""
    one_by_one: float
    """Time of a launch of our own engine where steps are not captured, over that of a captured one."""
    launches_of_token: float
    """Launches for each row that decodes, to draw its token and keep it."""
    launches_of_call: float
    """Likewise of the driver and the processes that it calls, for each pass over all rows, and each optimizer step."""
    links: Mapping[str, float]
    """Name of the transport of published weights -> bytes a second."""


_READ = TypeAdapter(dict[str, _Costs]).validate_python(
    yaml.safe_load(Path(__file__).with_name("step_costs.yaml").read_text(encoding="utf-8"))
)
_COSTS: Mapping[type, _Costs] = {Device: _READ["accelerators"], Cores: _READ["cores"]}


_TO_HOST_PER_S = 2.5e10
"""Bytes a second between a device and page-locked CPU memory: half of what PCIe 5.0 promises; never measured."""
_HALF = 2
"""Bytes of a number of half precision."""


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
    """Accelerators that the run holds; 0 on cores."""
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


def step_time(config: RunConfig, plan: RunPlan, device: Device | Cores) -> StepTime | None:
    """Predict the time of a step; None while a model is not known.

    Args:
        config: checked.
        plan: its plan, with the cache that a device has room for.
        device: of each process.
    """
    if not plan.memory:
        return None
    pace, found = _Pace(config, device, _COSTS[type(device)]), list[Phase]()
    for memory in plan.memory:
        shapes = [shape for shape in role_shapes(config, memory.role) if shape is not None]
        for name in ("rollout",) if memory.role == "rollout" else ("pass", "update"):
            bounds = [_terms(pace, plan, memory, shapes, name, share) for share in (0.5, 1.0)]
            least, most = (sum(terms.values()) for terms in bounds)
            if most:
                title = memory.role if name == "rollout" else f"{memory.role} {name}"
                found.append(Phase(title, memory.pool, least, most, max(bounds[1], key=bounds[1].__getitem__)))
    kind = transport_kind(config) or BROADCAST
    if kind != SHARED and plan.num_parameters is not None:
        seconds = plan.num_parameters * pace.size / pace.costs.links[kind.name]
        found.append(Phase("publish", config.roles["rollout"].pool, seconds, seconds, kind.name))
    num = 0 if config.cluster.device == "cpu" else math.ceil(num_devices(config))
    return StepTime(tuple(found), num, is_ahead=config.rollout.max_staleness > 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Pace:
    """A config, and what a process has to compute it with."""

    config: RunConfig
    device: Device | Cores
    costs: _Costs

    @property
    def size(self) -> int:
        """Bytes of a number of the model."""
        return 2 if self.config.model.dtype == "bfloat16" else 4

    def peak(self, shape: ModelShape, tokens: float, *, is_update: bool = False) -> float:
        """Return the operations per second of a layer's products, of so many tokens each; a layer has some seven."""
        width = math.sqrt(shape.token_cost / shape.num_layers / 7)
        return self.device.products(self.size, max(1.0, tokens), width, is_update=is_update)

    def calls(self, passes: _Passes, num_calls: int) -> float:
        """Return the seconds in which rows come to the ranks, and what these say of them comes back."""
        launches = self.costs.launches_of_call * num_calls + passes.launches_of_row * self.config.num_rows
        return launches * self.device.launch_s

    def beside(self, passes: _Passes, shape: ModelShape, num_passes: float, tokens: float) -> dict[str, float]:
        """Return what passes of so many tokens each spend beside products -> seconds."""
        launches = num_passes * (passes.launches_of_layer * shape.num_layers + passes.other_launches)
        numbers = num_passes * tokens * passes.numbers * shape.hidden_size * shape.num_layers
        return {
            "launches": launches * self.device.launch_s,
            "work between products": numbers * self.size / self.device.moved(tokens * shape.hidden_size),
        }


def _terms(
    pace: _Pace, plan: RunPlan, memory: RoleMemory, shapes: list[ModelShape], name: str, share: float
) -> dict[str, float]:
    """Return what a phase spends its time on, where responses are a share of their longest -> seconds."""
    config, device, costs = pace.config, pace.device, pace.costs
    if name == "rollout":
        return _sampling(pace, memory, shapes[0], share)
    num_passes = _num_updates(config, memory.role) if name == "update" else _num_passes(config, memory.role)
    if not num_passes:
        return {}
    is_update, (num_updates, _, num_micro_batches) = name == "update", plan.updates.get(memory.role, (1, 0, 1))
    prompt, response = _lengths(config, share)
    tokens = (config.num_examples * prompt + config.num_rows * (response - 1)) / memory.num_ranks
    rows = config.num_rows / memory.num_ranks
    parts, passes = (config.learners[memory.role].num_mini_batches, costs.update) if is_update else (1, costs.forward)
    cuts = parts * math.ceil(rows * (prompt + response) / parts / config.engine.max_tokens_per_micro_batch)
    terms = collections.defaultdict[str, float](float, {"calls": pace.calls(passes, num_updates if is_update else 1)})
    for shape in shapes:
        reached = costs.of_rows[share == 1] * pace.peak(shape, tokens / cuts, is_update=is_update)
        terms["arithmetic"] += num_passes * _forward(config, shape, share) / memory.num_ranks / reached
        times = num_passes / 3 if is_update else num_passes
        for what, seconds in pace.beside(passes, shape, times * cuts, tokens / cuts).items():
            terms[what] += seconds
    weights = sum(shape.num_parameters for shape in shapes) * pace.size
    if config.mesh(memory.role)["dp_shard"] > 1:
        gathers = 2 * num_updates * num_micro_batches if is_update else num_micro_batches
        terms["gathering weights"] = max(0.0, gathers * weights / device.gathered - terms["arithmetic"])
    if (cp := config.mesh(memory.role)["cp"]) > 1:
        cached = sum(shape.part(config.mesh(memory.role)["tp"], None).cached_bytes(pace.size) for shape in shapes)
        terms["exchanging keys and values"] = num_passes * (cp - 1) * tokens * cached / device.gathered
    if is_update:
        gradients = memory.gradients + memory.gradients_away
        num_bytes = memory.weights + gradients + memory.optimizer
        if config.engine.offload != "nothing":  # masters, unless the parts of the weights are, and two moments
            num_kinds = 3 if pace.size == _HALF and config.mesh(memory.role)["dp_shard"] == 1 else 2
            num_bytes += num_kinds * gradients
            terms["copying the optimizer's states"] = 2 * num_updates * num_kinds * gradients / _TO_HOST_PER_S
        if memory.gradients_away:  # each pass but the first adds to them; then they are summed, clipped, and stepped
            num_copies = num_updates * (2 * num_micro_batches - 1 + 5)
            terms["copying gradients"] = num_copies * gradients / _TO_HOST_PER_S
        terms["the optimizer's states"] = 2 * num_updates * num_bytes / (costs.states * device.bandwidth)
        if not costs.hides_sums and config.num_parts(memory.role) > 1:
            terms["sums of gradients"] = num_updates * gradients / device.gathered
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
    tokens = config.num_examples * prompt + config.num_rows * (response - 1)  # the last token chooses nothing
    pairs = config.num_examples * prompt**2 / 2 + config.num_rows * response * (prompt + response / 2)
    head = 2 * shape.hidden_size * shape.vocab_size * config.num_rows * response
    return 2.0 * shape.token_cost * (tokens + shape.attention_cost * pairs) + head


def _is_captured(config: RunConfig, shape: ModelShape) -> bool:
    """Whether our own engine captures its steps on accelerators: see `Decoder.may_be_captured`, docs/rollouts.md."""
    waits = config.rollout.mesh.tp > 1 or config.rollout.router_replay or shape.state_bytes(1) > 0
    return not waits and not (shape.model_type in MIXTURES and config.model.dtype == "float32")


def _sampling(pace: _Pace, memory: RoleMemory, shape: ModelShape, share: float) -> dict[str, float]:
    """Return what sampling spends its time on, in waves of as many rows as the cache has room for."""
    config, device, costs, size = pace.config, pace.device, pace.costs, pace.size
    prompt, response = _lengths(config, share)
    tp = config.rollout.mesh.tp  # devices of a server do their parts at the same time
    per_token, cached = 2.0 * shape.token_cost / tp, cache_bytes_per_token(config, shape.part(tp, None))
    num_copies = config.num_parts("rollout")
    num_rows = -(-config.num_rows // num_copies)
    at_once = max(1, min(num_rows, config.rollout.max_batch_rows, int(memory.cache / cached / (prompt + response))))
    num_waves, context = num_rows / at_once, prompt + response / 2
    head = 2 * shape.hidden_size * shape.vocab_size / tp
    one = per_token * (1 + shape.attention_cost * context) + head
    steps = num_waves * response
    bits = 1 if config.rollout.quantization else size  # bytes of a weight
    launches = costs.decode.launches_of_layer + (2 if tp > 1 else 0)  # and sums
    if config.rollout.engine == "native":
        launches += 0 if FAMILIES[shape.model_type].is_plain and not config.model.lora and tp == 1 else costs.own_code
        launches += costs.experts if shape.model_type in MIXTURES else 0
        launches *= 1 if _is_captured(config, shape) else costs.one_by_one
    decode = costs.decode._replace(launches_of_layer=launches)
    read, weights = config.num_examples / num_copies * prompt, shape.num_parameters - shape.num_idle(at_once)
    beside = pace.beside(decode, shape, steps, at_once)
    prompts = pace.beside(costs.forward, shape, num_waves, read / num_waves)
    return {
        "arithmetic": read * per_token / (costs.prefill * pace.peak(shape, read / num_waves))
        + steps * at_once * one / (costs.decoding * pace.peak(shape, at_once)),
        "reading weights": steps * weights / tp * bits / (costs.weights * device.bandwidth),
        "reading the cache": steps * at_once * context * cached / (costs.cache * device.bandwidth),
        "drawing tokens": steps * at_once * costs.launches_of_token * device.launch_s,
        "calls": pace.calls(costs.decode, 1),
        **{what: seconds + prompts[what] for what, seconds in beside.items()},
    }
