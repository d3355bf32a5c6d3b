"""Model folders that cannot be used, met by two ranks: one error, from one of them, with the file and what to do."""

import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import edit_config, edit_weights, make_tiny_model

UP_PROJ = "model.layers.0.mlp.up_proj.weight"
VOCABULARY = 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    make_tiny_model(folder, num_layers=1, num_heads=2, num_key_value_heads=2, initializer_range=0.2)
    return folder


def lose_a_tensor(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.pop(UP_PROJ))


def change_a_shape(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({UP_PROJ: torch.ones(30, 16)}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_the_family(folder: Path) -> None:
    edit_config(folder, model_type="no_such_family")


def shrink_the_embedding(folder: Path) -> None:
    def cut(weights):
        return {name: weight[:7].clone() if len(weight) == VOCABULARY else weight for name, weight in weights.items()}

    edit_config(folder, vocab_size=7)
    edit_weights(folder, lambda weights: weights.update(cut(weights)))


def break_a_weight(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights[UP_PROJ].fill_(float("nan")))


CASES = {
    lose_a_tensor: f"missing {UP_PROJ} Give the config.json and the safetensors files that were saved together.",
    change_a_shape: f"wrong shape {UP_PROJ}: [30, 16] of torch.float32 in model.safetensors, expected [32, 16] Give",
    truncate: "it is cut off: copy or download the file again",
    change_the_family: "pip install --upgrade transformers",
    break_a_weight: f"its weights are not finite (NaN or infinite) in {UP_PROJ}; copy or download the folder again",
    shrink_the_embedding: "20 ids, but the embedding only 7 rows, and the model reads",
}
THREADS, PROCESSES = ("cluster.runtime=inline", "actor.mesh.sp=2"), ("cluster.runtime=ray", "actor.mesh.dp_shard=2")
SHARED = ("cluster.runtime=inline", "actor.mesh.tp=2")


@pytest.mark.parametrize(
    ("spoil", "ranks", "key"),
    [
        *((spoil, THREADS, "model.path") for spoil in CASES),
        pytest.param(truncate, PROCESSES, "model.path", marks=pytest.mark.slow),  # as the next one
        (break_a_weight, PROCESSES, "model.path"),
        (break_a_weight, SHARED, "model.path"),
        (shrink_the_embedding, THREADS, "critic.path"),
    ],
    ids=lambda value: value.__name__ if callable(value) else value[1] if isinstance(value, tuple) else value,
)
def test_two_ranks_say_once_what_is_wrong_where_and_what_to_do(runs, sound, tmp_path, spoil, ranks, key):
    folder = shutil.copytree(sound, tmp_path / "spoiled")
    spoil(folder)
    paths = (f"model.path={sound}", f"{key}={folder}")
    keys = ("model.create=null", *paths, "cluster.pools={main: [2]}", *ranks)
    process = runs.start("train", "digits", *runs.overrides("bad", *keys))
    said, _ = process.communicate(timeout=100)
    assert process.returncode in (1, 2), said
    flat = " ".join(said.split())
    assert flat.count(CASES[spoil]) == 1, said
    assert flat.count("error: ") == flat.count(f"{folder}") == 1, said
    assert "Traceback" not in said
