"""The kernels between the products of a layer; Triton's interpreter and compiler see them in test_kernels.py."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rallypoint.generation.native.accelerator.backend import by_kernels
from rallypoint.generation.native.decoder import PlainDecoder, check_decoder
from rallypoint.models.kinds import mlp
from rallypoint.models.layer_kernels import HeadNorms, LayerKernels, find_layer_kernels, is_right
from rallypoint.models.layers import replace_layers

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 30,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


class InOperators(LayerKernels):
    """The same by operators, wrong in one place if asked; counts its launches."""

    def __init__(self, wrong=""):
        self.wrong, self.launched = wrong, []

    def add_norm(self, states, added, weight, eps):
        self.launched.append("add_norm")
        total = states + added
        return total, functional.rms_norm(total, weight.shape, weight, 1e-1 if self.wrong == "eps" else eps)

    def turn(self, heads, cos, sin, num_queries, norms: HeadNorms | None, eps):
        self.launched.append("turn")
        heads = heads[:, : cos.shape[1]]
        if norms is not None:
            cut = num_queries + (self.wrong == "norms")
            parts = zip((heads[:, :cut], heads[:, cut:]), norms, strict=True)
            heads = torch.cat([functional.rms_norm(part, of.shape, of, eps) for part, of in parts], 1)
        first, second = heads.chunk(2, -1)
        sign = -1 if self.wrong == "direction" else 1
        return torch.cat((first * cos - sign * second * sin, second * cos + sign * first * sin), -1)

    def swiglu(self, gate, up):
        self.launched.append("swiglu")
        return (functional.gelu if self.wrong == "gelu" else functional.silu)(gate) * up

    def swiglu_gradient(self, grad, gate, up):
        share = gate.sigmoid()
        of_gate = grad * up * share * (1 + gate * (1 - share))
        return of_gate, grad * gate * (1 if self.wrong == "gradient" else share)


@pytest.mark.parametrize("wrong", ["", "eps", "norms", "direction", "gelu", "gradient"])
def test_a_trial_tells_right_kernels_from_wrong_ones(wrong):
    assert is_right(InOperators(wrong), CPU, torch.float32) is (wrong == "")


def test_a_cpu_has_none():
    assert find_layer_kernels(torch.zeros(3)) is None


@pytest.mark.parametrize(
    ("kind", "config"), [(LlamaForCausalLM, LlamaConfig(**SHAPE)), (Qwen3ForCausalLM, Qwen3Config(**SHAPE))]
)
def test_a_layer_takes_four_launches_beside_its_products_and_attention(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    replace_layers(model)
    kernels = InOperators()

    check_decoder(model, PlainDecoder(model, lambda network, rows: by_kernels(network, rows, lambda _: kernels)))

    layer = ["turn", "add_norm", "swiglu", "add_norm"]
    assert kernels.launched == layer * 3


def test_the_training_pass_takes_them_and_recomputed_activations_allow_it(monkeypatch):
    gate, up = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    found = []
    for kernels in (None, InOperators()):
        monkeypatch.setattr(mlp, "find_layer_kernels", lambda _, kernels=kernels: kernels)
        inputs = [part.clone().requires_grad_() for part in (gate, up)]
        out = checkpoint(mlp.swiglu, *inputs, use_reentrant=False)
        out.square().sum().backward()
        found.append([out.detach(), *(part.grad for part in inputs)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert kernels.launched == ["swiglu"] * 2
