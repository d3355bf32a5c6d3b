"""Operations against the formula of the textbooks, and peaks."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rallypoint.observability.flops import ModelFlops, device_peak, flops_of, known_peak

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 32, 2, 4, 2, 16, 48, 100
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCABULARY,
}
PROJECTIONS = 2 * HIDDEN * HEADS * HEAD_DIM + 2 * HIDDEN * KV_HEADS * HEAD_DIM
BY_HAND = ModelFlops(
    per_token=2 * LAYERS * (PROJECTIONS + 3 * HIDDEN * INTERMEDIATE),
    per_pair=2 * LAYERS * 2 * HEADS * HEAD_DIM,
    per_output=2 * HIDDEN * VOCABULARY,
)


@pytest.mark.parametrize(
    "model",
    [
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        Qwen3ForCausalLM(Qwen3Config(**SIZES)),
        Gemma2ForCausalLM(Gemma2Config(**SIZES)),
        MistralForCausalLM(MistralConfig(**SIZES)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_the_operations_of_every_family_are_those_of_the_formula(model: PreTrainedModel):
    assert flops_of(model) == BY_HAND


def test_a_critic_has_one_output_for_a_token():
    config = Qwen3Config(**SIZES)
    config.num_labels = 1
    assert flops_of(Qwen3ForTokenClassification(config)) == ModelFlops(
        BY_HAND.per_token, BY_HAND.per_pair, per_output=2 * HIDDEN
    )


def test_of_a_mixture_the_router_and_the_chosen_experts_are_counted():
    config = Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
    per_layer = PROJECTIONS + HIDDEN * 8 + 3 * 3 * HIDDEN * 24
    expected = ModelFlops(2 * LAYERS * per_layer, BY_HAND.per_pair, BY_HAND.per_output)
    assert flops_of(Qwen3MoeForCausalLM(config)) == expected


def test_rows_add_up_and_do_not_see_each_other():
    flops = ModelFlops(per_token=10, per_pair=2, per_output=100)
    assert flops.forward([3, 4], num_outputs=2) == 10 * 7 + 2 * (9 + 16) + 100 * 2
    assert flops.forward([], num_outputs=0) == 0
    assert flops.attention_cost == 0.2


def test_forward_and_backward_are_what_torch_counts_for_them():
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    model.set_attn_implementation("eager")
    tokens = torch.zeros(1, 11, dtype=torch.int64, device="meta")
    positions = torch.arange(11, device="meta").unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        out = model(input_ids=tokens, position_ids=positions, attention_mask={"full_attention": None}, use_cache=False)
        out.logits.sum().backward()
    assert flops_of(model).forward_backward([11], num_outputs=11) == counter.get_total_flops()


def test_counting_leaves_the_model_as_it_was():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    implementation = model.config._attn_implementation
    flops_of(model)
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())


def test_peaks_of_gpus_are_known_by_the_names_that_cuda_gives_them():
    assert known_peak("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert known_peak("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert known_peak("NVIDIA H100 80GB HBM3", torch.float32) == 67e12
    assert known_peak("NVIDIA L40S", torch.bfloat16) == 362e12
    assert known_peak("NVIDIA L4", torch.bfloat16) == 121e12
    assert known_peak("NVIDIA A10", torch.bfloat16) is None
    assert known_peak("NVIDIA H100 80GB HBM3", torch.float64) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_of_a_processor_is_measured_once(dtype: torch.dtype):
    first = device_peak(torch.device("cpu"), dtype)
    assert first > 0
    assert device_peak(torch.device("cpu"), dtype) == first
