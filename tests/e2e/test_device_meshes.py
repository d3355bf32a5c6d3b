"""A run on any device mesh is the run on one process: same rollouts; weights, metrics up to rounding; it resumes."""

import re
from pathlib import Path

import pytest
import safetensors.torch
from metrics_file import read_metrics
from tiny_runs import Runs

pytestmark = pytest.mark.lasting_ray

ONE, TWO = "cluster.pools={main: [1]}", "cluster.pools={main: [2]}"
RAY, INLINE = "cluster.runtime=ray", "cluster.runtime=inline"
CORRECTED = "correction=[{name: tis, cap: 1.2}]"
HEADS = "model.create.num_key_value_heads=2"


OF_THE_MACHINE = re.compile("^time_s|/memory_gib$|/mfu$|^rollout/worst_")
"""Metrics of it, and of whichever token has the largest rounding error."""


def meshes(size: str) -> tuple[str, ...]:
    return tuple(f"{role}.mesh.{size}" for role in ("actor", "critic", "reference"))


def final_weights(run) -> dict:
    newest = max(run.checkpoints.iterdir())
    files = [Path("model.safetensors"), Path("critic/model.safetensors"), Path("training/actor.safetensors")]
    return {
        f"{file}/{name}": tensor
        for file in files
        for name, tensor in safetensors.torch.load_file(newest / file).items()
    }


def assert_close(actual, expected):
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (actual[name] - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max())), name


def metrics_of(run) -> dict:
    found = {(record["step"], name): number for record in read_metrics(run.metrics) for name, number in record.items()}
    return {place: number for place, number in found.items() if not OF_THE_MACHINE.search(place[1])}


def assert_same_metrics(actual, expected):
    assert actual.keys() == expected.keys()
    off = {
        name: (actual[name], wanted)
        for name, wanted in expected.items()
        if actual[name] != pytest.approx(wanted, rel=1e-3, abs=1e-5)
    }
    assert not off


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("expected")).run("one process", INLINE, ONE, HEADS, CORRECTED)


@pytest.mark.parametrize(
    "size",
    ["tp=2", "sp=2", "cp=2", pytest.param(None, marks=pytest.mark.slow)],  # rows: on Ray, below
)
def test_threads_that_share_matrices_tokens_or_rows_train_and_measure_as_one_process(runs, expected, size):
    run = runs.run("mesh", INLINE, TWO, HEADS, CORRECTED, *(meshes(size) if size else ()))
    assert_close(final_weights(run), final_weights(expected))
    assert_same_metrics(metrics_of(run), metrics_of(expected))


# Not GLM: its biases of keys do nothing where heads are not rotated, and AdamW makes steps of their rounding errors.
OF_MIXTURES = {
    "qwen3_moe": (HEADS,),
    "gpt_oss": (HEADS,),
    "deepseek_v3": (HEADS, "actor.router_bias_update_rate=0.01"),
}


# tests/distributed and tests/unit/models cut all of them: one stands for whole runs.
@pytest.mark.parametrize(
    "family",
    [name if name == "deepseek_v3" else pytest.param(name, marks=pytest.mark.slow) for name in OF_MIXTURES],
)
def test_ranks_that_share_experts_train_a_mixture_as_one_process_and_one_process_goes_on_from_theirs(runs, family):
    keys = (INLINE, *OF_MIXTURES[family], f"model.create.architecture={family}", "checkpoint={every_steps: 1, keep: 9}")
    keys += ("trainer.num_steps=2",)
    whole = final_weights(runs.run("one", *keys, ONE))
    run = runs.run("mesh", *keys, TWO, *meshes("ep=2"))
    assert_close(final_weights(run), whole)
    for later in sorted(run.checkpoints.iterdir())[1:]:
        later.rename(run.path / later.name)
    measured = metrics_of(run)
    assert 0 <= measured[1, "actor/expert_load_min"] < 1 < measured[1, "actor/expert_load_max"] <= 8
    # The sampler has the biases that the step before has moved.
    assert measured[2, "rollout/logprob_gap_max"] < 1e-4
    for name in (name for name in whole if name.endswith("correction_bias")):
        assert bool(whole[name].any()) == name.startswith("model."), "those of the actor, not of the critic"
    alone = [f"{role}.mesh.ep=1" for role in ("actor", "critic", "reference")]
    assert_close(final_weights(runs.resume("mesh", ONE, *alone)), whole)


def test_processes_that_shard_a_model_train_as_one_process_and_resume(runs, expected):
    keys = (HEADS, CORRECTED, "checkpoint={every_steps: 2, keep: 9}")
    run = runs.run("mesh", RAY, TWO, *keys, *meshes("dp_shard=2"))
    whole = final_weights(run)
    assert_close(whole, final_weights(expected))
    assert_same_metrics(metrics_of(run), metrics_of(expected))
    for later in sorted(run.checkpoints.iterdir())[1:]:
        later.rename(run.path / later.name)
    assert_close(final_weights(runs.resume("mesh")), whole)
