"""What becomes of requests when the server behaves, dies, hangs, or answers nonsense."""

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sampling_cases import outputs_of
from tiny_families import make_family_model

from rallypoint.config.shape import read_shape
from rallypoint.errors import GenerationError, NotFiniteError, PublishError, RequestError, WeightsMismatchError
from rallypoint.generation import EngineThread, Request, SamplingParams, generate, stream
from rallypoint.generation.vllm import Outline
from rallypoint.model_files.load import outline_policy
from rallypoint.types import Prompts

from .conftest import NUM_IDS, load, token_at

PARAMS = SamplingParams(max_new_tokens=12, stop_tokens=(0, 5))


def request_of(*tokens, **options):
    return Request(tokens=tokens, params=options.pop("params", PARAMS), **options)


def expected_of(request):
    """The response that the fake model gives."""
    tokens = []
    while len(tokens) < request.params.max_new_tokens:
        tokens.append(token_at(request.tokens, len(tokens)))
        if tokens[-1] in request.params.stop_tokens:
            break
    return tokens


def all_outputs(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def tokens_of(outputs, request_id):
    return [token for output in outputs if output.request_id == request_id for token in output.tokens]


def die(server, answer):
    server.die()


def hang(server, answer):
    return None


def test_every_request_gets_its_own_answer_and_no_more_are_sent_than_may_run_together(engine, world):
    requests = [request_of(1, number) for number in range(20)]
    ids = [engine.submit(request) for request in requests]
    outputs = all_outputs(engine)
    for request, request_id in zip(requests, ids, strict=True):
        assert tokens_of(outputs, request_id) == expected_of(request)
    assert {output.version for output in outputs} == {4}
    assert all(output.logprobs == (-0.5,) * len(output.tokens) for output in outputs)
    assert len(world.servers) == 1
    assert len(world.servers[0].asked) == 20


def test_a_stream_comes_token_by_token(engine):
    request = request_of(2, 3, streamed=True)
    outputs = list(stream(engine, request))
    assert [output.tokens for output in outputs] == [(token,) for token in expected_of(request)]
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason in ("stop", "length")


def test_a_stop_text_ends_a_response_here_and_the_server_is_told(make_engine):
    engine = make_engine(decode=lambda tokens: "".join(chr(65 + token) for token in tokens))
    whole = expected_of(request_of(9, params=SamplingParams(max_new_tokens=12)))
    text = chr(65 + whole[3]) + chr(65 + whole[4])
    (output,) = list(stream(engine, request_of(9, params=SamplingParams(max_new_tokens=12, stop_strings=(text,)))))
    assert list(output.tokens) == whole[:5]
    assert output.finish_reason == "stop"


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ((), "no tokens"),
        ((1,) * 100, "may have 100"),
        ((NUM_IDS,), "the model knows 0 to 49"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_never_sent(engine, tokens, problem):
    with pytest.raises(RequestError, match=problem):
        engine.submit(request_of(*tokens))
    assert not engine.has_work


def changed(**changes):
    def change(server, answer):
        answer["choices"][0] |= changes
        return answer

    return change


def with_logprob(value):
    def change(server, answer):
        answer["choices"][0]["logprobs"]["content"][1]["logprob"] = value
        return answer

    return change


NONSENSE = {
    "no JSON": (lambda server, answer: b"<html>", "Expecting value.*its answer: <html>"),
    "another JSON": (lambda server, answer: b'{"choices": []}', "IndexError"),
    "no list": (lambda server, answer: b"[1, 2]", "TypeError"),
    "a token short": (
        lambda server, answer: changed(token_ids=answer["choices"][0]["token_ids"][:-1])(server, answer),
        "11 tokens with 12 logprobs",
    ),
    "nothing": (changed(token_ids=[], logprobs={"content": []}), "0 tokens, expected 1 to 12"),
    "an unknown token": (
        lambda server, answer: changed(token_ids=[NUM_IDS, *answer["choices"][0]["token_ids"][1:]])(server, answer),
        "token 50, but the model knows 0 to 49",
    ),
    "words": (changed(token_ids=["a"] * 12), "token 'a'"),
    "another token's logprob": (
        lambda server, answer: changed(token_ids=[7] * 12)(server, answer),
        "expected token 7",
    ),
    "NaN": (with_logprob(float("nan")), "a logprob of nan"),
    "a probability over 1": (with_logprob(-2.0), "a logprob of 2.0"),
    "no end": (changed(finish_reason=None), "finish_reason None"),
    "given up": (changed(finish_reason="abort"), "finish_reason 'abort'"),
    "a stop without a stop token": (changed(finish_reason="stop"), "without one of the stop tokens"),
    "no version": (changed(weight_versions=None), "weight_versions of 0 tokens"),
    "another version": (
        changed(weight_versions=[{"version": "9", "start": 0, "end": 12}]),
        "weights of version 9, expected 4",
    ),
    "no number": (changed(weight_versions=[{"version": "default", "start": 0, "end": 12}]), "invalid literal"),
    "refused": (lambda server, answer: (400, b"too hot"), "refused prompt 0 sample 0 with status 400: too hot"),
}


@pytest.mark.parametrize(("nonsense", "problem"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_fails_its_request_with_what_came_and_no_other(engine, world, nonsense, problem):
    world.misbehave.append(nonsense)
    bad, good = request_of(1), request_of(2, prompt_index=1)
    assert len(expected_of(bad)) == 12
    engine.submit(bad)
    outputs = all_outputs(engine)
    (failed,) = [output for output in outputs if output.error is not None]
    assert failed.finish_reason == "failed"
    with pytest.raises(GenerationError, match=problem):
        raise failed.error
    request_id = engine.submit(good)
    assert tokens_of(all_outputs(engine), request_id) == expected_of(good)
    assert len(world.servers) == 1


def test_logits_that_are_not_finite_are_told_from_nonsense(engine, world):
    world.misbehave.append(with_logprob(1e30))
    engine.submit(request_of(1, prompt_index=8, sample_index=3))
    (output,) = all_outputs(engine)
    with pytest.raises(NotFiniteError, match="token 1 of the response of prompt 8 sample 3"):
        raise output.error
    request_id = engine.submit(request_of(2))
    assert tokens_of(all_outputs(engine), request_id) == expected_of(request_of(2))
    assert len(world.servers) == 2, "the cache of the first one has numbers that are not finite"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_server_that_dies_is_started_again_with_the_weights_and_its_requests_are_sent_again(
    make_engine, world, streamed
):
    said = []
    engine = make_engine(say=said.append)
    load(engine, 5)
    world.misbehave.extend([None, None, die])
    requests = [request_of(3, number, streamed=streamed) for number in range(6)]
    ids = [engine.submit(request) for request in requests]
    outputs = all_outputs(engine)
    for request, request_id in zip(requests, ids, strict=True):
        assert tokens_of(outputs, request_id) == expected_of(request)
    assert {output.version for output in outputs} == {5}
    assert len(world.servers) == 2
    assert world.loads == [5, 5]
    assert "vllm is started again: it died" in said
    assert (engine.take_restarts(), engine.take_restarts()) == (1, 0)
    assert engine.memory_bytes() == 2**30


def test_a_server_that_takes_long_to_start_is_waited_for_with_a_voice(make_engine, world):
    world.late_s, said = 0.5, []
    engine = make_engine(say=said.append, voice_every_s=0.05)
    request_id = engine.submit(request_of(2))
    assert tokens_of(all_outputs(engine), request_id) == expected_of(request_of(2))
    assert said[0].startswith("waiting for vllm to load the model for 0 s of 20; it said last: Loading safetensors")
    assert said[-1].startswith("vllm is ready after ")


def test_a_request_that_loses_two_servers_fails_alone(engine, world):
    world.misbehave.extend([die, die])
    engine.submit(request_of(2, 3, prompt_index=7))
    (failed,) = all_outputs(engine)
    assert failed.finish_reason == "failed"
    assert "prompt 7 sample 0 was sent 2 times, and each time the vllm server was lost" in str(failed.error)
    request_id = engine.submit(request_of(2, 3))
    assert tokens_of(all_outputs(engine), request_id) == expected_of(request_of(2, 3))
    assert len(world.servers) == 3


def test_what_a_failed_rollout_leaves_are_the_others(engine, world):
    world.misbehave.extend([None, lambda server, answer: b"?", None, None])
    ids = [engine.submit(request_of(1 + number // 2, sample_index=number % 2)) for number in range(4)]
    outputs = all_outputs(engine)
    assert [output.request_id for output in outputs if output.error is not None] == ids[1:2]
    assert all(tokens_of(outputs, ids[number]) == expected_of(request_of(1 + number // 2)) for number in (0, 2, 3))
    world.misbehave.append(lambda server, answer: b"?")
    prompts = Prompts(offsets=torch.tensor([0, 2]), tokens=torch.tensor([2, 3]), prompt_index=torch.tensor([7]))
    with pytest.raises(GenerationError, match="nonsense"):
        generate(engine, prompts, PARAMS, version=4, group_size=2)


def test_a_server_that_has_work_and_does_none_is_given_up(make_engine, world):
    engine = make_engine(silence_s=2.0)
    world.misbehave.append(hang)
    request = request_of(4)
    request_id = engine.submit(request)
    assert tokens_of(all_outputs(engine), request_id) == expected_of(request)
    assert len(world.servers) == 2
    assert world.servers[0].why == "it was told to"


def test_a_server_error_has_its_request_sent_again_to_the_same_server_if_it_is_well(engine, world):
    world.misbehave.append(lambda server, answer: (500, b"oops"))
    request = request_of(4)
    request_id = engine.submit(request)
    assert tokens_of(all_outputs(engine), request_id) == expected_of(request)
    assert len(world.servers) == 1


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(make_engine, world):
    world.starts.append("it has no such model")
    engine = make_engine()
    engine.submit(request_of(4))
    (output,) = all_outputs(engine)
    with pytest.raises(GenerationError, match="vllm did not start: it has no such model"):
        raise output.error


def test_a_server_takes_no_tensors(engine, world):
    with pytest.raises(WeightsMismatchError, match="without weights"):
        engine.load(5, None)
    assert world.loads == []
    assert engine.version == 4


def test_loaded_weights_stamp_what_is_sampled(engine):
    load(engine, 5)
    load(engine, 6)
    assert engine.version == 6
    engine.submit(request_of(1))
    (output,) = all_outputs(engine)
    assert output.version == 6


@pytest.mark.parametrize("forgets", [False, True])
def test_a_server_that_refuses_weights_serves_those_of_before(engine, world, forgets):
    load(engine, 4)
    world.refuse, world.forgets = "a checksum differs", forgets
    with pytest.raises(WeightsMismatchError, match="version 5 was not loaded by vllm: a checksum differs"):
        load(engine, 5)
    assert engine.version == 4
    engine.submit(request_of(1))
    (output,) = all_outputs(engine)
    assert output.version == 4
    assert world.loads == [4, 5, 4]


def test_weights_for_a_server_that_died_in_between_are_given_to_the_next_one_at_once(engine, world):
    load(engine, 5)
    world.servers[0].die()
    load(engine, 6)
    assert world.loads == [5, 6]
    engine.submit(request_of(1))
    (output,) = all_outputs(engine)
    assert output.version == 6
    assert len(world.servers) == 2


def test_what_streams_while_weights_are_loaded_goes_on_with_the_new_ones(engine, world):
    request = request_of(2, 3, streamed=True)
    engine.submit(request)
    outputs = []
    while not outputs:
        outputs += engine.step()
    load(engine, 5)
    outputs += all_outputs(engine)
    assert [token for output in outputs for token in output.tokens] == expected_of(request)
    assert outputs[0].version == 4
    assert outputs[-1].version in (4, 5)
    assert [output.version for output in outputs] == sorted(output.version for output in outputs)


def test_a_response_that_is_whole_only_after_a_load_says_which_weights_sampled_each_span(engine, world):
    async def after_load(server, answer):
        while server.version != "5":
            await asyncio.sleep(0.005)
        spans = [{"version": "4", "start": 0, "end": 7}, {"version": "5", "start": 7, "end": 12}]
        return changed(weight_versions=spans)(server, answer)

    world.misbehave.append(after_load)
    request = request_of(1)
    engine.submit(request)
    while not world.servers or not world.servers[0].asked:
        assert engine.step() == []
    load(engine, 5)
    outputs = all_outputs(engine)
    assert [(output.version, len(output.tokens), output.finish_reason) for output in outputs] == [
        (4, 7, None),
        (5, 5, "length"),
    ]
    assert [token for output in outputs for token in output.tokens] == expected_of(request)


def test_a_cancelled_request_ends_and_the_others_do_not_notice(engine, world):
    world.misbehave.extend([hang, None])
    first, second = (engine.submit(request_of(number)) for number in (1, 2))
    outputs = engine.step()
    engine.cancel(first)
    outputs += all_outputs(engine)
    assert [output.finish_reason for output in outputs if output.request_id == first] == ["cancelled"]
    assert tokens_of(outputs, second) == expected_of(request_of(2))
    engine.cancel(10**6)


def test_an_engine_that_sleeps_says_nothing_and_goes_on_after_wake(engine, world):
    world.misbehave.append(hang)
    request = request_of(6)
    request_id = engine.submit(request)
    engine.step()
    engine.sleep()
    assert engine.step() == []
    assert engine.has_work
    engine.wake()
    assert tokens_of(all_outputs(engine), request_id) == expected_of(request)


def memory_calls(world):
    """Take the calls to servers about memory and weights, as short words."""
    words = {"/collective_rpc": "load", "/sleep?level=1": "sleep 1", "/sleep?level=2": "sleep 2", "/wake_up": "wake"}
    words |= {"/wake_up?tags=weights": "wake weights", "/pause?mode=keep": "pause", "/resume": "resume"}
    found = [words[path] for path in world.calls if path in words]
    world.calls.clear()
    return found


def a_turn(engine, version):
    """Sample, and get other weights while other roles have the memory."""
    list(stream(engine, request_of(version)))
    engine.sleep()
    load(engine, version)
    engine.wake()


def test_a_server_that_gets_weights_in_its_sleep_wakes_for_them_alone_and_keeps_no_copy_from_then_on(
    make_engine, world
):
    engine = make_engine(gives_memory=True)
    a_turn(engine, 5)
    assert memory_calls(world) == ["sleep 1", "wake weights", "load", "wake"]
    a_turn(engine, 6)
    assert memory_calls(world) == ["sleep 2", "wake weights", "load", "wake"]
    engine.sleep()
    load(engine, 7)
    load(engine, 8)
    engine.wake()
    assert memory_calls(world) == ["sleep 2", "wake weights", "load", "load", "wake"]
    assert world.servers[0].version == "8"


def test_a_server_that_lost_its_weights_and_got_none_takes_the_last_ones_again_and_is_wary_for_a_while(
    make_engine, world
):
    engine = make_engine(gives_memory=True)
    a_turn(engine, 5)
    memory_calls(world)
    engine.sleep()
    engine.wake()
    assert memory_calls(world) == ["sleep 2", "wake", "load"]
    assert world.loads == [5, 5]
    for version in range(6, 14):
        a_turn(engine, version)
        assert memory_calls(world) == ["sleep 1", "wake weights", "load", "wake"]
    a_turn(engine, 14)
    assert memory_calls(world) == ["sleep 2", "wake weights", "load", "wake"]


def test_the_model_of_an_adapter_is_kept(make_engine, world, tmp_path):
    engine = make_engine(takes_adapters=True, gives_memory=True)
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 5}))
    for _ in range(2):
        engine.sleep()
        engine.load_folder(5, tmp_path)
        engine.wake()
        assert memory_calls(world) == ["sleep 1", "wake weights", "load", "wake"]


def test_a_server_takes_weights_from_memory_once_its_workers_have_joined(make_engine, world):
    engine = make_engine(gives_memory=True)
    with pytest.raises(PublishError, match="started again since it connected"):
        engine.receive(5)
    engine.join(lambda: "an invitation")
    world.calls.clear()
    list(stream(engine, request_of(5)))
    assert engine.receive(5) == "digest 5"
    assert memory_calls(world) == ["pause", "load", "resume"]
    for version in (6, 7):
        engine.sleep()
        assert engine.receive(version) == f"digest {version}"
        engine.wake()
    assert memory_calls(world) == ["sleep 1", "wake weights", "load", "wake", "sleep 2", "wake weights", "load", "wake"]
    assert world.servers[0].version == "7"
    assert engine.version == 7
    outputs = list(stream(engine, request_of(2)))
    assert {output.version for output in outputs} == {7}


def test_workers_that_cannot_join_say_why_and_the_server_keeps_its_weights(engine, world):
    world.refuse = "RuntimeError: CUDA error: peer access is not supported"
    with pytest.raises(PublishError, match=r"vllm cannot take weights from memory: .*peer access is not supported"):
        engine.join(lambda: "an invitation")
    assert tokens_of(list(stream(engine, request_of(2))), 1) == expected_of(request_of(2))
    assert len(world.servers) == 1


@pytest.mark.parametrize("sleeps", [False, True], ids=["killed", "gave them up while it slept"])
def test_a_server_that_lost_weights_from_memory_is_not_asked_until_it_gets_some_from_a_folder(
    make_engine, world, tmp_path, sleeps
):
    engine = make_engine(gives_memory=sleeps)
    engine.join(lambda: "an invitation")
    if sleeps:
        engine.sleep()
    engine.receive(5)
    if sleeps:  # it expects some again
        engine.wake()
        engine.sleep()
        engine.wake()
    else:
        world.servers[0].die()
    request = request_of(2)
    number = engine.submit(request)
    while not engine.lacks_weights:
        engine.step()
    assert engine.step() == []
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 5}))
    engine.load_folder(5, tmp_path)
    assert not engine.lacks_weights
    outputs = all_outputs(engine)
    assert tokens_of(outputs, number) == expected_of(request)
    assert {output.version for output in outputs} == {5}
    assert len(world.servers) == (1 if sleeps else 2)


def test_weights_from_memory_that_did_not_arrive_whole_end_the_server(engine, world, tmp_path):
    engine.join(lambda: "an invitation")
    world.refuse = "WeightsMismatchError: version 5 was not loaded: a.weight was damaged on its way"
    with pytest.raises(WeightsMismatchError, match=r"version 5 was not loaded by vllm: .*was damaged"):
        engine.receive(5)
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 5}))
    engine.load_folder(5, tmp_path)
    assert tokens_of(list(stream(engine, request_of(2))), 1) == expected_of(request_of(2))
    assert (len(world.servers), world.servers[1].version) == (2, "5")


def test_a_publish_that_is_given_up_ends_the_server_that_it_waits_for(engine, world, tmp_path):
    engine.join(lambda: "an invitation")
    world.stalled, given_up = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(engine.receive, 5, given_up)
        assert world.stalled.wait(120)
        given_up.set()
        with pytest.raises(PublishError, match="publishing weights to vllm was given up"):
            receiving.result()
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 5}))
    engine.load_folder(5, tmp_path)
    assert tokens_of(list(stream(engine, request_of(2))), 1) == expected_of(request_of(2))
    assert (len(world.servers), world.servers[1].version) == (2, "5")


def test_a_server_that_is_started_again_while_the_engine_sleeps_is_put_to_sleep(make_engine, world):
    engine = make_engine(gives_memory=True)
    a_turn(engine, 5)
    engine.sleep()
    memory_calls(world)
    world.servers[0].die()
    load(engine, 6)
    assert memory_calls(world)[-2:] == ["load", "sleep 1"]
    engine.wake()
    assert memory_calls(world) == ["wake"]
    assert tokens_of(list(stream(engine, request_of(2))), 2) == expected_of(request_of(2))
    assert (len(world.servers), world.servers[1].version) == (2, "6")


def test_what_is_cancelled_while_the_engine_sleeps_ends_there(engine):
    request_id = engine.submit(request_of(1))
    engine.sleep()
    engine.cancel(request_id)
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [(request_id, "cancelled")]
    assert not engine.has_work


def test_requests_of_many_threads_get_their_own_outputs(engine):
    thread = EngineThread(engine)
    request = request_of(3, streamed=True)
    assert [token for output in outputs_of(thread, request) for token in output.tokens] == expected_of(request)
    thread.close()


def test_an_adapter_is_named_once_to_every_server_and_asked_for_from_then_on(make_engine, world, tmp_path):
    engine = make_engine(takes_adapters=True)
    list(stream(engine, request_of(1)))
    for version in (5, 6):
        (tmp_path / str(version)).mkdir()
        (tmp_path / str(version) / "manifest.json").write_text(json.dumps({"version": version}))
        engine.load_folder(version, tmp_path / str(version))
        list(stream(engine, request_of(2)))
    world.servers[0].die()
    assert tokens_of(list(stream(engine, request_of(3))), 4) == expected_of(request_of(3))
    names = [[body.get("model") for body in server.asked] for server in world.servers]
    assert names == [[None, "rallypoint", "rallypoint"], ["rallypoint"]]
    assert [server.adapters for server in world.servers] == [["rallypoint"], ["rallypoint"]]
    assert world.loads == [5, 6, 6]


def test_a_server_that_nobody_asked_for_long_is_not_taken_for_silent(make_engine, world):
    engine = make_engine(silence_s=2.0)
    list(stream(engine, request_of(1)))
    time.sleep(2.1)

    def slowly(server, answer):
        time.sleep(0.15)
        return answer

    world.misbehave.append(slowly)
    assert tokens_of(list(stream(engine, request_of(2))), 2) == expected_of(request_of(2))
    assert len(world.servers) == 1


def test_two_engines_take_turns_over_one_server_and_keep_their_requests_apart(make_engine, world):
    training = make_engine()
    guests = training.beside(max_rows=2, decode=lambda tokens: "")
    guests.sleep()
    asked = [request_of(1, number, streamed=True) for number in range(5)]
    ids = [guests.submit(request) for request in asked]
    outputs, num_turns = [], 0
    while guests.has_work:
        own = request_of(9, num_turns)
        assert tokens_of(list(stream(training, own)), num_turns + 1) == expected_of(own)
        training.sleep()
        guests.wake()
        outputs += guests.step()
        guests.sleep()
        training.wake()
        num_turns += 1
    assert [tokens_of(outputs, request_id) for request_id in ids] == [expected_of(request) for request in asked]
    assert num_turns > 1
    assert len(world.servers) == 1
    load(training, 5)
    assert guests.version == 5


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_server_is_given_as_much_cache_for_a_token_as_plans_say(tmp_path, family):
    outline = Outline.of(outline_policy(make_family_model(tmp_path / family, family), dtype="bfloat16"))
    shape = read_shape(tmp_path / family)
    assert shape is not None
    assert outline.cache_bytes_per_token == shape.cached_bytes(2, by_server=True)
