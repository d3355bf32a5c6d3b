"""Roles that take turns on an accelerator: nothing of a sleeping one stays there."""

import pytest
import torch

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine
from rallypoint.models import ModelShard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]


def test_a_sleeping_engine_leaves_the_device_and_wakes_with_the_same_bits(make_model):
    device = torch.accelerator.current_accelerator(check_available=True)
    before = torch.accelerator.memory_allocated()
    engine = TrainingEngine(
        ModelShard.whole(make_model().to(device)),
        optimizer=OptimizerConfig(),
        max_tokens_per_micro_batch=1024,
    )
    for master in engine.optimizer.masters:
        master.grad = torch.ones_like(master)
    engine.optimizer.step()
    tensors = [*engine.model.parameters(), *engine.optimizer.tensors]
    expected = [tensor.detach().cpu() for tensor in tensors]
    awake = torch.accelerator.memory_allocated()
    engine.sleep()
    assert torch.accelerator.memory_allocated() - before < 0.01 * (awake - before)
    engine.wake()
    assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(tensors, expected, strict=True))
