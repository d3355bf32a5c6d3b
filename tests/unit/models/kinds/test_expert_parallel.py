"""Experts dealt over ranks: each rank's tokens get what one rank computes, and each expert its whole gradient."""

import itertools

import pytest
import torch
from grids import thinned
from parity_rank import Case, Models, make_batch, run
from tiny_families import FAMILY_CONFIGS, MIXTURE, SIZES, make_family_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rallypoint.cluster.mesh import Mesh
from rallypoint.config import LoRAConfig, OptimizerConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.errors import ModelError
from rallypoint.families import MIXTURES
from rallypoint.model_files import load_policy
from rallypoint.models import Part
from rallypoint.models.kinds.expert_parallel import deal_experts
from rallypoint.models.shard import gather
from rallypoint.models.tensor_parallel import TensorParts
from rallypoint.parallel import DeviceMesh
from rallypoint.parallel.mesh import AXES
from rallypoint.roles.dealing import deal
from rallypoint.types import Metrics


@pytest.fixture(params=["gpt_oss", "qwen3_moe"])
def folder(request, tmp_path):
    return make_family_model(tmp_path / request.param, request.param)


MESHES = {
    "ep4": {"ep": 4},
    "dp2 x ep2 x sp2": {"dp_replicate": 2, "ep": 2, "sp": 2},
    "ep2 x sp2 x tp2": {"ep": 2, "sp": 2, "tp": 2},
}


@pytest.mark.parametrize(
    ("name", "family"),
    thinned(itertools.product(MESHES, MIXTURES), *zip(itertools.cycle(MESHES), MIXTURES, strict=False)),
)
def test_ranks_that_share_experts_take_the_steps_of_one(on_mesh, tmp_path, name, family):
    """Axes that share experts know nothing of the rest of a layer: always each family with one mesh of three."""
    sizes = MESHES[name]
    make_family_model(tmp_path / family, family)
    case = Case("ep", "packed", "many", "actor", "float64", family)
    batch, grid = make_batch("actor"), Mesh({axis: sizes.get(axis, 1) for axis in AXES})
    parts, parent = deal(batch, grid.num_parts, 0.01)[0], str(tmp_path)

    def steps(mesh, part):
        return run(case, Models(parent, mesh), part, batch.num_loss_tokens)

    found, expected = (
        on_mesh(lambda mesh: steps(mesh, parts[grid.part(mesh.rank)]), **sizes),
        steps(DeviceMesh.solo(), batch),
    )
    whole = found[0] | {"loss": torch.stack([found[rank]["loss"] for rank in grid.leaders]).sum()}
    for name, wanted in expected.items():
        if not name.startswith("held/"):
            bound = 1e-10 if family == "qwen3_5_moe_text" else 1e-12  # rounds more
            assert (whole[name] - wanted).abs().max() <= bound * wanted.abs().max(), name


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_a_rank_without_rows_takes_part_and_adds_nothing(on_mesh, folder, activations):
    batch = make_batch("actor")

    def gradients(mesh):
        shard = load_policy(folder, dtype="float64", mesh=mesh)
        engine = TrainingEngine(
            shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=48, activations=activations
        )
        part = batch if mesh.rank == 0 else batch.rows([])
        engine.accumulate(
            part,
            lambda rows, at: (policy_outputs(shard, rows, at, 1.0).logprobs.sum(), Metrics()),
            denominator=100.0,
        )
        found = {name: weight.grad for name, weight in shard.model.named_parameters()}
        logprobs = engine.evaluate(part, lambda rows, at: policy_outputs(shard, rows, at, 1.0).logprobs)
        return dict(gather(found, shard.parts, mesh)), logprobs.values

    (expected, logprobs), ((found, same), (_, none)) = gradients(DeviceMesh.solo()), on_mesh(gradients, ep=2)
    torch.testing.assert_close(same, logprobs, rtol=1e-12, atol=1e-12)
    assert len(none) == 0
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-10, atol=1e-12)


def test_checkpoints_of_either_mesh_load_in_the_other(on_mesh, folder):
    whole = dict(load_policy(folder, dtype="float32").model.named_parameters())

    def held(mesh):
        shard = load_policy(folder, dtype="float32", mesh=mesh)
        assert shard.model.base_model.layers[0].mlp.experts.gate_up_proj.shape[0] == 8 // 2 // mesh.tp.size
        return dict(gather(shard.tensors(), shard.parts, mesh))

    for sizes in ({"ep": 2}, {"ep": 2, "tp": 2}):
        gathered, *others = on_mesh(held, **sizes)
        assert not any(others)
        assert gathered.keys() == whole.keys()
        assert all(torch.equal(gathered[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen3",
            {},
            rf"Qwen3ForCausalLM has no experts to deal over ranks \(ep > 1\); models of type {', '.join(MIXTURES)} ",
        ),
        ("qwen3_moe", {"num_experts": 9}, "Qwen3MoeForCausalLM: ep=2 does not divide 9 experts; choose 1, 3 or 9"),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_what_can(on_mesh, name, changes, message):
    config = FAMILY_CONFIGS[name](**SIZES)
    for key, value in changes.items():
        setattr(config, key, value)

    def on_rank(mesh):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        with pytest.raises(ModelError, match=message):
            deal_experts(model, mesh.ep, TensorParts.whole(model))

    on_mesh(on_rank, ep=2)


def test_a_dense_layer_of_a_mixture_stays_whole_and_adapters_fit_beside_dealt_experts(on_mesh, tmp_path):
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **MIXTURE, mlp_only_layers=[1]))
    model.save_pretrained(tmp_path)

    def on_rank(mesh):
        shard = load_policy(str(tmp_path), dtype="float32", mesh=mesh, lora=LoRAConfig(rank=2))
        return {name: part.is_whole for name, part in shard.parts.items()}, set(shard.trained())

    for parts, trained in on_mesh(on_rank, ep=2):
        assert {name for name, is_whole in parts.items() if not is_whole} == {
            f"model.layers.0.mlp.experts.{kind}_proj" for kind in ("gate_up", "down")
        }
        assert all(".lora_" in name for name in trained)


def test_adapters_of_latent_attention_have_the_gradients_of_one_rank(on_mesh, tmp_path):
    folder, batch = make_family_model(tmp_path / "deepseek_v3", "deepseek_v3"), make_batch("actor")

    def gradients(mesh):
        shard = load_policy(folder, dtype="float64", mesh=mesh, lora=LoRAConfig(rank=2))
        for number, (name, weight) in enumerate(sorted(shard.trained().items())):
            part, generator = shard.parts[name], torch.Generator().manual_seed(number)
            whole = 0.1 * torch.randn(part.shape, generator=generator, dtype=torch.float64)  # of one, gradients cancel
            weight.copy_(whole[part.within(Part.whole(part.shape))])
        engine = TrainingEngine(shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=48)
        engine.accumulate(
            batch, lambda rows, at: (policy_outputs(shard, rows, at, 1.0).logprobs.sum(), Metrics()), denominator=100.0
        )
        trained = {name: weight for name, weight in engine.weights.items() if weight.requires_grad}
        engine._sharding.reduce_and_clip(lambda: [trained], 1e9)
        return dict(gather({name: weight.grad for name, weight in trained.items()}, shard.parts, mesh))

    expected, (found, _) = gradients(DeviceMesh.solo()), on_mesh(gradients, tp=2)
    assert {name for name in expected if "kv_a_proj_with_mqa" in name or "q_b_proj" in name}
    for name, wanted in expected.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)
