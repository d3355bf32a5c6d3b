import dataclasses

import numpy as np
import pytest
import torch

from rallypoint.config.limits import MAX_TOP_K
from rallypoint.errors import RequestError
from rallypoint.generation import Request, SamplingParams
from rallypoint.generation.requests import check_request
from rallypoint.generation.sampler import Sampler, SamplingMetadata, sample as sample_with_rules


def sample(logits, temperature, numbers):
    """Draw from the whole distribution."""
    params = SamplingParams(max_new_tokens=1, temperature=temperature)
    draws = sample_with_rules(logits, SamplingMetadata.of([params] * len(logits), logits.device), numbers)
    return draws.tokens, draws.logprobs


def numbers(count):
    """Evenly spread in [0, 1), each exactly once: frequencies are then exact up to one count."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_evenly_spread_numbers_hit_each_token_as_often_as_its_probability_says(temperature):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3
    tokens, logprobs = sample(logits.expand(100_000, -1), temperature, numbers(100_000))
    shares = (logits.double() / temperature).softmax(-1)
    frequencies = torch.bincount(tokens, minlength=50) / 100_000
    assert (frequencies - shares).abs().max() < 2e-5
    torch.testing.assert_close(logprobs.double(), shares.log()[tokens], rtol=1e-5, atol=1e-5)


def test_a_vocabulary_of_150_thousand_is_sampled_without_bias():
    logits = torch.zeros(1, 150_000).expand(64, -1)
    tokens, _ = sample(logits, 1.0, numbers(64))
    assert tokens.tolist() == [int(number * 150_000) for number in numbers(64)]


def test_a_tail_that_float32_cannot_tell_from_nothing_is_drawn_as_its_probabilities_say():
    # After a token of nearly 1 come a thousand of 1e-9 each; next to 1, float32 has steps of 6e-8.
    shares = torch.tensor([1.0 - 1e-6, *[1e-9] * 1000], dtype=torch.float64)
    wanted = torch.arange(1, 1001, 37)
    middles = 1.0 - 1e-6 + (wanted.double() - 0.5) * 1e-9
    tokens, _ = sample(shares.log().float().expand(len(wanted), -1), 1.0, middles)
    assert tokens[0] <= 2
    assert (tokens - wanted).abs().max() <= 1


def test_temperature_0_takes_the_likeliest_and_reports_the_models_own_logprob():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]])
    tokens, logprobs = sample(logits, 0.0, numbers(2))
    assert tokens.tolist() == [1, 2]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[torch.arange(2), tokens])


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_tokens_without_probability_are_never_drawn(number):
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf"), -200.0]])
    tokens, logprobs = sample(logits, 1.0, torch.tensor([number], dtype=torch.float64))
    assert tokens.item() == (1 if number < 0.5 else 3)
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_a_vocabulary_of_one_is_drawn_with_certainty(number):
    tokens, logprobs = sample(torch.tensor([[-7.0]]), 1.0, torch.tensor([number], dtype=torch.float64))
    assert (tokens.item(), logprobs.item()) == (0, 0.0)


def test_rows_are_drawn_alike_however_many_are_drawn_at_once():
    # 400 rows of this width need several chunks.
    logits = torch.randn(400, 50_000, generator=torch.Generator().manual_seed(0))
    together, _ = sample(logits, 1.0, numbers(400))
    alone = [sample(logits[row : row + 1], 1.0, numbers(400)[row : row + 1])[0].item() for row in range(0, 400, 37)]
    assert together[::37].tolist() == alone


def test_bfloat16_logits_are_drawn_from_in_full_precision():
    logits = torch.zeros(1000, 300, dtype=torch.bfloat16)
    tokens, logprobs = sample(logits, 1.0, numbers(1000))
    assert len(torch.unique(tokens)) == 300
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_give_a_logprob_of_nan_and_disturb_no_other_row(temperature, number):
    logits = torch.zeros(3, 4)
    logits[1, 2] = number
    _, logprobs = sample(logits, temperature, numbers(3))
    assert logprobs.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"min_new_tokens": 13}, "min_new_tokens=13: expected 0 to max_new_tokens=12"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1e-300}, r"temperature=1e-300: expected 0 \(greedy\) or at least 0.001"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2**31}, "top_k=2147483648: expected a whole number from 1 to 2147483647"),
        ({"top_k": 10**20}, "top_k=1000"),
        ({"top_k": 1.5}, "top_k=1.5"),
        ({"seed": 2**63}, "seed=9223372036854775808: expected a whole number of at most 64 bits"),
        ({"seed": -(2**63) - 1}, "seed=-92233"),
        ({"seed": True}, "seed=True"),
        ({"max_new_tokens": 12.5}, "max_new_tokens=12.5: expected a whole number"),
        ({"max_new_tokens": "4"}, "max_new_tokens='4': expected a whole number"),
        ({"max_new_tokens": 2**63}, "max_new_tokens=92233"),
        ({"min_new_tokens": 0.5}, "min_new_tokens=0.5"),
        ({"top_p": 0.0, "min_p": 1.5}, "top_p=0.0.*min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"stop_strings": ("a", "")}, "no empty string"),
        ({"stop_strings": "ab"}, "stop_strings='ab': expected several strings in a tuple"),
    ],
)
def test_params_that_mean_nothing_are_refused(params, changes, problem):
    with pytest.raises(ValueError, match=problem):
        dataclasses.replace(params, **changes)


def test_integers_of_numpy_are_taken_for_those_that_they_are(params):
    numbers = {"max_new_tokens": 12, "min_new_tokens": 2, "seed": 5, "top_k": 7}
    plain = dataclasses.replace(params, **numbers, stop_tokens=(0, 3))
    others = {name: np.int64(number) for name, number in numbers.items()}
    found = dataclasses.replace(params, **others, stop_tokens=tuple(np.array([0, 3])))
    request = Request(tokens=tuple(np.array([1, 2])), params=found, prompt_index=np.int32(1), sample_index=np.uint8(2))
    assert repr(request) == repr(Request(tokens=(1, 2), params=plain, prompt_index=1, sample_index=2))
    check_request(request, 10, 100, has_decoder=True)
    for tokens in ((np.float64(1.0),), (np.True_,), (True,)):
        with pytest.raises(RequestError, match="token 0 has the id"):
            check_request(dataclasses.replace(request, tokens=tokens), 10, 100, has_decoder=True)


def test_the_largest_numbers_that_are_taken_can_be_drawn_with(params):
    largest = dataclasses.replace(params, top_k=MAX_TOP_K, seed=2**63 - 1, max_new_tokens=2**63 - 1)
    rows = [
        (Request(tokens=(1,), params=one, prompt_index=2**63 - 1, sample_index=-(2**63)), ())
        for one in (params, largest, dataclasses.replace(largest, seed=-(2**63)))
    ]
    tokens = Sampler(rows, torch.device("cpu")).sample(torch.zeros(3, 20)).tokens
    assert ((tokens >= 0) & (tokens < 20)).all()


@pytest.mark.parametrize("name", ["prompt_index", "sample_index"])
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 1.0])
def test_indices_that_no_tensor_holds_are_refused(params, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: expected a whole number of at most 64 bits"):
        Request(tokens=(1,), params=params, **{name: value})
