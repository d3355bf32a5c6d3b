"""How long a step takes: beside what was measured on one device, and by hand."""

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from rallypoint.config import load_config
from rallypoint.cpu.speed import Asked, main
from rallypoint.observability.devices import Cores
from rallypoint.prepare.inventory import Machine, find_cores, imagine, measure_cores
from rallypoint.prepare.machine import plan_on, time_on
from rallypoint.prepare.plan import make_plan
from rallypoint.prepare.step_time import StepTime, step_time

MEASURED = ("model.path=Qwen/Qwen3-0.6B", "cluster={device: cuda, pools: {main: [1]}}", "engine.activations=keep")

OFFLOADED = "engine.offload=optimizer"


def planned(*overrides: str, name: str = "gsm8k-grpo", on: str = "H200") -> StepTime:
    config = load_config(name, [*MEASURED, *overrides]).config
    machine = imagine(on)
    time = time_on(config, plan_on(config, machine), machine, print)
    assert time is not None
    return time


def phase(time: StepTime, name: str):
    [found] = [each for each in time.phases if each.name == name]
    return found


@pytest.mark.parametrize(("num_prompts", "tokens_per_s"), [(32, 32_000), (1, 5_170)])
def test_decoding_is_within_a_quarter_of_what_an_h200_was_measured_to_do(num_prompts: int, tokens_per_s: float):
    lengths = ("data.max_prompt_tokens=256", "rollout.max_response_tokens=256", "actor.num_mini_batches=1")
    time = planned(*lengths, f"rollout={{num_prompts: {num_prompts}, group_size: 8}}")
    expected = 8 * num_prompts * 256 / tokens_per_s
    assert phase(time, "rollout").most_s == pytest.approx(expected, rel=0.25)


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
"""Four layers of Qwen3-30B-A3B."""


@pytest.mark.parametrize(
    ("kind", "num_prompts", "tokens_per_s"),
    [("adapters", 1, 2_293), ("adapters", 8, 11_348), ("experts", 1, 4_091), ("experts", 8, 15_706)],
)
def test_captured_decoding_is_within_a_quarter_of_what_an_h100_was_measured_to_do(
    tmp_path: Path, kind: str, num_prompts: int, tokens_per_s: float
):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    what = "model.lora.rank=16" if kind == "adapters" else f"model.path={tmp_path}"
    lengths = ("data.max_prompt_tokens=256", "rollout.max_response_tokens=128", "actor.num_mini_batches=1")
    rows = f"rollout={{engine: native, num_prompts: {num_prompts}, group_size: 8}}"
    rollout = phase(planned(*lengths, what, rows, on="H100"), "rollout")
    assert rollout.most_s == pytest.approx(8 * num_prompts * 128 / tokens_per_s, rel=0.25)


def test_steps_that_are_not_captured_take_what_launching_one_by_one_was_measured_to_take(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    lengths = ("data.max_prompt_tokens=256", "rollout.max_response_tokens=128", "actor.num_mini_batches=1")
    own = (*lengths, f"model.path={tmp_path}", "rollout={engine: native, num_prompts: 1, group_size: 8}")
    captured, replayed, wide = (
        phase(planned(*own, more, on="H100"), "rollout").most_s
        for more in ("seed=0", "rollout.router_replay=true", "model.dtype=float32")
    )
    assert replayed == pytest.approx(128 * 11.1e-3, rel=0.25)
    assert min(replayed, wide) > 4 * captured
    cut = planned(*own, "cluster.pools={main: [2]}", "rollout.mesh.tp=2", on="2xH100")
    assert phase(cut, "rollout").most_s > 4 * captured


def test_an_update_is_within_a_quarter_of_what_an_h100_was_measured_to_do():
    rows = ("data.max_prompt_tokens=8", "actor.num_mini_batches=1", "rollout={num_prompts: 32, group_size: 2}")
    update = phase(planned(*rows, "rollout.max_response_tokens=1016", on="H100"), "actor update")
    assert 64 * 1024 / update.most_s == pytest.approx(70_900, rel=0.25)
    update = phase(planned(*rows, "rollout.max_response_tokens=2032", on="H100"), "actor update")
    assert 64 * 1024 / update.least_s == pytest.approx(104_000, rel=0.25)


def test_what_follows_from_the_numbers_of_a_run():
    alone, eight = planned(on="H100"), planned("cluster.pools={main: [8]}", on="8xH100")
    for role in ("actor pass", "actor update", "reference pass"):
        assert phase(eight, role).most_s == pytest.approx(phase(alone, role).most_s / 8, rel=0.02)
    assert eight.num_devices == 8
    assert planned("cluster.num_gpus_per_process=0.5").num_devices == 1, "a part of one is held, and no core"
    for bound, seconds in zip(("least_s", "most_s"), eight.seconds, strict=True):
        assert seconds == pytest.approx(sum(getattr(each, bound) for each in eight.phases))
    assert phase(planned("actor.num_epochs=2"), "actor update").most_s > 1.9 * phase(planned(), "actor update").most_s
    cut = planned("cluster.pools={main: [8]}", "actor.mesh.cp=8", on="8xH100")
    assert phase(cut, "actor update").most_s > phase(eight, "actor update").most_s
    once = planned("actor.num_mini_batches=1", "kl=null")
    assert [each.name for each in once.phases] == ["actor update", "rollout"], "the update has the logprobs"


def test_an_offloaded_state_is_copied_there_and_back_in_each_step_of_the_optimizer():
    kept, offloaded = planned("actor.num_mini_batches=3"), planned("actor.num_mini_batches=3", OFFLOADED)
    more = phase(offloaded, "actor update").most_s - phase(kept, "actor update").most_s
    assert more == pytest.approx(3 * 2 * 12 * 596_049_920 / 2.5e10)


def test_pools_beside_each_other_take_as_long_as_the_slower_one():
    pools = "cluster.pools={main: [4], side: [4]}"
    time = planned(pools, "rollout.placement.pool=side", "rollout.max_staleness=1", on="8xH100")
    assert time.seconds[1] == pytest.approx(
        max(sum(e.most_s for e in time.phases if e.pool == p) for p in ("main", "side"))
    )


def test_what_limits_a_phase_is_said_and_a_faster_memory_helps_where_it_is_the_cache():
    assert phase(planned(), "rollout").limit == "reading the cache"
    assert phase(planned(), "actor update").limit == "arithmetic"
    few = planned("rollout={num_prompts: 1, group_size: 8}", "actor.num_mini_batches=1")
    assert phase(few, "rollout").limit in ("launches", "reading the cache")
    assert phase(planned(on="H100"), "rollout").most_s > phase(planned(), "rollout").most_s


def test_a_device_that_is_not_known_has_no_time():
    config = load_config("digits").config
    machine = imagine("H100")
    assert time_on(config, plan_on(config, machine), machine, print) is None, "on the CPU"


CORES = Cores(
    launch_s=2e-6,
    bandwidth=2e10,
    gathered=1e9,
    traffic=[4e10, 2e10],
    forward=[1e10, 6e10, 1e11, 6e10, 1e11, 1e11, 3e10, 1e11, 1e11],
    update=[1e10, 6e10, 1e11, 6e10, 1e11, 1e11, 3e10, 1e11, 1e11],
)
SIZES = "model.create={hidden_size: 320, num_layers: 8, num_heads: 5, num_key_value_heads: 5, intermediate_size: 896}"
LONG = "rollout={num_prompts: 32, group_size: 8, max_response_tokens: 32}"


def on_cores(*overrides: str, cores: Cores = CORES) -> StepTime:
    config = load_config("digits-grpo", ["cluster.pools={main: [2]}", *overrides]).config
    time = step_time(config, make_plan(config), cores)
    assert time is not None
    return time


def test_cores_are_counted_as_they_were_measured():
    time = on_cores(SIZES, LONG)
    assert [each.name for each in time.phases] == ["actor pass", "actor update", "rollout", "reference pass"]
    assert phase(time, "actor update").limit == "arithmetic"
    tokens, weights = 32 * 8 + 256 * 31, 8 * (4 * 320**2 + 3 * 320 * 896)
    assert phase(time, "actor update").most_s > 6 * tokens * weights / 2 / 1e11, "products alone take that long"
    assert time.num_devices == 0, "nobody counts device-hours"
    twice = phase(on_cores(SIZES, LONG, "actor.num_epochs=2"), "actor update").most_s
    assert twice == pytest.approx(2 * phase(time, "actor update").most_s, rel=0.02), "each epoch has its passes"


def test_what_makes_a_phase_slow_on_cores():
    slow = {
        "actor update": dataclasses.replace(CORES, update=[one / 2 for one in CORES.update]),
        "reference pass": dataclasses.replace(CORES, traffic=[one / 2 for one in CORES.traffic]),
        "rollout": dataclasses.replace(CORES, launch_s=2 * CORES.launch_s),
    }
    for name, cores in slow.items():
        assert phase(on_cores(SIZES, LONG, cores=cores), name).most_s > 1.1 * phase(on_cores(SIZES, LONG), name).most_s
    summed = dataclasses.replace(CORES, gathered=CORES.gathered / 100)
    assert phase(on_cores(SIZES, cores=summed), "actor update").limit == "sums of gradients"
    alone = on_cores(SIZES, "cluster.pools={main: [1]}", cores=summed)
    assert phase(alone, "actor update").limit == "arithmetic", "one process has nobody to sum with"


def test_what_cores_do_is_measured_once_a_day_and_read_until_then(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured, said = [], []

    def measure(*asked):
        measured.append(asked[:-1])
        return dataclasses.replace(CORES, launch_s=1e-6 * len(measured))

    monkeypatch.setattr("rallypoint.prepare.inventory.measure_cores", measure)

    def find():
        cores = find_cores(2, 1, "float32", said.append)
        return None if cores is None else cores.launch_s

    assert [find() for _ in range(2)] == [1e-6, 1e-6]
    [file] = tmp_path.glob("rallypoint/cores-*.json")
    file.write_text("{")
    assert [find() for _ in range(2)] == [2e-6, 2e-6], "what cannot be read is measured again"
    os.utime(file, (0, time.time() - 25 * 3600))
    assert [find() for _ in range(2)] == [3e-6, 3e-6], "a day later, too"
    assert measured == [(2, 1, "float32")] * 3
    assert said == ["measuring what 2 processes compute here: a few seconds, once a day"] * 3


def test_cores_that_cannot_be_measured_are_said_to_be():
    said = []
    assert measure_cores(1, 1, "float99", said.append) is None
    [line] = said
    assert line.startswith("a step is not timed: the processes that measure cores failed: ")
    assert "float99" in line


def test_a_run_here_is_timed_by_what_its_cores_do(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("rallypoint.prepare.inventory.measure_cores", lambda *asked: CORES)
    config = load_config("digits-grpo", ["cluster={pools: {main: [2]}, num_cpus_per_process: 1}"]).config
    machine = Machine(num_cores=2, num_bytes=2**33)
    plan = plan_on(config, machine)
    assert time_on(config, plan, machine, print) == step_time(config, plan, CORES)


@pytest.mark.slow  # in processes of their own, which import torch
def test_processes_measure_together():
    cores = measure_cores(2, 1, "float32", print)
    assert cores is not None
    assert min(cores.launch_s, cores.bandwidth, cores.gathered, *cores.traffic, *cores.forward, *cores.update) > 0


def test_a_process_measures_everything_that_is_asked(capsys):
    asked = Asked(1, 1, "float32", "", widths=(8, 16), rows=(4,), numbers=(64,))
    main(0, asked)
    found = Cores(**json.loads(capsys.readouterr().out))
    assert (len(found.forward), len(found.update), len(found.traffic)) == (2, 2, 1)
    assert min(found.launch_s, found.bandwidth, found.gathered, *found.traffic, *found.forward, *found.update) > 0


def test_cores_elsewhere_are_not_measured():
    config = load_config("digits-grpo", ["cluster.address=auto"]).config
    machine = Machine(num_cores=2, num_bytes=2**33)
    assert time_on(config, plan_on(config, machine), machine, print) is None


def test_nothing_is_measured_for_more_processes_than_there_are_cores(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine(num_cores=2, num_bytes=2**33)
    for cluster in ("{pools: {main: [3]}}", "{pools: {main: [2]}, num_cpus_per_process: 2}"):
        config = load_config("digits-grpo", [f"cluster={cluster}"]).config
        assert time_on(config, plan_on(config, machine), machine, print) is None
    assert not list(tmp_path.rglob("*")), "such a plan may have thousands of processes"
