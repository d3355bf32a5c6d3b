"""Adapters on every axis of a device mesh: trained, written and read as by one process.

Four processes run `lora_rank.py`.
"""

import pytest
import safetensors.torch
import torch
from lora_rank import MESHES, WHOLE, cases
from ranks import TOLERANCES, run_ranks
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from rallypoint.cluster import Mesh
from rallypoint.config import LoRAConfig
from rallypoint.model_files import load_policy, merge_adapters, open_adapter

pytestmark = pytest.mark.timeout(270)

CUT = [name for name in MESHES if name != "1 process"]
CASES = list(cases(whole=False))
OF_CUT = [case for case in CASES if case[0] in CUT]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The folder into which four ranks wrote what they got."""
    return run_all(tmp_path_factory.mktemp("outcomes"), tmp_path_factory.mktemp("model"))


def run_all(folder, model_folder):
    """Have four ranks train the cases that the folder asks for, and return it."""
    run_ranks("lora_rank", make_tiny_model(model_folder, architecture="qwen3"), folder, statuses=[0] * 4, limit_s=250)
    return folder


@pytest.mark.slow
def test_the_whole_grid(tmp_path):
    outcomes = tmp_path / "outcomes"
    outcomes.mkdir()
    (outcomes / WHOLE).touch()
    run_all(outcomes, tmp_path / "model")
    for name, role, dtype in cases(whole=True):
        if dtype == "bfloat16":
            test_masters_of_half_precision_are_those_of_float32_up_to_rounding(outcomes, name, role)
        if name != "1 process":
            test_an_adapter_that_was_written_by_some_ranks_says_the_same_when_they_read_it(outcomes, name, role, dtype)
            if dtype in TOLERANCES:
                test_loss_gradient_norm_and_adapters_after_three_steps_are_those_of_one_process(
                    outcomes, name, role, dtype
                )
            if role == "actor":
                test_a_frozen_model_is_held_in_its_own_precision_and_in_parts(outcomes, name, dtype)


def load(outcomes, name, role, dtype):
    """What every rank got; the first one has whole weights."""
    ranks = range(Mesh(MESHES[name] or {"dp": 1}).size)
    return [safetensors.torch.load_file(outcomes / f"{name}, {role}, {dtype}, {rank}.safetensors") for rank in ranks]


def error_of(found, expected, keys, norm):
    """How far some tensors are from others, relative to these, in a norm of all of their elements together."""
    actual, wanted = (torch.cat([tensors[key].flatten() for key in keys]) for tensors in (found, expected))
    return float(torch.linalg.vector_norm(actual - wanted, norm) / torch.linalg.vector_norm(wanted, norm))


def compared(outcomes, name, role, dtype, base):
    """What the ranks got together, what one process got in the precision `base`, and the names of weights."""
    (expected,) = load(outcomes, "1 process", role, base)
    ranks = load(outcomes, name, role, dtype)
    # Each data-parallel part has a loss of its own; its sp and tp peers know the same one.
    peers = MESHES[name].get("sp", 1) * MESHES[name].get("tp", 1)
    found = ranks[0] | {"losses": sum(rank["losses"] for rank in ranks) / peers}
    weights = [key for key in expected if key.startswith("weight/")]
    assert len(weights) == 2 * 2 * 7 + (2 if role == "critic" else 0)
    return found, expected, weights


@pytest.mark.parametrize(("name", "role", "dtype"), [case for case in OF_CUT if case[2] in TOLERANCES])
def test_loss_gradient_norm_and_adapters_after_three_steps_are_those_of_one_process(outcomes, name, role, dtype):
    found, expected, weights = compared(outcomes, name, role, dtype, dtype)
    for key in ("losses", "norms", *weights):
        assert error_of(found, expected, [key], torch.inf) <= TOLERANCES[dtype], key


@pytest.mark.parametrize(("name", "role"), [case[:2] for case in CASES if case[2] == "bfloat16"])
def test_masters_of_half_precision_are_those_of_float32_up_to_rounding(outcomes, name, role):
    found, expected, weights = compared(outcomes, name, role, "bfloat16", "float32")
    assert {found[key].dtype for key in weights} == {torch.float32}
    assert error_of(found, expected, weights, 2) <= 0.03
    for key in ("losses", "norms"):  # of the first step: later ones begin where that one has rounded to
        assert abs(found[key][0] / expected[key][0] - 1) <= 0.05


@pytest.mark.parametrize(("name", "role", "dtype"), OF_CUT)
def test_an_adapter_that_was_written_by_some_ranks_says_the_same_when_they_read_it(outcomes, name, role, dtype):
    for rank in load(outcomes, name, role, dtype):
        assert torch.equal(rank["outputs again"], rank["outputs"])


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, role, dtype in OF_CUT if role == "actor"])
def test_a_frozen_model_is_held_in_its_own_precision_and_in_parts(outcomes, name, dtype):
    whole = load(outcomes, "1 process", "actor", dtype)[0]
    sizes = {key: int(size) for key, size in whole.items() if key.startswith("bytes/")}
    ranks = load(outcomes, name, "actor", dtype)
    if "dp_shard" in MESHES[name] and "tp" not in MESHES[name]:
        assert {key: sum(int(rank[key]) for rank in ranks) for key in sizes} == sizes
    for key, size in sizes.items():
        assert max(int(rank[key]) for rank in ranks) <= size


@pytest.mark.parametrize("name", CUT)
def test_peft_opens_what_ranks_have_written_and_computes_what_they_do(outcomes, name):
    peft = pytest.importorskip("peft")
    folder = outcomes / f"{name}, actor, float32"
    base = open_adapter(str(folder)).base
    merged = merge_adapters(load_policy(base, dtype="float32", lora=LoRAConfig(path=str(folder)))).model
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
    tokens = torch.tensor([[3, 9, 4, 11, 0, 7]])
    merged.set_attn_implementation("eager")
    with torch.no_grad():
        expected = theirs(tokens, use_cache=False).logits
        torch.testing.assert_close(merged(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
