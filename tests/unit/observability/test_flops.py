"""Operations against the formula of the textbooks, and peaks."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_families import make_family_model
from tiny_models import make_tiny_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rallypoint.config import LoRAConfig
from rallypoint.model_files import load_policy
from rallypoint.models import adapt_alike
from rallypoint.observability.flops import ModelFlops, PassFlops, device_peak, flops_of, known_peak
from rallypoint.parallel import DeviceMesh

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
BY_HAND = PassFlops(
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
    assert flops_of(model).forward == BY_HAND


def test_a_critic_has_one_output_for_a_token():
    config = Qwen3Config(**SIZES)
    config.num_labels = 1
    assert flops_of(Qwen3ForTokenClassification(config)).forward == PassFlops(
        BY_HAND.per_token, BY_HAND.per_pair, per_output=2 * HIDDEN
    )


def test_of_a_mixture_the_router_and_the_chosen_experts_are_counted():
    config = Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
    per_layer = PROJECTIONS + HIDDEN * 8 + 3 * 3 * HIDDEN * 24
    expected = PassFlops(2 * LAYERS * per_layer, BY_HAND.per_pair, BY_HAND.per_output)
    assert flops_of(Qwen3MoeForCausalLM(config)).forward == expected


def test_of_latent_attention_and_shared_experts_all_products_are_counted():
    latents = {"q_lora_rank": 10, "kv_lora_rank": 6, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2}
    sizes = SIZES | {"num_key_value_heads": HEADS, "head_dim": 4, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(**sizes, **latents, **experts, first_k_dense_replace=1)
    attention = HIDDEN * 10 + 10 * HEADS * 10 + HIDDEN * 10 + 6 * HEADS * 11 + HEADS * 5 * HIDDEN
    sparse = HIDDEN * 8 + 3 * (3 + 2) * HIDDEN * 24
    per_token = 2 * (LAYERS * attention + 3 * HIDDEN * INTERMEDIATE + (LAYERS - 1) * sparse)
    expected = PassFlops(per_token, 2 * LAYERS * HEADS * (10 + 5), BY_HAND.per_output)
    assert flops_of(DeepseekV3ForCausalLM(config)).forward == expected


def test_of_linear_attention_the_projections_and_three_products_with_a_state_are_counted():
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 6}
    config = Qwen3_5TextConfig(**SIZES, **heads, full_attention_interval=2)
    linear = HIDDEN * (2 * 2 * 8 + 4 * 6) + 2 * HIDDEN * 4 * 6 + 2 * HIDDEN * 4 + 3 * 4 * 8 * 6
    gated = PROJECTIONS + HIDDEN * HEADS * HEAD_DIM
    per_token = 2 * (linear + gated + LAYERS * 3 * HIDDEN * INTERMEDIATE)
    expected = PassFlops(per_token, BY_HAND.per_pair // 2, BY_HAND.per_output)
    assert flops_of(Qwen3_5ForCausalLM(config)).forward == expected


def test_rows_add_up_and_do_not_see_each_other():
    flops = PassFlops(per_token=10, per_pair=2, per_output=100)
    assert flops.of([3, 4], num_outputs=2) == 10 * 7 + 2 * (9 + 16) + 100 * 2
    assert flops.of([], num_outputs=0) == 0


def test_what_another_row_has_computed_is_not_counted_again_but_looked_at():
    flops = PassFlops(per_token=10, per_pair=2, per_output=100)
    assert flops.of([3, 4], num_outputs=2, computed=[3, 1]) == 10 * 4 + 2 * (9 + 4) + 100 * 2


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


@pytest.fixture
def adapted_folder(tmp_path) -> str:
    return make_tiny_model(
        tmp_path,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=INTERMEDIATE,
        initializer_range=0.2,
        max_positions=16,
    )


def test_frozen_weights_have_no_gradient_and_adapters_have(adapted_folder: str):
    model, rank = load_policy(adapted_folder, dtype="float32", lora=LoRAConfig(rank=4)).model, 4
    heads, kv_heads = HEADS * (HIDDEN // HEADS), KV_HEADS * (HIDDEN // HEADS)
    into_attention = [(HIDDEN, heads), (HIDDEN, kv_heads), (HIDDEN, kv_heads)]
    rest = [(heads, HIDDEN), (HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
    products = [n * m for n, m in into_attention + rest]
    a, b = ([rank * sizes[side] for sizes in into_attention + rest] for side in (0, 1))
    counted = flops_of(model, functools.partial(adapt_alike, model))
    assert counted.forward.per_token == 2 * LAYERS * (sum(products) + sum(a) + sum(b))
    # Gradients of A and B, and of the inputs of all; nothing is trained before the first layer.
    inputs = LAYERS * (sum(products) + sum(a) + sum(b)) - sum(products[:3]) - sum(a[:3])
    assert counted.backward.per_token == 2 * (inputs + LAYERS * (sum(a) + sum(b)))
    assert counted.backward.per_pair == 2 * counted.forward.per_pair
    assert counted.backward.per_output == counted.forward.per_output


def test_adapters_of_experts_are_counted_for_the_experts_of_a_token(tmp_path):
    folder, rank = make_family_model(tmp_path / "qwen3_moe", "qwen3_moe"), 4
    counts = []
    for lora in (LoRAConfig(rank=rank), LoRAConfig(rank=rank, target_parameters=("experts.down_proj",))):
        model = load_policy(folder, dtype="float32", lora=lora).model
        counts.append(flops_of(model, functools.partial(adapt_alike, model)))
    plain, adapted = counts
    products = 2 * model.config.num_experts_per_tok * rank * (8 + 16)  # of both layers
    assert adapted.forward.per_token - plain.forward.per_token == 2 * products
    assert adapted.backward.per_token - plain.backward.per_token == 2 * 2 * products
    assert adapted.forward.per_pair == plain.forward.per_pair


def test_a_rank_counts_the_whole_model(adapted_folder: str, on_mesh: Callable[..., Any]):
    def count(mesh: DeviceMesh) -> ModelFlops:
        model = load_policy(adapted_folder, dtype="float32", mesh=mesh, lora=LoRAConfig(rank=4)).model
        return flops_of(model, functools.partial(adapt_alike, model))

    assert on_mesh(count, tp=2) == [count(DeviceMesh.solo())] * 2


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
