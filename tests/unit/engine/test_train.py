"""The property that the engine exists for: no cut of a batch changes the step that is taken."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine, optimizer_tensors, restore_optimizer
from rallypoint.errors import NotFiniteError, PeerFailedError, RowTooLongError
from rallypoint.models import ModelShard, named_weights
from rallypoint.parallel import DeviceMesh
from rallypoint.types import Metrics, merge

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
# A large eps keeps Adam's division well conditioned: noise in a gradient of zero is not blown up to a step of lr.
EPS = 1e-3
LENGTHS = [9, 2, 17, 40, 1, 6, 33, 8]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def engine_of(model, cap=1000, mesh=None, config=CONFIG, padded=False):
    return TrainingEngine(
        ModelShard.whole(model, mesh), optimizer=config, eps=EPS, max_tokens_per_micro_batch=cap, padded=padded
    )


def outcome(engine, metrics):
    """What must be the same: loss, gradient norm, gradients and weights."""
    scalars = metrics.scalars()
    tensors = {f"grad {name}": weight.grad.clone() for name, weight in named_weights(engine.model).items()}
    tensors |= {name: weight.detach().clone() for name, weight in named_weights(engine.model).items()}
    tensors |= {name: torch.tensor(scalars.get(name, 0.0)).double() for name in ("loss", "grad_norm", "lr")}
    return tensors


def assert_same(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        error = (actual[name] - wanted).abs().max()
        assert error <= tolerance * wanted.abs().max(), f"{name} differs by {error / wanted.abs().max():.2g}"


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def train(make_policy, policy_gradient):
    """Return a function that takes one step on parts of a batch, a rank each, and returns every rank's outcome."""
    meetings, rendezvous = itertools.count(), open_rendezvous("memory", "test")

    def run(parts, dtype, *, cap=1000, architecture="llama", wrap=lambda loss, rank: loss, num_steps=1, padded=False):
        name = f"meeting {next(meetings)}"
        denominator = max(1, sum(part.num_loss_tokens for part in parts))
        models = [make_policy(dtype, architecture) for _ in parts]

        def rank_of(rank):
            mesh = DeviceMesh.connect(rendezvous, name, rank, {"dp_replicate": len(parts)}, timeout_s=30)
            engine = engine_of(models[rank], cap, mesh, padded=padded)
            loss = wrap(policy_gradient(models[rank]), rank)
            for step in range(1, num_steps + 1):
                metrics = engine.train(parts[rank], loss, denominator=denominator, step=step, num_steps=num_steps)
            return engine, metrics

        with ThreadPoolExecutor(len(parts)) as pool:
            futures = [pool.submit(rank_of, rank) for rank in range(len(parts))]
        errors = [future.exception() for future in futures]
        if any(errors):
            return models, errors
        measured = merge(*(future.result()[1] for future in futures))
        return [outcome(future.result()[0], measured) for future in futures]

    return run


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_no_micro_batch_cap_changes_loss_gradients_or_weights(train, make_batch, dtype, architecture):
    batch = make_batch(LENGTHS, masked_rows=[1])
    (expected,) = train([batch], dtype, cap=10_000, architecture=architecture)
    for cap in (40, 41, 57, 80, 116):
        (actual,) = train([batch], dtype, cap=cap, architecture=architecture)
        assert_same(actual, expected, TOLERANCES[dtype])


def test_one_row_at_a_time_gives_the_same_step(train, make_batch, dtype):
    # With every row as long as the cap no two rows meet in a micro-batch.
    batch = make_batch([12] * 6, masked_rows=[3])
    (expected,) = train([batch], dtype, cap=10_000)
    (actual,) = train([batch], dtype, cap=12)
    assert_same(actual, expected, TOLERANCES[dtype])


def test_the_order_of_rows_does_not_change_the_step(train, make_batch, dtype):
    batch = make_batch(LENGTHS)
    (expected,) = train([batch], dtype, cap=60)
    (actual,) = train([batch.rows(list(reversed(range(len(batch)))))], dtype, cap=60)
    assert_same(actual, expected, TOLERANCES[dtype])


def test_rows_longer_than_half_a_thousand_tokens_give_the_same_step(train, make_batch):
    batch = make_batch([600, 5, 513])
    (expected,) = train([batch], torch.float64, cap=10_000)
    (actual,) = train([batch], torch.float64, cap=600)
    assert_same(actual, expected, 1e-10)


@pytest.mark.parametrize("cap", [10_000, 45, 40])
def test_rows_that_are_padded_give_the_same_step(train, make_batch, dtype, cap):
    batch = make_batch([*LENGTHS, 0], masked_rows=[1])
    (expected,) = train([batch], dtype, cap=10_000)
    (actual,) = train([batch], dtype, cap=cap, padded=True)
    assert_same(actual, expected, TOLERANCES[dtype])


SHARDS = {
    "2 ranks": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "2 uneven ranks": [[3], [0, 1, 2, 4, 5, 6, 7]],
    "3 ranks": [[0, 1], [2, 3, 4], [5, 6, 7]],
    "a rank without rows": [[0, 1, 2, 3, 4], [], [5, 6, 7]],
    "a rank with nothing to train": [[1], [0, 2, 3, 4, 5, 6, 7]],
    "all rows on the last rank": [[], [], [0, 1, 2, 3, 4, 5, 6, 7]],
}


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS.keys())
def test_no_split_over_ranks_changes_loss_gradients_or_weights(train, make_batch, dtype, shards):
    batch = make_batch(LENGTHS, masked_rows=[1])
    (expected,) = train([batch], dtype, num_steps=2)
    ranks = train([batch.rows(rows) for rows in shards], dtype, cap=45, num_steps=2)
    for actual in ranks:
        assert_same(actual, expected, TOLERANCES[dtype])
        # Copies of one model stay copies: not nearly the same, but the same.
        assert all(torch.equal(actual[name], ranks[0][name]) for name in actual)


@st.composite
def cuts(draw):
    """Rows as (length, rank, whether nothing of it is trained); the number of ranks, the cap, and whether to pad."""
    num_ranks = draw(st.integers(1, 4))
    row = st.tuples(st.integers(0, 20), st.integers(0, num_ranks - 1), st.booleans())
    rows = draw(st.lists(row, min_size=1, max_size=8))
    return rows, num_ranks, draw(st.integers(20, 60)), draw(st.booleans())


@settings(  # each call meets anew
    max_examples=settings.default.max_examples // 5, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts(), st.sampled_from(["llama", "qwen3"]), st.integers(0, 99))
def test_any_rows_on_any_ranks_under_any_cap_give_the_same_step(train, make_batch, cut, architecture, seed):
    rows, num_ranks, cap, padded = cut
    masked = [row for row, (_, _, is_masked) in enumerate(rows) if is_masked]
    batch = make_batch([length for length, _, _ in rows], seed=seed, masked_rows=masked)
    (expected,) = train([batch], torch.float64, cap=10_000, architecture=architecture)
    parts = [batch.rows([row for row, (_, at, _) in enumerate(rows) if at == rank]) for rank in range(num_ranks)]
    for actual in train(parts, torch.float64, cap=cap, architecture=architecture, padded=padded):
        assert_same(actual, expected, 1e-10)


def test_the_denominator_divides_the_gradient(make_batch, make_policy):
    batch = make_batch(LENGTHS)
    norms = []
    for denominator in (10.0, 20.0):
        model = make_policy()
        engine = engine_of(model)
        metrics = engine.train(batch, first_weights_of(model), denominator=denominator, step=1, num_steps=1)
        norms.append(metrics.scalars()["grad_norm"])
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-12)


def test_the_norm_of_a_step_is_the_mean_over_its_mini_batches(make_batch, make_policy):
    model, batch = make_policy(), make_batch(LENGTHS)
    engine = engine_of(model)
    found = [
        engine.train(batch, first_weights_of(model), denominator=denominator, step=1, num_steps=1)
        for denominator in (1.0, 3.0)
    ]
    norms = [metrics.scalars()["grad_norm"] for metrics in found]
    assert norms[0] == pytest.approx(3 * norms[1], rel=1e-12)
    assert merge(*found).scalars()["grad_norm"] == pytest.approx(sum(norms) / 2, rel=1e-12)


def first_weights_of(model):
    """A loss without a forward pass: the sum of the trained tokens' embeddings."""

    def loss(part, at):
        return model.get_input_embeddings()(part.tokens[at]).sum(), Metrics()

    return loss


def test_the_reported_norm_is_that_before_clipping_and_the_gradients_are_clipped_to_the_bound(make_policy, make_batch):
    model, batch = make_policy(), make_batch(LENGTHS)
    counts = torch.bincount(batch.tokens[batch.loss_mask], minlength=20).double()
    metrics = engine_of(model).train(batch, first_weights_of(model), denominator=1, step=1, num_steps=1).scalars()
    assert metrics["grad_norm"] == pytest.approx(float((16 * counts**2).sum().sqrt()), rel=1e-12)
    clipped = torch.cat([weight.grad.flatten() for weight in model.parameters()]).norm()
    assert float(clipped) == pytest.approx(CONFIG.max_grad_norm, rel=1e-5)


def test_the_learning_rate_is_that_of_the_step(make_policy, make_batch):
    config = OptimizerConfig(lr=1e-2, schedule="linear")
    model, batch = make_policy(), make_batch([5])
    engine = engine_of(model, config=config)
    rates = [
        engine.train(batch, first_weights_of(model), denominator=1, step=step, num_steps=4).scalars()["lr"]
        for step in (1, 2, 3, 4)
    ]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def poison(prompt, sample, number):
    """Make one row's loss not finite."""

    def wrap(loss, rank=0):
        def poisoned(part, at):
            total, metrics = loss(part, at)
            guilty = (part.prompt_index == prompt) & (part.sample_index == sample)
            return total + (number if bool(guilty[part.row_of_token[at]].any()) else 0.0), metrics

        return poisoned

    return wrap


def untouched(model, fresh):
    return all(torch.equal(weight, fresh[name]) for name, weight in named_weights(model).items())


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("cap", [40, 1000], ids=["in a micro-batch of few", "among all rows"])
def test_a_loss_that_is_not_finite_names_its_rollout_and_leaves_the_weights_alone(
    make_policy, make_batch, policy_gradient, number, cap
):
    model = make_policy()
    engine = engine_of(model, cap)
    loss = poison(42, 1, number)(policy_gradient(model))
    with pytest.raises(NotFiniteError, match=r"the loss is -?(nan|inf) for prompt 42 sample 1$"):
        engine.train(make_batch(LENGTHS), loss, denominator=10, step=1, num_steps=1)
    assert untouched(model, named_weights(make_policy()))
    assert optimizer_tensors(dict(model.named_parameters()), engine.optimizer) == {}


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(make_policy, make_batch, policy_gradient):
    model = make_policy()
    loss = policy_gradient(model)

    def steep(part, at):
        total, metrics = loss(part, at)
        return total + (model.get_input_embeddings().weight[0, 0] * 0).sqrt(), metrics

    engine = engine_of(model)
    with pytest.raises(NotFiniteError, match="gradient norm is nan"):
        engine.train(make_batch(LENGTHS), steep, denominator=10, step=1, num_steps=1)
    assert untouched(model, named_weights(make_policy()))
    assert optimizer_tensors(dict(model.named_parameters()), engine.optimizer) == {}


def test_the_step_after_a_failed_one_is_as_if_that_had_never_been(make_policy, make_batch, policy_gradient):
    batch, outcomes = make_batch(LENGTHS), []
    for failing in (False, True):
        model = make_policy()
        engine, loss = engine_of(model, 40), policy_gradient(model)
        if failing:
            poisoned = poison(43, 0, float("nan"))(loss)
            with pytest.raises(NotFiniteError):
                engine.train(batch, poisoned, denominator=10, step=1, num_steps=1)
        outcomes.append(outcome(engine, engine.train(batch, loss, denominator=10, step=1, num_steps=1)))
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def test_no_rank_steps_when_one_of_them_fails_and_none_waits_for_ever(train, make_batch, make_policy):
    batch = make_batch(LENGTHS)
    models, errors = train(batch.split(3), torch.float64, wrap=poison(42, 1, float("nan")))
    assert [type(error) for error in errors] == [PeerFailedError, PeerFailedError, NotFiniteError]
    assert all(error.is_of_update for error in errors), "all can go on without the step"
    assert all(untouched(model, named_weights(make_policy())) for model in models)


def test_a_rank_that_fails_with_an_error_of_any_kind_does_not_keep_the_others_waiting(train, make_batch):
    def breaks(loss, rank):
        return loss if rank == 0 else lambda part, at: {}[0]

    _, errors = train(make_batch(LENGTHS).split(2), torch.float64, wrap=breaks)
    assert [type(error) for error in errors] == [PeerFailedError, KeyError]


def test_a_row_over_the_cap_stops_every_rank(train, make_batch):
    _, errors = train(make_batch([4, 4, 50]).split(2), torch.float64, cap=40)
    assert [type(error) for error in errors] == [PeerFailedError, RowTooLongError]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_saved_and_restored_training_continues_bit_for_bit(
    make_policy, make_batch, policy_gradient, tmp_path, precision
):
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(4)]

    def steps(engine, numbers):
        loss = policy_gradient(engine.model)
        for number in numbers:
            engine.train(batches[number], loss, denominator=50, step=number + 1, num_steps=4)

    whole = engine_of(make_policy(precision), 60)
    steps(whole, [0, 1, 2, 3])
    first = engine_of(make_policy(precision), 60)
    steps(first, [0, 1])
    safetensors.torch.save_file(dict(named_weights(first.model)), tmp_path / "weights")
    safetensors.torch.save_file(optimizer_tensors(first.weights, first.optimizer), tmp_path / "state")
    second = engine_of(make_policy(precision), 60)
    steps(second, [3])  # whatever it held before must not matter
    saved = safetensors.torch.load_file(tmp_path / "weights")
    with torch.no_grad():
        for name, weight in named_weights(second.model).items():
            weight.copy_(saved[name])
    restore_optimizer(second.weights, second.optimizer, safetensors.torch.load_file(tmp_path / "state"))
    steps(second, [2, 3])
    for name, weight in named_weights(whole.model).items():
        assert torch.equal(named_weights(second.model)[name], weight), name


def test_the_same_step_twice_gives_the_same_bits(train, make_batch):
    batch = make_batch(LENGTHS)
    for parts in ([batch], batch.split(3)):
        once, again = (train(parts, torch.float32, cap=45) for _ in range(2))
        assert all(torch.equal(once[0][name], again[0][name]) for name in once[0])


def test_an_engine_without_an_optimizer_freezes_its_model(make_policy):
    model = make_policy()
    TrainingEngine(ModelShard.whole(model), optimizer=None, max_tokens_per_micro_batch=10)
    assert not any(weight.requires_grad for weight in model.parameters())
