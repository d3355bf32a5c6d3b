"""What sleeps leaves the device whole, lies in few pieces of page-locked memory, and is waited for once."""

import gc

import torch
from ranks import make_actor_batch
from tiny_models import make_tiny_model

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine
from rallypoint.engine.forward import policy_outputs
from rallypoint.engine.offload import Sleeper
from rallypoint.model_files import load_policy
from rallypoint.types import Metrics

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


def test_an_offloaded_optimizer_is_on_the_device_in_parts_while_it_steps(pretend, monkeypatch, tmp_path):
    monkeypatch.setattr("rallypoint.engine.optimizer.OPTIMIZER_BYTES", 2**14)
    folder = make_tiny_model(tmp_path / "model")

    def train(offload):
        gc.collect()
        before = pretend.allocated()
        shard = load_policy(folder, dtype="bfloat16", device=DEVICE)
        engine = TrainingEngine(shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=100, offload=offload)
        for number in range(2):
            for place, master in enumerate(engine.optimizer.masters):
                master.grad = torch.full_like(master, 1.0 + number + place)
            pretend.reset()
            engine.optimizer.step()
            waits = dict(pretend.syncs)
        gc.collect()
        weights = {name: weight.detach().cpu() for name, weight in engine.weights.items()}
        engine.sleep()
        engine.wake()
        return weights, pretend.allocated() - before, waits, sum(each.numel() for each in weights.values())

    kept, held, _, num_weights = train("nothing")
    offloaded, held_less, waits, _ = train("optimizer")
    assert all(torch.equal(kept[name], offloaded[name]) for name in kept)
    assert held - held_less >= 0.95 * 12 * num_weights
    assert set(waits) == {"synchronize"}, "nothing else is waited for"


def test_offloaded_gradients_leave_the_device_as_soon_as_they_are_there(pretend, monkeypatch, tmp_path):
    monkeypatch.setattr("rallypoint.engine.optimizer.OPTIMIZER_BYTES", 2**14)
    monkeypatch.setattr("rallypoint.engine.optimizer._SUMMED_BYTES", 2**12)
    folder, batch = make_tiny_model(tmp_path / "model"), make_actor_batch()

    def train(offload):
        gc.collect()
        before = pretend.allocated()
        shard = load_policy(folder, dtype="bfloat16", device=DEVICE)
        engine = TrainingEngine(shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=48, offload=offload)

        def loss(rows, at):
            return policy_outputs(shard, rows, at, 1.0).logprobs.sum(), Metrics()

        engine.accumulate(batch, loss, 100.0)
        gc.collect()
        held = pretend.allocated() - before
        for step in (1, 2):
            engine.train(batch, loss, denominator=100.0, step=step, num_steps=2)
        weights = {name: weight.detach().cpu() for name, weight in engine.weights.items()}
        return weights, held, sum(each.numel() for each in weights.values())

    kept, held, num_weights = train("optimizer")
    offloaded, held_less, _ = train("optimizer_and_gradients")
    assert all(torch.equal(kept[name], offloaded[name]) for name in kept)
    assert held - held_less >= 0.95 * 4 * num_weights
