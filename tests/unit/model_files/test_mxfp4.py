"""Experts in MXFP4, as the hub has those of gpt-oss: read as transformers reads them, whole and by parts."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny_families import make_family_model
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rallypoint.errors import ModelError
from rallypoint.model_files import load_policy, save_model
from rallypoint.model_files.mxfp4 import unpacked
from rallypoint.models.shard import gather

SIZES = {"hidden_size": 64, "intermediate_size": 32}


@pytest.fixture
def folder(tmp_path):
    """A model whose experts are in MXFP4, and beside it the same numbers as transformers converts them."""
    path = Path(make_family_model(tmp_path / "packed", "gpt_oss", **SIZES))
    weights, generator = safetensors.torch.load_file(path / "model.safetensors"), torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        num, inputs, outputs = weights[name].shape
        blocks = torch.randint(256, (num, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del weights[name]
    safetensors.torch.save_file(weights, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def expected_of(folder):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in weights if name.endswith("_blocks")]:
        blocks, scales = weights.pop(f"{name}_blocks"), weights.pop(f"{name}_scales")
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return weights


def test_all_numbers_of_four_bits_and_scales_are_those_of_transformers():
    scales = torch.arange(255, dtype=torch.uint8).repeat(16, 1).unsqueeze(0)
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 1, 16).repeat(1, 255, 1).unsqueeze(0)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(unpacked(blocks, scales), wanted)
    assert unpacked(blocks[0, 0, :1], torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_read_as_transformers_converts_it_and_saved_in_plain_numbers(folder, tmp_path, dtype):
    expected = expected_of(folder)
    shard = load_policy(str(folder), dtype=dtype)
    found = dict(shard.model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight.to(found[name].dtype)) for name, weight in expected.items())
    save_model(shard, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == dtype
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=getattr(torch, dtype))
    assert all(torch.equal(again.get_parameter(name), weight) for name, weight in found.items())


@pytest.mark.parametrize("sizes", [{"ep": 2}, {"tp": 2}, {"dp_shard": 2}], ids=str)
def test_ranks_read_their_parts(on_mesh, folder, sizes):
    def held(mesh):
        shard = load_policy(str(folder), dtype="float32", mesh=mesh)
        return dict(gather(shard.tensors(), shard.parts, mesh))

    found, expected = on_mesh(held, **sizes)[0], expected_of(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_tensors_of_another_shape_or_type_are_refused(folder):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    safetensors.torch.save_file(weights | {name: weights[name][:, :-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"down_proj_scales is \[8, 63, 1\] of torch\.uint8, expected \[8, 64, 1\]"):
        load_policy(str(folder), dtype="float32")
    safetensors.torch.save_file(weights | {name: weights[name].float()}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"of torch\.float32, expected"):
        load_policy(str(folder), dtype="float32")
