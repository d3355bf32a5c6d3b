"""The engine that the config names, for one rank of the rollout role."""

from __future__ import annotations

import contextlib

import torch
from transformers import PreTrainedModel

from rallypoint.cluster import WorkerContext
from rallypoint.config import LoRAConfig, RunConfig
from rallypoint.config.limits import BLOCK_TOKENS, MOST_VLLM_RANK
from rallypoint.config.shape import parse_shape
from rallypoint.errors import ModelError
from rallypoint.generation import GenerationEngine, HFEngine, NativeEngine
from rallypoint.generation.native.kv_cache import CacheSize
from rallypoint.generation.requests import Decode
from rallypoint.generation.vllm import Launch, Outline, ServerProcess, VllmConnection, VLLMEngine
from rallypoint.install import find_engine
from rallypoint.model_files import adapters_of, outline_policy
from rallypoint.prepare.plan import make_plan
from rallypoint.prepare.role_memory import least_tokens, may_keep_cache, reserved_tokens, sampling_bytes
from rallypoint.roles.placement import WorkerSpec

_LEAST_SHARE = 0.001
_VLLM_BLOCK_TOKENS = 128
"""Tokens of a block of keys and values on processors, where blocks are largest."""


def make_engine(config: RunConfig, model: PreTrainedModel, decode: Decode | None = None) -> GenerationEngine:
    """Return the engine that the config names, for a model in this process; stop texts need `decode`."""
    rollout = config.rollout
    if rollout.engine == "hf":
        return HFEngine(model, decode=decode)
    return NativeEngine(
        model,
        max_rows=rollout.max_batch_rows,
        cache_tokens=_cache_room(
            config, model, rollout.cache_tokens or _num_rows(config) * (config.max_row_tokens + 2 * BLOCK_TOKENS)
        ),
        mode="exact" if rollout.exact else "fast",
        on_load=rollout.on_load,
        decode=decode,
        keeps_memory=keeps_memory(config),
        records_experts=rollout.router_replay,
    )


def start_server(
    spec: WorkerSpec, context: WorkerContext, devices: tuple[str, ...], until: contextlib.ExitStack
) -> VLLMEngine:
    """Start vLLM for this rank, with the initial policy; it ends with `until`, or with this process.

    It is on this rank's own devices, or those of the ranks that share it; see `ServerRanks.devices`.

    Raises:
        EngineError: this node does not have it.
        ModelError: the model cannot be read.
    """
    config, rollout = spec.config, spec.config.rollout
    model = config.model
    installed = find_engine("vllm")
    outline = Outline.of(outline_policy(spec.model_path, dtype=model.dtype, trust_remote_code=model.trust_remote_code))
    num_blocks = -(-config.max_row_tokens // _VLLM_BLOCK_TOKENS) + 1
    cache_tokens = rollout.cache_tokens or _num_rows(config) * num_blocks * _VLLM_BLOCK_TOKENS
    bytes_per_token = -(-outline.cache_bytes_per_token // min(rollout.mesh.tp, outline.num_cache_heads))
    cache_bytes = cache_tokens * bytes_per_token
    if rollout.cache_tokens is None and context.device != "cpu":
        least_bytes = num_blocks * _VLLM_BLOCK_TOKENS * bytes_per_token
        cache_bytes = max(least_bytes, min(cache_bytes, planned_cache(config) or cache_bytes))
    launch = Launch(
        python=installed.python,
        model=spec.model_path,
        dtype=model.dtype,
        device=context.device,
        num_cpus=context.num_cpus * context.mesh.axes.get("tp", 1),
        max_tokens=config.max_row_tokens,
        max_rows=rollout.max_batch_rows,
        cache_bytes=cache_bytes,
        trust_remote_code=model.trust_remote_code,
        memory_share=_memory_share(
            outline.num_bytes(rollout.quantization) // rollout.mesh.tp + cache_bytes, context.device
        ),
        log=spec.folder.path / "logs" / f"vllm-{context.rank}.log",
        adapter_rank=_adapter_rank(model.lora),
        second_runner=context.device != "cpu",
        records_experts=rollout.router_replay,
        quantization=rollout.quantization,
        num_devices=rollout.mesh.tp,
        visible_devices=devices,
    )
    connection = VllmConnection(
        lambda folder: ServerProcess(launch, folder),
        takes_adapters=launch.adapter_rank is not None,
        gives_memory=context.device != "cpu",
        start_s=config.cluster.call_timeout_s,
        tick=context.tick,
        say=context.say,
    )
    until.callback(connection.close)
    return VLLMEngine(
        connection,
        outline,
        max_request_tokens=config.max_row_tokens,
        max_rows=rollout.max_batch_rows,
        decode=spec.stop_decoder(),
        silence_s=config.cluster.call_timeout_s,
    )


def planned_cache(config: RunConfig) -> int | None:
    """Return the bytes of a cache that the plan leaves room for on this accelerator; None if there is no plan.

    A server reserves it before other roles are there, so that what is free then says little.
    """
    _, total = torch.accelerator.get_memory_info()
    room = int(total * min(1.0, config.cluster.num_gpus_per_process))
    plan = make_plan(config).within({config.rollout.placement.pool: room})
    return next((memory.cache for memory in plan.memory if memory.role == "rollout"), None)


def _memory_share(num_bytes: int, device: str) -> float | None:
    """Return the part of an accelerator's memory that weights and cache take; None on a CPU.

    It is what has to be free for vLLM to start, which by default would be 92 % of a device that others are on, too.
    """
    if device == "cpu":
        return None
    _, total = torch.accelerator.get_memory_info()
    return min(1.0, max(_LEAST_SHARE, num_bytes / total))


def make_guest_engine(
    config: RunConfig, training: GenerationEngine, model: PreTrainedModel | None, *, max_rows: int, decode: Decode
) -> GenerationEngine:
    """Return an engine for requests of guests, asleep; only one of the two may be awake.

    Args:
        config: of the run.
        training: what samples for training in this process.
        model: that it samples from, if it is in this process.
        max_rows: requests that run at once.
        decode: for stop texts.
    """
    if isinstance(training, VLLMEngine):
        engine = training.beside(max_rows=max_rows, decode=decode)
    else:
        assert model is not None, "no server has it"
        engine = NativeEngine(
            model,
            max_rows=max_rows,
            # What training's own engine has, which sleeps meanwhile: nobody has to plan for more.
            cache_tokens=_cache_room(config, model, reserved_tokens(config)),
            mode="exact" if config.rollout.exact else "fast",
            decode=decode,
            version=training.version,
        )
    engine.sleep()
    return engine


def _cache_room(config: RunConfig, model: PreTrainedModel, most_tokens: int) -> CacheSize | int:
    """Return the size of a cache; off the CPU one that follows from free memory, unless it was said."""
    least = least_tokens(config)
    if least >= most_tokens or config.cluster.device == "cpu":
        return most_tokens
    shape = parse_shape(model.config.to_dict())
    spared = sampling_bytes(config, shape) if shape is not None else 0
    return CacheSize(most_tokens, least, spared, min(1.0, config.cluster.num_gpus_per_process))


def keeps_memory(config: RunConfig) -> bool:
    """Whether a rollout rank keeps its cache and captured steps between turns; see `RunPlan.within`.

    It does where its pool has no other role, and where the plan has memory for both, on the device of this process.
    """
    pool = config.rollout.placement.pool
    if not may_keep_cache(config):
        return False
    if all(role == "rollout" or placement.pool != pool for role, placement in config.roles.items()):
        return True
    _, total = torch.accelerator.get_memory_info()
    return any(memory.kept_cache for memory in make_plan(config).within({pool: total}).memory)


def _adapter_rank(lora: LoRAConfig | None) -> int | None:
    """Return the rank of the adapters that are published to vLLM.

    Raises:
        ModelError: vLLM has no adapters like these.
    """
    if lora is None:
        return None
    adapters = adapters_of(lora)
    if adapters.whole or adapters.lora.rank > MOST_VLLM_RANK:
        found = f"whole weights of {', '.join(adapters.whole)}" if adapters.whole else f"rank {adapters.lora.rank}"
        raise ModelError(
            f"model.lora.path={lora.path}: this adapter has {found}, and vLLM takes adapters of linear layers only, "
            f"with ranks up to {MOST_VLLM_RANK}; use rollout.engine=native"
        )
    return adapters.lora.rank


def _num_rows(config: RunConfig) -> int:
    """Return how many rollouts a rank has to itself, as far as they run together."""
    rollout = config.rollout
    return min(rollout.max_batch_rows, -(-config.max_groups // config.num_parts("rollout")) * rollout.group_size)
