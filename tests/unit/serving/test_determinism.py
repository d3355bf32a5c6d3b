"""The same seed and request give the same tokens, whatever runs beside them."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_models import make_tiny_model

from rallypoint.data import make_digits_tokenizer
from rallypoint.generation import HFEngine, NativeEngine
from rallypoint.model_files import load_policy

ENGINES = {"hf": HFEngine, "native": functools.partial(NativeEngine, mode="exact", max_rows=6, cache_tokens=1024)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, max_positions=128)
    return load_policy(str(folder), dtype="float32").model


@pytest.mark.parametrize("make_engine", ENGINES.values(), ids=ENGINES)
def test_twenty_requests_at_once_are_answered_as_each_is_alone(serve, model, make_engine):
    tokenizer = make_digits_tokenizer()

    def decode(tokens):
        return tokenizer.decode(tokens, skip_special_tokens=True)

    client = serve(engine=make_engine(model, decode=decode), tokenizer=tokenizer, max_concurrency=100).client

    def answer(number: int):
        fields = {"seed": number % 7, "n": 1 + number % 3, "max_tokens": 5 + number, "temperature": 0.5 + number / 20}
        prompt = "493105 27"[: 1 + number % 9]
        stops = {"stop": "3"} if number % 4 == 0 else {}
        body = client.complete(prompt, **fields, **stops, logprobs=0, return_token_ids=True).json
        return [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in body["choices"]]

    alone = [answer(number) for number in range(20)]
    with ThreadPoolExecutor(20) as clients:
        together = list(clients.map(answer, range(20)))
    assert together == alone
    assert len({str(choices) for choices in alone}) > 15
