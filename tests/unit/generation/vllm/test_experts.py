"""Experts that a server says it chose, as they are recorded."""

import io
import types

import numpy as np
import pytest
import torch

from rallypoint.errors import GenerationError
from rallypoint.generation.protocol import Output
from rallypoint.generation.vllm import Outline
from rallypoint.model_files.pieces import same_names

ROUTER = types.SimpleNamespace(weight=torch.empty(8, 4), top_k=2)


@pytest.fixture
def outline():
    """Of a model whose first layer is dense and whose second one has experts."""
    return Outline({}, same_names, 20, cache_bytes_per_token=1, num_cache_heads=1, routers={1: ROUTER})


def output(*tokens):
    numbers = (0.0,) * len(tokens)
    return Output(request_id=1, tokens=tokens, logprobs=numbers, sampled_logprobs=numbers, version=4)


def sent(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("num_read", [4, 5], ids=["without the last token", "with it"])
def test_each_token_has_the_experts_of_the_one_before_and_the_first_has_none(outline, num_read):
    read = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(5, 2, 2) % 8
    outputs = outline.with_experts([output(7), output(8, 9)], 2, sent(read[:num_read]))
    before = [bytes(2), *(bytes(read[token, 1] + 1) for token in range(4))]
    assert [one.experts for one in outputs] == [before[2], before[3] + before[4]]
    assert [one.prompt_experts for one in outputs] == [b"", before[0] + before[1]]


@pytest.mark.parametrize(
    "read",
    [
        b"nonsense",
        b"",
        sent(np.zeros((4, 2, 2)))[:90],
        sent(np.zeros(3)),
        sent(np.zeros((3, 2, 2))),
        sent(np.zeros((4, 1, 2))),
    ],
    ids=["nonsense", "nothing", "half", "one dimension", "too few tokens", "too few layers"],
)
def test_what_is_not_of_the_response_is_refused(outline, read):
    with pytest.raises(GenerationError, match="vllm sent experts"):
        outline.with_experts([output(7), output(8, 9)], 2, read)
