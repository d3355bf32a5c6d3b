"""Activations that leave the device and come back: same bits, less memory."""

import gc

import pytest
import torch

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.models import ModelShard
from rallypoint.types import Metrics, Sequences, offsets_from_lengths

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]


def trained(model, activations):
    """Return the gradients of a step, and the most bytes that the device held for it."""
    device = torch.accelerator.current_accelerator(check_available=True)
    gc.collect()
    before = torch.accelerator.memory_allocated()  # gradients of earlier steps
    engine = TrainingEngine(
        ModelShard.whole(model.to(device)),
        optimizer=OptimizerConfig(),
        max_tokens_per_micro_batch=8192,
        activations=activations,
    )
    lengths = torch.full((64,), 256)
    offsets = offsets_from_lengths(lengths)
    batch = Sequences(
        offsets=offsets,
        tokens=torch.randint(20, (int(offsets[-1]),), generator=torch.Generator().manual_seed(0)),
        loss_mask=torch.arange(int(offsets[-1])) % 256 > 0,
        prompt_index=torch.arange(64),
        sample_index=torch.zeros(64, dtype=torch.int64),
    )

    def loss(part, at):
        return -policy_outputs(engine.shard, part, at, 1.0).logprobs.sum(), Metrics()

    torch.accelerator.reset_peak_memory_stats()
    engine.train(batch, loss, denominator=batch.num_loss_tokens, step=1, num_steps=1)
    peak = torch.accelerator.max_memory_allocated() - before
    return [master.grad for master in engine.optimizer.masters], peak


def test_offloading_gives_the_same_gradients_in_less_memory(make_model):
    outcomes = {activations: trained(make_model(), activations) for activations in ("keep", "checkpoint", "offload")}
    for gradients, _ in outcomes.values():
        assert all(map(torch.equal, gradients, outcomes["keep"][0]))
    assert outcomes["offload"][1] < outcomes["checkpoint"][1] < 0.5 * outcomes["keep"][1]
