import functools
import math

import pytest
import torch
from ranks import make_actor_batch
from tiny_models import make_tiny_model
from torch import nn

from rallypoint.config import OptimizerConfig
from rallypoint.data import make_digits_tokenizer
from rallypoint.engine import TrainingEngine, optimizer_tensors, restore_optimizer
from rallypoint.engine.forward import policy_outputs
from rallypoint.engine.optimizer import learning_rate, make_optimizer
from rallypoint.model_files import load_policy
from rallypoint.types import Metrics


def rates(num_steps, **config):
    return [learning_rate(OptimizerConfig(lr=2.0 / 4, **config), step, num_steps) for step in range(1, num_steps + 1)]


def test_a_constant_rate_is_reached_after_the_warmup():
    assert rates(5, warmup_ratio=0.8) == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert rates(3) == [0.5, 0.5, 0.5]


def test_a_linear_rate_falls_by_equal_amounts_to_its_floor():
    assert rates(6, schedule="linear", warmup_ratio=1 / 3) == [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]
    assert rates(4, schedule="linear", min_lr_ratio=0.5) == [0.5, 0.4375, 0.375, 0.3125]


def test_a_cosine_rate_follows_half_a_wave():
    expected = [0.25 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates(4, schedule="cosine") == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_step_beyond_the_last_stays_at_the_floor(schedule):
    config = OptimizerConfig(lr=1.0, schedule=schedule, warmup_ratio=0.5, min_lr_ratio=0.1)
    assert learning_rate(config, 1000, 10) == pytest.approx(1.0 if schedule == "constant" else 0.1)


def test_the_warmup_shrinks_with_the_run_so_that_a_short_one_gets_to_its_peak_too():
    config = OptimizerConfig(lr=1.0, warmup_ratio=0.1)
    assert [learning_rate(config, step, 20) for step in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert learning_rate(config, 1, 2) == 1.0


def weights_of(model):
    return dict(model.named_parameters())


def make(dtype=torch.float32, lr=0.1, *, offload="nothing", **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype)
    return model, make_optimizer(weights_of(model), OptimizerConfig(lr=lr, **config), eps=1e-8, offload=offload)


def backward(model, seed):
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    (model(inputs.to(model[0].weight.dtype)) ** 3).sum().backward()


def step(model, optimizer, seed, num_passes=1):
    optimizer.zero_grad()
    for number in range(num_passes):
        backward(model, 10 * number + seed)
    optimizer.step()


def test_decay_is_for_matrices_only():
    _, optimizer = make(weight_decay=0.1)
    assert [(g["weight_decay"], {p.dim() for p in g["params"]}) for g in optimizer.param_groups] == [
        (0.1, {2}),
        (0.0, {1}),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_weights_are_their_own_masters(dtype):
    model, optimizer = make(dtype)
    assert all(optimizer.master(weight) is weight for weight in model.parameters())
    step(model, optimizer, 0)
    assert all(weight.grad is not None for weight in model.parameters())
    assert not any(name.endswith("/master") for name in optimizer_tensors(weights_of(model), optimizer))


def test_steps_too_small_for_bfloat16_add_up_as_in_float32():
    num_steps, lr = 300, 1e-6
    (narrow, narrow_optimizer), (wide, wide_optimizer) = make(torch.bfloat16, lr), make(lr=lr)
    with torch.no_grad():
        for weight, rounded in zip(wide.parameters(), narrow.parameters(), strict=True):
            weight.copy_(rounded)
    for number in range(num_steps):
        step(narrow, narrow_optimizer, number)
        step(wide, wide_optimizer, number)
    for rounded, weight in zip(narrow.parameters(), wide.parameters(), strict=True):
        master = narrow_optimizer.master(rounded)
        assert torch.equal(rounded, master.to(torch.bfloat16))
        torch.testing.assert_close(master, weight.detach(), rtol=0, atol=0.05 * num_steps * lr)
    moved = (make()[0][0].weight.to(torch.bfloat16).float() - wide[0].weight).abs().max()
    assert moved > 0.2 * num_steps * lr


def test_gradients_of_bfloat16_are_added_up_in_float32():
    model, optimizer = make(torch.bfloat16)
    for seed in range(50):
        backward(model, seed)
    expected = sum(gradient_of(seed) for seed in range(50))
    master = optimizer.master(model[0].weight)
    assert model[0].weight.grad is None
    assert master.grad.dtype == torch.float32
    torch.testing.assert_close(master.grad.double(), expected, rtol=1e-6, atol=1e-6 * expected.abs().max().item())


def gradient_of(seed):
    """Of one backward pass in bfloat16, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(torch.bfloat16)
    backward(model, seed)
    return model[0].weight.grad.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_restored_state_continues_bit_for_bit(dtype):
    model, optimizer = make(dtype)
    step(model, optimizer, 0)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(weights_of(model), optimizer).items()}
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    step(model, optimizer, 1)
    other, other_optimizer = make(dtype)
    step(other, other_optimizer, 9)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.copy_(weights[name])
    restore_optimizer(weights_of(other), other_optimizer, saved)
    step(other, other_optimizer, 1)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.master(one), other_optimizer.master(two))
    # What was restored is a copy: the step did not write into it.
    assert saved["0.weight/step"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_before_the_first_step_can_be_restored(dtype):
    model, optimizer = make(dtype)
    empty = optimizer_tensors(weights_of(model), optimizer)
    assert empty == {}
    step(model, optimizer, 0)
    restore_optimizer(weights_of(model), optimizer, empty)
    assert optimizer_tensors(weights_of(model), optimizer) == {}
    assert all(torch.equal(optimizer.master(weight), weight.float()) for weight in model.parameters())


def test_a_missing_master_is_named():
    model, optimizer = make(torch.bfloat16)
    step(model, optimizer, 0)
    state = {
        name: tensor
        for name, tensor in optimizer_tensors(weights_of(model), optimizer).items()
        if name != "1.bias/master"
    }
    with pytest.raises(ValueError, match=r"lacking 1\.bias/master"):
        restore_optimizer(weights_of(model), optimizer, state)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("0.weight/exp_avg_sq"), "lacking 0.weight/exp_avg_sq"),
        (lambda t: [t.pop(name) for name in list(t) if name.startswith("1.bias")], "lacking 1.bias/exp_avg"),
        (lambda t: t.update({"2.weight/exp_avg": torch.zeros(1)}), "unknown 2.weight/exp_avg"),
        (lambda t: t.update({"0.weight/momentum": torch.zeros(1)}), "unknown 0.weight/momentum"),
        (lambda t: t.update({"0.weight/master": torch.zeros(3, 4)}), "unknown 0.weight/master"),
        (
            lambda t: t.update({"0.weight/exp_avg": torch.zeros(4, 3)}),
            r"0.weight/exp_avg: \[4, 3\] instead of \[3, 4\]",
        ),
    ],
)
def test_the_state_of_another_model_is_refused_and_changes_nothing(damage, message):
    model, optimizer = make()
    step(model, optimizer, 0)
    before = {name: tensor.clone() for name, tensor in optimizer_tensors(weights_of(model), optimizer).items()}
    other = dict(before)
    damage(other)
    with pytest.raises(ValueError, match=message):
        restore_optimizer(weights_of(model), optimizer, other)
    after = optimizer_tensors(weights_of(model), optimizer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("offload", ["optimizer", "optimizer_and_gradients"])
@pytest.mark.parametrize("part_bytes", [1, 60, 2**28])
def test_an_offloaded_state_steps_to_the_same_bits_and_is_saved_and_restored_alike(
    monkeypatch, dtype, part_bytes, offload
):
    monkeypatch.setattr("rallypoint.engine.optimizer._SUMMED_BYTES", part_bytes)
    monkeypatch.setattr("rallypoint.engine.optimizer.OPTIMIZER_BYTES", part_bytes)
    (kept, kept_optimizer), (model, optimizer) = (
        make(dtype, weight_decay=0.1),
        make(dtype, weight_decay=0.1, offload=offload),
    )
    for seed in range(3):
        step(kept, kept_optimizer, seed, num_passes=3)
        step(model, optimizer, seed, num_passes=3)
        assert all(map(torch.equal, kept.parameters(), model.parameters()))
        assert not optimizer.tensors
        if offload == "optimizer_and_gradients":
            assert all(one.grad is None for one in (*optimizer.masters, *model.parameters()))
        assert not any(weight.untyped_storage().nbytes() for weight in optimizer._masters.values())
    expected = optimizer_tensors(weights_of(kept), kept_optimizer)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(weights_of(model), optimizer).items()}
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    assert [group["params"] for group in optimizer.param_groups] == [
        [optimizer.master(weight) for weight in model.parameters() if (weight.dim() >= 2) == matrices]
        for matrices in (True, False)
    ]
    other, other_optimizer = make(dtype, weight_decay=0.1, offload=offload)
    step(other, other_optimizer, 9)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    restore_optimizer(weights_of(other), other_optimizer, saved)
    step(kept, kept_optimizer, 3)
    step(other, other_optimizer, 3)
    assert all(map(torch.equal, kept.parameters(), other.parameters()))
    other_optimizer.reset()
    assert all(
        torch.equal(other_optimizer.values_of(one), one.to(other_optimizer.values_of(one)))
        for one in other.parameters()
    )


@pytest.mark.parametrize(
    ("sizes", "part_bytes", "num_more"),
    # With 21 tokens one rank has 11 rows of the head, and room for fewer of the norms that ranks sum beside them.
    [({"dp_replicate": 2}, 2**12, 0), ({"tp": 2}, 2**12, 0), ({"tp": 2}, 880, 1)],
    ids=str,
)
def test_offloaded_gradients_are_summed_and_clipped_over_ranks_as_others_are(
    on_mesh, monkeypatch, tmp_path, sizes, part_bytes, num_more
):
    monkeypatch.setattr("rallypoint.engine.optimizer.OPTIMIZER_BYTES", part_bytes)
    tokenizer = make_digits_tokenizer()
    tokenizer.add_tokens(["more"][:num_more])
    folder = make_tiny_model(tmp_path / "model", tokenizer=tokenizer, architecture="qwen3")
    batch = make_actor_batch()

    def trained(offload, mesh):
        shard = load_policy(folder, dtype="float32", mesh=mesh)
        optimizer = OptimizerConfig(max_grad_norm=0.01)
        engine = TrainingEngine(shard, optimizer=optimizer, max_tokens_per_micro_batch=48, offload=offload)
        rows = batch.rows([mesh.rank, mesh.rank + 2] if mesh.sizes["dp_replicate"] > 1 else [0, 1, 2, 3])

        def loss(part, at):
            return policy_outputs(shard, part, at, 1.0).logprobs.sum(), Metrics()

        steps = [engine.train(rows, loss, denominator=100.0, step=step, num_steps=2) for step in (1, 2)]
        return [step["grad_norm"].scalar for step in steps], dict(engine.weights)

    ways = ("optimizer", "optimizer_and_gradients")
    for kept, offloaded in zip(*(on_mesh(functools.partial(trained, way), **sizes) for way in ways), strict=True):
        assert kept[0] == offloaded[0]
        assert min(kept[0]) > 0.01
        assert all(torch.equal(kept[1][name], offloaded[1][name]) for name in kept[1])
