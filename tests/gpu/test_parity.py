"""The step on an accelerator, in bfloat16, is the step on a CPU in float64, up to what bfloat16 can say."""

import pytest
import torch
from parity_rank import CAPS, CONFIG, loss_of, make_batch
from tiny_models import make_tiny_model

from rallypoint.engine import Engine
from rallypoint.models import load_critic, load_policy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, architecture="qwen3", hidden_size=64, intermediate_size=128, initializer_range=0.1)


def stepped(folder, role, dtype, device, cap, padded):
    """Loss and gradient norm of a step, and the weights behind it."""
    load = load_policy if role == "actor" else load_critic
    shard = load(folder, dtype=dtype, device=device)
    engine = Engine(shard, optimizer=CONFIG, max_tokens_per_micro_batch=cap, padded=padded)
    batch = make_batch(role)
    denominator = batch.num_loss_tokens
    metrics = engine.train(
        batch, lambda rows, at: loss_of(shard, rows, at), denominator=denominator, step=1, num_steps=3
    )
    return metrics.scalars(), {name: weight.detach().cpu().double() for name, weight in shard.tensors().items()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_step_in_bfloat16_is_that_of_the_cpu_in_float64(folder, role, cap, padded):
    device = torch.accelerator.current_accelerator()
    expected, expected_weights = stepped(folder, role, "float64", torch.device("cpu"), 10_000, False)
    found, weights = stepped(folder, role, "bfloat16", device, cap, padded)
    assert found["loss"] == pytest.approx(expected["loss"], rel=0.05, abs=0.02)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)
    for name, wanted in expected_weights.items():
        assert (weights[name] - wanted).abs().max() <= 0.02 * max(1.0, float(wanted.abs().max())), name
