"""A hybrid in the native engine: recurrent states beside the cache say what training and transformers' generate say."""

import dataclasses
import functools

import pytest
import torch
from grids import paired
from tiny_families import FAMILY_CONFIGS, SIZES
from transformers import AutoModelForCausalLM

from rallypoint.engine import policy_outputs
from rallypoint.engine.forward import trained_positions
from rallypoint.errors import ModelError
from rallypoint.generation import HFEngine, NativeEngine, Request, generate
from rallypoint.generation.native.accelerator.backend import AcceleratorBackend
from rallypoint.generation.native.cpu.backend import CPUBackend
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard

HYBRIDS = ["qwen3_5_text", "qwen3_5_moe_text"]
BACKENDS = {"cpu": CPUBackend, "accelerator": AcceleratorBackend}
MEMORY = {"much": {}, "few rows": {"max_rows": 3}, "little": {"cache_tokens": 256}}
LENGTHS = [3, 32, 1, 64, 40]


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request, tmp_path_factory):
    """A policy whose rows may be long, with two layers of each kind."""
    folder = tmp_path_factory.mktemp("hybrid")
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 4, "max_position_embeddings": 512, "initializer_range": 0.1}
    AutoModelForCausalLM.from_config(FAMILY_CONFIGS[request.param](**sizes)).save_pretrained(folder)
    return load_policy(str(folder), dtype="float32").model


@pytest.fixture
def long(params):
    """Responses that cross the ends of blocks."""
    return dataclasses.replace(params, max_new_tokens=40, stop_tokens=())


@pytest.fixture(scope="module")
def by_generate(hybrid, make_prompts):
    """Return a function that draws with transformers' generate: it takes longest, so once for all tests of a policy."""
    engine = HFEngine(hybrid, version=4)
    return functools.cache(lambda how: generate(engine, make_prompts(LENGTHS), how, version=4, group_size=2))


@pytest.mark.parametrize(
    ("hybrid", "backend", "memory"), paired(HYBRIDS, BACKENDS, MEMORY), indirect=["hybrid"], scope="module"
)
def test_a_hybrid_draws_the_same_tokens_as_generate_with_the_logprobs_of_training(
    hybrid, by_generate, make_prompts, long, backend, memory
):
    engine = NativeEngine(hybrid, version=4, backend=BACKENDS[backend](hybrid), **MEMORY[memory])
    batch = generate(engine, make_prompts(LENGTHS), long, version=4, group_size=2)
    expected = by_generate(long)
    assert batch.tokens.tolist() == expected.tokens.tolist()
    assert (engine.num_preempted > 0) == (memory == "little")
    with torch.no_grad():
        at = trained_positions(batch)
        trained = policy_outputs(ModelShard.whole(hybrid), batch, at, 1.0).logprobs
    assert (batch.rollout_logprobs[at] - trained).abs().max() < 1e-4


@pytest.mark.parametrize("on_load", ["keep", "recompute"])
def test_tokens_sampled_ahead_of_new_weights_leave_no_trace_in_states(hybrid, make_prompts, long, on_load):
    engines = [
        NativeEngine(hybrid, on_load=on_load, backend=backend(hybrid)) for backend in (CPUBackend, AcceleratorBackend)
    ]
    engines.append(NativeEngine(hybrid))
    found = []
    for engine in engines:
        ended: dict[int, tuple[int, ...]] = {}
        wanted = dataclasses.replace(long, max_new_tokens=24, stop_tokens=())
        for sample in range(3):
            prompt = tuple(make_prompts([20]).tokens.tolist())
            engine.submit(Request(tokens=prompt, params=wanted, sample_index=sample))
        for step in range(200):
            ended |= {one.request_id: (*ended.get(one.request_id, ()), *one.tokens) for one in engine.step()}
            if step == 7 and engine is not engines[-1]:
                engine.load(1, None)
            if not engine.has_work:
                break
        found.append(ended)
    assert found[0] == found[1] == found[2]


def test_a_prompt_is_computed_again_when_its_snapshot_has_gone(hybrid, make_prompts, long):
    engine = NativeEngine(hybrid, version=4)
    first = generate(engine, make_prompts(LENGTHS), long, version=4, group_size=2)
    again = generate(engine, make_prompts(LENGTHS), long, version=4, group_size=2)
    assert first.tokens.tolist() == again.tokens.tolist()


def test_the_mode_exact_is_refused(hybrid):
    with pytest.raises(ModelError, match="exact=false"):
        NativeEngine(hybrid, mode="exact")
