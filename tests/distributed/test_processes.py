"""Ranks as processes of their own: the same step however rows are split, and no waiting for the dead.

Three processes run `one_rank.py`.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ranks import TOLERANCES, run_ranks
from tiny_models import make_tiny_model

SHARDS = {
    "2 ranks": 2,
    "3 uneven ranks": 3,
    "3 ranks, one without rows": 3,
    "3 ranks, one with nothing to train": 3,
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Path:
    """The folder into which three ranks wrote what they got."""
    folder = tmp_path_factory.mktemp("outcomes")
    model = make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3")
    run_ranks("one_rank", model, folder, statuses=[0, 0, -9])
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
