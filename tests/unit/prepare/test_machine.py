"""What a run asks of this machine, beside machines of every kind: known before anything is started."""

import dataclasses
import importlib.util
from typing import get_args

import pytest

from rallypoint.cluster.capacity import Node
from rallypoint.config import RoleName, load_config
from rallypoint.errors import ConfigError
from rallypoint.prepare.inventory import Accelerator, Machine, imagine, look_around
from rallypoint.prepare.machine import (
    check_machine,
    check_nodes,
    choices,
    describe_choices,
    plan_on,
)
from rallypoint.prepare.plan import make_plan
from rallypoint.prepare.pools import shrunk
from rallypoint.prepare.role_memory import reserved_tokens
from rallypoint.roles.placement import module_of

GIB = 2**30
H100 = Accelerator("NVIDIA H100", 80 * GIB)
LAPTOP = Machine(num_cores=2, num_bytes=8 * GIB, complaint="torch 2.13.0+cpu")
SERVER = Machine(num_cores=64, num_bytes=512 * GIB, accelerators=(H100,) * 8)
LARGE = (
    "model.create={hidden_size: 1024, num_layers: 32, num_heads: 16, num_key_value_heads: 16, intermediate_size: 8192}"
)


def check(machine, *overrides):
    config = load_config("digits", overrides).config
    return check_machine(config, make_plan(config), machine)


def refusal(machine, *overrides):
    with pytest.raises(ConfigError) as raised:
        check(machine, *overrides)
    return str(raised.value)


def test_the_demo_fits_two_cores_and_has_nothing_to_say():
    assert check(LAPTOP) == ()


def test_an_engine_that_was_chosen_is_said_with_the_reason_and_how_another_would_be():
    adapters = ("model={path: Qwen/Qwen3-8B, lora: {}}", "cluster={device: cuda, pools: {main: [1]}}")

    def said(engine: str) -> str:
        chosen = lambda *_: {"rollout.engine": engine}  # noqa: E731
        return next(describe_choices(load_config("gsm8k-grpo", adapters, choose=chosen), SERVER))

    assert said("vllm") == "rollout.engine=vllm: chosen for its adapters, its 8.2B parameters"
    assert "where vLLM is installed (rally engine install vllm) and has room, it is chosen" in said("native")
    asked = load_config("gsm8k-grpo", [*adapters, "rollout.engine=native"], choose=lambda *_: {})
    assert not any("rollout.engine" in line for line in describe_choices(asked, SERVER))


def test_a_device_that_is_not_here_is_refused_with_what_torch_says_and_never_with_fewer_processes():
    said = refusal(LAPTOP, "cluster.device=cuda")
    assert "cluster.device=cuda: torch finds no such device on this machine (torch 2.13.0+cpu)" in said
    assert "set cluster.device=cpu, or join a cluster that has some with cluster.address" in said
    assert "fewer" not in said


JOINED = ("cluster.device=cuda", "cluster.pools={main: [8, 8]}", "cluster.address=auto")


def test_of_a_cluster_that_is_joined_it_is_said_that_its_devices_are_not_known_yet():
    [said] = check(LAPTOP, *JOINED)
    assert "not known yet, and compared with the plan when it is joined; a dry run with --on" in said


def test_a_machine_with_devices_that_joins_a_cluster_is_not_taken_for_all_of_it():
    assert check(SERVER, *JOINED, "engine.activations=keep") == ()


def node(kind: str | None, *, store: float = 30 * GIB, labelled: bool = True, name: str = "10.0.0.1") -> Node:
    resources = {"CPU": 64.0, "GPU": 8.0, "object_store_memory": store}
    if kind is None or labelled:
        return Node(name, resources, {} if kind is None else {"ray.io/accelerator-type": kind})
    return Node(name, resources | {f"accelerator_type:{kind}": 1.0})


HUGE = ("model.path=Qwen/Qwen3-8B", *JOINED)


def joined(nodes, *overrides):
    return check_nodes(load_config("math-dapo", overrides).config, nodes)


@pytest.mark.parametrize("labelled", [True, False])
def test_what_no_device_of_the_joined_cluster_can_hold_is_refused(labelled: bool):
    with pytest.raises(ConfigError) as raised:
        joined([node("H100", labelled=labelled)] * 2, *HUGE)
    assert "take 137.3 GiB in each process, but a H100 has 79.1 GiB; divide the model" in str(raised.value)
    assert joined([node("H100", labelled=labelled)] * 2, *HUGE, "actor.mesh.dp_shard=16") == ()


def test_what_only_some_devices_of_the_joined_cluster_can_hold_is_said_with_the_label_that_keeps_off_the_others():
    mixed = [node("T4")] * 2 + [node("B200")] * 2
    [said] = joined(mixed, *HUGE)
    assert "but a T4 has 14.7 GiB" in said
    assert said.endswith("cluster.labels={ray.io/accelerator-type: B200} keeps it off these")
    assert joined(mixed, *HUGE, "cluster.labels={ray.io/accelerator-type: B200}") == ()
    head = Node("10.0.0.9", {"CPU": 4.0}, {})
    assert joined([head, *mixed[2:]], *HUGE) == (), "nothing is placed on a head without devices"


def test_devices_that_nobody_knows_are_named_and_those_of_cpus_are_not_looked_for():
    [said] = joined([node("Abacus")], *HUGE)
    assert "whose memory is not known here (type: Abacus)" in said
    [said] = joined([node(None)], *HUGE)
    assert "(type: not named)" in said
    assert joined([node(None)], "model.path=Qwen/Qwen3-8B", "cluster={device: cpu, address: auto}") == ()


def test_a_store_that_is_smaller_than_what_a_step_sends_is_said_with_what_would_do():
    rows = ("rollout={num_prompts: 1024, group_size: 8, max_response_tokens: 3000}",)
    [said] = joined(
        [node("H100"), node("H100", store=GIB / 2, name="10.0.0.2")],
        *HUGE,
        *rows,
        "actor.mesh.dp_shard=16",
        "reward.overlong=null",
    )
    assert "the object store of 1 node has less (10.0.0.2: 0.5 GiB)" in said
    assert said.endswith("--object-store-memory=1612775424")
    own = check(LAPTOP, *rows, "cluster.pools={main: [1]}", "engine.max_tokens_per_micro_batch=16384")
    assert [line for line in own if "object_store_gib" in line and line.endswith("null chooses it")]


OFFLOADED = (
    "recipe=grpo",
    "engine.offload=optimizer_and_gradients",
    "model.create=null",
    "model.path=Qwen/Qwen3-8B",
    "cluster.device=cuda",
)


def test_what_leaves_the_devices_is_compared_with_the_memory_of_a_node():
    small = dataclasses.replace(SERVER, num_bytes=128 * GIB)
    said = refusal(small, *OFFLOADED, "cluster.pools={main: [1]}")
    assert "engine.offload=optimizer_and_gradients: what leaves the devices takes 162.5 GiB of CPU memory" in said
    assert "but this machine has 128.0 GiB" in said
    two = ("cluster.pools={main: [1, 1]}", "cluster.address=auto")
    assert not any("CPU memory" in line for line in check(small, *OFFLOADED, *two)), "nobody knows its nodes yet"
    assert any("a node like that often has 128.0 GiB" in line for line in check(imagine("2x1xH100"), *OFFLOADED, *two))
    assert not any("CPU memory" in line for line in check(SERVER, *OFFLOADED, "cluster.pools={main: [1]}"))


@pytest.mark.parametrize(
    ("machine", "overrides", "problem", "remedy"),
    [
        (LAPTOP, ("cluster.pools={main: [3]}",), "1 (this machine)  3 CPU   2 CPU      too little", "fewer processes"),
        (LAPTOP, ("cluster.num_cpus_per_process=2",), "4 CPU   2 CPU", "(cluster.num_cpus_per_process)"),
        (LAPTOP, ("cluster.pools={main: [1, 1]}",), "no such node", "give cluster.pools one number"),
        (LAPTOP, ("cluster.memory_gib_per_process=4",), "8 GiB memory", "(cluster.memory_gib_per_process)"),
        (SERVER, ("cluster.device=cuda", "cluster.pools={main: [9]}"), "9 GPU  64 CPU, 8 GPU", "num_gpus_per_process"),
    ],
    ids=["cores", "cores of each", "nodes", "memory", "devices"],
)
def test_pools_larger_than_the_machine_are_refused_with_the_key_that_helps(machine, overrides, problem, remedy):
    said = refusal(machine, *overrides)
    assert problem in said
    assert remedy in said


def test_nodes_that_are_described_are_compared_with_pools_although_a_cluster_is_joined():
    joined = ("cluster.device=cuda", "cluster.address=auto", "engine.activations=keep")
    assert check(imagine("2x8xH100"), *joined, "cluster.pools={main: [8, 8]}") == ()
    assert "9 GPU  128 CPU, 8 GPU" in refusal(imagine("2x8xH100"), *joined, "cluster.pools={main: [9, 7]}")


def test_threads_of_one_process_need_no_cores():
    assert check(LAPTOP, "cluster.runtime=inline", "cluster.pools={main: [8]}") == ()


GPU = ("cluster.device=cuda", "cluster.pools={main: [1]}", "model.dtype=float32")


def test_weights_that_a_device_cannot_hold_are_refused_with_both_numbers():
    small = Machine(8, 64 * GIB, (Accelerator("Tesla T4", 4 * GIB),))
    assert "weights, gradients and optimizer of its roles take" in refusal(small, LARGE, *GPU)
    assert "but a Tesla T4 has 4.0 GiB; divide the model (actor.mesh.dp_shard" in refusal(small, LARGE, *GPU)
    assert "train adapters" not in (said := refusal(small, LARGE, *GPU, "model.lora={}", "rollout.exact=true"))
    assert "keep less there (engine.offload, engine.sleep)" in said
    assert "rollout.mesh.tp" not in said
    assert "has 80.0 GiB and 0.05 of it is 4.0 GiB" in refusal(SERVER, LARGE, *GPU, "cluster.num_gpus_per_process=0.05")


def test_the_label_of_a_cluster_tells_what_its_devices_have():
    labels = "cluster.labels={ray.io/accelerator-type: T4}"
    joined = (*GPU, "cluster.address=10.0.0.1:6379", "engine.max_tokens_per_micro_batch=1000000")
    [said] = check(LAPTOP, LARGE, *joined)
    assert "not known yet" in said
    assert "but a T4 has 14.7 GiB" in refusal(LAPTOP, LARGE, *joined, labels)


def test_a_peak_that_may_not_fit_is_said_with_the_keys_that_lower_it():
    large_batches = (
        "rollout={num_prompts: 4096, max_response_tokens: 2000}",
        "engine.max_tokens_per_micro_batch=2100000",
        "cluster.object_store_gib=2",
    )
    machine = Machine(64, 512 * GIB, (Accelerator("Tesla T4", 16 * GIB),) * 8)
    [said, idle] = check(machine, *GPU, *large_batches, "engine.activations=keep", "kl=null")
    assert "pool main may need" in said
    assert "when all rows are at their longest, but a Tesla T4 has 16.0 GiB; lower" in said
    assert "1 of the 8 devices here (Tesla T4) are used" in idle


def test_devices_that_lie_idle_are_said():
    assert check(SERVER) == (
        "cores: 2 of 64 here are used; cluster.pools=null uses them",
        "8 GPUs here (NVIDIA H100) lie idle: cluster.device=cuda uses them",
    )
    assert check(SERVER, "cluster.device=cuda", "cluster.pools={main: [8]}", "engine.activations=keep") == ()


def test_layers_that_are_computed_twice_without_need_are_said():
    [said] = check(SERVER, "cluster.device=cuda", "cluster.pools={main: [8]}")
    assert said.startswith("engine.activations=keep would save the second pass over the layers: ")
    assert said.endswith("of 80.0 GiB")


def test_this_machine_has_cores_and_memory_and_a_kind_of_device_that_nobody_makes_is_explained():
    here = look_around(load_config("digits").config)
    assert here.num_cores >= 1
    assert here.num_bytes > GIB / 4
    there = look_around(load_config("digits", ["cluster.device=warp"]).config)
    assert there.accelerators == ()
    assert "warp" in there.complaint


LONG_ROWS = (
    "rollout={num_prompts: 4096, max_response_tokens: 2000}",
    "engine.max_tokens_per_micro_batch=2100",
    "data.max_prompt_tokens=64",
    "kl=null",
)


def cache_of(plan):
    return next(memory.cache for memory in plan.memory if memory.role == "rollout")


def test_a_cache_that_a_device_has_no_room_for_is_planned_as_large_as_what_is_left():
    config = load_config("digits", (*GPU, *LONG_ROWS)).config
    whole = cache_of(make_plan(config))
    plan = plan_on(config, Machine(8, 64 * GIB, (Accelerator("small", 2 * GIB),)))
    assert 2**20 < cache_of(plan) < whole
    assert plan.awake_memory("rollout") == pytest.approx(0.9 * 2 * GIB, rel=1e-6)
    assert cache_of(plan_on(config, SERVER)) == whole
    tiny = cache_of(plan_on(config, Machine(8, 64 * GIB, (Accelerator("tiny", 2**20),))))
    assert tiny == whole * (64 + 2000 + 64) // reserved_tokens(config), "one row, or nothing could be sampled"


def test_a_cache_of_a_size_that_was_said_is_planned_as_it_is():
    config = load_config("digits", (*GPU, *LONG_ROWS, "rollout.cache_tokens=1000000")).config
    plan = plan_on(config, Machine(8, 64 * GIB, (Accelerator("tiny", 2**20),)))
    assert cache_of(plan) == cache_of(make_plan(config))


def test_a_dry_run_says_what_was_chosen_for_this_machine_and_what_the_alternatives_need():
    here = look_around(load_config("digits").config)
    loaded = load_config("digits", ["cluster.pools=null"], choose=choices)
    [said] = describe_choices(loaded, here)
    assert said.startswith("cluster.pools={main: [")
    assert said.endswith(f"chosen for the {here.num_cores} core{'s' if here.num_cores > 1 else ''} here")
    assert list(describe_choices(load_config("digits"), here)) == []
    [said] = describe_choices(load_config("digits", GPU), SERVER)
    assert said.startswith("engine.activations=checkpoint: a process would need keep ")
    assert said.endswith(" GiB; a device has 80.0 GiB, of which a plan may fill 80%")


def test_torch_is_asked_for_the_devices_that_it_has(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "import types\n"
        "__version__, device = '2.13', str\n"
        "properties = types.SimpleNamespace(name='NVIDIA H100', total_memory=80 * 2**30)\n"
        "module = types.SimpleNamespace(\n"
        "    is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: properties\n"
        ")\n"
        "get_device_module = lambda device: module\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = load_config("digits", ["cluster.device=imagined"]).config
    machine = look_around(config)
    assert (machine.accelerators, machine.complaint) == ((H100, H100), "")


@pytest.mark.parametrize("role", get_args(RoleName))
def test_every_role_has_a_module_that_its_processes_import_first(role):
    assert importlib.util.find_spec(module_of(role)) is not None


TWO = [Node("a", {"CPU": 2.0}), Node("b", {"CPU": 2.0})]
SPLIT = "cluster.pools={main: [1], side: [2, 1, 1]}"


@pytest.mark.parametrize(
    ("overrides", "nodes", "pools"),
    [
        ((SPLIT, "rollout.placement.pool=side"), TWO, {"main": (1,), "side": (2, 1)}),
        ((SPLIT, "rollout.placement.pool=side"), TWO[:1], {"main": (1,), "side": (1,)}),
        (("cluster.pools={main: [2, 2]}",), TWO, None),  # they fit: others are in the way
        (("cluster.pools={main: [2, 2]}",), TWO[:1], {"main": (2,)}),
        (("cluster.pools={main: [2, 2]}", "actor.mesh.dp_shard=2"), TWO[:1], {"main": (2,)}),
        (("cluster.pools={main: [2, 2]}", "actor.mesh.dp_shard=4"), TWO[:1], None),
        (("cluster.pools={main: [2]}",), [Node("a", {"CPU": 1.0})], None),
        (("cluster.pools={main: [1], side: [1]}", "rollout.placement.pool=side"), [Node("a", {"CPU": 1.0})], None),
        (("cluster.pools={main: [1, 1]}", "reference.placement.num_ranks=2"), TWO[:1], None),
    ],
)
def test_pools_whose_nodes_are_gone_shrink_as_little_as_they_must_if_roles_can_still_be_divided(
    overrides, nodes, pools
):
    config = load_config("digits", ["cluster.address=auto", "rollout.weights=auto", *overrides]).config
    smaller = shrunk(config, nodes)
    assert (smaller and smaller.cluster.pools) == pools
    if smaller:
        assert smaller.rollout.num_prompts == config.rollout.num_prompts
