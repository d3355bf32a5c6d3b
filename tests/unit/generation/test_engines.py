"""What holds for every engine, asked of each through the doors that all of them share."""

import copy
import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rallypoint.engine import policy_outputs
from rallypoint.engine.forward import trained_positions
from rallypoint.errors import GenerationError, NotFiniteError, RequestError, WeightsMismatchError
from rallypoint.generation import EngineThread, HFEngine, NativeEngine, Request, SamplingParams, generate, stream
from rallypoint.models import ModelShard, load_policy, named_weights

LENGTHS = [3, 9, 1, 17]
TEXT = "0123456789abcdefghij"


def decode(tokens):
    return "".join(TEXT[token] for token in tokens)


ENGINES = {
    "hf": lambda model, decode=decode: HFEngine(model, decode=decode, version=4),
    "native": lambda model, decode=decode: NativeEngine(model, decode=decode, version=4),
    "native, exact": lambda model, decode=decode: NativeEngine(model, decode=decode, version=4, mode="exact"),
    "native, little memory": lambda model, decode=decode: NativeEngine(model, decode=decode, version=4, max_rows=3),
}

PARAMS = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.7, "temperature": 1.5},
    "min-p": {"min_p": 0.3},
    "penalty": {"repetition_penalty": 1.7},
    "at least": {"min_new_tokens": 6},
    "stop strings": {"stop_strings": ("12", "j"), "stop_tokens": ()},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8, "min_new_tokens": 3},
}


@pytest.fixture(params=ENGINES)
def make_engine(request):
    return ENGINES[request.param]


@pytest.fixture
def engine(make_engine, make_policy):
    return make_engine(make_policy())


@pytest.fixture
def params(params):
    return dataclasses.replace(params, group_size=2)


@pytest.mark.parametrize("changes", PARAMS.values(), ids=PARAMS)
def test_every_engine_draws_the_same_tokens(engine, make_policy, make_prompts, params, changes):
    wanted = dataclasses.replace(params, **changes)
    expected = generate(ENGINES["hf"](make_policy()), make_prompts(LENGTHS), wanted, version=4)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4)
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
    expected = generate(make_engine(make_policy()), make_prompts(LENGTHS), params, version=4)
    batch = generate(make_engine(model), make_prompts(LENGTHS), params, version=4)
    assert torch.equal(batch.tokens, expected.tokens)
    assert torch.equal(batch.rollout_logprobs, expected.rollout_logprobs)
    assert model.generation_config is said
    assert said.num_beams == 2


@pytest.mark.parametrize("changes", PARAMS.values(), ids=PARAMS)
def test_logprobs_are_those_that_training_recomputes_whatever_narrows_the_distribution(
    engine, make_policy, make_prompts, params, changes
):
    wanted = dataclasses.replace(params, **changes)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4)
    with torch.no_grad():
        at = trained_positions(batch)
        expected = policy_outputs(ModelShard.whole(make_policy()), batch, at, wanted.temperature or 1.0).logprobs
    assert (batch.rollout_logprobs[at] - expected).abs().max() < 1e-4
    assert (batch.rollout_logprobs[~batch.loss_mask] == 0).all()
    if batch.sampled_logprobs is not None and wanted.temperature == 0:
        assert (batch.sampled_logprobs == 0).all()
    if batch.sampled_logprobs is not None and wanted.repetition_penalty == 1 and not wanted.min_new_tokens:
        assert (batch.sampled_logprobs >= batch.rollout_logprobs - 1e-6).all(), "what is left is likelier"


def test_a_stop_string_ends_a_rollout_with_the_token_that_completes_it(engine, make_prompts, params):
    wanted = dataclasses.replace(params, stop_strings=("12", "j"), stop_tokens=(), max_new_tokens=40)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4)
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
        tokens = [token for piece in stream(engine, request) for token in piece.tokens]
        end = next((n for n in range(1, 101) if "ab" in shown(tokens[:n])), 100)
        stopped = dataclasses.replace(request, params=dataclasses.replace(endless, stop_strings=("ab",)))
        assert [token for piece in stream(engine, stopped) for token in piece.tokens] == tokens[:end]
        if "ab" in shown(tokens):
            distances.append(end - 1 - max(n for n in range(end) if tokens[n] == 3))
    assert max(distances) > 15


def test_a_stop_string_counts_only_if_its_last_token_comes_after_the_minimum_length(engine, make_prompts, params):
    endless = dataclasses.replace(params, stop_tokens=(), max_new_tokens=40)
    wanted = dataclasses.replace(endless, stop_strings=("1", "j"), min_new_tokens=9)
    tokens = generate(engine, make_prompts(LENGTHS), endless, version=4)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4)
    came_early = 0
    for row in range(len(batch)):
        text = decode(tokens.response(row).tolist())
        end = next((n for n in range(9, 40) if text[:n].endswith(("1", "j"))), 40)
        assert decode(batch.response(row).tolist()) == text[:end]
        came_early += end > 9 and not {"1", "j"}.isdisjoint(text[:8])
    assert came_early


def test_a_minimum_length_is_kept(engine, make_prompts, params):
    wanted = dataclasses.replace(params, min_new_tokens=6, max_new_tokens=10)
    batch = generate(engine, make_prompts(LENGTHS), wanted, version=4)
    for row in range(len(batch)):
        assert not set(batch.response(row)[:6].tolist()) & set(params.stop_tokens)


def test_stop_strings_without_a_decoder_are_refused(make_policy, make_prompts, params):
    wanted = dataclasses.replace(params, stop_strings=("12",))
    with pytest.raises(RequestError, match="decode"):
        generate(HFEngine(make_policy(), version=4), make_prompts(LENGTHS), wanted, version=4)


def test_the_pieces_of_a_stream_are_the_rollout(engine, make_prompts, params):
    prompts = make_prompts([5])
    batch = generate(engine, prompts, params, version=4)
    request = Request(tokens=tuple(prompts.tokens.tolist()), params=params, prompt_index=7, streamed=True)
    pieces = list(stream(engine, request))
    assert [token for piece in pieces for token in piece.tokens] == batch.response(0).tolist()
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == ("length" if batch.truncated[0] else "stop")
    assert {piece.version for piece in pieces} == {4}
    assert not engine.has_work


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ((), "prompt 7 has no tokens"),
        ((1,) * 1024, "prompt 7 has 1024 tokens, but prompt and response together may have 1024"),
        ((1, 2, 20), "prompt 7: token 2 has the id 20, but the model knows 0 to 19"),
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


def test_a_bad_prompt_of_a_batch_leaves_nothing_behind(engine, make_prompts, params):
    with pytest.raises(RequestError, match="prompt 9 has no tokens"):
        generate(engine, make_prompts([3, 4, 0]), params, version=4)
    for _ in range(20):
        engine.step()
    assert not engine.has_work
    assert len(generate(engine, make_prompts([3]), params, version=4)) == params.group_size


def test_a_response_ends_where_the_models_positions_end(engine):
    params = SamplingParams(max_new_tokens=50)
    pieces = list(stream(engine, Request(tokens=(3,) * 1020, params=params)))
    assert sum(len(piece.tokens) for piece in pieces) == 4
    assert pieces[-1].finish_reason == "length"


def test_weights_are_loaded_all_or_nothing_and_stamp_what_is_sampled(make_engine, make_policy, make_prompts, params):
    model, other = copy.deepcopy(make_policy()), make_policy(initializer_range=0.2)
    engine, prompts = make_engine(model), make_prompts(LENGTHS)
    before = generate(engine, prompts, params, version=4)
    weights = named_weights(other)
    lacking = {name: weight for name, weight in weights.items() if "q_proj" not in name}
    bent = {name: weight.flatten() for name, weight in weights.items()}
    for wrong in (lacking, bent):
        with pytest.raises(WeightsMismatchError, match="version 5 is of another model"):
            engine.load(5, wrong)
    assert generate(engine, prompts, params, version=4).tokens.tolist() == before.tokens.tolist()
    with pytest.raises(WeightsMismatchError, match="expected to sample from version 5, but version 4 is loaded"):
        generate(engine, prompts, params, version=5)
    engine.load(5, weights)
    batch = generate(engine, prompts, params, version=5)
    assert batch.versions.tolist() == [5] * len(batch)
    assert batch.tokens.tolist() == generate(ENGINES["hf"](other), prompts, params, version=4).tokens.tolist()


def test_a_cancelled_request_ends_and_the_others_do_not_notice(engine, make_prompts, params):
    requests = [Request(tokens=(3, 4), params=params, sample_index=sample) for sample in range(3)]
    alone = [tuple(t for piece in stream(engine, request) for t in piece.tokens) for request in requests]
    ids = [engine.submit(request) for request in requests]
    engine.cancel(ids[1])
    found = dict.fromkeys(ids, ())
    reasons = {}
    while engine.has_work:
        for piece in engine.step():
            found[piece.request_id] += piece.tokens
            if piece.finish_reason:
                reasons[piece.request_id] = piece.finish_reason
    assert [found[ids[0]], found[ids[2]]] == [alone[0], alone[2]]
    assert reasons[ids[1]] == "cancelled"
    engine.cancel(ids[1])
    engine.cancel(10**6)
    assert engine.step() == []


def test_an_engine_that_sleeps_waits_and_goes_on_after_wake(engine, params):
    request = Request(tokens=(3, 4), params=params)
    expected = [token for piece in stream(engine, request) for token in piece.tokens]
    engine.submit(request)
    engine.sleep()
    assert engine.step() == []
    assert engine.has_work
    engine.wake()
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    assert [token for piece in pieces for token in piece.tokens] == expected


def test_no_door_waits_for_an_engine_that_sleeps(engine, make_prompts, params):
    engine.sleep()
    with pytest.raises(GenerationError, match="asleep"):
        generate(engine, make_prompts(LENGTHS), params, version=4)
    with pytest.raises(GenerationError, match="asleep"):
        list(stream(engine, Request(tokens=(3, 4), params=params)))
    engine.wake()
    assert not engine.has_work
    assert len(generate(engine, make_prompts([3]), params, version=4)) == params.group_size


def test_what_is_cancelled_while_the_engine_sleeps_ends_there(engine, params):
    ids = [engine.submit(Request(tokens=(3, 4), params=params, sample_index=sample)) for sample in range(3)]
    engine.step()
    engine.sleep()
    engine.cancel(ids[2])
    assert [(piece.request_id, piece.finish_reason) for piece in engine.step()] == [(ids[2], "cancelled")]
    assert engine.has_work
    engine.cancel(ids[1])
    engine.cancel(ids[0])
    engine.step()
    assert not engine.has_work


def test_requests_come_and_go_while_a_step_is_taken(make_engine, make_policy, params):
    model = copy.deepcopy(make_policy())
    requests = [Request(tokens=(3, 4), params=params, sample_index=sample) for sample in range(4)]
    other = make_engine(make_policy())
    alone = [tuple(t for piece in stream(other, request) for t in piece.tokens) for request in requests]
    engine = make_engine(model)
    ids = [engine.submit(request) for request in requests[:3]]

    def come_and_go():
        engine.cancel(ids[2])
        ids.append(engine.submit(requests[3]))

    def during_the_first_pass(*_):
        hook.remove()
        with ThreadPoolExecutor(1) as executor:
            executor.submit(come_and_go).result()

    hook = model.base_model.register_forward_pre_hook(during_the_first_pass)
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    found = {request_id: tuple(t for p in pieces if p.request_id == request_id for t in p.tokens) for request_id in ids}
    assert [found[ids[place]] for place in (0, 1, 3)] == [alone[place] for place in (0, 1, 3)]
    assert [piece.request_id for piece in pieces if piece.finish_reason == "cancelled"] == [ids[2]]


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "asleep"])
def test_every_token_is_stamped_with_the_weights_that_it_was_sampled_from(make_engine, make_policy, params, sleeps):
    """What is handed out at the end has the stamps of what is handed out token by token."""
    other = named_weights(make_policy(initializer_range=0.2))
    endless = dataclasses.replace(params, stop_tokens=())

    def stamped(streamed):
        engine = make_engine(copy.deepcopy(make_policy()))
        for sample in range(4):
            engine.submit(Request(tokens=(3, 4), params=endless, sample_index=sample, streamed=streamed))
        pieces = [piece for _ in range(3) for piece in engine.step()]
        if sleeps:
            engine.sleep()
        engine.load(5, other)
        engine.wake()
        while engine.has_work:
            pieces += engine.step()
        pieces.sort(key=lambda piece: piece.request_id)
        return [(piece.request_id, token, piece.version) for piece in pieces for token in piece.tokens]

    expected = stamped(streamed=True)
    assert {version for _, _, version in expected} == {4, 5}
    assert stamped(streamed=False) == expected


def test_logits_that_are_not_finite_fail_their_request_and_no_other(make_engine, make_policy, params):
    model = copy.deepcopy(make_policy())
    with torch.no_grad():
        model.get_input_embeddings().weight[19] = float("nan")
    engine = make_engine(model)
    good, bad = (Request(tokens=tokens, params=params, prompt_index=8) for tokens in ((3, 4), (3, 19)))
    expected = [token for piece in stream(engine, good) for token in piece.tokens]
    ids = [engine.submit(request) for request in (bad, good)]
    pieces = []
    while engine.has_work:
        pieces += engine.step()
    assert [token for piece in pieces if piece.request_id == ids[1] for token in piece.tokens] == expected
    (failed,) = [piece for piece in pieces if piece.request_id == ids[0]]
    assert failed.finish_reason == "failed"
    with pytest.raises(NotFiniteError, match="token 0 of the response of prompt 8 sample 0"):
        list(stream(engine, bad))


def test_requests_of_many_threads_get_their_own_pieces(engine, params):
    requests = [
        Request(tokens=(3, 4 + place % 3), params=params, sample_index=place, streamed=True) for place in range(12)
    ]
    expected = [[token for piece in stream(engine, request) for token in piece.tokens] for request in requests]
    found = [[] for _ in requests]
    thread = EngineThread(engine)

    def ask(place):
        for piece in thread.stream(requests[place]):
            found[place].extend(piece.tokens)

    askers = [threading.Thread(target=ask, args=[place]) for place in range(len(requests))]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    thread.close()
    assert found == expected


def test_a_thread_makes_changes_between_steps_and_hands_their_errors_back(engine, params):
    thread = EngineThread(engine)
    request = Request(tokens=(3, 4), params=params)
    expected = [token for piece in thread.stream(request) for token in piece.tokens]
    thread.call(lambda engine: engine.sleep())
    pieces = []
    finished = threading.Event()

    def deliver(piece):
        pieces.append(piece)
        if piece.finish_reason:
            finished.set()

    thread.submit(request, deliver)
    with pytest.raises(WeightsMismatchError):
        thread.call(lambda engine: engine.load(5, {}))
    assert pieces == []
    thread.call(lambda engine: engine.wake())
    finished.wait()
    thread.close()
    assert [token for piece in pieces for token in piece.tokens] == expected
    with pytest.raises(GenerationError, match="closed"):
        thread.submit(request, pieces.append)


def test_requests_of_an_engine_that_breaks_fail_instead_of_waiting_for_ever(make_policy, params):
    class Broken(HFEngine):
        def step(self):
            raise OSError("out of order")

    thread = EngineThread(Broken(make_policy()))
    with pytest.raises(GenerationError, match="OSError: out of order"):
        list(thread.stream(Request(tokens=(3, 4), params=params)))
    with pytest.raises(GenerationError, match="out of order"):
        thread.submit(Request(tokens=(3, 4), params=params), print)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_new_tokens": 13}, "min_new_tokens=13: expected 0 to max_new_tokens=12"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0, "min_p": 1.5}, "top_p=0.0.*min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop_strings": ("a", "")}, "no empty string"),
        ({"group_size": 0}, "group_size=0"),
    ],
)
def test_params_that_mean_nothing_are_refused(params, changes, problem):
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(params, **changes)
