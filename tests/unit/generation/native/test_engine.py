import copy
import dataclasses

import pytest
import torch
from grids import thinned

from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.errors import NotFiniteError, RequestError
from rallypoint.generation import NativeEngine, Request, generate as through
from rallypoint.models import ModelShard
from rallypoint.types import RolloutBatch

LENGTHS = [3, 9, 1, 17, 5, 4]


FAMILIES = [("llama", 1), ("llama", 2), ("llama", 4), ("qwen3", 2), ("qwen3", 4), ("glm4_moe", 2), ("deepseek_v3", 4)]


@pytest.fixture
def generate(make_policy):
    def run(prompts, params, *, group_size=4, architecture="llama", kv_heads=2, **options):
        engine = NativeEngine(make_policy(architecture, kv_heads), version=4, **options)
        return through(engine, prompts, params, version=4, group_size=group_size)

    return run


def rollouts(batch):
    """What was sampled, by (prompt, sample): tokens, logprobs, truncated."""
    found = {}
    for row in range(len(batch)):
        part = slice(*batch.offsets[row : row + 2].tolist())
        found[int(batch.prompt_index[row]), int(batch.sample_index[row])] = (
            batch.response(row).tolist(),
            batch.rollout_logprobs[part],
            bool(batch.truncated[row]),
        )
    assert len(found) == len(batch)
    return found


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, (tokens, logprobs, truncated) in expected.items():
        assert actual[name][0] == tokens, name
        assert actual[name][2] == truncated
        torch.testing.assert_close(actual[name][1], logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("architecture", "kv_heads"), FAMILIES)
def test_greedy_rollouts_are_those_of_transformers(generate, make_policy, make_prompts, params, architecture, kv_heads):
    prompts = make_prompts(LENGTHS)
    greedy = dataclasses.replace(params, temperature=0.0, max_new_tokens=20)
    batch = generate(prompts, greedy, group_size=1, architecture=architecture, kv_heads=kv_heads)
    model = copy.deepcopy(make_policy(architecture, kv_heads))
    model.set_attn_implementation("eager")
    for row in range(len(prompts)):
        prompt = prompts.rows([row]).tokens
        expected = model.generate(
            prompt.unsqueeze(0),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=list(greedy.stop_tokens),
            pad_token_id=0,
        )
        assert batch.rows([row]).tokens.tolist() == expected[0].tolist()


@pytest.mark.parametrize(
    ("architecture", "kv_heads", "temperature"),
    thinned(
        ((*family, temperature) for family in FAMILIES for temperature in (0.7, 1.0, 2.0)),
        *((*family, 0.7) for family in FAMILIES),
        *((*FAMILIES[0], temperature) for temperature in (1.0, 2.0)),
    ),
)
def test_reported_logprobs_are_those_of_the_engine(
    generate, make_policy, make_prompts, params, architecture, kv_heads, temperature
):
    warm = dataclasses.replace(params, temperature=temperature, max_new_tokens=30)
    batch = generate(make_prompts(LENGTHS), warm, architecture=architecture, kv_heads=kv_heads)
    model = copy.deepcopy(make_policy(architecture, kv_heads))
    engine = TrainingEngine(ModelShard.whole(model), optimizer=None, max_tokens_per_micro_batch=100)
    expected = engine.evaluate(batch, lambda part, at: policy_outputs(engine.shard, part, at, temperature).logprobs)
    assert (batch.rollout_logprobs - expected.values).abs().max() < 1e-4
    assert (batch.rollout_logprobs[~batch.loss_mask] == 0).all()


def test_rollouts_do_not_depend_on_the_order_of_prompts(generate, make_prompts, params):
    prompts = make_prompts(LENGTHS)
    expected = rollouts(generate(prompts, params))
    assert_same(rollouts(generate(prompts.rows([4, 2, 0, 5, 3, 1]), params)), expected)


@pytest.mark.parametrize("num_workers", [2, 4, 6, 8])
def test_rollouts_do_not_depend_on_the_split_over_workers(generate, make_prompts, params, num_workers):
    prompts = make_prompts(LENGTHS)
    parts = [generate(part, params) for part in prompts.split(num_workers)]
    joined = RolloutBatch.join(parts)
    whole = generate(prompts, params)
    assert_same(rollouts(joined), rollouts(whole))
    assert torch.equal(joined.tokens, whole.tokens)
    assert torch.equal(joined.prompt_index, whole.prompt_index)


@pytest.mark.parametrize("max_rows", [1, 4, 8, 11, 23])
def test_rollouts_do_not_depend_on_how_many_run_at_once(generate, make_prompts, params, max_rows):
    prompts = make_prompts(LENGTHS)
    expected = rollouts(generate(prompts, params))
    assert_same(rollouts(generate(prompts, params, max_rows=max_rows)), expected)


@pytest.mark.parametrize(("architecture", "kv_heads"), FAMILIES)
def test_the_first_samples_of_a_group_are_those_of_a_smaller_group(
    generate, make_prompts, params, architecture, kv_heads
):
    prompts = make_prompts(LENGTHS)
    expected = rollouts(generate(prompts, params, group_size=7, architecture=architecture, kv_heads=kv_heads))
    for group_size in (1, 2, 5):
        smaller = generate(prompts, params, group_size=group_size, architecture=architecture, kv_heads=kv_heads)
        actual = rollouts(smaller)
        assert_same(actual, {name: wanted for name, wanted in expected.items() if name[1] < group_size})


def test_a_longer_limit_only_continues_what_was_cut_off(generate, make_prompts, params):
    prompts = make_prompts(LENGTHS)
    long = rollouts(generate(prompts, dataclasses.replace(params, max_new_tokens=40)))
    for name, (tokens, _, truncated) in rollouts(generate(prompts, params)).items():
        assert long[name][0][: len(tokens)] == tokens
        assert truncated or len(long[name][0]) == len(tokens)


@pytest.mark.parametrize("group_size", [1, 3])
def test_groups_that_finish_early_leave_without_changing_the_others(generate, make_prompts, params, group_size):
    # Many stop tokens and a long limit: groups end at very different times and are dropped in several rounds.
    prompts = make_prompts([1 + 5 * (n % 4) for n in range(24)])
    early = dataclasses.replace(params, max_new_tokens=60, stop_tokens=(0, 5, 11, 7))
    together = generate(prompts, early, group_size=group_size)
    lengths = torch.tensor([len(together.response(row)) for row in range(len(together))])
    assert lengths.view(24, group_size).amax(1).unique().numel() > 5
    parts = [generate(prompts.rows([row]), early, group_size=group_size) for row in range(len(prompts))]
    alone = RolloutBatch.join(parts)
    assert_same(rollouts(together), rollouts(alone))


def test_the_stop_token_belongs_to_its_rollout_and_the_others_are_truncated(generate, make_prompts, params):
    batch = generate(make_prompts(LENGTHS), params)
    endings = set()
    for row in range(len(batch)):
        response = batch.response(row).tolist()
        stops = [token in params.stop_tokens for token in response]
        assert not any(stops[:-1])
        assert bool(batch.truncated[row]) is not stops[-1]
        assert len(response) == params.max_new_tokens if batch.truncated[row] else len(response) >= 1
        endings.add(stops[-1])
    assert endings == {True, False}


def test_a_stop_token_at_the_very_limit_is_no_truncation(generate, make_prompts, params):
    prompts = make_prompts(LENGTHS)
    for (prompt, sample), (tokens, _, truncated) in rollouts(generate(prompts, params)).items():
        if not truncated and len(tokens) > 1:
            exact = dataclasses.replace(params, max_new_tokens=len(tokens))
            again = rollouts(generate(prompts, exact))[prompt, sample]
            assert (again[0], again[2]) == (tokens, False)
            return
    pytest.fail("no rollout ended by itself")


def test_without_stop_tokens_every_rollout_is_truncated_at_the_limit(generate, make_prompts, params):
    endless = dataclasses.replace(params, stop_tokens=())
    batch = generate(make_prompts(LENGTHS), endless)
    assert batch.truncated.all()
    assert {len(batch.response(row)) for row in range(len(batch))} == {params.max_new_tokens}


def test_one_new_token_is_the_least_that_can_be_sampled(generate, make_prompts, params):
    prompts = make_prompts(LENGTHS)
    batch = generate(prompts, dataclasses.replace(params, max_new_tokens=1))
    long = rollouts(generate(prompts, params))
    assert all(tokens == long[name][0][:1] for name, (tokens, _, _) in rollouts(batch).items())


def test_a_batch_says_for_which_prompt_sample_and_version_each_row_is(generate, make_prompts, params):
    prompts = make_prompts([3, 1, 2], first=40)
    batch = generate(prompts, params)
    assert batch.prompt_index.tolist() == [40] * 4 + [41] * 4 + [42] * 4
    assert batch.sample_index.tolist() == [0, 1, 2, 3] * 3
    assert batch.versions.tolist() == [4] * 12
    for row in range(len(batch)):
        start, stop = batch.offsets[row : row + 2].tolist()
        prompt = prompts.rows([row // 4]).tokens
        assert torch.equal(batch.tokens[start : start + len(prompt)], prompt)
        assert batch.loss_mask[start:stop].tolist() == [t >= len(prompt) for t in range(stop - start)]


def test_different_seeds_and_different_prompt_numbers_give_different_rollouts(generate, make_prompts, params):
    one = rollouts(generate(make_prompts([3]), params))
    other_seed = rollouts(generate(make_prompts([3]), dataclasses.replace(params, seed=4)))
    other_number = rollouts(generate(make_prompts([3], first=8), params))
    texts = lambda found: [tokens for tokens, _, _ in found.values()]  # noqa: E731
    assert texts(one) != texts(other_seed)
    assert texts(one) != texts(other_number)
    assert len({tuple(tokens) for tokens in texts(one)}) > 1


def test_a_worker_without_prompts_returns_a_batch_without_rows_that_joins_with_others(generate, make_prompts, params):
    nothing = generate(make_prompts([]), params)
    assert len(nothing) == nothing.num_tokens == 0
    something = generate(make_prompts(LENGTHS), params)
    joined = RolloutBatch.join([nothing, something, nothing])
    for field in dataclasses.fields(RolloutBatch):
        one, other = getattr(joined, field.name), getattr(something, field.name)
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == other.dtype and torch.equal(one, other))


def test_a_prompt_without_tokens_is_named(generate, make_prompts, params):
    with pytest.raises(RequestError, match="prompt 8 has no tokens"):
        generate(make_prompts([3, 0, 2]), params)


@pytest.mark.parametrize("num", [2_000, pytest.param(6_000, marks=pytest.mark.slow)])
def test_sampled_tokens_follow_the_softmax(make_policy, make_prompts, params, num):
    """Chi-square over the twenty tokens of the vocabulary, for the first and for the second token of a response."""
    model = make_policy()
    many = dataclasses.replace(params, max_new_tokens=2, stop_tokens=(), seed=0)
    prompts = make_prompts([4])
    engine = NativeEngine(model, max_rows=num, cache_tokens=num * 40)
    batch = through(engine, prompts, many, version=0, group_size=num)
    responses = batch.tokens.view(num, 6)[:, 4:]
    reference = copy.deepcopy(model).double()
    reference.set_attn_implementation("eager")

    def chi_square(tokens, prompt):
        with torch.no_grad():
            expected = reference(prompt.unsqueeze(0)).logits[0, -1].softmax(-1) * len(tokens)
        return float(((torch.bincount(tokens, minlength=20) - expected) ** 2 / expected).sum())

    # 19 degrees of freedom: one in a thousand exceeds 43.8.
    assert chi_square(responses[:, 0], prompts.tokens) < 43.8
    likeliest = int(responses[:, 0].mode().values)
    continued = responses[responses[:, 0] == likeliest, 1]
    assert chi_square(continued, torch.cat([prompts.tokens, torch.tensor([likeliest])])) < 43.8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_that_names_the_rollout(make_policy, make_prompts, params, temperature):
    model = copy.deepcopy(make_policy())
    prompts = make_prompts([3, 5, 2])
    with torch.no_grad():
        prompts.tokens[prompts.tokens == 19] = 18
        prompts.tokens[6] = 19
        model.get_input_embeddings().weight[19] = float("nan")
    with pytest.raises(NotFiniteError, match="token 0 of the response of prompt 8 sample 0"):
        through(
            NativeEngine(model), prompts, dataclasses.replace(params, temperature=temperature), version=0, group_size=4
        )


def test_sampling_leaves_the_model_as_it_was(make_policy, make_prompts, params, generate):
    model = make_policy()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    generate(make_prompts(LENGTHS), params)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_bfloat16_model_samples_what_its_engine_would_have_said(tmp_path, make_policy, make_prompts, params):
    model = copy.deepcopy(make_policy()).to(torch.bfloat16)
    batch = through(NativeEngine(model), make_prompts(LENGTHS), params, version=0, group_size=4)
    engine = TrainingEngine(ModelShard.whole(model), optimizer=None, max_tokens_per_micro_batch=100)
    expected = engine.evaluate(batch, lambda part, at: policy_outputs(engine.shard, part, at, 1.0).logprobs)
    assert (batch.rollout_logprobs - expected.values).abs().max() < 0.1


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_request_whose_memory_is_taken_is_computed_again_and_ends_the_same(make_policy, make_prompts, params, mode):
    prompts, long = make_prompts([40, 7, 33]), dataclasses.replace(params, max_new_tokens=90, stop_tokens=())
    plenty, little = (NativeEngine(make_policy(), mode=mode, cache_tokens=n * 32) for n in (100, 12))
    expected = rollouts(through(plenty, prompts, long, version=0, group_size=4))
    assert_same(rollouts(through(little, prompts, long, version=0, group_size=4)), expected)
    assert plenty.num_preempted == 0
    assert little.num_preempted > 0


def test_requests_that_are_set_back_keep_the_stamps_of_what_they_have(make_policy, params):
    long = dataclasses.replace(params, max_new_tokens=90, stop_tokens=())

    def stamped(streamed):
        engine = NativeEngine(make_policy(), cache_tokens=12 * 32, version=3)
        for place in range(3):
            engine.submit(Request(tokens=(3 + place,) * 40, params=long, streamed=streamed))
        outputs = []
        while not engine.num_preempted:
            assert engine.has_work
            outputs += engine.step()
        engine.load(4, None)
        while engine.has_work:
            outputs += engine.step()
        outputs.sort(key=lambda output: output.request_id)
        return [(output.request_id, token, output.version) for output in outputs for token in output.tokens]

    assert stamped(streamed=False) == stamped(streamed=True)


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
def test_the_mode_exact_has_the_same_bits_with_any_number_of_threads(
    make_policy, make_prompts, params, set_threads, dtype
):
    """Ninety rows, three tiles, which one to four lanes share; some lose their memory and are computed again."""
    model = copy.deepcopy(make_policy()).to(dtype)
    prompts = make_prompts([40 + place for place in range(9)])
    long = dataclasses.replace(params, max_new_tokens=70, stop_tokens=())
    found = []
    for num_threads, num_blocks in ((1, 1000), (2, 1000), (2, 120), (3, 1000), (4, 90)):
        set_threads(num_threads)
        engine = NativeEngine(model, mode="exact", cache_tokens=num_blocks * 32)
        found.append(through(engine, prompts, long, version=0, group_size=10))
        assert torch.get_num_threads() == num_threads
        assert (engine.num_preempted > 0) is (num_blocks < 1000)
    for other in found[1:]:
        assert torch.equal(other.tokens, found[0].tokens)
        assert torch.equal(other.rollout_logprobs, found[0].rollout_logprobs)


@pytest.mark.parametrize("max_rows", [pytest.param(2000, marks=pytest.mark.slow), 1100])
def test_rows_that_come_and_go_in_two_lanes_are_drawn_as_in_one(
    make_policy, make_prompts, params, set_threads, max_rows
):
    """Rows end after one token or thirty, others take their places, and lanes of any number of rows draw ahead."""
    prompts, many = make_prompts([3, 40, 1, 17, 64, 4]), dataclasses.replace(params, max_new_tokens=30)
    found = []
    for num_threads in (1, 2, 2):
        set_threads(num_threads)
        engine = NativeEngine(make_policy(), max_rows=max_rows, cache_tokens=32 * 3500)
        found.append(through(engine, prompts, many, version=0, group_size=250))
    assert_same(rollouts(found[1]), rollouts(found[0]))
    assert torch.equal(found[1].rollout_logprobs, found[2].rollout_logprobs)


def test_rows_that_several_threads_share_are_drawn_as_by_one(make_policy, make_prompts, params, set_threads):
    found = []
    for num_threads in (1, 3, 3):
        set_threads(num_threads)
        engine = NativeEngine(make_policy(), max_rows=2000, cache_tokens=32 * 3000)
        found.append(through(engine, make_prompts([3, 9, 1, 17, 5, 4, 8, 8, 2]), params, version=0, group_size=190))
    assert_same(rollouts(found[1]), rollouts(found[0]))
    assert torch.equal(found[1].rollout_logprobs, found[2].rollout_logprobs)
