"""Ranks as processes of their own: the same step however rows are split, and no waiting for the dead.

Three processes are started once, because importing torch takes most of their time; `one_rank.py` is what they run.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.data import make_digits_tokenizer
from rallypoint.models import create_model

SHARDS = {
    "2 ranks": 2,
    "3 uneven ranks": 3,
    "3 ranks, one without rows": 3,
    "3 ranks, one with nothing to train": 3,
}
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Path:
    """The folder into which three ranks wrote what they got."""
    folder = tmp_path_factory.mktemp("outcomes")
    model = tmp_path_factory.mktemp("model")
    create_model(
        model,
        make_digits_tokenizer(),
        architecture="qwen3",
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        tie_embeddings=False,
        initializer_range=0.3,
        max_positions=64,
        seed=0,
    )
    rendezvous = open_rendezvous("tcp", "these tests")
    (folder / "rendezvous").write_bytes(pickle.dumps(rendezvous))
    command = [sys.executable, str(Path(__file__).with_name("one_rank.py")), str(model), str(folder)]
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        rendezvous.close()
    assert [process.returncode for process in processes] == [0, 0, -9], "\n".join(said)
    return folder


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SHARDS)
def test_loss_gradient_norm_and_weights_are_those_of_a_single_process(outcomes, name, dtype):
    expected = safetensors.torch.load_file(outcomes / f"1 rank in {dtype}, 0.safetensors")
    ranks = [
        safetensors.torch.load_file(outcomes / f"{name} in {dtype}, {rank}.safetensors") for rank in range(SHARDS[name])
    ]
    totals = {"loss": torch.stack([rank.pop("loss") for rank in ranks]).sum()}
    for key, wanted in expected.items():
        error = (totals.get(key, ranks[0].get(key)) - wanted).abs().max()
        assert error <= TOLERANCES[dtype] * wanted.abs().max(), f"{key} differs by {error / wanted.abs().max():.2g}"
    for rank in ranks[1:]:
        assert all(torch.equal(rank[key], ranks[0][key]) for key in ranks[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_noticed_at_once_and_the_others_take_no_step(outcomes, rank):
    seen = json.loads((outcomes / f"death seen by {rank}.json").read_text())
    assert seen["noticed"] != "nothing"
    assert seen["weights are untouched"]
