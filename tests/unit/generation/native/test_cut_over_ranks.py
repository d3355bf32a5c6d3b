"""Engines of ranks that share a model, each from its part, against the engine of the whole model."""

import dataclasses
import time

import pytest
import torch
from sampling_cases import CHANGES, decode
from tiny_families import FAMILY_CONFIGS, make_family_model

from rallypoint.config import LoRAConfig
from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.errors import DeterminismError
from rallypoint.generation import NativeEngine, Request, SamplingParams
from rallypoint.model_files import load_policy
from rallypoint.models import Part
from rallypoint.roles.rank_engine import RankEngine, SliceRequest

BASE = SamplingParams(max_new_tokens=9, seed=3, stop_tokens=(0, 5))
WAYS = {name: dataclasses.replace(BASE, **change) for name, change in CHANGES.items() if name != "stop strings"}
LENGTHS = (5, 21, 70, 1)


def requests(ways=WAYS, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(1, 20, (length,), generator=generator).tolist()) for length in lengths]
    return [
        Request(
            tokens=tokens, params=params, prompt_index=index, sample_index=way, prompt_logprobs=2 if way == 0 else None
        )
        for way, params in enumerate(ways.values())
        for index, tokens in enumerate(prompts)
    ]


def policy(folder, mesh=None, **options):
    """Return an engine of a policy in float64, of a rank's part if there are ranks."""
    model = load_policy(folder, dtype="float32", mesh=mesh).model.double()
    return NativeEngine(model, decode=decode, **options)


def sampled(engine, asked, mesh=None):
    """Return the response to each request: its tokens, logprobs, those that it was drawn with, and of its prompt."""
    own = RankEngine(engine, lambda: None, mesh)
    assert own.take(SliceRequest(new=tuple(enumerate(asked)))) == []
    outputs = []
    while engine.has_work:
        outputs += own.sample(until_one_ends=True).outputs
    found = {}
    for output in outputs:
        assert output.error is None
        said = found.setdefault(output.request_id, [[], [], [], output.prompt_logprobs])
        for column, new in zip(said, (output.tokens, output.logprobs, output.sampled_logprobs), strict=False):
            column += new
    assert len(found) == len(asked)
    return [found[number] for number in range(len(asked))]


def assert_alike(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours[0] == theirs[0]
        for column in (1, 2):
            assert ours[column] == pytest.approx(theirs[column], abs=1e-10)
        assert (ours[3] is None) == (theirs[3] is None)
        for here, there in zip(ours[3] or (), theirs[3] or (), strict=True):
            assert here == pytest.approx(there, abs=1e-6)


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_two_ranks_sample_the_tokens_of_one_in_every_way(on_mesh, tmp_path, name):
    folder, asked = make_family_model(tmp_path, name), requests()
    expected = sampled(policy(folder), asked)
    assert len({tuple(said[0]) for said in expected}) > len(LENGTHS)
    for actual in on_mesh(lambda mesh: sampled(policy(folder, mesh), asked, mesh), tp=2):
        assert_alike(actual, expected)


def test_adapters_are_sampled_as_by_one_rank(on_mesh, tmp_path):
    folder, asked = make_family_model(tmp_path, "qwen3"), requests()
    lora = LoRAConfig(rank=4, alpha=8, target_modules=("all-linear",))

    def adapted(mesh=None):
        shard, generator = load_policy(folder, dtype="float32", mesh=mesh, lora=lora, seed=1), torch.Generator()
        for name, weight in shard.model.double().named_parameters():
            if weight.requires_grad:  # the second factors begin at 0
                part, whole = shard.parts[name], Part.whole(shard.parts[name].shape)
                drawn = torch.randn(part.shape, generator=generator.manual_seed(1), dtype=torch.float64)
                weight.data.copy_(0.3 * drawn[part.within(whole)])
        return NativeEngine(shard.model, decode=decode)

    expected = sampled(adapted(), asked)
    assert [said[0] for said in expected] != [said[0] for said in sampled(policy(folder), asked)]
    for actual in on_mesh(lambda mesh: sampled(adapted(mesh), asked, mesh), tp=2):
        assert_alike(actual, expected)


def test_a_rank_has_the_keys_and_values_of_its_own_heads(on_mesh, tmp_path):
    folder, asked = make_family_model(tmp_path, "qwen3"), requests({"plain": BASE})

    def on_rank(mesh):
        engine = policy(folder, mesh, cache_tokens=1024)
        sampled(engine, asked, mesh)
        return engine._runner.cache.keys.nbytes

    whole = policy(folder, cache_tokens=1024)
    sampled(whole, asked)
    assert [2 * each for each in on_mesh(on_rank, tp=2)] == [whole._runner.cache.keys.nbytes] * 2


def test_ranks_with_little_memory_preempt_the_same_requests(on_mesh, tmp_path):
    long = dataclasses.replace(BASE, max_new_tokens=50, stop_tokens=())
    folder, asked = (
        make_family_model(tmp_path, "llama"),
        requests({"plain": long, "hot": long, "more": long}, (40, 7, 33)),
    )
    expected = sampled(policy(folder), asked)

    def on_rank(mesh):
        # The second has more memory: both use what the first has.
        num_tokens = (10 + 90 * mesh.tp.rank) * BLOCK_TOKENS
        engine = policy(folder, mesh, cache_tokens=num_tokens)
        return sampled(engine, asked, mesh), engine.num_preempted

    (first, num_preempted), (second, also) = on_mesh(on_rank, tp=2)
    assert num_preempted == also > 0
    assert_alike(first, expected)
    assert first == second


def test_a_slice_ends_on_all_ranks_when_it_ends_on_the_first(on_mesh, tmp_path):
    folder, asked = make_family_model(tmp_path, "llama"), requests()

    def on_rank(mesh):
        own = RankEngine(policy(folder, mesh), lambda: time.sleep(0.1 * mesh.tp.rank), mesh)
        own.take(SliceRequest(new=tuple(enumerate(asked))))
        slices = []
        while own.engine.has_work:
            slices.append(own.sample(until_one_ends=True).num_steps)
        return slices

    first, second = on_mesh(on_rank, tp=2)
    assert first == second


def test_ranks_that_sample_different_tokens_both_say_so(on_mesh, tmp_path):
    folder, asked = make_family_model(tmp_path, "llama"), requests({"plain": BASE})

    def on_rank(mesh):
        changed = [dataclasses.replace(one, sample_index=mesh.tp.rank) for one in asked]
        with pytest.raises(DeterminismError, match="sampled different tokens"):
            sampled(policy(folder, mesh), changed, mesh)

    on_mesh(on_rank, tp=2)
