"""Weights that are not those of config.json: all that is missing, superfluous or of another shape, with its names."""

import pytest
import torch
from tiny_families import make_family_model
from tiny_models import edit_config, edit_weights

from rallypoint.errors import ModelError
from rallypoint.model_files import load_critic, load_policy


def test_a_missing_tensor_is_named(folder):
    edit_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ModelError, match=r"do not fit config\.json, .*:\n  - missing model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load_policy(str(folder), dtype="float32")
    with pytest.raises(ModelError, match="missing"):
        load_critic(str(folder), dtype="float32")


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    def shorten(weights):
        weights["model.norm.weight"] = torch.ones(8)

    edit_weights(folder, shorten)
    with pytest.raises(ModelError, match=r"wrong shape .*model\.norm\.weight.*8.*16"):
        load_policy(str(folder), dtype="float32")


def said_of(folder):
    """What is wrong with the weights, line by line."""
    with pytest.raises(ModelError) as raised:
        load_policy(str(folder), dtype="float32")
    first, *lines, last = str(raised.value).splitlines()
    assert first.startswith(f"{folder}: the weights do not fit config.json, which describes a LlamaForCausalLM:")
    assert last == "Give the config.json and the safetensors files that were saved together."
    return [line.removeprefix("  - ") for line in lines]


def test_many_missing_tensors_are_all_listed_once_for_all_layers(folder):
    edit_config(folder, num_hidden_layers=5)
    edit_weights(folder, lambda weights: weights.pop("model.layers.0.mlp.up_proj.weight"))
    said = said_of(folder)
    assert len(said) == 9
    assert "missing model.layers.{0,2..4}.mlp.up_proj.weight" in said
    assert "missing model.layers.{2..4}.input_layernorm.weight" in said


def test_names_of_another_kind_of_model_are_listed_beside_those_that_are_expected(folder):
    def rename(weights):
        for name in list(weights):
            weights[name.replace("layers", "blocks").replace("proj", "projection")] = weights.pop(name)

    edit_weights(folder, rename)
    said = said_of(folder)
    assert len(said) == 18
    assert (
        "missing model.layers.{0..1}.mlp.up_proj.weight; the nearest name in the files is "
        "model.blocks.{0..1}.mlp.up_projection.weight"
    ) in said
    assert (
        "not known to the model: model.blocks.{0..1}.mlp.up_projection.weight in model.safetensors; the nearest name "
        "that is missing is model.layers.{0..1}.mlp.up_proj.weight"
    ) in said


def test_superfluous_tensors_are_listed_beside_the_nearest_names_of_the_model(folder):
    extra = ("model.layers.0.mlp.up_proj.weigth", *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in (7, 8, 9)))
    edit_weights(folder, lambda weights: weights.update({name: torch.ones(2) for name in extra}))
    nearest = "; the nearest name of the model is model.layers.{0..1}.mlp.up_proj.weight"
    assert said_of(folder) == [
        f"not known to the model: model.layers.0.mlp.up_proj.weigth in model.safetensors{nearest}",
        f"not known to the model: model.layers.{{7..9}}.mlp.up_proj.weight in model.safetensors{nearest}",
    ]


def test_a_wrong_shape_of_all_layers_is_said_once(folder):
    edit_config(folder, num_key_value_heads=4)
    assert said_of(folder) == [
        f"wrong shape model.layers.{{0..1}}.self_attn.{name}_proj.weight: [8, 16] of torch.float32 in "
        "model.safetensors, expected [16, 16]"
        for name in "kv"
    ]


def test_a_tensor_under_another_name_is_named_beside_the_nearest(folder):
    def rename(weights):
        weights["model.layers.1.mlp.up_projection.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")

    edit_weights(folder, rename)
    with pytest.raises(ModelError) as raised:
        load_policy(str(folder), dtype="float32")
    assert (
        "missing model.layers.1.mlp.up_proj.weight; the nearest name in the files is "
        "model.layers.1.mlp.up_projection.weight\n"
    ) in str(raised.value)
    assert "not known to the model: model.layers.1.mlp.up_projection.weight in model.safetensors" in str(raised.value)


def test_quantized_weights_are_refused(folder):
    def quantize(weights):
        weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)

    edit_weights(folder, quantize)
    with pytest.raises(ModelError, match=r"wrong type model\.norm\.weight: \[16\] of torch\.int8.*may be quantized"):
        load_policy(str(folder), dtype="float32")
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match=r"its weights are quantized \(gptq\)"):
        load_policy(str(folder), dtype="float32")


@pytest.mark.parametrize(("family", "layer"), [("glm4_moe", 46), ("deepseek_v3", 61)])
def test_a_layer_that_predicts_a_second_token_ahead_is_left_out(tmp_path, family, layer):
    folder = make_family_model(tmp_path / family, family)
    before = load_policy(folder, dtype="float32").tensors()
    edit_weights(
        tmp_path / family, lambda all_: all_.update({f"model.layers.{layer}.eh_proj.weight": torch.ones(2, 4)})
    )
    after = load_policy(folder, dtype="float32").tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
