"""Every family on an accelerator: steps and rollouts of a CPU, with mixtures, linear attention, sinks and latents."""

import logging

import pytest
import torch
from compared_rollouts import GAPS, assert_alike, responses
from rounded_steps import errors_of, take_steps
from tiny_families import FAMILY_CONFIGS, make_family_model

from rallypoint.config import LoRAConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.generation import NativeEngine, SamplingParams, generate
from rallypoint.generation.native.accelerator.backend import AcceleratorBackend
from rallypoint.generation.native.accelerator.graphs import captures_on
from rallypoint.generation.native.recurrent import is_recurrent
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard
from rallypoint.types import Prompts, offsets_from_lengths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]

DEVICE = torch.accelerator.current_accelerator(check_available=True)
PARAMS = SamplingParams(max_new_tokens=40, seed=3, stop_tokens=(0,))
BOUNDS = {"first norm": 1e-4, "norms": 1e-3, "changes": 1e-3}
"""Of steps in float32 beside float64, relative. On a CPU they are at most 7.5e-6, 3.9e-4 and 1.9e-4."""


@pytest.fixture(scope="module", params=FAMILY_CONFIGS)
def folder(request, tmp_path_factory) -> str:
    return make_family_model(tmp_path_factory.mktemp("model"), request.param, max_position_embeddings=512)


@pytest.fixture
def prompts() -> Prompts:
    lengths = torch.tensor([3, 9, 1, 40, 33])
    tokens = torch.randint(4, 20, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    return Prompts(offsets=offsets_from_lengths(lengths), tokens=tokens, prompt_index=torch.arange(len(lengths)))


def test_steps_in_float32_are_those_of_the_cpu_in_float64(folder):
    expected = take_steps(folder, "actor", "float64")
    errors = errors_of(take_steps(folder, "actor", "float32", device=DEVICE), expected)
    assert {name: errors[name] for name, bound in BOUNDS.items() if not errors[name] <= bound} == {}


def test_rollouts_are_those_of_a_cpu_in_float64(folder, prompts):
    wide = load_policy(folder, dtype="float32").model.double()
    expected = responses(generate(NativeEngine(wide), prompts, PARAMS, version=0, group_size=4))
    model = load_policy(folder, dtype="float32", device=DEVICE).model
    found = responses(generate(NativeEngine(model), prompts, PARAMS, version=0, group_size=4))
    assert_alike(found, expected, "float32", gap=1e-3 if is_recurrent(model) else None)  # states add up all tokens


def test_steps_are_captured_through_a_models_own_code_and_adapters(folder, prompts, caplog):
    """All but those of layers of linear attention; each captured step was compared with usual ones."""
    makes, num_captured = captures_on(DEVICE), 0
    if makes is None:
        pytest.skip("this torch captures nothing")

    def counted(step):
        nonlocal num_captured
        replay = makes(step)
        num_captured += 1
        return replay

    # In float32 the products of experts look at their sizes.
    model = load_policy(folder, dtype="bfloat16", device=DEVICE, lora=LoRAConfig(rank=2)).model
    with caplog.at_level(logging.WARNING):
        engine = NativeEngine(model, backend=AcceleratorBackend(model, counted))
        batch = generate(engine, prompts, PARAMS, version=0, group_size=4)
    assert batch.rollout_logprobs.isfinite().all()
    assert [line for line in caplog.messages if "captured one failed" in line] == []
    assert (num_captured > 0) == (not is_recurrent(model))


def test_logprobs_in_bfloat16_are_those_of_the_training_pass(folder, prompts):
    model = load_policy(folder, dtype="bfloat16", device=DEVICE).model
    batch = generate(NativeEngine(model), prompts, PARAMS, version=0, group_size=4)
    engine = TrainingEngine(ModelShard.whole(model), optimizer=None, max_tokens_per_micro_batch=8192)
    expected = engine.evaluate(batch, lambda part, at: policy_outputs(engine.shard, part, at, 1.0).logprobs)
    gaps = (batch.rollout_logprobs - expected.values.cpu()).abs()[batch.loss_mask]
    assert gaps.mean() < GAPS["bfloat16"] / 3  # a router may choose another expert for single tokens
