"""What the plan counts of a pass on an accelerator, where kernels are fused and products large."""

import dataclasses
import json
from pathlib import Path

from rallypoint.config import RoleName, RunConfig, load_config
from rallypoint.config.shape import shape_of
from rallypoint.prepare.plan import make_plan
from rallypoint.prepare.pools import num_devices
from rallypoint.prepare.role_memory import role_memory


def load(device: str) -> RunConfig:
    more = (
        "data.max_prompt_tokens=1024",
        "rollout.max_response_tokens=1024",
        "recipe=grpo",
        "actor.num_mini_batches=1",
        "model.dtype=float32",
        "engine.activations=keep",
    )
    return load_config("digits-grpo", [f"cluster.device={device}", *more]).config


def test_scores_are_counted_where_no_fused_kernel_knows_what_is_done_to_them(here: Path):
    config = load("cuda")
    shape = shape_of(config)
    assert shape is not None
    [layers] = shape.layers
    capping = dataclasses.replace(layers, mixer=dataclasses.replace(layers.mixer, caps_scores=True))
    fused, capped = (
        role_memory(config, "actor", each) for each in (shape, dataclasses.replace(shape, layers=(capping,)))
    )
    # Of every query a number for each key before it, in all layers.
    rows = config.engine.max_tokens_per_micro_batch // config.max_row_tokens
    scores = 4 * shape.num_layers * rows * layers.mixer.num_heads * config.max_row_tokens**2 // 2
    assert capped.activations - fused.activations > 0.8 * scores
    sinking = dataclasses.replace(layers, mixer=dataclasses.replace(layers.mixer, has_sinks=True))
    sinks = dataclasses.replace(shape, layers=(sinking,))
    assert role_memory(config, "actor", sinks).activations == capped.activations
    half = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    assert role_memory(half, "actor", sinks).activations == role_memory(half, "actor", shape).activations


def test_larger_chunks_of_the_head_are_counted(here: Path):
    shape = shape_of(load("cpu"))
    assert shape is not None
    wide = dataclasses.replace(shape, vocab_size=150_000)
    here_and_there = [role_memory(load(device), "actor", wide).activations for device in ("cpu", "cuda")]
    assert here_and_there[1] > 2**30 > here_and_there[0] / 4


def test_ranks_that_share_the_weights_have_their_part_as_masters_and_whole_layers_one_at_a_time(here: Path):
    config = load("cuda")
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    mesh = config.actor.mesh.model_copy(update={"dp_shard": 2})
    sharded = config.model_copy(update={"actor": config.actor.model_copy(update={"mesh": mesh})})
    shape = shape_of(config)
    assert shape is not None
    alone, part = role_memory(config, "actor", shape), role_memory(sharded, "actor", shape)
    trained = shape.num_parameters // 2
    # The shards are float32 masters; whole weights of half precision have masters beside them.
    assert (alone.weights, alone.optimizer) == (2 * shape.num_parameters, 12 * shape.num_parameters)
    assert (part.weights, part.gradients, part.optimizer) == (4 * trained, 4 * trained, 8 * trained)
    outside = shape.num_parameters - shape.num_backbone_parameters
    layers = 2 * shape.num_backbone_parameters // shape.num_layers
    assert part.activations - alone.activations == 2 * (outside + layers)


def test_ranks_that_share_the_tokens_of_a_row_have_their_part_and_the_keys_of_all(here: Path):
    config = load("cuda")
    shape = shape_of(config)
    assert shape is not None
    found = {}
    for axis in ("tp", "sp", "cp"):
        mesh = config.actor.mesh.model_copy(update={} if axis == "tp" else {axis: 4})
        cut = config.model_copy(update={"actor": config.actor.model_copy(update={"mesh": mesh})})
        found[axis] = role_memory(cut, "actor", shape).activations
    assert found["sp"] < found["cp"] < found["tp"]
    rows = config.engine.max_tokens_per_micro_batch // config.max_row_tokens
    borrowed = rows * (config.max_row_tokens - 1) * 3 // 4 * shape.cached_bytes(4)
    assert 0.9 * borrowed < found["cp"] - found["sp"] < 1.1 * borrowed


def test_all_teachers_are_counted_and_one_is_at_work_at_a_time(tmp_path: Path):
    sizes = {"small": (64, 2), "large": (256, 4)}
    for name, (width, layers) in sizes.items():
        (tmp_path / name).mkdir()
        shape = {"model_type": "llama", "vocab_size": 100, "hidden_size": width, "num_hidden_layers": layers}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 2 * width}
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    small, large = (tmp_path / name for name in sizes)

    def held(*teachers: str):
        own = [f"model.path={small}", "data.train=d.jsonl", "model.lora={}", *teachers]
        plan = make_plan(load_config("opd", own).config)
        return next(memory for memory in plan.memory if memory.role == "teacher")

    first, second = held(f"teacher.path={small}"), held(f"teacher.path={large}")
    both = held(f"teacher.path={small}", f"teacher.by_source={{math: {large}, code: {small}, law: 'http://host/v1'}}")
    assert second.weights > 10 * first.weights > 0
    assert both.weights == first.weights + second.weights, "each folder once, and none that is served"
    assert both.activations == second.activations
    assert both.gradients == both.optimizer == 0


def test_ranks_that_sample_together_have_their_part_of_the_cache_and_of_weights_that_are_not_the_actors(here: Path):
    cut = [
        "cluster.pools={main: [2]}",
        "rollout.mesh.tp=2",
        "rollout.cache_tokens=4096",
        "model.create.num_key_value_heads=2",
    ]
    whole, own, shared = (
        load_config("digits-grpo", more).config
        for more in ([cut[0], *cut[2:]], cut, [*cut, "actor.mesh.tp=2", "reference.mesh.tp=2"])
    )
    shape = shape_of(whole)
    assert shape is not None
    one, part, actors = (role_memory(config, "rollout", shape) for config in (whole, own, shared))
    assert [2 * part.cache, 2 * actors.cache] == [one.cache] * 2
    assert (one.weights, actors.weights) == (0, 0), "the actor's"
    assert 0.4 < part.weights / (4 * shape.num_parameters) < 0.6


def test_a_server_that_keeps_8_bits_has_half_of_the_layers_and_all_of_what_is_around_them(here: Path):
    config = load_config(
        "digits-grpo",
        ["cluster.device=cuda", "model.dtype=bfloat16", "rollout.engine=vllm", "correction=[{name: tis, cap: 2.0}]"],
    ).config
    rollout = config.rollout.model_copy(update={"quantization": "fp8"})
    shape = shape_of(config)
    assert shape is not None
    plain, quantized = (
        role_memory(each, "rollout", shape).weights for each in (config, config.model_copy(update={"rollout": rollout}))
    )
    assert plain == 2 * shape.num_parameters
    assert quantized == plain - shape.num_backbone_parameters


def test_a_server_over_the_devices_of_ranks_has_a_part_of_weights_and_cache_on_each(here: Path):
    own = [
        "rollout.engine=vllm",
        "rollout.cache_tokens=4096",
        "cluster.device=cuda",
        "model.create.num_key_value_heads=2",
    ]
    one, shared, alone = (
        load_config("digits-grpo", [*own, *more]).config
        for more in (
            ["cluster.pools={main: [2]}"],
            ["cluster.pools={main: [2]}", "rollout.mesh.tp=2"],
            ["cluster.pools={main: [2], sampling: [1]}", "rollout.placement.pool=sampling", "rollout.mesh.tp=2"],
        )
    )
    shape = shape_of(one)
    assert shape is not None
    whole, part, of_its_own = (role_memory(config, "rollout", shape) for config in (one, shared, alone))
    assert (part.weights, part.cache) == (of_its_own.weights, of_its_own.cache)
    assert 2 * part.cache == whole.cache
    assert 0.4 < part.weights / whole.weights < 0.6
    assert [config.num_parts("rollout") for config in (one, shared, alone)] == [2, 1, 1]
    devices = [num_devices(config) for config in (one, shared, alone)]
    assert devices == [2, 2, 4]


def test_buckets_of_weights_that_are_broadcast_are_counted_and_those_that_a_rank_passes_on_to_its_server(here: Path):
    pools = ("cluster={device: cuda, address: auto, pools: {main: [1, 1], side: [1]}}", "rollout.placement.pool=side")

    def held(role: RoleName, *more: str) -> int:
        config = load_config("digits-grpo", [*pools, "model.create.num_key_value_heads=2", *more]).config
        shape = shape_of(config)
        assert shape is not None
        return role_memory(config, role, shape).weights

    sent = {role: held(role) - held(role, "rollout.weights=folder") for role in ("actor", "rollout", "reference")}
    assert sent == {"actor": 128 * 2**20, "rollout": 128 * 2**20, "reference": 0}
    served = "rollout.engine=vllm"
    assert held("rollout", served) - held("rollout", served, "rollout.weights=folder") == 384 * 2**20
