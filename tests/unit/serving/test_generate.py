"""Token ids in and out, as the training clients of others ask for them (vLLM's `/inference/v1/generate`)."""

import json
import math

import pytest


def generate(client, body, **headers):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.call("POST", "/inference/v1/generate", raw, **{"Content-Type": "application/json", **headers})


PROMPT = [40, 41]
ASKED = {
    "model": "m",
    "token_ids": PROMPT,
    "sampling_params": {"stop_token_ids": [256], "logprobs": 1, "skip_special_tokens": False, "temperature": 0.7},
    "cache_salt": "step-3",
    "routed_experts_prompt_start": 1,
    "priority": 2,
}


def test_token_ids_are_answered_with_token_ids_and_a_finite_logprob_of_each(serve, tokenizer):
    served = serve("hello")
    answer = generate(served.client, ASKED)
    assert answer.status == 200, answer.body
    body = answer.json
    (choice,) = body["choices"]
    ids = [*tokenizer.encode("hello"), 256]
    assert body["request_id"]
    assert (body["prompt_token_ids"], body["model"], body["system_fingerprint"]) == (PROMPT, "m", "version-7")
    assert (choice["index"], choice["token_ids"], choice["finish_reason"]) == (0, ids, "stop")
    assert choice["versions"] == [7] * len(ids)
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ids]
    assert [entry["logprob"] for entry in content] == [-0.5 - token for token in ids]
    assert all(math.isfinite(entry["logprob"]) for entry in content)
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    (request,) = served.engine.seen
    assert request.tokens == tuple(PROMPT)
    assert (request.params.temperature, request.params.stop_tokens) == (0.7, (256,))
    assert request.params.max_new_tokens == 400 - 2


def test_a_stream_has_the_ids_of_the_whole_answer(serve):
    client = serve("hello").client
    whole = generate(client, ASKED).json
    *events, usage = generate(client, ASKED | {"stream": True, "stream_options": {"include_usage": True}}).events
    choices = [event["choices"][0] for event in events]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    said = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert said == whole["choices"][0]["logprobs"]["content"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert {event["request_id"] for event in events} == {usage["request_id"]}
    assert usage["usage"] == whole["usage"]


def test_further_stop_tokens_end_an_answer_and_the_models_own_can_be_ignored(serve, tokenizer):
    served = serve("hello")
    last = tokenizer.encode("e")
    body = {"token_ids": PROMPT, "sampling_params": {"stop_token_ids": last, "ignore_eos": True, "logprobs": None}}
    (choice,) = generate(served.client, body).json["choices"]
    assert choice["token_ids"] == tokenizer.encode("he")
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert served.engine.seen[0].params.stop_tokens == tuple(last)
    answer = served.client.chat(stop_token_ids=last)
    assert answer.json["choices"][0]["message"]["content"] == "h"
    assert served.engine.seen[1].params.stop_tokens == (256, *last)


REFUSED = {
    "no ids": ({"sampling_params": {}}, "token_ids", "the prompt as a list of token ids"),
    "empty": ({"token_ids": []}, "token_ids", "the prompt as a list of token ids"),
    "text": ({"token_ids": "hello"}, "token_ids", "the prompt as a list of token ids"),
    "below 0": ({"token_ids": [-1]}, "token_ids", "the prompt as a list of token ids"),
    "unknown id": ({"token_ids": [300]}, None, "cannot be continued"),
    "not params": ({"token_ids": [1], "sampling_params": [1]}, "sampling_params", "expected an object, found list"),
    "twice": ({"token_ids": [1], "n": 2, "sampling_params": {"n": 3}}, "n", "in the body or in sampling_params"),
    "alternatives": ({"token_ids": [1], "sampling_params": {"logprobs": 5}}, "logprobs", "less than or equal to 1"),
    "unknown": ({"token_ids": [1], "sampling_params": {"temprature": 1}}, "temprature", "no field"),
    "too long": ({"token_ids": [1] * 500}, "token_ids", "500 tokens"),
    "pictures": ({"token_ids": [1], "features": {"mm_hashes": {}}}, "features", "no field"),
}


@pytest.mark.parametrize(("body", "param", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_answered_is_refused_by_name(serve, body, param, message):
    served = serve()
    answer = generate(served.client, body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert message in answer.error["message"]


def test_another_model_and_a_missing_key_are_refused_here_too(serve):
    client = serve(keys=("secret",)).client
    assert generate(client, ASKED).status == 401
    answer = generate(client, ASKED | {"model": "gpt"}, Authorization="Bearer secret")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


def test_the_card_of_the_model_says_how_long_a_row_may_be(serve):
    client = serve().client
    assert client.get("/v1/models").json["data"][0]["max_model_len"] == 400
    assert client.get("/v1/models/m").json["max_model_len"] == 400
