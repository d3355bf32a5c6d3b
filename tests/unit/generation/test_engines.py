"""What every engine samples, in what it agrees with training and with the others, and what it refuses."""

import copy
import dataclasses
import functools
import json

import pytest
import torch
from sampling_cases import CHANGES, decode

from rallypoint.engine import policy_outputs
from rallypoint.engine.forward import likeliest_tokens, trained_positions
from rallypoint.errors import RequestError, WeightsMismatchError
from rallypoint.generation import HFEngine, Request, SamplingParams, generate, stream
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard, named_weights
from rallypoint.types import Sequences

LENGTHS = [3, 9, 1, 17]


@pytest.fixture(scope="module")
def drawn(make_policy, make_prompts, params):
    """Return what an engine, as a function makes it, answers with a change of `params`: each once for all tests."""

    @functools.cache
    def draw(make_engine, changed):
        wanted = dataclasses.replace(params, **CHANGES[changed])
        return generate(make_engine(make_policy()), make_prompts(LENGTHS), wanted, version=4, group_size=2)

    return draw


@pytest.mark.parametrize("changed", CHANGES)
def test_every_engine_draws_the_same_tokens(make_engine, slow_engine, drawn, changed):
    expected, batch = drawn(slow_engine, changed), drawn(make_engine, changed)
    assert batch.tokens.tolist() == expected.tokens.tolist()
    assert batch.truncated.tolist() == expected.truncated.tolist()
    torch.testing.assert_close(batch.rollout_logprobs, expected.rollout_logprobs, rtol=1e-4, atol=1e-5)
    assert (batch.sampled_logprobs is None) == (expected.sampled_logprobs is None)
    if batch.sampled_logprobs is not None and expected.sampled_logprobs is not None:
        torch.testing.assert_close(batch.sampled_logprobs, expected.sampled_logprobs, rtol=1e-4, atol=1e-5)


def test_how_a_model_folder_would_generate_changes_nothing(make_engine, make_policy, make_prompts, params, tmp_path):
    make_policy().save_pretrained(tmp_path)
    own = {
        "do_sample": True,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": [3, 4],
        "bad_words_ids": [[7]],
        "max_time": 1e-9,
        "stop_strings": ["1"],
        "num_beams": 2,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    model = load_policy(str(tmp_path), dtype="float32").model
    said = model.generation_config
    expected = generate(make_engine(make_policy()), make_prompts(LENGTHS), params, version=4, group_size=2)
    batch = generate(make_engine(model), make_prompts(LENGTHS), params, version=4, group_size=2)
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.rollout_logprobs, expected.rollout_logprobs)
    assert model.generation_config is said
    assert said.num_beams == 2


@pytest.mark.parametrize("changed", CHANGES)
def test_logprobs_are_those_that_training_recomputes_whatever_narrows_the_distribution(
    make_engine, drawn, make_policy, params, changed
):
    wanted, batch = dataclasses.replace(params, **CHANGES[changed]), drawn(make_engine, changed)
    with torch.no_grad():
        at = trained_positions(batch)
        trained = wanted.policy_temperature or wanted.temperature or 1.0
        expected = policy_outputs(ModelShard.whole(make_policy()), batch, at, trained).logprobs
    assert (batch.rollout_logprobs[at] - expected).abs().max() < 1e-4
    assert (batch.rollout_logprobs[~batch.loss_mask] == 0).all()
    if batch.sampled_logprobs is not None and wanted.temperature == 0:
        assert (batch.sampled_logprobs == 0).all()
    if batch.sampled_logprobs is not None and wanted.repetition_penalty == 1 and not wanted.has_own_temperature:
        if wanted.min_new_tokens:
            return
        assert (batch.sampled_logprobs >= batch.rollout_logprobs - 1e-6).all(), "what is left is likelier"


@pytest.mark.parametrize("num", [0, 3, 50])
def test_prompts_have_the_logprobs_that_training_computes_whatever_else_is_asked(engine, make_policy, params, num):
    prompt = tuple(1 + place * place % 19 for place in range(70))
    beside = [Request(tokens=prompt[:40], params=params), Request(tokens=prompt, params=params, sample_index=1)]
    asks = [dataclasses.replace(one, prompt_logprobs=num) for one in (*beside, Request(tokens=(3,), params=params))]
    found = {}
    for requests in (beside, asks, beside):  # what was asked finds no keys and values of others, and leaves none
        ids = [engine.submit(request) for request in requests]
        ended = {}
        while engine.has_work:
            ended |= {one.request_id: one for one in engine.step() if one.finish_reason}
        outputs = [ended[request_id] for request_id in ids]
        found.setdefault(requests is asks, []).append(outputs)
    (asked,) = found[True]
    for plain in found[False]:
        assert [one.tokens for one in plain] == [one.tokens for one in asked[:2]]
        assert {one.prompt_logprobs for one in plain} == {None}
    rows = Sequences(
        offsets=torch.tensor([0, 40, 110]),
        tokens=torch.tensor([*prompt[:40], *prompt]),
        loss_mask=torch.tensor([place not in (0, 40) for place in range(110)]),
        prompt_index=torch.tensor([0, 1]),
        sample_index=torch.tensor([0, 0]),
    )
    at, num_kept = trained_positions(rows), min(num, 20)
    expected = likeliest_tokens(ModelShard.whole(make_policy()), rows, at, 1.0, num_kept)
    places = zip(rows.tokens[at].tolist(), expected, asked[0].prompt_logprobs + asked[1].prompt_logprobs, strict=True)
    for token, place, said in places:
        assert said[token] == pytest.approx(float(place[0]), abs=1e-4)
        ids = place[1 + num_kept :].int().tolist()
        assert list(said)[:num_kept] == ids
        assert [said[one] for one in ids] == pytest.approx(place[1 : 1 + num_kept].tolist(), abs=1e-4)
    assert asked[2].prompt_logprobs == ()


def test_a_stop_string_ends_a_rollout_with_the_token_that_completes_it(engine, make_prompts, params):
    wanted = dataclasses.replace(params, stop_strings=("12", "j"), stop_tokens=(), max_new_tokens=40)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4, group_size=2)
    assert not batch.truncated.all()
    for row in range(len(batch)):
        text = decode(batch.response(row).tolist())
        assert bool(batch.truncated[row]) is not text.endswith(("12", "j"))
        assert len(text) == 40 or not batch.truncated[row]
        assert "12" not in text[:-1]
        assert "j" not in text[:-1]


def test_a_stop_string_is_found_however_many_tokens_without_text_are_in_it(make_engine, make_policy, params):
    def shown(tokens):
        return "".join({3: "a", 4: "b"}.get(token, "") for token in tokens)

    engine = make_engine(make_policy(), decode=shown)
    endless = dataclasses.replace(params, stop_tokens=(), max_new_tokens=100)
    distances = []
    for sample in range(2):
        request = Request(tokens=(5, 6), params=endless, sample_index=sample)
        tokens = [token for output in stream(engine, request) for token in output.tokens]
        end = next((n for n in range(1, 101) if "ab" in shown(tokens[:n])), 100)
        stopped = dataclasses.replace(request, params=dataclasses.replace(endless, stop_strings=("ab",)))
        assert [token for output in stream(engine, stopped) for token in output.tokens] == tokens[:end]
        if "ab" in shown(tokens):
            distances.append(end - 1 - max(n for n in range(end) if tokens[n] == 3))
    assert max(distances) > 15


def test_a_stop_string_counts_only_if_its_last_token_comes_after_the_minimum_length(engine, make_prompts, params):
    endless = dataclasses.replace(params, stop_tokens=(), max_new_tokens=40)
    wanted = dataclasses.replace(endless, stop_strings=("1", "j"), min_new_tokens=9)
    tokens = generate(engine, make_prompts(LENGTHS), endless, version=4, group_size=2)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4, group_size=2)
    came_early = 0
    for row in range(len(batch)):
        text = decode(tokens.response(row).tolist())
        end = next((n for n in range(9, 40) if text[:n].endswith(("1", "j"))), 40)
        assert decode(batch.response(row).tolist()) == text[:end]
        came_early += end > 9 and not {"1", "j"}.isdisjoint(text[:8])
    assert came_early


def test_a_minimum_length_is_kept(engine, make_prompts, params):
    wanted = dataclasses.replace(params, min_new_tokens=6, max_new_tokens=10)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4, group_size=2)
    for row in range(len(batch)):
        assert not set(batch.response(row)[:6].tolist()) & set(params.stop_tokens)


def test_stop_strings_without_a_decoder_are_refused(make_policy, make_prompts, params):
    wanted = dataclasses.replace(params, stop_strings=("12",))
    with pytest.raises(RequestError, match="decode"):
        generate(HFEngine(make_policy(), version=4), make_prompts(LENGTHS), wanted, version=4, group_size=2)


def test_the_outputs_of_a_stream_are_the_rollout(engine, make_prompts, params):
    prompts = make_prompts([5])
    batch = generate(engine, prompts, params, version=4, group_size=2)
    request = Request(tokens=tuple(prompts.tokens.tolist()), params=params, prompt_index=7, streamed=True)
    outputs = list(stream(engine, request))
    assert [token for output in outputs for token in output.tokens] == batch.response(0).tolist()
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == ("length" if batch.truncated[0] else "stop")
    assert {output.version for output in outputs} == {4}
    assert not engine.has_work


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ((), "prompt 7 has no tokens"),
        ((1,) * 1024, "prompt 7 has 1024 tokens, but prompt and response together may have 1024"),
        ((1, 2, 20), "prompt 7: token 2 has the id 20, but the model knows 0 to 19"),
        ((1, 2.0), "prompt 7: token 1 has the id 2.0"),
        ((True, 1), "prompt 7: token 0 has the id True"),
        ([1, 2], "prompt 7 is a list; expected a tuple of token ids"),
        ("34", "prompt 7 is a str"),
        ((1, -1), "token 1 has the id -1"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_an_error_that_says_why(engine, params, tokens, problem):
    with pytest.raises(RequestError, match=problem):
        engine.submit(Request(tokens=tokens, params=params, prompt_index=7))
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize("unknown", [20, -1])
def test_a_stop_token_that_the_model_does_not_know_is_an_error_that_names_it(engine, params, unknown):
    wanted = dataclasses.replace(params, stop_tokens=(0, unknown), min_new_tokens=2)
    with pytest.raises(RequestError, match=f"prompt 7: the stop token {unknown} is none of the model, .* 0 to 19"):
        engine.submit(Request(tokens=(3, 4), params=wanted, prompt_index=7))
    assert not engine.has_work


def test_a_response_ends_where_the_models_positions_end(engine):
    params = SamplingParams(max_new_tokens=50)
    outputs = list(stream(engine, Request(tokens=(3,) * 1020, params=params)))
    assert sum(len(output.tokens) for output in outputs) == 4
    assert outputs[-1].finish_reason == "length"


def test_weights_are_loaded_all_or_nothing_and_stamp_what_is_sampled(make_engine, make_policy, make_prompts, params):
    model, other = copy.deepcopy(make_policy()), make_policy(initializer_range=0.2)
    engine, prompts = make_engine(model), make_prompts(LENGTHS)
    before = generate(engine, prompts, params, version=4, group_size=2)
    weights = named_weights(other)
    lacking = {name: weight for name, weight in weights.items() if "q_proj" not in name}
    bent = {name: weight.flatten() for name, weight in weights.items()}
    for wrong in (lacking, bent):
        with pytest.raises(WeightsMismatchError, match="version 5 is of another model"):
            engine.load(5, wrong)
    assert generate(engine, prompts, params, version=4, group_size=2).tokens.tolist() == before.tokens.tolist()
    with pytest.raises(WeightsMismatchError, match="expected to sample from version 5, but version 4 is loaded"):
        generate(engine, prompts, params, version=5, group_size=2)
    engine.load(5, weights)
    batch = generate(engine, prompts, params, version=5, group_size=2)
    assert batch.versions.tolist() == [5] * len(batch)
    assert (
        batch.tokens.tolist()
        == generate(HFEngine(other, version=4), prompts, params, version=4, group_size=2).tokens.tolist()
    )
