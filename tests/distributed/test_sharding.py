"""A model cut over ranks that are processes (FSDP2) takes the steps of a whole one, and waits for no rank for ever.

Four processes run `sharded_rank.py`.
"""

import json
import re

import pytest
import safetensors.torch
import torch
from ranks import TOLERANCES, run_ranks
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

CASES = {
    "shard2": 2,
    "shard3": 3,
    "shard3, one without rows": 3,
    "shard3, one with nothing to train": 3,
    "shard2 x replicate2": 4,
    "shard2 x sp2": 4,
    "shard2 x tp2": 4,
}
TRIED = [
    *(("policy", name, "float64") for name in CASES),
    *(("policy", name, "float32") for name in ["shard3", "shard2 x replicate2", "shard2 x tp2"]),
    *(("tied policy", name, "float64") for name in ["shard3", "shard2 x tp2"]),
    *(("critic", name, "float64") for name in ["shard3, one without rows", "shard2 x sp2"]),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The folder into which four ranks wrote what they got."""
    folder = tmp_path_factory.mktemp("outcomes")
    model = make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3", tie_embeddings=True)
    run_ranks("sharded_rank", model, folder, statuses=[0, 0, -9, 0])
    return folder


def load(outcomes, kind, name, dtype):
    """What every rank got."""
    ranks = range(CASES.get(name, 1))
    return [safetensors.torch.load_file(outcomes / f"{kind}, {name}, {dtype}, {rank}.safetensors") for rank in ranks]


def assert_near(actual, wanted, tolerance, what):
    error = (actual.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error <= tolerance, f"{what} differs by {error:.2g}"


def assembled(ranks, name, shape):
    """A whole weight, of the parts of all ranks."""
    whole = torch.full(shape, float("nan"), dtype=ranks[0][name].dtype)
    for rank in ranks:
        starts = rank[f"start of {name}"].tolist()
        at = tuple(slice(start, start + size) for start, size in zip(starts, rank[name].shape, strict=True))
        # Ranks that hold the same hold the same bits.
        assert whole[at].isnan().all() or torch.equal(whole[at], rank[name]), name
        whole[at] = rank[name]
    return whole


@pytest.mark.parametrize(("kind", "name", "dtype"), TRIED)
def test_loss_gradient_norm_and_weights_are_those_of_a_whole_model(outcomes, kind, name, dtype):
    (expected,) = load(outcomes, kind, "alone", dtype)
    ranks = load(outcomes, kind, name, dtype)
    assert_near(sum(rank["losses"] for rank in ranks), expected["losses"], TOLERANCES[dtype], "the loss")
    assert all(torch.equal(rank["norms"], ranks[0]["norms"]) for rank in ranks)
    assert_near(ranks[0]["norms"], expected["norms"], TOLERANCES[dtype], "the norm")
    weights = [key.removeprefix("start of ") for key in expected if key.startswith("start of ")]
    assert len(weights) > 20
    for key in weights:
        whole = assembled(ranks, key, expected[key].shape)
        assert_near(whole, expected[key], TOLERANCES[dtype], key)


@pytest.mark.parametrize(
    ("kind", "name", "order"),
    [
        ("policy", "shard2", [0, 1]),
        ("policy", "shard2 x tp2", [1, 3]),
        ("critic", "shard3, one without rows", [0, 1, 2]),
    ],
)
def test_an_evaluation_gives_the_numbers_of_a_whole_model(outcomes, kind, name, order):
    (expected,) = load(outcomes, kind, "alone", "float64")
    ranks = load(outcomes, kind, name, "float64")
    found = torch.cat([ranks[rank]["outputs"] for rank in order])
    assert_near(found, expected["outputs"], 1e-6, "an output")  # numbers of an evaluation are float32


@pytest.mark.parametrize("name", ["shard3", "shard2 x tp2"])
def test_shards_are_float32_masters_of_a_model_in_half_precision(outcomes, name):
    (expected,) = load(outcomes, "policy", "alone", "float32")
    ranks = load(outcomes, "policy", name, "bfloat16")
    assert {rank["model.norm.weight"].dtype for rank in ranks} == {torch.float32}
    assert_near(ranks[0]["norms"][0], expected["norms"][0], 0.03, "the norm")
    assert_near(sum(rank["losses"][0] for rank in ranks), expected["losses"][0], 0.03, "the loss")


def test_a_model_that_is_read_in_parts_is_written_whole(outcomes):
    expected = safetensors.torch.load_file(outcomes / "of one" / "model.safetensors")
    found = safetensors.torch.load_file(outcomes / "of three" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert_near(found[name], wanted, TOLERANCES["float64"], name)
    assert AutoModelForCausalLM.from_pretrained(outcomes / "of three").dtype == torch.float64


def test_what_is_written_of_a_model_in_half_precision_is_its_masters_and_the_masters_rounded(outcomes):
    weights = safetensors.torch.load_file(outcomes / "in half precision" / "model.safetensors")
    masters = safetensors.torch.load_file(outcomes / "in half precision" / "masters")
    assert weights.keys() == masters.keys()
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.bfloat16(), weights[name])
    assert any(not torch.equal(master, weights[name].float()) for name, master in masters.items())
    assert not safetensors.torch.load_file(outcomes / "of three" / "masters")


def test_a_model_that_packed_rows_would_compute_wrongly_is_refused_though_no_rank_has_all_of_it(outcomes):
    said = [json.loads((outcomes / f"refusals of {rank}.json").read_text()) for rank in range(2)]
    assert said[0][0] == said[1][0]
    assert re.match(
        "CohereForCausalLM on packed rows differs from its own code by .*; models of type .*llama", said[0][0]
    )
    # A rank sees the weights that it holds.
    assert said[0][1] == "nothing"
    assert said[1][1].startswith("its weights are not finite (NaN or infinite) in model.layers.1.mlp.up_proj.weight; ")


def test_a_failure_of_one_rank_is_raised_by_all_of_them(outcomes):
    said = [json.loads((outcomes / f"failures seen by {rank}.json").read_text()) for rank in range(3)]
    assert said == [
        ["RowTooLongError", "PeerFailedError"],
        ["PeerFailedError", "NotFiniteError"],
        ["PeerFailedError", "PeerFailedError"],
    ]


@pytest.mark.parametrize("name", ["error in an update", "error in an evaluation"])
def test_an_error_of_one_rank_in_a_pass_ends_the_waiting_of_the_others_and_its_rank_is_named(outcomes, name):
    seen = [json.loads((outcomes / f"{name} seen by {rank}.json").read_text()) for rank in range(3)]
    assert all(one["weights are untouched"] for one in seen)
    assert seen[2]["noticed"] == "ZeroDivisionError: this is the cause"
    # Of two that wait for each other, one may hear of the other's end first.
    noticed = [one["noticed"] for one in seen[:2]]
    assert all(re.match(rf"MembershipLostError: rendezvous '{name}/.*: .*rank 2 \(.*\) left", text) for text in noticed)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_pass_is_named_and_the_others_take_no_step(outcomes, rank):
    seen = json.loads((outcomes / f"death seen by {rank}.json").read_text())
    assert re.match(r"MembershipLostError: rendezvous 'death/.*: .*rank 2 \(.*\) died", seen["noticed"])
    assert seen["weights are untouched"]
