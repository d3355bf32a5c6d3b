"""What the endpoint passes on to an engine that computes: nothing that it could not survive."""

import pytest
from tiny_models import make_tiny_model

from rallypoint.data import make_digits_tokenizer
from rallypoint.generation import NativeEngine
from rallypoint.model_files import load_policy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, max_positions=128)
    return load_policy(str(folder), dtype="float32").model


@pytest.fixture
def client(serve, model):
    tokenizer = make_digits_tokenizer()
    engine = NativeEngine(
        model,
        max_rows=6,
        cache_tokens=1024,
        decode=lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
    )
    return serve(engine=engine, tokenizer=tokenizer).client


EXTREME = {
    "top_k": {"top_k": 99999999999999999999},
    "seed": {"seed": 2**63},
    "min_tokens": {"min_tokens": 2**70},
    "max_tokens": {"max_tokens": 2**70},
    "token": {"prompt": [10**30]},
}


@pytest.mark.parametrize("fields", EXTREME.values(), ids=EXTREME)
def test_after_a_number_that_no_tensor_holds_the_next_request_is_answered(client, fields):
    refused = client.complete(**{"prompt": "12", "max_tokens": 3, **fields})
    assert refused.status == 400, refused.body
    assert client.complete("12", max_tokens=3).status == 200
    assert client.get("/health").json["status"] == "ok"


def test_what_the_model_says_of_a_prompt_is_answered_as_vllm_does(client):
    prompt = [3, 9, 9, 4]
    (choice,) = client.complete(prompt, max_tokens=1, prompt_logprobs=2, add_special_tokens=False).json["choices"]
    first, *places = choice["prompt_logprobs"]
    assert first is None
    assert len(places) == 3
    for token, said in zip(prompt[1:], places, strict=True):
        assert 2 <= len(said) <= 3
        by_rank = {one["rank"]: one["logprob"] for one in said.values()}
        assert max(one["logprob"] for one in said.values()) == by_rank[1] > by_rank[2]
        assert said[str(token)]["logprob"] <= by_rank[1] <= 0
    (own,) = client.complete(prompt, max_tokens=1, prompt_logprobs=0).json["choices"]
    assert [list(one) for one in own["prompt_logprobs"][1:]] == [[str(token)] for token in prompt[1:]]
    assert [one["rank"] for place in own["prompt_logprobs"][1:] for one in place.values()] == [None] * 3
    assert "prompt_logprobs" not in client.complete(prompt, max_tokens=1).json["choices"][0]
    for fields, message in (
        ({"prompt_logprobs": 21}, "prompt_logprobs: expected at most 20 (--max-logprobs of `rally serve`), found 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: input should be greater than or equal to 0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs: not available with stream=true"),
    ):
        refused = client.complete(prompt, max_tokens=1, **fields)
        assert (refused.status, refused.error["message"], refused.error["param"]) == (400, message, "prompt_logprobs")


def test_the_largest_numbers_that_are_taken_are_answered(client):
    extreme = {"top_k": 2**31 - 1, "seed": 2**63 - 1, "temperature": 100, "min_p": 1, "repetition_penalty": 100}
    assert client.complete("12", max_tokens=5, n=3, **extreme).status == 200
    assert client.complete("12", max_tokens=5, seed=-(2**63), top_p=1e-300).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_is_shorter_than_its_minimum(client, stream):
    def lengths_and_texts(**fields):
        asked = {"max_tokens": 12, "n": 6, "seed": 4, "return_token_ids": True, "stop": ["1", "3"], **fields}
        if not stream:
            choices = client.complete("12", **asked).json["choices"]
            return [(len(choice["token_ids"]), choice["text"]) for choice in choices]
        answer = client.complete("12", **asked, stream=True)
        choices = [choice for event in answer.events for choice in event["choices"]]
        by_index = [[choice for choice in choices if choice["index"] == index] for index in range(6)]
        return [(sum(len(c["token_ids"]) for c in own), "".join(c["text"] for c in own)) for own in by_index]

    free, held = lengths_and_texts(), lengths_and_texts(min_tokens=8)
    assert min(length for length, _ in free) < 8
    assert not any(stop in text for _, text in free for stop in "13")
    assert all(8 <= length <= 12 for length, _ in held)
    # What came too early to end an answer is part of it.
    assert any(stop in text for _, text in held for stop in "13")
