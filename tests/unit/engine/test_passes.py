"""Passes over the micro-batches of one rank: what goes in, what adds up, and what is the same every time."""

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine
from rallypoint.engine.training_engine import check_tokens
from rallypoint.errors import ModelError
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard, named_weights

LENGTHS = [9, 12, 17, 40, 11, 16, 33, 8, 20, 20, 30, 15]
CAP = 80


@pytest.fixture(scope="module")
def shard(make_folder):
    """Return a policy that is not trained."""
    return load_policy(make_folder(), dtype="float32")


def engine_of(shard, **options):
    optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)
    options = {"optimizer": optimizer, "eps": 1e-3, "max_tokens_per_micro_batch": CAP} | options
    return TrainingEngine(shard, **options)


def stepped(model, batch, loss, *, num_steps=1, **options):
    """What two runs must have in common: metrics, gradients and weights."""
    engine = engine_of(ModelShard.whole(model), **options)
    for step in range(1, num_steps + 1):
        metrics = engine.train(batch, loss, denominator=batch.num_loss_tokens, step=step, num_steps=num_steps)
    gradients = {f"gradient {number}": master.grad for number, master in enumerate(engine.optimizer.masters)}
    weights = {name: weight.detach() for name, weight in named_weights(model).items()}
    return {name: torch.tensor(number) for name, number in metrics.scalars().items()} | gradients | weights


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_the_same_steps_have_the_same_bits(make_policy, make_batch, policy_gradient, dtype, activations):
    outcomes = []
    for _ in range(2):
        model = make_policy(dtype, "qwen3")
        loss = policy_gradient(model)
        outcomes.append(stepped(model, make_batch(LENGTHS), loss, num_steps=3, activations=activations))
    assert outcomes[0].keys() == outcomes[1].keys()
    assert all(torch.equal(outcomes[1][name], wanted) for name, wanted in outcomes[0].items())


def test_gradients_of_half_precision_are_added_up_in_float32(make_policy, make_batch, policy_gradient):
    model = make_policy(torch.bfloat16)
    engine = engine_of(ModelShard.whole(model))
    engine.train(make_batch(LENGTHS), policy_gradient(model), denominator=10, step=1, num_steps=1)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(master.grad.dtype == torch.float32 for master in engine.optimizer.masters)


def test_weights_that_no_pass_uses_have_a_gradient_of_zero(make_policy, make_batch, policy_gradient):
    model = make_policy()
    model.unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    engine = engine_of(ModelShard.whole(model))
    engine.train(make_batch(LENGTHS), policy_gradient(model), denominator=10, step=1, num_steps=1)
    assert torch.equal(model.unused.grad, torch.zeros(3, dtype=torch.float64))


@given(st.lists(st.integers(2, 30), min_size=4, max_size=16), st.integers(30, 120))
def test_every_row_passes_once_and_no_pass_exceeds_the_cap(shard, make_batch, lengths, cap):
    batch, sizes, seen, ticks = make_batch(lengths), [], [], []

    def outputs(part, at):
        sizes.append(part.num_tokens)
        seen.extend(zip(part.prompt_index.tolist(), part.sample_index.tolist(), strict=True))
        return torch.zeros(len(at))

    engine = engine_of(shard, optimizer=None, max_tokens_per_micro_batch=cap, tick=lambda: ticks.append(None))
    engine.evaluate(batch, outputs)
    trained = set(batch.row_of_token[batch.loss_mask].tolist())
    wanted = list(zip(batch.prompt_index.tolist(), batch.sample_index.tolist(), strict=True))
    assert len(seen) == len(set(seen))
    assert {wanted[row] for row in trained} <= set(seen) <= set(wanted)
    assert max(sizes, default=0) <= cap
    assert len(ticks) == len(sizes)


def test_a_batch_with_nothing_to_train_takes_a_step_all_the_same(make_policy, make_batch, policy_gradient):
    model, batch = make_policy(), make_batch([5] * 8, masked_rows=range(8))
    metrics = engine_of(ModelShard.whole(model)).train(
        batch, policy_gradient(model), denominator=1, step=1, num_steps=1
    )
    assert metrics.scalars()["grad_norm"] == 0


def test_a_token_that_the_model_does_not_know_is_named_with_its_row(make_batch):
    batch = make_batch([3, 4])
    num_ids = int(batch.tokens.max()) + 1
    check_tokens(batch, num_ids)
    batch.tokens[5] = num_ids
    place = rf"sample {int(batch.sample_index[1])} of prompt {int(batch.prompt_index[1])} has the token {num_ids}, but"
    with pytest.raises(ModelError, match=place):
        check_tokens(batch, num_ids)
