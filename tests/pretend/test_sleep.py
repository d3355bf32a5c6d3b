"""What sleeps leaves the device whole, lies in few pieces of page-locked memory, and is waited for once."""

import gc

import torch
from tiny_models import make_tiny_model

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine
from rallypoint.engine.offload import Sleeper
from rallypoint.model_files import load_policy

DEVICE = torch.device("pretend:0")


def test_a_sleeping_engine_leaves_the_device_and_wakes_with_the_same_bits(pretend, tmp_path):
    gc.collect()
    before = pretend.allocated()
    shard = load_policy(make_tiny_model(tmp_path / "model"), dtype="bfloat16", device=DEVICE)
    engine = TrainingEngine(shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=100)
    for master in engine.optimizer.masters:
        master.grad = torch.ones_like(master)
    engine.optimizer.step()
    tensors = [*engine.weights.values(), *engine.optimizer.tensors]
    expected = [tensor.detach().cpu() for tensor in tensors]
    gc.collect()
    awake = pretend.allocated() - before
    engine.sleep()
    gc.collect()
    # What is no weight stays: frequencies, and how many steps were taken.
    assert pretend.allocated() - before < 0.05 * awake
    engine.wake()
    assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(tensors, expected, strict=True))


def test_storages_of_any_size_lie_in_pieces_and_are_waited_for_together(pretend):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(DEVICE) for size in (3, 1000, 1, 5000, 7)]
    expected = [tensor.cpu() for tensor in tensors]
    sleeper = Sleeper(piece_bytes=2**13)
    pretend.reset()
    sleeper.sleep([*tensors, tensors[1][5:]])
    assert sleeper.num_bytes == 4 * 6011
    assert pretend.syncs == {"synchronize": 1}
    assert sum(pretend._pinned[piece.data_ptr()] for piece in sleeper._pieces) == 3 * 2**13
    pretend.reset()
    sleeper.wake()
    assert pretend.syncs == {"synchronize": 1}
    assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(tensors, expected, strict=True))
