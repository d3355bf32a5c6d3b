"""What a rank needs to load its part of a model, beyond that part: a few buffers, whatever the model's size.

Two processes run `loading_rank.py`, on meshes of their own and by torch's `set_model_state_dict`.
"""

import json

import pytest
import torch
from loading_rank import BY_TORCH, NUM_RANKS, OURS, TORCHS
from ranks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from rallypoint.model_files import save_model
from rallypoint.models.shard import allocate, build
from rallypoint.parallel import DeviceMesh

MODEL_MIB = 172
BOUND_MIB = 32
"""Much less than half of the model: a rank that reads all of it on the way needs more."""


def make_model(path, num_layers):
    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    LlamaConfig(**sizes, num_hidden_layers=num_layers).save_pretrained(path)
    config = AutoConfig.from_pretrained(path)
    shard = build(config, AutoModelForCausalLM, dtype=torch.bfloat16, mesh=DeviceMesh.solo(), trust_remote_code=False)
    allocate(shard, torch.device("cpu"))
    for tensor in shard.tensors().values():
        tensor.normal_(std=0.02)
    save_model(shard, path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model(path, 24)
    make_model(path / "small", 1)
    return path


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory):
    """What each rank measured: way -> "part" and "beyond" in MiB, and whether the weights are "right"."""
    return measured(model, tmp_path_factory.mktemp("loaded"))


def measured(path, into):
    run_ranks("loading_rank", str(path), into, statuses=[0] * NUM_RANKS)
    return [json.loads((into / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("way", OURS)
def test_a_rank_of_two_needs_little_more_than_its_half(ranks, way):
    size = 1 if way in ("shard2, frozen", "tp2") else 2  # of float32, as masters are
    for rank in ranks:
        assert rank[way]["part"] == pytest.approx(MODEL_MIB / 2 * size, rel=0.05)
        assert rank[way]["beyond"] < BOUND_MIB


@pytest.mark.parametrize("way", [way for way in OURS if not way.startswith("tp2")])
def test_every_rank_gets_its_own_rows(ranks, way):
    assert [rank[way]["right"] for rank in ranks] == [True] * NUM_RANKS


@pytest.mark.slow  # nothing here loads in these ways, which ours are compared with
def test_this_torch_is_without_the_bug_of_2_6_that_every_rank_held_the_whole_model(model, tmp_path):
    # torch 2.6 gave each rank a view of every tensor that it was sent, which kept the whole tensor until the last one
    # was there (`_distribute_tensors` in torch/distributed/_state_dict_utils.py; pytorch issue 149640): every rank held
    # the whole model, and one larger than a device could not be loaded. 2.7 copies the part; frameworks that work with
    # 2.6 carry a copy of 2.7's files. With the lines of 2.6 in their place a rank needs 172 MiB beyond its part here,
    # and 86 from the meta device. What it needs without them, up to 33 MiB, are holes that a heap has between clones.
    # Rank 0, which reads the file, holds the whole model all the same.
    (tmp_path / BY_TORCH).touch()
    ranks = measured(model, tmp_path)
    for way in TORCHS:
        first, other = (rank[way]["beyond"] for rank in ranks)
        assert other < MODEL_MIB / 4
        assert first < MODEL_MIB + BOUND_MIB
        assert [rank[way]["right"] for rank in ranks] == [True] * NUM_RANKS
