"""Rollouts on an accelerator: the tokens of a CPU, in any company, captured or not, and within their memory."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from compared_rollouts import GAPS, assert_alike, responses
from tiny_models import make_tiny_model

from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.generation import NativeEngine, SamplingParams, generate
from rallypoint.generation.native.accelerator.backend import AcceleratorBackend, PagedAttention, is_right
from rallypoint.generation.native.accelerator.graphs import captures_on
from rallypoint.generation.native.accelerator.kernel import PagedKernel
from rallypoint.generation.native.block_manager import AttentionMetadata, BlockManager
from rallypoint.generation.native.kv_cache import KVCache, LayerShapes
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard
from rallypoint.models.products import Limits
from rallypoint.types import Prompts, offsets_from_lengths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]

DEVICE = torch.accelerator.current_accelerator(check_available=True)
PARAMS = SamplingParams(max_new_tokens=100, seed=3, stop_tokens=(0,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    sizes = {"hidden_size": 128, "num_layers": 4, "num_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, architecture="qwen3", initializer_range=0.1, max_positions=512, **sizes)


@pytest.fixture
def prompts() -> Prompts:
    lengths = torch.tensor([3, 9, 1, 150, 33, 64, 5, 100])
    offsets = offsets_from_lengths(lengths)
    tokens = torch.randint(1, 20, (int(offsets[-1]),), generator=torch.Generator().manual_seed(0))
    return Prompts(offsets=offsets, tokens=tokens, prompt_index=torch.arange(len(lengths)))


@pytest.mark.parametrize("dtype", GAPS)
def test_rollouts_are_those_of_a_cpu_in_float64(folder, prompts, dtype):
    """Of the same weights: those that have been rounded."""
    wide = load_policy(folder, dtype=dtype).model.double()
    expected = responses(generate(NativeEngine(wide), prompts, PARAMS, version=0, group_size=8))
    model = load_policy(folder, dtype=dtype, device=DEVICE).model
    found = responses(generate(NativeEngine(model), prompts, PARAMS, version=0, group_size=8))
    assert_alike(found, expected, dtype)


@pytest.mark.parametrize("dtype", GAPS)
def test_logprobs_are_those_of_the_training_pass(folder, prompts, dtype):
    model = load_policy(folder, dtype=dtype, device=DEVICE).model
    batch = generate(NativeEngine(model), prompts, PARAMS, version=0, group_size=8)
    engine = TrainingEngine(ModelShard.whole(model), optimizer=None, max_tokens_per_micro_batch=8192)
    expected = engine.evaluate(batch, lambda part, at: policy_outputs(engine.shard, part, at, 1.0).logprobs)
    gaps = (batch.rollout_logprobs - expected.values.cpu()).abs()[batch.loss_mask]
    assert gaps.max() < GAPS[dtype]


@pytest.mark.parametrize("dtype", GAPS)
def test_exact_rollouts_are_the_same_bits_in_any_company(folder, prompts, dtype):
    model = load_policy(folder, dtype=dtype, device=DEVICE).model
    asked = dataclasses.replace(PARAMS, max_new_tokens=40)
    together = responses(generate(NativeEngine(model, mode="exact"), prompts, asked, version=0, group_size=2))
    few = responses(generate(NativeEngine(model, mode="exact", max_rows=3), prompts, asked, version=0, group_size=2))
    for row in (6, 0):
        alone = responses(
            generate(NativeEngine(model, mode="exact"), prompts.rows([row]), asked, version=0, group_size=2)
        )
        for name, (tokens, logprobs) in alone.items():
            assert together[name][0] == few[name][0] == tokens
            assert torch.equal(together[name][1], logprobs)
            assert torch.equal(few[name][1], logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (32, 8, 64), (8, 1, 256), (14, 2, 96)])
def test_the_kernel_finds_what_products_find(dtype, heads, kv_heads, dim):
    pytest.importorskip("triton")
    shapes = LayerShapes(1, heads, kv_heads, dim, torch.zeros(1, dtype=dtype, device=DEVICE))
    assert is_right(PagedKernel(), shapes)


SINKS = torch.linspace(-2.0, 4.0, 8, device=DEVICE)


@pytest.mark.parametrize("num_rows", [1, 7, 200])
@pytest.mark.parametrize(
    "limits", [Limits(), Limits(window=100), Limits(softcap=20.0), Limits(100, sinks=SINKS)], ids=str
)
def test_the_kernel_finds_it_for_many_rows_and_long_ones(num_rows, limits):
    pytest.importorskip("triton")
    cache = KVCache(9000, LayerShapes(1, 8, 4, 64, torch.zeros(1, dtype=torch.float32, device=DEVICE)))
    manager = BlockManager(9000)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for memory in (cache.keys, cache.values):
        memory.normal_(generator=generator)
    lengths = [*(1 + 37 * row % 1200 for row in range(num_rows)), 60_000 if num_rows == 1 else 1200]
    rows = [(1, length - 1, [manager.allocate() for _ in range(-(-length // 32))]) for length in lengths]
    states = torch.randn(16, len(rows), 64, device=DEVICE, generator=generator).transpose(0, 1)
    found, expected = (
        PagedAttention(cache, AttentionMetadata.of(rows), kernel=kernel).attend(
            0, states[:, :8], states[:, 8:12], states[:, 12:], 0.125, limits
        )
        for kernel in (PagedKernel(), None)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", GAPS)
def test_captured_steps_draw_what_steps_draw(folder, prompts, dtype, caplog):
    if captures_on(DEVICE) is None:
        pytest.skip("this torch captures nothing")

    def refuse(step):
        raise RuntimeError("not captured")

    model = load_policy(folder, dtype=dtype, device=DEVICE).model
    found = []
    for capture in (None, refuse):
        with caplog.at_level(logging.WARNING):
            engine = NativeEngine(model, backend=AcceleratorBackend(model, capture))
            found.append(responses(generate(engine, prompts, PARAMS, version=0, group_size=8)))
            lines = [line for line in caplog.messages if "captured one failed" in line]
            assert (lines == []) is (capture is None)
    assert_alike(*found, dtype)


def test_an_engine_takes_its_cache_and_little_more_and_gives_it_back(folder, prompts):
    model = load_policy(folder, dtype="bfloat16", device=DEVICE).model
    engine = NativeEngine(model, cache_tokens=2**19)
    before = torch.accelerator.memory_allocated()
    generate(engine, prompts, PARAMS, version=0, group_size=8)
    cache = 2 * 4 * 4 * 16 * 2 * 2**19
    torch.accelerator.reset_peak_memory_stats()
    generate(engine, prompts, PARAMS, version=0, group_size=8)
    assert torch.accelerator.max_memory_allocated() - before < 1.05 * cache + 128 * 2**20
    engine.sleep()
    asleep = torch.accelerator.memory_allocated()
    assert asleep - before < 0.01 * cache + 64 * 2**20  # libraries keep the room that they took at first
    engine.wake()
    generate(engine, prompts, PARAMS, version=0, group_size=8)
    engine.sleep()
    assert torch.accelerator.memory_allocated() - asleep < 0.01 * cache
    engine.wake()
    assert np.isfinite(generate(engine, prompts, PARAMS, version=0, group_size=8).rollout_logprobs.numpy()).all()
