"""Whatever is kept for the backward pass, the gradients are the same bits."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine
from rallypoint.engine.offload import Checkpoints
from rallypoint.errors import ModelError
from rallypoint.models import ModelShard, named_weights

LENGTHS = [9, 2, 17, 40, 1, 6, 33, 8]


class RecordedCopies:
    """Copies within CPU memory that write down what happens."""

    def __init__(self):
        self.events = []

    def out(self, tensor):
        self.events.append(f"out {len(self.events)}")
        return self.events[-1].removeprefix("out "), tensor.clone()

    def back(self, held):
        self.events.append(f"back {held[0]}")
        return held

    def wait(self, coming):
        self.events.append(f"use {coming[0]}")
        return coming[1].clone()


def trained(model, batch, loss, activations, cap=1000):
    """Weights, gradients and metrics after two steps."""
    engine = TrainingEngine(
        ModelShard.whole(model),
        optimizer=OptimizerConfig(lr=1e-2),
        max_tokens_per_micro_batch=cap,
        activations=activations,
    )
    for step in (1, 2):
        metrics = engine.train(batch, loss, denominator=batch.num_loss_tokens, step=step, num_steps=2)
    masters = {f"master {number}": master for number, master in enumerate(engine.optimizer.masters)}
    gradients = {f"gradient of {name}": master.grad for name, master in masters.items()}
    return masters | gradients | dict(named_weights(model)), metrics.scalars()


def assert_same_bits(actual, expected):
    assert actual[1] == expected[1]
    assert all(torch.equal(actual[0][name], tensor) for name, tensor in expected[0].items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("cap", [1000, 45])
def test_checkpointed_layers_give_the_same_bits(make_policy, make_batch, policy_gradient, dtype, architecture, cap):
    outcomes = []
    for activations in ("keep", "checkpoint"):
        model = make_policy(dtype, architecture)
        outcomes.append(trained(model, make_batch(LENGTHS), policy_gradient(model), activations, cap))
    assert_same_bits(*outcomes)


def gradients_of(model, batch, loss, checkpoints):
    model.requires_grad_(True)
    with checkpoints.recorded():
        for part in batch.split(2):
            loss(part, torch.nonzero(part.loss_mask).flatten())[0].backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def test_offloaded_layers_give_the_same_bits(make_policy, make_batch, policy_gradient):
    gradients = []
    for activations in ("keep", "offload"):
        model = make_policy(torch.float32)
        checkpoints = Checkpoints(model, activations, RecordedCopies())
        gradients.append(gradients_of(model, make_batch(LENGTHS), policy_gradient(model), checkpoints))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_what_a_layer_needs_comes_back_while_the_layer_after_it_is_at_work(make_policy, make_batch, policy_gradient):
    model, copies = make_policy(torch.float32), RecordedCopies()
    gradients_of(model, make_batch(LENGTHS), policy_gradient(model), Checkpoints(model, "offload", copies))
    # Two micro-batches through two layers; the input of layer 0 is asked for before layer 1 is computed again.
    assert copies.events == [
        *("out 0", "out 1", "back 1", "use 1", "back 0", "use 0"),
        *("out 6", "out 7", "back 7", "use 7", "back 6", "use 6"),
    ]


@pytest.mark.parametrize(("activations", "at_most"), [("checkpoint", 0.2), ("offload", 0.1)])
def test_little_is_kept_on_the_device(make_policy, make_batch, policy_gradient, activations, at_most):
    kept = []
    for what in ("keep", activations):
        model = make_policy(torch.float32)
        tensors, copies = [], RecordedCopies()

        def pack(tensor, tensors=tensors):
            tensors.append(tensor)
            return tensor

        copies.out = lambda tensor: ("0", tensor)
        batch = make_batch(LENGTHS)
        with Checkpoints(model, what, copies).recorded(), saved_tensors_hooks(pack, lambda tensor: tensor):
            model.requires_grad_(True)
            rows = torch.nonzero(batch.loss_mask).flatten()
            loss, _ = policy_gradient(model)(batch, rows)
        assert loss.requires_grad
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        kept.append(sum(size for at, size in storages.items() if at not in weights))
    assert kept[1] < at_most * kept[0]


def test_layers_are_checkpointed_in_training_only(make_policy):
    model = make_policy(torch.float32)
    checkpoints = Checkpoints(model, "checkpoint")
    with checkpoints.recorded():
        assert [module for module in model.modules() if module.training] == list(model.model.layers)
    assert not any(module.training for module in model.modules())


def test_a_model_without_layers_to_checkpoint_is_refused(make_policy):
    model = make_policy(torch.float32)
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ModelError, match="LlamaForCausalLM has no layers that transformers can checkpoint"):
        Checkpoints(model, "checkpoint")
