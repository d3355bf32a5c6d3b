"""Requests that share the memory of the native engine, weights that change meanwhile, and windows."""

import copy
import dataclasses
import itertools
import math
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, PreTrainedModel

from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.errors import CacheError, RequestError
from rallypoint.generation import NativeEngine, Request, SamplingParams, generate as through, stream
from rallypoint.generation.native.scheduler import blocks_to_come
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard, PackedRows, named_weights

LENGTHS = [3, 9, 1, 17, 5, 4]


def test_a_request_that_no_memory_could_hold_is_refused_and_says_what_it_needs(make_policy, make_prompts, params):
    engine = NativeEngine(make_policy(), cache_tokens=4 * 32)
    with pytest.raises(RequestError, match="takes 5 blocks of 32 tokens, but the cache has 4"):
        through(engine, make_prompts([40]), dataclasses.replace(params, max_new_tokens=70), version=0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_rows": 0}, "max_rows=0: expected a whole number of at least 1"),
        ({"max_rows": 1.5}, "max_rows=1.5"),
        ({"cache_tokens": 0}, "cache_tokens=0: expected a whole number of at least 64"),
        ({"cache_tokens": 63}, "cache_tokens=63"),
        ({"mode": "exct"}, "mode='exct': expected 'fast' or 'exact'"),
        ({"on_load": "foo", "max_rows": -1}, "max_rows=-1: .*; on_load='foo': expected 'keep' or 'recompute'"),
    ],
)
def test_an_engine_that_could_not_be_meant_is_refused(make_policy, options, problem):
    with pytest.raises(ValueError, match=problem):
        NativeEngine(make_policy(), **options)


@pytest.mark.parametrize("cache_tokens", [10**12, 2**40, 2**62])
def test_a_cache_beyond_memory_is_refused_with_what_it_takes_and_what_there_is(make_policy, params, cache_tokens):
    engine = NativeEngine(make_policy(), cache_tokens=cache_tokens)
    engine.submit(Request(tokens=(3, 4), params=params))
    said = r"take [\d,]{8,} MiB, but this machine has [\d,]+ MiB; .*rollout.cache_tokens"
    with pytest.raises(CacheError, match=said):
        engine.step()


def test_requests_join_while_others_run_and_common_beginnings_are_computed_once(make_policy):
    """Sixty-four tokens in common, then each its own; the model counts the tokens that go through it."""
    model, counted = copy.deepcopy(make_policy()), []
    model.base_model.register_forward_pre_hook(
        lambda module, args, options: counted.append(options["input_ids"].numel()), with_kwargs=True
    )
    params = SamplingParams(max_new_tokens=20, seed=1)
    requests = [
        Request(tokens=(3,) * 64 + (4 + place % 3,) * 7, params=params, prompt_index=place % 3, sample_index=place)
        for place in range(9)
    ]
    alone = [[t for output in stream(NativeEngine(model), one) for t in output.tokens] for one in requests]
    engine = NativeEngine(model)
    counted.clear()
    found = {}
    for request in requests:
        found[engine.submit(request)] = []
        for output in engine.step():
            found[output.request_id] += output.tokens
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.tokens
    assert list(found.values()) == alone
    # Five tokens to ask for shapes, 64 in common, three endings of 7, and all but the last token of each response.
    assert sum(counted) == 5 + 64 + 3 * 7 + 9 * 19


@pytest.mark.parametrize("on_load", ["keep", "recompute"])
def test_weights_that_come_while_requests_run_are_stamped_on_what_they_sample(make_policy, params, on_load):
    model, other = copy.deepcopy(make_policy()), make_policy(initializer_range=0.2)
    engine = NativeEngine(model, on_load=on_load, version=3)
    request_id = engine.submit(Request(tokens=(3, 4, 5), params=dataclasses.replace(params, stop_tokens=())))
    for _ in range(5):
        assert engine.step() == []
    engine.load(4, named_weights(other))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [(output.request_id, output.version, len(output.tokens)) for output in outputs] == [
        (request_id, 3, 5),
        (request_id, 4, params.max_new_tokens - 5),
    ]
    # With its keys and values computed again, the rest is what the new weights alone say of it.
    tokens = torch.tensor([3, 4, 5, *(token for output in outputs for token in output.tokens)])
    rows = PackedRows(torch.tensor([0, len(tokens)]), tokens.device)
    with torch.no_grad():
        states = other.base_model(
            input_ids=tokens.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows
        ).last_hidden_state
        logprobs = other.lm_head(states[0, 7:-1]).log_softmax(-1).gather(1, tokens[8:].unsqueeze(1)).squeeze(1)
    same = torch.allclose(logprobs, torch.tensor(outputs[1].logprobs), atol=1e-5)
    assert same is (on_load == "recompute")


@pytest.mark.parametrize("on_load", ["keep", "recompute"])
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_nothing_that_old_weights_have_drawn_ahead_is_handed_out_under_new_ones(
    make_policy, params, on_load, num_steps
):
    """For requests that are streamed nothing is drawn ahead; what they get is what the others must get."""
    endless, other = dataclasses.replace(params, stop_tokens=(), max_new_tokens=30), make_policy(initializer_range=0.2)

    def found(streamed):
        engine = NativeEngine(copy.deepcopy(make_policy()), on_load=on_load)
        for place in range(3):
            engine.submit(Request(tokens=(3 + place,) * 40, params=endless, sample_index=place, streamed=streamed))
        outputs = [output for _ in range(num_steps) for output in engine.step()]
        engine.load(1, named_weights(other))
        while engine.has_work:
            outputs += engine.step()
        outputs.sort(key=lambda output: output.request_id)
        return [
            (output.request_id, output.version, token, logprob)
            for output in outputs
            for token, logprob in zip(output.tokens, output.logprobs, strict=True)
        ]

    assert found(streamed=False) == found(streamed=True)


def test_a_prompt_is_not_found_again_under_other_weights(make_policy, params):
    model, other = copy.deepcopy(make_policy()), make_policy(initializer_range=0.2)
    engine, request = NativeEngine(model), Request(tokens=(3,) * 70, params=params)
    list(stream(engine, request))
    engine.load(1, named_weights(other))
    tokens = [token for output in stream(engine, request) for token in output.tokens]
    assert tokens == [token for output in stream(NativeEngine(other), request) for token in output.tokens]


def limited_policy(folder, config) -> PreTrainedModel:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_policy(str(folder), dtype="float32").model


LIMITED = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "sliding_window": 6,
}


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**LIMITED),
        Gemma2Config(**LIMITED, head_dim=8, attn_logit_softcapping=1.0, final_logit_softcapping=2.0),
    ],
    ids=["windows", "windows, and capped scores and logits"],
)
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_rollouts_longer_than_a_window_have_the_logprobs_of_the_engine(make_prompts, params, tmp_path, config, mode):
    model = limited_policy(tmp_path, config)
    long = dataclasses.replace(params, max_new_tokens=30, stop_tokens=(0,))
    batch = through(NativeEngine(model, mode=mode), make_prompts(LENGTHS), long, version=0)
    # With little memory responses are computed again, looking back at their prompt.
    little = NativeEngine(model, mode=mode, cache_tokens=9 * 32)
    through(
        little, make_prompts(LENGTHS), dataclasses.replace(long, max_new_tokens=1), version=0
    )  # it expects short ones
    assert torch.equal(through(little, make_prompts(LENGTHS), long, version=0).tokens, batch.tokens)
    assert little.num_preempted > 0
    engine = TrainingEngine(ModelShard.whole(model), optimizer=None, max_tokens_per_micro_batch=100)
    expected = engine.evaluate(batch, lambda part, at: policy_outputs(engine.shard, part, at, 1.0).logprobs)
    assert (batch.rollout_logprobs - expected.values).abs().max() < 1e-4


def sampled(engine, prompts, params, load_at=None):
    """(tokens, logprobs) of each prompt; before a step the engine may load the weights that it has once more."""
    place = {engine.submit(Request(tokens=prompt, params=params)): at for at, prompt in enumerate(prompts)}
    found = [([], []) for _ in prompts]
    for step in itertools.takewhile(lambda _: engine.has_work, itertools.count()):
        if step == load_at:
            engine.load(1, None)
        for output in engine.step():
            tokens, logprobs = found[place[output.request_id]]
            tokens += output.tokens
            logprobs += output.logprobs
    return found


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_prompts_that_begin_with_each_other_and_join_together_are_answered_as_they_are_alone(make_policy, params, mode):
    numbers = torch.randint(3, 20, (120,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [tuple(numbers[:length]) for length in (32, 64, 120)]
    greedy = dataclasses.replace(params, temperature=0.0, max_new_tokens=4, stop_tokens=())
    together = sampled(NativeEngine(make_policy(), mode=mode), prompts, greedy)
    for prompt, (tokens, logprobs) in zip(prompts, together, strict=True):
        ((expected, wanted),) = sampled(NativeEngine(make_policy(), mode=mode), [prompt], greedy)
        assert tokens == expected
        assert logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("load_at", [3, 50, 80])
def test_requests_that_are_computed_again_go_on_as_they_would_have(make_policy, params, mode, load_at):
    """Two prompts begin with one block, and their responses become longer than what is left of them."""
    numbers = torch.randint(3, 20, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    prompts = [tuple(numbers[:40]), tuple(numbers[:32] + numbers[50:59])]
    long = dataclasses.replace(params, max_new_tokens=90, stop_tokens=())
    expected, found = (
        sampled(NativeEngine(make_policy(), mode=mode, on_load="recompute"), prompts, long, at)
        for at in (None, load_at)
    )
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(found, expected, strict=True):
        assert tokens == wanted_tokens
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-4)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("num_passes", [1, 2, 9])
def test_an_error_in_a_step_leaves_nothing_in_the_engine(make_policy, make_prompts, params, mode, num_passes):
    """The model fails once, in the pass of the prompts or in one of those after it."""
    model, left = copy.deepcopy(make_policy()), [1000]

    def fail(module, args):
        left[0] -= 1
        if not left[0]:
            raise MemoryError("of the model")

    model.base_model.register_forward_pre_hook(fail)
    endless = dataclasses.replace(params, stop_tokens=())
    expected = through(NativeEngine(model, mode=mode), make_prompts(LENGTHS), endless, version=0)
    engine = NativeEngine(model, mode=mode)
    list(stream(engine, Request(tokens=(3, 4), params=params)))
    left[0] = num_passes
    with pytest.raises(MemoryError, match="of the model"):
        through(engine, make_prompts(LENGTHS), endless, version=0)
    assert not engine.has_work
    again = through(engine, make_prompts(LENGTHS), endless, version=0)
    assert torch.equal(again.tokens, expected.tokens)
    assert torch.equal(again.rollout_logprobs, expected.rollout_logprobs)


def test_a_response_goes_on_after_a_step_that_failed(make_policy, params):
    model, fails = copy.deepcopy(make_policy()), []

    def fail(module, args):
        if fails:
            raise MemoryError(fails.pop())

    model.base_model.register_forward_pre_hook(fail)
    engine, request = NativeEngine(model), Request(tokens=(3,) * 40, params=dataclasses.replace(params, stop_tokens=()))
    expected = [token for output in stream(NativeEngine(model), request) for token in output.tokens]
    for num_steps in (0, 1, 5):
        engine.submit(request)
        outputs = [output for _ in range(num_steps) for output in engine.step()]
        fails.append("of the model")
        with pytest.raises(MemoryError):
            engine.step()
        while engine.has_work:
            outputs += engine.step()
        assert [token for output in outputs for token in output.tokens] == expected


def test_hardly_any_token_is_computed_twice_with_a_cache_for_a_part_of_the_rows(make_policy, params):
    """Responses of 40 tokens, or of half as many, in memory for a sixth of them; the first turn knows no lengths."""
    engine = NativeEngine(make_policy(), max_rows=24, cache_tokens=9 * 32)
    for length, most in ((40, 6), (40, 0), (20, 0)):
        before = engine.num_preempted
        for place in range(24):
            limits = dataclasses.replace(params, stop_tokens=(), max_new_tokens=length)
            engine.submit(Request(tokens=(3 + place % 7,) * 5, params=limits, prompt_index=place))
        num_ended = 0
        while engine.has_work:
            num_ended += sum(output.finish_reason == "length" for output in engine.step())
        assert num_ended == 24
        assert engine.num_preempted - before <= most


def test_sequences_never_need_more_at_once_than_all_that_each_of_them_needs():
    random = Random(3)
    for _ in range(300):
        prospects = [(random.randrange(200), random.randrange(8)) for _ in range(random.randrange(1, 20))]
        at_once = blocks_to_come(prospects)
        assert at_once <= sum(math.ceil(left / BLOCK_TOKENS) for left, _ in prospects), prospects
