"""The way of rows that run on an accelerator, on a CPU: as its tokens, without a look in between, and captured."""

import copy
import dataclasses
import gc
import logging
import subprocess
import weakref

import pytest
import torch
from accelerator_forms import accelerator_forms
from recorded import NoLooks, Tapes
from tiny_families import make_family_model
from tiny_models import TINY, make_tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from rallypoint.config import LoRAConfig
from rallypoint.generation import NativeEngine, Request, SamplingParams, generate, stream
from rallypoint.generation.native.accelerator.backend import AcceleratorBackend
from rallypoint.generation.native.block_manager import AttentionMetadata, Block, BlockManager
from rallypoint.generation.native.decoder import Decoder
from rallypoint.generation.native.kv_cache import KVCache
from rallypoint.generation.native.recording_decoder import RecordingDecoder
from rallypoint.generation.sampler import SamplingMetadata
from rallypoint.model_files import load_policy

CPU = torch.device("cpu")
LENGTHS = [3, 9, 1, 40, 5, 33]
FAMILIES = ["gemma2", "llama", "qwen3", "gpt_oss"]
WAYS = {
    "likely": {},
    "greedy": {"temperature": 0.0},
    "narrowed": {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.01},
}


def by_name(batch):
    return {
        (int(batch.prompt_index[row]), int(batch.sample_index[row])): (
            batch.response(row).tolist(),
            batch.rollout_logprobs[slice(*batch.offsets[row : row + 2].tolist())],
        )
        for row in range(len(batch))
    }


def assert_same(found, expected, tolerance=1e-5):
    found, expected = by_name(found), by_name(expected)
    assert found.keys() == expected.keys()
    for name, (tokens, logprobs) in expected.items():
        assert found[name][0] == tokens, name
        torch.testing.assert_close(found[name][1], logprobs, rtol=1e-4, atol=tolerance)


@pytest.fixture(scope="module", params=["gemma2", "llama", "qwen3"])
def model(request, tmp_path_factory):
    """Of Gemma 2, layers have windows and softcaps, and it goes through its own code; so does gpt-oss, with sinks."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "gemma2":
        limits = {"sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
        sizes = {**TINY, "vocab_size": 20, "max_position_embeddings": 512}
        torch.manual_seed(0)
        Gemma2ForCausalLM(Gemma2Config(**sizes, **limits, head_dim=8)).save_pretrained(folder)
    elif request.param == "gpt_oss":
        make_family_model(folder, request.param, vocab_size=20, max_position_embeddings=512)
    else:
        make_tiny_model(folder, architecture=request.param, max_positions=512)
    return load_policy(str(folder), dtype="float32").model


@pytest.fixture(scope="module")
def plain(make_policy):
    return make_policy("qwen3")


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_usual_way(model, make_prompts, params, half, way):
    """In either half any two of model, type and way meet."""
    place = FAMILIES.index(model.config.model_type) + list(WAYS).index(way)
    dtype, way = [torch.float64, torch.float32][(place + half) % 2], WAYS[way]
    model = copy.deepcopy(model).to(dtype)
    prompts, asked = make_prompts(LENGTHS), dataclasses.replace(params, max_new_tokens=45, **way)
    expected = generate(NativeEngine(model), prompts, asked, version=0, group_size=4)
    assert_same(
        generate(NativeEngine(model, backend=AcceleratorBackend(model)), prompts, asked, version=0, group_size=4),
        expected,
    )
    little = NativeEngine(model, backend=AcceleratorBackend(model), max_rows=5, cache_tokens=480)
    assert_same(generate(little, prompts, asked, version=0, group_size=4), expected)


def some_rows(backend, lengths=(3, 40, 9), num_steps=16):
    """Sequences of some lengths in a cache, laid out: each has a block more than its tokens need."""
    shapes = backend.decoder.probe()
    backend.prepare(shapes)
    cache, manager = KVCache(40, shapes), BlockManager(40)
    rows = [[manager.allocate() for _ in range(2 + length // 32)] for length in lengths]
    cache.zero(manager.take_new())
    queries = [(5 + row, lengths[row] - 1, blocks) for row, blocks in enumerate(rows)]
    (layout,) = backend.attention(cache, AttentionMetadata.of(queries), num_steps)
    return layout


def some_numbers(num_steps, num_rows=3):
    return torch.rand(num_steps, num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@torch.no_grad()
def test_the_host_does_not_wait_between_two_tokens(model, way):
    backend, sampling = (
        AcceleratorBackend(model),
        SamplingMetadata.of([SamplingParams(max_new_tokens=9, **way)] * 3, torch.device("cpu")),
    )
    layout = some_rows(backend)
    with NoLooks() as looks:
        draws = backend.decode_steps([layout], sampling, some_numbers(8))
    assert looks.num > 8 * 20
    assert len(draws) == 8
    assert layout.num_moves == 8


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("is_mixed", [False, True])
@torch.no_grad()
def test_replayed_steps_draw_what_steps_draw(plain, way, is_mixed):
    """Five calls of three steps each; the first captures."""
    params = [SamplingParams(max_new_tokens=9, **way)] * 3
    params[2] = dataclasses.replace(params[2], temperature=params[2].temperature and 0.8) if is_mixed else params[2]
    sampling, found, tapes = SamplingMetadata.of(params, torch.device("cpu")), [], Tapes()
    for capture in (None, tapes):
        backend = AcceleratorBackend(plain, capture)
        layout = some_rows(backend)
        draws = [draw for part in some_numbers(15).split(3) for draw in backend.decode_steps([layout], sampling, part)]
        found.append([torch.stack(drawn) for drawn in zip(*draws, strict=True)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert (len(tapes.made), tapes.num_replays) == (1, 2 + 14)


@pytest.mark.parametrize(
    ("family", "lora"), [("gemma2", None), ("gpt_oss", None), ("deepseek_v3", None), ("qwen3", LoRAConfig(rank=2))]
)
@torch.no_grad()
def test_steps_through_code_of_its_own_are_replayed_too(tmp_path, family, lora):
    """Windows, sinks, experts and latents, in the form of accelerators; and adapters."""
    model = load_policy(make_family_model(tmp_path, family), dtype="float32", lora=lora).model
    sampling, found, tapes = SamplingMetadata.of([SamplingParams(max_new_tokens=9)] * 3, CPU), [], Tapes()
    with accelerator_forms():
        for capture in (None, tapes):
            backend = AcceleratorBackend(model, capture)
            layout = some_rows(backend)
            assert not backend.decoder.is_plain
            draws = [
                draw for part in some_numbers(6).split(3) for draw in backend.decode_steps([layout], sampling, part)
            ]
            found.append([torch.stack(drawn) for drawn in zip(*draws, strict=True)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert (len(tapes.made), tapes.num_replays) == (1, 2 + 5)


@pytest.mark.parametrize(("decoder", "family"), [(Decoder, "qwen3_next"), (RecordingDecoder, "qwen3_moe")])
def test_steps_that_leave_something_beside_their_tokens_are_not_captured(tmp_path, decoder, family):
    model = load_policy(make_family_model(tmp_path, family), dtype="float32").model
    assert not decoder(model).may_be_captured


def test_what_was_captured_serves_later_rows(plain, make_prompts, params):
    """Rows leave, join, and are set back; those of one number of rows and blocks have one graph."""
    tapes, asked = Tapes(), dataclasses.replace(params, max_new_tokens=60)
    engine = NativeEngine(plain, backend=AcceleratorBackend(plain, tapes), cache_tokens=960)
    for first in (7, 20):
        prompts = make_prompts(LENGTHS, first=first)
        assert_same(
            generate(engine, prompts, asked, version=0, group_size=4),
            generate(NativeEngine(plain), prompts, asked, version=0, group_size=4),
        )
    assert tapes.num_replays > 3 * len(tapes.made)


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_an_engine_that_keeps_its_memory_asleep_captures_no_step_again(plain, make_prompts, params, keeps_memory):
    """New weights are in place of the old ones; prompts are unknown when it wakes, as to an engine that begins."""
    model, tapes, prompts = copy.deepcopy(plain), Tapes(), make_prompts(LENGTHS)
    asked = dataclasses.replace(params, stop_tokens=())  # as many rows and blocks in each version
    engine = NativeEngine(model, backend=AcceleratorBackend(model, tapes), keeps_memory=keeps_memory)
    num_captured = []
    for version in range(3):
        expected = generate(NativeEngine(model), prompts, asked, version=0, group_size=4)
        assert_same(generate(engine, prompts, asked, version=version, group_size=4), expected)
        num_captured.append(len(tapes.made))
        engine.sleep()
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        engine.load(version + 1, None)
        engine.wake()
    first, second, third = num_captured
    assert (second == third == first) if keeps_memory else (third - second == second - first == first > 0)


def test_weights_that_change_in_place_are_replayed_and_those_that_move_are_captured_anew(plain, make_prompts, params):
    model, tapes, prompts = copy.deepcopy(plain), Tapes(), make_prompts([4, 4])
    asked = dataclasses.replace(params, stop_tokens=())
    engine = NativeEngine(model, backend=AcceleratorBackend(model, tapes))
    generate(engine, prompts, asked, version=0, group_size=1)
    num = len(tapes.made)
    for version, moves in enumerate((False, True), 1):
        with torch.no_grad():
            for weight in model.parameters():
                changed = weight + 0.05 * torch.randn_like(weight)
                if moves:
                    weight.data = changed
                else:
                    weight.copy_(changed)
        engine.load(version, None)
        expected = generate(NativeEngine(model, version=version), prompts, asked, version=version, group_size=1)
        assert_same(generate(engine, prompts, asked, version=version, group_size=1), expected)
        assert (len(tapes.made) > num) is moves


@torch.no_grad()
def test_a_batch_whose_buffers_another_one_takes_goes_on_by_itself(plain):
    tapes, sampling = Tapes(), SamplingMetadata.of([SamplingParams(max_new_tokens=9)] * 3, torch.device("cpu"))
    alone, backend = AcceleratorBackend(plain), AcceleratorBackend(plain, tapes)
    expected = [
        alone.decode_steps([layout], sampling, some_numbers(6)) for layout in (some_rows(alone), some_rows(alone))
    ]
    one = some_rows(backend)
    found = backend.decode_steps([one], sampling, some_numbers(6)[:3])
    other = backend.attention(one.cache, AttentionMetadata.of([(1, 0, [Block(39)])] * 3), 9)
    backend.decode_steps(other, sampling, some_numbers(6))
    found += backend.decode_steps([one], sampling, some_numbers(6)[3:])
    assert torch.equal(
        torch.stack([draws.tokens for draws in found]), torch.stack([draws.tokens for draws in expected[0]])
    )


def spoil(tape):
    """Have matrix products return what they returned first."""
    tape.calls = [call for call in tape.calls if call[0] is not torch.ops.aten.mm.default]


def refuse(step):
    raise RuntimeError("operation not permitted when stream is capturing")


def fail_to_compile(step):
    raise subprocess.CalledProcessError(1, ["gcc"])


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (refuse, "not permitted when stream is capturing"),
        (fail_to_compile, "CalledProcessError"),
        (Tapes(spoil), "nats off"),
    ],
)
def test_where_capturing_fails_steps_go_on_as_usual_and_the_log_says_so(
    plain, make_prompts, params, caplog, capture, reason
):
    prompts = make_prompts(LENGTHS)
    engine = NativeEngine(plain, backend=AcceleratorBackend(plain, capture))
    with caplog.at_level(logging.WARNING):
        found = generate(engine, prompts, params, version=0, group_size=4)
    assert_same(found, generate(NativeEngine(plain), prompts, params, version=0, group_size=4))
    (line,) = [record.getMessage() for record in caplog.records if "captured one failed" in record.getMessage()]
    assert reason in line


def test_a_sleeping_engine_holds_no_memory_of_its_blocks(plain, make_prompts, params):
    engine = NativeEngine(plain, backend=AcceleratorBackend(plain, Tapes()))
    generate(engine, make_prompts(LENGTHS), params, version=0, group_size=4)
    memory = weakref.ref(engine._runner.cache)
    engine.sleep()
    gc.collect()
    assert memory() is None
    engine.wake()
    generate(engine, make_prompts(LENGTHS), params, version=0, group_size=4)


def test_whoever_reads_along_gets_every_token_by_itself(plain, params):
    engine = NativeEngine(plain, backend=AcceleratorBackend(plain, Tapes()))
    asked = dataclasses.replace(params, stop_tokens=(), max_new_tokens=9)
    request = Request(tokens=(3, 4, 5), params=asked, streamed=True)
    assert [len(output.tokens) for output in stream(engine, request)] == [1] * 9
