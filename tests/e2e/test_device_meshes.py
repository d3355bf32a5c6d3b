"""A run on any device mesh is the run on one process: same rollouts, same weights up to rounding, and it resumes."""

from pathlib import Path

import pytest
import safetensors.torch
from tiny_runs import Runs

pytestmark = pytest.mark.lasting_ray

ONE, TWO = "cluster.pools={main: [1]}", "cluster.pools={main: [2]}"
RAY, INLINE = "cluster.runtime=ray", "cluster.runtime=inline"
HEADS = "model.create.num_key_value_heads=2"


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


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict:
    return final_weights(Runs(tmp_path_factory.mktemp("expected")).run("one process", INLINE, ONE, HEADS))


@pytest.mark.parametrize("size", ["tp=2", "sp=2"])
def test_threads_that_share_matrices_or_tokens_train_as_one_process(runs, expected, size):
    assert_close(final_weights(runs.run("mesh", INLINE, TWO, HEADS, *meshes(size))), expected)


def test_processes_that_shard_a_model_train_as_one_process_and_resume(runs, expected):
    run = runs.run("mesh", RAY, TWO, HEADS, *meshes("dp_shard=2"), "checkpoint={every_steps: 2, keep: 9}")
    whole = final_weights(run)
    assert_close(whole, expected)
    for later in sorted(run.checkpoints.iterdir())[1:]:
        later.rename(run.path / later.name)
    assert_close(final_weights(runs.resume("mesh")), whole)
