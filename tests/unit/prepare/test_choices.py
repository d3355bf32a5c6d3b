"""Automatic keys that nobody set, on machines of every size, by plain numbers."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.config import RunConfig, load_config, values_of
from rallypoint.config.load import AUTOMATICALLY, THIS_MACHINE
from rallypoint.errors import ConfigError
from rallypoint.prepare.plan import SENT_BYTES, activations_bytes, choose, make_plan
from rallypoint.types import ActorBatch, CriticBatch, DistilledBatch

GIB = 2**30
OPEN = ("cluster.pools=null",)
NO_DEVICES = {"num_cores": 8, "memory_bytes": 64 * GIB, "devices_per_node": (), "device_bytes": 0}


def layout(*overrides: str, cores: int, gib: float = 64, name: str = "base.yaml") -> tuple[int, int]:
    """Processes and cores of each that a machine would get."""
    machine = {**NO_DEVICES, "num_cores": cores, "memory_bytes": round(gib * GIB)}
    cluster = load_config(name, [*OPEN, *overrides], choose=partial(choose, **machine)).config.cluster
    return cluster.pools["main"][0], cluster.num_cpus_per_process


ROWS = ("rollout.num_prompts=64", "recipe=grpo", "actor.num_mini_batches=1")


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, (1, 1)), (2, (2, 1)), (8, (8, 1)), (16, (16, 1)), (24, (12, 2)), (64, (16, 4))]
)
def test_every_core_works_and_there_are_not_more_processes_than_gain_anything(here: Path, cores: int, expected):
    assert layout(*ROWS, cores=cores) == expected


def test_a_process_is_not_made_without_prompts_and_rows_for_it(here: Path):
    assert layout(*ROWS, "rollout.num_prompts=3", cores=8) == (2, 4)
    # 8 x 4 rows in 4 mini-batches: 8 rows of each, two for each of 4 processes.
    assert layout(cores=8) == (4, 2)


def test_a_mesh_is_divided_by_the_processes(here: Path):
    halves = ("actor.mesh.tp=2", "reference.mesh.tp=2")
    assert layout(*ROWS, *halves, cores=7) == (6, 1)
    with pytest.raises(ConfigError, match=r"actor\.mesh: tp=2 makes 2 ranks"):
        layout(*ROWS, *halves, cores=1)


def test_memory_bounds_processes_and_the_cores_that_are_left_become_threads(here: Path):
    large = "model.create={hidden_size: 1024, num_layers: 16, num_heads: 16, intermediate_size: 4096}"
    num, each = layout(*ROWS, large, cores=8, gib=48)
    assert 1 < num < 8
    assert num * each > 8 - num
    config = load_config("base.yaml", [*ROWS, large, f"cluster.pools.main=[{num}]"]).config
    assert num * (make_plan(config).process_memory("main") + GIB / 2) < 0.6 * 48 * GIB
    assert layout(*ROWS, large, cores=8, gib=4) == (1, 8)


def test_of_a_model_that_is_not_known_there_is_one_process_with_all_cores(here: Path):
    assert layout(*ROWS, "model.create=null", "model.path=Some/Model", cores=8) == (1, 8)


@pytest.mark.parametrize("alone", [("cluster.runtime=inline",), ("rollout.engine=vllm", "model.create.num_heads=2")])
def test_threads_of_one_process_and_servers_are_not_multiplied(here: Path, alone: tuple[str, ...]):
    assert layout(*ROWS, *alone, cores=8) == (1, 8)


def test_what_was_said_is_kept(here: Path):
    assert layout(*ROWS, "cluster.num_cpus_per_process=2", cores=8) == (4, 2)
    assert layout(*ROWS, "cluster.pools={main: [3]}", cores=8) == (3, 1)
    for elsewhere in ("cluster.address=auto", "cluster.device=cuda"):
        assert layout(*ROWS, elsewhere, cores=8) == (1, 1)


@given(cores=st.integers(1, 300), gib=st.floats(1, 600), prompts=st.integers(1, 40))
def test_no_machine_is_given_more_than_it_has(cores: int, gib: float, prompts: int):
    rows = (f"rollout.num_prompts={prompts}", "actor.num_mini_batches=1")
    num, each = layout(*rows, cores=cores, gib=gib, name="digits-grpo")
    assert 1 <= num * each <= cores
    assert num <= min(16, prompts)


def test_what_was_chosen_stands_in_the_config_with_its_origin(here: Path):
    def chosen(config: RunConfig, left_open: tuple[str, ...]) -> dict[str, object]:
        places = {"cluster.pools", "cluster.num_cpus_per_process", "cluster.object_store_gib"}
        shards = {f"{section}.mesh.dp_shard" for section in ("actor", "critic", "reference", "reward", "teacher")}
        engines = {"engine.activations", "engine.offload", "rollout.engine", "rollout.mesh.tp"}
        assert set(left_open) == {"model.dtype", *engines, *places, *shards}
        return {"cluster.pools": {"main": (3,)}, "cluster.num_cpus_per_process": 2}

    loaded = load_config("base.yaml", OPEN, choose=chosen)
    assert dict(values_of(loaded.config))["cluster.pools"] == {"main": (3,)}
    assert loaded.config.cluster.num_cpus_per_process == 2
    assert loaded.origins["cluster.pools"] == loaded.origins["cluster.num_cpus_per_process"] == THIS_MACHINE
    assert loaded.origins["model.dtype"] == "default"


LARGE = (
    "model.create={hidden_size: 1024, num_layers: 24, num_heads: 16, num_key_value_heads: 16, intermediate_size: 4096}",
    "cluster={device: cuda, pools: {main: [1]}}",
    "data.max_prompt_tokens=512",
    "rollout.max_response_tokens=512",
    "engine.max_tokens_per_micro_batch=16384",
    "rollout.num_prompts=64",
)


def test_layers_keep_what_fits_into_most_of_the_device(here: Path):
    loaded = load_config("base.yaml", LARGE)
    needed = activations_bytes(loaded.config, 80 * GIB)
    assert needed["keep"] > needed["checkpoint"] > needed["offload"]

    def way(num_bytes: float) -> object:
        machine = {**NO_DEVICES, "devices_per_node": (8,), "device_bytes": round(num_bytes)}
        return choose(loaded.config, ("engine.activations",), **machine).get("engine.activations")

    assert way(needed["keep"] / 0.79) == "keep"
    assert way(needed["keep"] / 0.81) == "checkpoint"
    assert way(needed["checkpoint"] / 0.81) == "offload"
    assert way(needed["offload"] / 0.9) is None, "the default stays, and the machine's own check speaks"


def test_a_device_that_is_not_known_leaves_the_default(here: Path):
    loaded = load_config("base.yaml", LARGE)
    assert loaded.config.engine.activations == "checkpoint"
    assert choose(loaded.config, ("engine.activations",), **NO_DEVICES) == {}


def over_devices(*overrides: str, nodes: tuple[int, ...] = (8,), gib: float = 80) -> dict[str, object]:
    """What is chosen for devices, without the way of activations."""
    machine = {**NO_DEVICES, "devices_per_node": nodes, "device_bytes": round(gib * GIB)}
    given = [*LARGE[:1], *LARGE[2:], "cluster={device: cuda}", *OPEN, *overrides]
    chosen: dict[str, object] = {}

    def chosen_for(config: RunConfig, left_open: tuple[str, ...]) -> dict[str, object]:
        chosen.update(choose(config, left_open, **machine))
        return chosen

    load_config("base.yaml", given, choose=chosen_for)
    return {key: value for key, value in chosen.items() if key != "engine.activations"}


@pytest.mark.parametrize(
    ("nodes", "pools"), [((1,), (1,)), ((8,), (8,)), ((8, 8), (8, 8)), ((4, 4, 4, 4, 4, 4, 4, 4), (4,) * 8)]
)
def test_every_device_of_every_node_works(here: Path, nodes: tuple[int, ...], pools: tuple[int, ...]):
    assert over_devices(nodes=nodes) == {"cluster.pools": {"main": pools}}


def test_a_process_may_have_two_devices_and_where_it_has_half_of_one_it_stays_alone(here: Path):
    assert over_devices("cluster.num_gpus_per_process=2") == {"cluster.pools": {"main": (4,)}}
    assert over_devices("cluster.num_gpus_per_process=0.5") == {}


def test_ranks_share_a_model_only_if_a_device_has_no_room_for_it_and_models_that_learn_come_first(here: Path):
    def shards(gib: float) -> dict[str, object]:
        chosen = over_devices("recipe=grpo", "kl.placement=loss", "rollout.cache_tokens=4096", gib=gib)
        assert chosen.pop("cluster.pools") == {"main": (8,)}
        return {key.removesuffix(".mesh.dp_shard"): value for key, value in chosen.items()}

    assert [shards(gib) for gib in (80, 8, 0.5)] == [{}, {"actor": 8}, {"actor": 8, "reference": 8}]


def test_an_optimizers_state_lies_in_cpu_memory_where_nothing_else_makes_room(here: Path):
    def chosen(gib: float, *more: str) -> dict[str, object]:
        return over_devices("recipe=grpo", "kl=null", "rollout.cache_tokens=4096", *more, nodes=(1,), gib=gib)

    pools = {"cluster.pools": {"main": (1,)}}
    ways = [{}, {"engine.offload": "optimizer"}, {"engine.offload": "optimizer_and_gradients"}, {}]
    assert [chosen(gib) for gib in (16, 6, 3, 1)] == [{**pools, **way} for way in ways]
    assert chosen(6, "engine.offload=nothing") == pools
    assert "engine.offload" not in chosen(6, "model.lora={}"), "an adapter has little"


def test_ranks_of_one_node_share_a_model_before_those_of_all(here: Path):
    def shards(gib: float) -> dict[str, object]:
        return over_devices("recipe=grpo", "kl=null", "rollout.cache_tokens=4096", nodes=(4, 4), gib=gib)

    pools = {"cluster.pools": {"main": (4, 4)}}
    assert [shards(gib) for gib in (8, 3.2)] == [{**pools, "actor.mesh.dp_shard": num} for num in (4, 8)]


def test_ranks_of_pools_that_were_said_share_a_model_too(here: Path):
    pools = "cluster.pools={train: [2], side: [2]}"
    places = [f"{role}.placement.pool=train" for role in ("actor", "critic", "reference")]
    chosen = over_devices(pools, *places, "rollout.placement.pool=side", "rollout.cache_tokens=4096", gib=10)
    assert chosen == {"actor.mesh.dp_shard": 2, "critic.mesh.dp_shard": 2}


SAMPLING = ("recipe=grpo", "kl=null", "rollout.cache_tokens=4096", "engine.max_tokens_per_micro_batch=1024")


@pytest.mark.parametrize(
    ("gib", "more", "expected"),
    [
        (2.5, (), None),
        (2, (), 2),
        (2, ("rollout.engine=vllm",), 2),
        (2, ("cluster.num_gpus_per_process=2",), 4),
        (2, ("rollout.mesh.tp=1",), None),
        (2, ("rollout.exact=true",), None),
        (2, ("rollout.weights=ipc",), None),
        (2, ("rollout.engine=vllm", "cluster.num_gpus_per_process=2"), None),
        (1, (), None),
    ],
)
def test_ranks_that_sample_share_a_model_of_which_a_device_has_no_room_for_a_whole_copy(
    here: Path, gib: float, more: tuple[str, ...], expected: int | None
):
    assert over_devices(*SAMPLING, *more, gib=gib).get("rollout.mesh.tp") == expected


@pytest.mark.parametrize(("engine", "expected"), [("native", 2), ("vllm", None)])
def test_a_pool_of_rollouts_alone_is_cut_by_its_own_size_and_servers_take_no_devices_that_it_lacks(
    here: Path, engine: str, expected: int | None
):
    pools = ("cluster.pools={main: [8], side: [2]}", "rollout.placement.pool=side", "actor.mesh.dp_shard=8")
    chosen = over_devices(*SAMPLING, *pools, f"rollout.engine={engine}", gib=1)
    assert chosen.get("rollout.mesh.tp") == expected


def test_a_pool_that_is_not_there_is_refused_by_its_name(here: Path):
    with pytest.raises(ConfigError, match=r"rollout\.placement\.pool='nowhere' is not in cluster\.pools"):
        over_devices(*SAMPLING, "rollout.placement.pool=nowhere", gib=1)


@pytest.mark.parametrize("alone", ["cluster.runtime=inline", "actor.mesh={dp_shard: 1, tp: 3}"])
def test_what_cannot_be_shared_is_left_to_the_checks(here: Path, alone: str):
    with contextlib.suppress(ConfigError):
        assert over_devices(alone, gib=1) == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), None),
        (("rollout={num_prompts: 1024, group_size: 8, max_response_tokens: 3000}",), 0.9),
        (("rollout={num_prompts: 1024, group_size: 8, max_response_tokens: 3000}", "recipe=ppo"), 1.4),
        (("rollout={num_prompts: 65536, group_size: 8, max_response_tokens: 3000}",), 19.2),
        (("rollout={num_prompts: 1024, group_size: 8, max_response_tokens: 3000}", "cluster.address=auto"), None),
    ],
)
def test_the_object_store_has_room_for_what_a_step_sends(here: Path, overrides: tuple[str, ...], expected):
    config = load_config("base.yaml", ["recipe=grpo", "engine.max_tokens_per_micro_batch=4096", *overrides]).config
    chosen = choose(config, ("cluster.object_store_gib",), **NO_DEVICES)
    assert chosen.get("cluster.object_store_gib") == expected


def test_the_bytes_that_are_sent_of_a_token_are_those_of_the_batch_of_an_update():
    number, index, flag = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    row: dict[str, Any] = {"offsets": torch.tensor([0, 1]), "prompt_index": index, "sample_index": index}
    tokens: dict[str, Any] = {"tokens": index, "loss_mask": flag, "sequence_starts": flag}
    sent: dict[str, Any] = {"places": index, "steps_behind": index, "selected": flag}
    names = ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages", "entropies")
    actor = ActorBatch(**row, **tokens, **sent, **dict[str, Any](dict.fromkeys(names, number)))
    critic = CriticBatch(**row, **tokens, values=number, returns=number)
    likely: dict[str, Any] = {"top_logprobs": number[None], "top_tokens": index[None]}
    student = DistilledBatch(
        **row, **tokens, **sent, **dict[str, Any](dict.fromkeys((*names, "teacher_logprobs"), number)), **likely
    )
    base, stale, of_critic, top = SENT_BYTES
    expected = [(actor, base + stale), (critic, of_critic), (student, base + stale + 4 + top)]
    for batch, each in expected:
        sizes = [x.element_size() for name, x in vars(batch).items() if torch.is_tensor(x) and name not in row]
        assert sum(sizes) == each


def engine(name: str, *overrides: str, gib: float = 80, has_server: bool = True) -> object:
    """The engine that is chosen for a process with a whole device; None if none is."""
    config = load_config(name, [*overrides, "cluster.device=cuda"]).config
    machine = {**NO_DEVICES, "devices_per_node": (1,), "device_bytes": round(gib * GIB), "has_server": has_server}
    return choose(config, ("rollout.engine", "engine.activations"), **machine).get("rollout.engine")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("model.path=Qwen/Qwen3-0.6B",), None),
        (("model.path=Qwen/Qwen3-4B", "rollout.num_prompts=8"), None),
        (("model={path: Qwen/Qwen3-4B, lora: {}}",), "vllm"),
        (("model={path: Qwen/Qwen3-8B, lora: {}}",), "vllm"),
        (("model.path=Qwen/Qwen3-30B-A3B",), "vllm"),
        (("rollout.max_response_tokens=8192",), "vllm"),
        (("model={path: Qwen/Qwen3-4B, lora: {}}", "rollout.exact=true"), None),
        (("model={path: Qwen/Qwen3-4B, lora: {rank: 513}}",), None),
        (("model={path: Qwen/Qwen3-30B-A3B, lora: {target_parameters: [mlp.experts.down_proj]}}",), None),
    ],
)
def test_a_server_samples_what_our_own_engine_is_slow_at_on_devices_if_it_can(overrides: tuple[str, ...], expected):
    gib = 800 if "30B" in overrides[0] else 80
    assert engine("gsm8k-grpo", *overrides, gib=gib) == expected
    on_cpus = load_config("gsm8k-grpo", [*overrides, "cluster.device=cpu"]).config
    machine = {**NO_DEVICES, "has_server": True}
    assert "rollout.engine" not in choose(on_cpus, ("rollout.engine", "cluster.pools"), **machine)


@pytest.mark.parametrize(("pools", "expected"), [(("cluster.pools={main: [2]}",), "vllm"), ((
    "cluster.pools={main: [1], sampling: [2]}", "rollout.placement.pool=sampling"), None)])  # fmt: skip
def test_ranks_that_sample_together_may_share_a_server_on_the_actors_pool(here: Path, pools, expected):
    lora = "model={path: Qwen/Qwen3-4B, lora: {}}"
    assert engine("gsm8k-grpo", lora, "rollout.mesh.tp=2", *pools) == expected


def test_our_own_engine_samples_where_there_is_no_server_or_no_room_for_its_copy_of_the_model(here: Path):
    large = ("model={path: Qwen/Qwen3-8B, lora: {}}", "rollout.cache_tokens=4096", "kl=null")
    assert engine("gsm8k-grpo", *large, has_server=False) == "native"
    assert [engine("gsm8k-grpo", *large, gib=gib) for gib in (80, 32)] == ["vllm", "native"]


@pytest.mark.parametrize("word", ["null", "auto"])
def test_the_engine_may_be_asked_for_or_left_to_the_machine(here: Path, word: str):
    def chosen(_: RunConfig, left_open: tuple[str, ...]) -> dict[str, object]:
        return {key: "hf" for key in left_open if key == "rollout.engine"}

    loaded = load_config("digits", [f"rollout.engine={word}"], choose=chosen)
    assert (loaded.config.rollout.engine, loaded.origins["rollout.engine"]) == ("hf", THIS_MACHINE)
    assert load_config("digits", [f"rollout.engine={word}"]).config.rollout.engine == "native"
    said = load_config("digits", ["rollout.engine=native"], choose=chosen)
    assert said.config.rollout.engine == "native"


@pytest.mark.parametrize("key", ["model.dtype", "engine.activations", "cluster.num_cpus_per_process"])
def test_null_asks_for_what_follows_from_the_machine(here: Path, key: str):
    (here / "mine.yaml").write_text(
        "base: base.yaml\ncluster: {num_cpus_per_process: 3}\nengine: {activations: keep}\n"
    )
    loaded = load_config("mine.yaml", [f"{key}=null", "cluster.device=cuda"])
    values = {"model.dtype": "bfloat16", "engine.activations": "checkpoint", "cluster.num_cpus_per_process": 1}
    assert dict(values_of(loaded.config))[key] == values[key]
    assert loaded.origins[key] == AUTOMATICALLY
