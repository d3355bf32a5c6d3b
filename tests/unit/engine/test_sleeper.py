"""What sleeps holds no memory, and wakes as the same objects with the same bits."""

import pytest
import torch

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine
from rallypoint.engine.offload import Sleeper
from rallypoint.models import ModelShard, named_weights


@pytest.fixture
def engine(make_policy):
    def make(dtype=torch.float32, optimizer=OptimizerConfig(lr=1e-2)):  # noqa: B008 - frozen
        model = make_policy(dtype, "qwen3")
        for weight in model.parameters():
            weight.data = weight.data.clone()  # on CPUs, memory that a file was read into cannot be given back
        return TrainingEngine(ModelShard.whole(model), optimizer=optimizer, max_tokens_per_micro_batch=1000)

    return make


def step(engine, batch, loss, number):
    return engine.train(batch, loss, denominator=50, step=number, num_steps=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_that_slept_between_its_steps_has_the_same_weights(engine, make_batch, policy_gradient, dtype):
    outcomes = []
    for sleeps in (False, True):
        one = engine(dtype)
        loss, batch = policy_gradient(one.model), make_batch([9, 17, 4])
        for number in (1, 2, 3):
            step(one, batch, loss, number)
            if sleeps:
                one.sleep()
                one.wake()
        outcomes.append([master.detach().clone() for master in one.optimizer.masters])
    assert all(map(torch.equal, *outcomes))


def test_nothing_of_a_sleeping_engine_takes_memory(engine, make_batch, policy_gradient):
    one = engine(torch.bfloat16)
    step(one, make_batch([9, 17, 4]), policy_gradient(one.model), 1)
    weights = list(named_weights(one.model).values())
    before = [weight.detach().clone() for weight in weights]
    one.sleep()
    held = [*weights, *one.optimizer.tensors]
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
    assert all(master.grad is None for master in one.optimizer.masters)
    one.sleep()  # who sleeps sleeps on
    one.wake()
    assert all(map(torch.equal, weights, before))


def test_an_evaluation_wakes_the_weights_only(engine, make_batch, policy_gradient):
    one = engine(torch.bfloat16)
    step(one, make_batch([9, 17, 4]), policy_gradient(one.model), 1)
    one.sleep()
    one.wake(to_train=False)
    assert all(weight.untyped_storage().nbytes() for weight in one.model.parameters())
    assert not any(tensor.untyped_storage().nbytes() for tensor in one.optimizer.tensors)


def test_an_engine_without_optimizer_sleeps_too(engine):
    one = engine(optimizer=None)
    before = [weight.clone() for weight in one.model.parameters()]
    one.sleep()
    one.wake()
    assert all(map(torch.equal, one.model.parameters(), before))


def test_tensors_that_share_memory_share_it_again_when_they_wake():
    whole = torch.arange(6.0)
    part, sleeper = whole[2:4], Sleeper()
    sleeper.sleep([whole, part])
    assert sleeper.num_bytes == 24
    sleeper.wake()
    part += 10
    assert whole.tolist() == [0, 1, 12, 13, 4, 5]
    assert sleeper.num_bytes == 0
