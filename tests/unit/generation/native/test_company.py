"""What becomes of a request does not depend on the others, whatever is asked of each."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st
from sampling_cases import CHANGES

from rallypoint.generation import NativeEngine, Request, SamplingParams
from rallypoint.generation.sampler import Sampler

NUM_PROMPTS, NUM_SAMPLES = 4, 3
COMPANY = st.fixed_dictionaries(
    {
        "order": st.permutations(range(NUM_PROMPTS * NUM_SAMPLES)),
        "num_workers": st.integers(1, 4),
        "max_rows": st.integers(1, 15),
        "num_blocks": st.integers(5, 20),
    }
)
KINDS = [
    {name: value for name, value in changes.items() if name != "stop_strings"}
    for changes in (*CHANGES.values(), {"min_new_tokens": 33}, {"repetition_penalty": 0.8, "temperature": 0.0})
]


def rollouts(engine, requests):
    """What was sampled, by (prompt, sample): tokens, both logprobs, and why it ended."""
    names = {engine.submit(one): (one.prompt_index, one.sample_index) for one in requests}
    found = {name: ([], [], [], []) for name in names.values()}
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs, sampled, reasons = found[names[output.request_id]]
            tokens += output.tokens
            logprobs += output.logprobs
            sampled += output.sampled_logprobs
            reasons += [output.finish_reason] if output.finish_reason else []
    return found


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_mixed", [False, True], ids=["alike", "mixed"])
@settings(max_examples=settings.default.max_examples // 12)
@given(company=COMPANY, data=st.data())
def test_rollouts_do_not_depend_on_their_company(
    make_policy, make_prompts, params, mode, dtype, is_mixed, company, data
):
    """Shuffled, split over workers, run in any number and in little memory: the same tokens; `exact`: the same bits."""
    if (mode, dtype) == ("fast", torch.bfloat16):
        return  # says itself that it does not promise this
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=NUM_PROMPTS, max_size=NUM_PROMPTS))
    prompts = make_prompts(lengths)
    prompts.tokens[: min(lengths)] = 3
    long = dataclasses.replace(params, max_new_tokens=50, stop_tokens=(0,))
    ways = [dataclasses.replace(long, **kind) for kind in (KINDS if is_mixed else [{}])]
    requests = [
        Request(
            tokens=tuple(prompts.rows([prompt]).tokens.tolist()),
            params=data.draw(st.sampled_from(ways)),
            prompt_index=prompt,
            sample_index=sample,
            streamed=is_mixed and data.draw(st.booleans()),
        )
        for prompt in range(NUM_PROMPTS)
        for sample in range(NUM_SAMPLES)
    ]
    model = copy.deepcopy(make_policy()).to(dtype)

    expected = rollouts(NativeEngine(model, mode=mode), requests)
    actual, options = {}, {"max_rows": company["max_rows"], "cache_tokens": company["num_blocks"] * 32}
    for worker in range(company["num_workers"]):
        part = [requests[place] for place in company["order"][worker :: company["num_workers"]]]
        actual |= rollouts(NativeEngine(model, mode=mode, **options), part)
    assert actual.keys() == expected.keys()
    for name, (tokens, logprobs, sampled, reasons) in expected.items():
        assert (actual[name][0], actual[name][3]) == (tokens, reasons), name
        if mode == "exact":
            assert actual[name][1:3] == (logprobs, sampled), name
        assert actual[name][1] == pytest.approx(logprobs, rel=1e-4, abs=1e-5), name
        assert actual[name][2] == pytest.approx(sampled, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("family", "kv_heads"), [("qwen3_moe", 2), ("gpt_oss", 2), ("glm4_moe", 2), ("deepseek_v3", 4)]
)
def test_in_the_mode_exact_tokens_of_a_mixture_do_not_depend_on_those_sent_to_the_same_experts(
    make_policy, make_prompts, params, family, kv_heads
):
    prompts = make_prompts([5, 9, 2, 7])
    requests = [
        Request(
            tokens=tuple(prompts.rows([prompt]).tokens.tolist()), params=params, prompt_index=prompt, sample_index=0
        )
        for prompt in range(4)
    ]
    model = make_policy(family, kv_heads)
    together = rollouts(NativeEngine(model, mode="exact"), requests)
    for name, alone in zip(together, requests, strict=True):
        assert rollouts(NativeEngine(model, mode="exact"), [alone])[name] == together[name]


@pytest.mark.parametrize("vocabulary", [20, 600])
def test_what_is_said_of_a_row_has_the_same_bits_beside_rows_with_penalties_and_minimum_lengths(vocabulary):
    """Rows that have drawn as many tokens as their number: some may not end yet, some may since their last one."""
    rows = [
        (Request(tokens=(3, row % 7), params=SamplingParams(max_new_tokens=9, stop_tokens=(0, 5), **kind)), [4] * row)
        for row, kind in enumerate(
            [
                {"min_new_tokens": 2},
                {},
                {"min_new_tokens": 2},
                {"repetition_penalty": 1.5},
                {"temperature": 0.0},
                {"top_k": 5, "temperature": 0.7},
                {"min_new_tokens": 8, "repetition_penalty": 0.7, "top_p": 0.8},
            ]
        )
    ]
    logits = torch.randn(3, len(rows), vocabulary, generator=torch.Generator().manual_seed(1)).mul_(3)
    together = Sampler(rows, torch.device("cpu"))
    alone = [Sampler([row], torch.device("cpu")) for row in rows]
    for step in logits:
        drawn = together.sample(step)
        each = [sampler.sample(step[row : row + 1]) for row, sampler in enumerate(alone)]
        assert all(torch.equal(a, torch.cat(b)) for a, b in zip(drawn, zip(*each, strict=True), strict=True))
