"""Rollouts on the pretend device: the bits of the CPU, for every way through a model, and few waits of the host.

The bits of the CPU, that is, in the forms that accelerators take.
"""

import dataclasses
import itertools

import pytest
import torch
from accelerator_forms import accelerator_forms
from tiny_families import make_family_model
from tiny_models import TINY, make_tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM

from rallypoint.config import LoRAConfig
from rallypoint.generation import NativeEngine, Request, SamplingParams
from rallypoint.generation.native import prefill
from rallypoint.model_files import load_policy
from rallypoint.models import trained_weights

CPU, DEVICE = torch.device("cpu"), torch.device("pretend:0")
PARAMS = SamplingParams(max_new_tokens=9, seed=3, stop_tokens=(0,))
ALIKE = [{}, {"temperature": 0.0}, {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.01}]
"""Ways to draw of which several tokens are drawn at once."""
LOOKED_AT = [{"repetition_penalty": 1.3}, {"min_new_tokens": 6}, {"stop_strings": ("7 3",)}]
"""Of which the next token depends on those before in more than its logits."""
LENGTHS = [3, 40]
MOST_WAITS_FOR_TABLES = 20


def decode(tokens):
    return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), architecture="qwen3", num_layers=1, max_positions=256)


@pytest.fixture(scope="module", params=["gemma2", "gpt_oss"])
def limited(request, tmp_path_factory):
    """Layers have windows and softcaps, or sinks, and it goes through its own code."""
    if request.param == "gpt_oss":
        sizes = {"vocab_size": 20, "max_position_embeddings": 256}
        return make_family_model(tmp_path_factory.mktemp("model"), request.param, **sizes)
    limits = {"sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
    sizes = {**TINY, "vocab_size": 20, "max_position_embeddings": 256, "num_hidden_layers": 1}
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("model"))
    Gemma2ForCausalLM(Gemma2Config(**sizes, **limits, head_dim=8)).save_pretrained(folder)
    return folder


def make_engine(folder, device, *, lora=None, **how):
    return NativeEngine(
        load_policy(folder, dtype="float32", device=torch.device(device), lora=lora).model, decode=decode, **how
    )


def prompt(length):
    return tuple(torch.randint(1, 20, (length,), generator=torch.Generator().manual_seed(0)).tolist())


def requests(ways, *, lengths=LENGTHS, streamed=False):
    """One of each length, which are drawn in these ways, in turn."""
    return [
        Request(
            tokens=prompt(length),
            params=dataclasses.replace(PARAMS, **way),
            prompt_index=number,
            sample_index=0,
            streamed=streamed,
        )
        for number, (length, way) in enumerate(zip(lengths, itertools.cycle(ways), strict=False))
    ]


def outputs_of(engine, asked):
    for request in asked:
        engine.submit(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {output.finish_reason for output in outputs} <= {None, "stop", "length"}
    return outputs


def assert_bits(do):
    """Do something with a device, and with the CPU in the forms that accelerators take."""
    there = do(DEVICE)
    with accelerator_forms():
        assert do(CPU) == there


@pytest.mark.parametrize("ways", [ALIKE, LOOKED_AT], ids=["ahead", "looked at"])
def test_however_tokens_are_drawn_they_have_the_bits_of_the_cpu(folder, ways):
    assert_bits(lambda device: outputs_of(make_engine(folder, device), requests(ways, lengths=[3, 40, 1])))


@pytest.mark.parametrize(
    "how",
    [{"mode": "exact"}, {"cache_tokens": 160, "max_rows": 2}, {"lora": LoRAConfig(rank=2)}],
    ids=["exact", "little memory", "adapters"],
)
def test_whichever_way_rows_go_through_the_model_they_have_the_bits_of_the_cpu(folder, how):
    asked = requests(ALIKE, lengths=[3, 40, 33])
    assert_bits(lambda device: outputs_of(make_engine(folder, device, **how), asked))


def test_windows_softcaps_and_sinks_have_the_bits_of_the_cpu(limited):
    assert_bits(lambda device: outputs_of(make_engine(limited, device), requests(ALIKE, lengths=[20])))


def test_prompts_that_look_back_and_streamed_ones_have_the_bits_of_the_cpu(folder):
    """The beginning of the later ones is found: it has been computed for the earlier."""

    def do(device):
        engine = make_engine(folder, device)
        asked = requests([{"max_new_tokens": 3}], lengths=[32, 70, 64], streamed=True)
        return [outputs_of(engine, [request]) for request in asked]

    assert_bits(do)


def test_an_engine_sleeps_wakes_and_takes_new_weights_as_on_the_cpu(folder, pretend):
    def do(device):
        engine, found = make_engine(folder, device), []
        before = pretend.allocated()
        for version in (1, 2):
            engine.wake()
            found.append(outputs_of(engine, requests(ALIKE, lengths=[3])))
            engine.sleep()
            assert pretend.allocated() <= before + 2**16  # the cache has gone
            engine.load(version, {name: -weight.detach() for name, weight in trained_weights(engine.model).items()})
        return found

    assert_bits(do)


def test_a_model_on_another_device_than_the_first_one_is_sampled_from_there(folder):
    """All tensors are there: an operator that got one of another device would raise."""
    there, other = (
        outputs_of(make_engine(folder, device), requests(ALIKE, lengths=[3])) for device in (DEVICE, "pretend:1")
    )
    assert there == other


def test_the_host_waits_once_for_eight_tokens_of_all_rows(folder, pretend):
    """And for the tables of rows that run together, once in 32 tokens."""
    engine = make_engine(folder, DEVICE)
    long = {"max_new_tokens": 41, "stop_tokens": ()}
    for request in requests([way | long for way in ALIKE[1:]], lengths=[3, 9]):
        engine.submit(request)
    engine.step()  # their prompts
    waits, copies = [], []
    while engine.has_work:
        pretend.reset()
        engine.step()
        waits.append(sum(pretend.syncs.values()))
        copies.append(pretend.copies["to the device"] + pretend.copies["to the host"])
    assert copies == waits, "something else than a copy has the host wait"
    first, *rest = [waits[place : place + 8] for place in range(0, 40, 8)]
    assert first[0] <= MOST_WAITS_FOR_TABLES
    assert rest[-1][0] <= MOST_WAITS_FOR_TABLES  # in another block of keys and values
    assert [drawn[0] for drawn in rest[:-1]] == [1, 1, 1]
    assert not any(wait for drawn in (first, *rest) for wait in drawn[1:])


def test_prompts_that_look_back_are_laid_out_once_for_all_layers(tmp_path, pretend, monkeypatch):
    """With a kernel for rows of any lengths, as CUDA has in half precision: the host waits for no layer or prompt."""
    monkeypatch.setattr(prefill, "find_varlen", lambda *_: lambda query, *_: torch.zeros_like(query))
    counted = []
    for num_layers, num in ((1, 2), (3, 2), (3, 6)):
        sizes = {"num_layers": num_layers, "max_positions": 256}
        folder = make_tiny_model(tmp_path / f"{num_layers}-{num}", architecture="qwen3", **sizes)
        engine, first = make_engine(folder, DEVICE), prompt(32)
        asked = requests([{"max_new_tokens": 3}], lengths=[40, *[50] * num])
        asked = [dataclasses.replace(one, tokens=(*first, *range(at + 1, at + 9))) for at, one in enumerate(asked)]
        outputs_of(engine, asked[:1])
        for request in asked[1:]:
            engine.submit(request)
        pretend.reset()
        engine.step()
        counted.append(pretend.syncs.copy())
    assert counted[0] == counted[1]
    assert counted[2] == counted[1]
