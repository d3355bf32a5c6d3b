"""Passes in lanes: threads that are side by side change when something is computed, and nothing else."""

import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.config import LoRAConfig, OptimizerConfig
from rallypoint.engine import Engine, critic_values, policy_outputs
from rallypoint.engine.sums import GradientSums
from rallypoint.engine.token_stream import trained_positions
from rallypoint.errors import NotFiniteError
from rallypoint.model_files import load_critic, load_policy
from rallypoint.models import ModelShard, named_weights
from rallypoint.types import Mean, Metrics

LENGTHS = [9, 12, 17, 40, 11, 16, 33, 8, 20, 20, 30, 15]
CAP = 80


@pytest.fixture(autouse=True)
def num_threads():
    """Return a function that sets how many threads torch has, until the test ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shard(make_folder):
    """Return a policy that is not trained."""
    return load_policy(make_folder(), dtype="float32")


def engine_of(shard, **options):
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    options = {"optimizer": optimizer, "eps": 1e-3, "max_tokens_per_micro_batch": CAP} | options
    return Engine(shard, **options)


def in_threads(loss):
    """Return the loss, and the set of the threads that have asked for it."""
    seen = set()

    def watched(part, at):
        seen.add(threading.get_ident())
        return loss(part, at)

    return watched, seen


def stepped(model, batch, loss, *, num_steps=1, **options):
    """What two runs must have in common: metrics, gradients and weights."""
    engine = engine_of(ModelShard.whole(model), **options)
    for step in range(1, num_steps + 1):
        denominator = max(1, batch.num_loss_tokens)
        metrics = engine.train(batch, loss, denominator=denominator, step=step, num_steps=num_steps)
    gradients = {f"gradient {number}": master.grad for number, master in enumerate(engine.optimizer.masters)}
    weights = {name: weight.detach() for name, weight in named_weights(model).items()}
    return {name: torch.tensor(number) for name, number in metrics.scalars().items()} | gradients | weights


def assert_near(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (actual[name] - wanted).abs().max() <= tolerance * wanted.abs().max(), name


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], wanted) for name, wanted in expected.items())


@settings(max_examples=15)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(2, 4), st.integers(40, 90), st.integers(0, 99)
)
def test_any_number_of_lanes_takes_the_same_step(make_folder, make_batch, policy_gradient, lengths, num, cap, seed):
    batch, outcomes, before = make_batch(lengths, seed=seed), [], torch.get_num_threads()
    try:
        for threads in (1, num):
            torch.set_num_threads(threads)
            model = load_policy(make_folder(), dtype="float64").model
            loss = policy_gradient(model)
            outcomes.append(stepped(model, batch, loss, max_tokens_per_micro_batch=cap))
    finally:
        torch.set_num_threads(before)
    assert_near(outcomes[1], outcomes[0], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_the_same_steps_in_lanes_have_the_same_bits(make_policy, make_batch, policy_gradient, dtype, activations):
    outcomes = []
    for _ in range(3):
        model = make_policy(dtype, "qwen3")
        loss, threads = in_threads(policy_gradient(model))
        outcomes.append(stepped(model, make_batch(LENGTHS), loss, num_steps=3, activations=activations))
        assert len(threads) == 2
    assert_same_bits(outcomes[1], outcomes[0])
    assert_same_bits(outcomes[2], outcomes[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_checkpointed_layers_give_the_same_bits_in_lanes(make_policy, make_batch, policy_gradient, dtype):
    outcomes = []
    for activations in ("keep", "checkpoint"):
        model = make_policy(dtype)
        outcomes.append(stepped(model, make_batch(LENGTHS), policy_gradient(model), activations=activations))
        assert not any(module.training for module in model.modules())
    assert_same_bits(*outcomes)


def test_gradients_of_half_precision_are_added_up_in_float32(make_policy, make_batch, policy_gradient, num_threads):
    outcomes = []
    for threads in (1, 2):
        num_threads(threads)
        model = make_policy(torch.bfloat16)
        outcomes.append(stepped(model, make_batch(LENGTHS), policy_gradient(model)))
        assert all(weight.grad is None for weight in model.parameters())
    gradients = [{name: grad for name, grad in one.items() if name.startswith("gradient")} for one in outcomes]
    assert all(gradient.dtype == torch.float32 for gradient in gradients[1].values())
    # Micro-batches are others, and each of their gradients has eight bits.
    assert_near(gradients[1], gradients[0], 0.05)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])  # the second ties embeddings and head
def test_adapters_take_the_same_step_in_lanes(make_folder, make_batch, architecture, num_threads):
    batch, outcomes = make_batch(LENGTHS), []
    for threads in (1, 2):
        num_threads(threads)
        shard = load_policy(make_folder(architecture), dtype="float64", lora=LoRAConfig(rank=2))

        def loss(part, at, shard=shard):
            outputs = policy_outputs(shard, part, at, 1.0)
            total = -(outputs.logprobs * part.advantages[at]).sum()
            return total, Metrics({"loss": Mean(float(total.detach()), len(at))})

        outcomes.append(stepped(shard.model, batch, loss, num_steps=2))
    assert_near(outcomes[1], outcomes[0], 1e-12)


def test_weights_that_no_pass_uses_have_a_gradient_of_zero(make_policy, make_batch, policy_gradient):
    model = make_policy()
    model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    engine = engine_of(ModelShard.whole(model))
    engine.train(make_batch(LENGTHS), policy_gradient(model), denominator=10, step=1, num_steps=1)
    assert torch.equal(model.unused.grad, torch.zeros(3, dtype=torch.float64))


def test_lanes_compute_the_same_numbers(make_folder, make_batch, num_threads):
    batch, found = make_batch(LENGTHS, masked_rows=[3]), []
    policy, critic = load_policy(make_folder(), dtype="float64"), load_critic(make_folder(), dtype="float64")
    torch.nn.init.normal_(critic.model.score.weight, generator=torch.Generator().manual_seed(0))
    for threads in (1, 2, 2):
        num_threads(threads)
        logprobs = engine_of(policy, optimizer=None).evaluate(
            batch, lambda part, at: policy_outputs(policy, part, at, 0.7).logprobs
        )
        values = engine_of(critic, optimizer=None).evaluate(batch, lambda part, at: critic_values(critic, part, at))
        found.append({"logprobs": logprobs.values, "values": values.values})
    assert_near(found[1], found[0], 1e-6)
    assert_same_bits(found[2], found[1])


@given(st.lists(st.integers(2, 30), min_size=4, max_size=16), st.integers(30, 120), st.integers(1, 4))
def test_what_is_computed_at_one_time_never_exceeds_the_cap(shard, make_batch, lengths, cap, num):
    before = torch.get_num_threads()
    largest, lock = {}, threading.Lock()

    def outputs(part, at):
        with lock:
            lane = threading.get_ident()
            largest[lane] = max(largest.get(lane, 0), part.num_tokens)
        return torch.zeros(len(at))

    try:
        torch.set_num_threads(num)
        engine_of(shard, optimizer=None, max_tokens_per_micro_batch=cap).evaluate(make_batch(lengths), outputs)
    finally:
        torch.set_num_threads(before)
    # Threads are taken from a pool: one may be of several lanes, but never of two at a time.
    assert sum(largest.values()) <= cap


def test_only_the_callers_thread_says_that_it_gets_on(make_policy, make_batch, policy_gradient):
    ticks, model = [], make_policy()
    loss, threads = in_threads(policy_gradient(model))
    engine = engine_of(ModelShard.whole(model), tick=lambda: ticks.append(threading.get_ident()))
    engine.train(make_batch(LENGTHS), loss, denominator=10, step=1, num_steps=1)
    assert len(threads) == 2
    assert set(ticks) == {threading.get_ident()}


@pytest.mark.parametrize("which", ["here", "elsewhere", "both"])
def test_an_error_in_a_lane_ends_the_update_when_all_lanes_have_ended(make_policy, make_batch, policy_gradient, which):
    batch, outcomes, here = make_batch(LENGTHS), [], threading.get_ident()
    for failing in (False, True):
        model = make_policy()
        engine, loss = engine_of(ModelShard.whole(model)), policy_gradient(model)
        if failing:
            under_way = set()

            def breaks(part, at, loss=loss, under_way=under_way):
                under_way.add(threading.get_ident())
                total, metrics = loss(part, at)
                if which == "both" or (threading.get_ident() == here) == (which == "here"):
                    under_way.remove(threading.get_ident())
                    raise ArithmeticError(f"of prompt {int(part.prompt_index[0])}")
                under_way.remove(threading.get_ident())
                return total, metrics

            with pytest.raises(ArithmeticError, match="of prompt"):
                engine.train(batch, breaks, denominator=10, step=1, num_steps=1)
            assert not under_way
        engine.train(batch, loss, denominator=10, step=1, num_steps=1)
        outcomes.append(dict(named_weights(model)))
    assert_same_bits(outcomes[1], outcomes[0])


def is_inside(ident, name):
    """Whether a thread is in a function of that name now."""
    frame = sys._current_frames()[ident]
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


def test_an_error_in_a_lane_stops_the_others_before_their_next_pass(make_policy, make_batch):
    here, meeting, passes = threading.get_ident(), threading.Barrier(2, timeout=20), []

    def breaks(part, at):
        if threading.get_ident() == here:
            meeting.wait()
            raise ArithmeticError("of the first lane")
        passes.append(part)
        if len(passes) == 1:
            meeting.wait()
        while is_inside(here, "run_lane"):
            threading.Event().wait(0.001)
        return torch.zeros(len(at))

    engine = engine_of(ModelShard.whole(make_policy()), optimizer=None, max_tokens_per_micro_batch=80)
    with pytest.raises(ArithmeticError, match="of the first lane"):
        engine.evaluate(make_batch([20] * 16), breaks)
    assert len(passes) == 1


@pytest.mark.parametrize("prompt", range(40, 46))
def test_a_loss_that_is_not_finite_is_named_from_any_lane(make_policy, make_batch, policy_gradient, prompt):
    model = make_policy()
    loss, threads = in_threads(policy_gradient(model))

    def poisoned(part, at):
        total, metrics = loss(part, at)
        guilty = (part.prompt_index == prompt) & (part.sample_index == 1)
        return total + (torch.nan if bool(guilty[part.row_of_token[at]].any()) else 0.0), metrics

    engine = engine_of(ModelShard.whole(model))
    with pytest.raises(NotFiniteError, match=rf"the loss is nan for prompt {prompt} sample 1$"):
        engine.train(make_batch(LENGTHS), poisoned, denominator=10, step=1, num_steps=1)
    assert len(threads) == 2
    fresh = named_weights(make_policy())
    assert all(torch.equal(weight, fresh[name]) for name, weight in named_weights(model).items())


def test_a_model_of_a_family_that_is_not_known_has_one_lane(make_policy, make_batch, policy_gradient):
    model = make_policy()
    loss, threads = in_threads(policy_gradient(model))
    model.config.model_type = "mine"
    engine_of(ModelShard.whole(model)).train(make_batch(LENGTHS), loss, denominator=10, step=1, num_steps=1)
    assert threads == {threading.get_ident()}


def test_a_batch_with_nothing_to_train_takes_a_step_all_the_same(make_policy, make_batch, policy_gradient):
    model, batch = make_policy(), make_batch([5] * 8, masked_rows=range(8))
    metrics = engine_of(ModelShard.whole(model)).train(
        batch, policy_gradient(model), denominator=1, step=1, num_steps=1
    )
    assert metrics.scalars()["grad_norm"] == 0


def test_sums_do_not_share_memory_between_weights():
    one, other = (torch.zeros(2, requires_grad=True) for _ in range(2))
    sums = GradientSums([one, other])
    for _ in range(2):
        sums.add_backward((one + other).sum())  # torch gives both the same gradient
    assert [total.tolist() for total in sums.totals] == [[2.0, 2.0]] * 2
    more = GradientSums([one, other])
    more.add_backward(one.sum())
    sums.add(more)
    assert [total.tolist() for total in sums.totals] == [[3.0, 3.0], [2.0, 2.0]]


def test_the_first_token_of_a_row_cannot_be_trained_in_lanes_either(make_policy, make_batch):
    batch = make_batch([20] * 8)
    batch.loss_mask[0] = True
    with pytest.raises(ValueError, match="first token of a row"):
        trained_positions(batch)
    with pytest.raises(ValueError, match="first token of a row"):
        engine_of(ModelShard.whole(make_policy()), optimizer=None).evaluate(batch, lambda part, at: part.advantages[at])
