"""The loss for routers beside transformers' own, in value and gradient, on every mesh and in every cut."""

import re

import pytest
import torch
from parity_rank import make_batch
from tiny_families import make_family_model
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rallypoint.cluster.mesh import Mesh
from rallypoint.config import OptimizerConfig
from rallypoint.engine import TokenStream, TrainingEngine, choosing_tokens, policy_outputs, trained_positions
from rallypoint.errors import ModelError
from rallypoint.model_files import load_policy
from rallypoint.models import LoadBalancing, PackedRows, gather
from rallypoint.models.kinds.experts import routers_of
from rallypoint.parallel import DeviceMesh
from rallypoint.parallel.mesh import AXES
from rallypoint.roles.dealing import deal
from rallypoint.types import Metrics

COEF = 0.25


@pytest.fixture(params=["gpt_oss", "qwen3_moe"])
def folder(request, tmp_path):
    return make_family_model(tmp_path / request.param, request.param)


def by_transformers(folder, batch):
    """Return transformers' loss of every layer for rows computed alone, their mean, and its gradients."""
    model = load_policy(folder, dtype="float64").model
    offsets, tokens, _ = choosing_tokens(batch, trained_positions(batch))
    rows, scores = PackedRows(offsets, model.device), []
    hooks = [router.register_forward_hook(lambda *passed: scores.append(passed[2][0])) for router in routers_of(model)]
    model.base_model(input_ids=tokens.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows)
    del hooks
    loss = torch.stack([load_balancing_loss_func((of_layer,), 8, 3) for of_layer in scores]).mean()
    (COEF * loss).backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return float(loss.detach()), found


def by_engine(folder, mesh, part, max_tokens=48, activations="checkpoint"):
    """Return the loss that ranks compute, and its gradients alone."""
    shard = load_policy(folder, dtype="float64", mesh=mesh)
    engine = TrainingEngine(
        shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=max_tokens, activations=activations
    )

    def route(rows, at):
        return TokenStream(shard, rows, at).states().new_zeros(len(at))

    def nothing(rows, at):
        return 0.0 * policy_outputs(shard, rows, at, 1.0).logprobs.sum(), Metrics()

    balancing = LoadBalancing(shard.model.base_model, COEF, mesh)
    with balancing.over(lambda: engine.evaluate(part, route)) as loss:
        engine.accumulate(part, nothing, denominator=1.0)
    engine._sharding.reduce_and_clip(engine.weights, 1e9)
    found = {name: weight.grad for name, weight in engine.weights.items()}
    return float(loss), dict(gather(found, shard.parts, mesh))


def check(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, wanted in expected[1].items():
        torch.testing.assert_close(found[1][name], wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("max_tokens", [48, 10_000])
def test_it_is_that_of_transformers_whatever_the_cut(folder, max_tokens):
    batch = make_batch("actor")
    expected = by_transformers(folder, batch)
    assert any(bool(grad.any()) for name, grad in expected[1].items() if re.search(r"(gate|router)\.weight", name))
    for activations in ("keep", "checkpoint"):
        check(by_engine(folder, DeviceMesh.solo(), batch, max_tokens, activations), expected)


MESHES = ({"ep": 2}, {"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}, {"sp": 2}, {"ep": 2, "tp": 2})


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_compute_that_of_one_process(on_mesh, folder, sizes):
    batch, grid = make_batch("actor"), Mesh({axis: sizes.get(axis, 1) for axis in AXES})
    parts = deal(batch, grid.num_parts, 0.01)[0]
    ranks = on_mesh(lambda mesh: by_engine(folder, mesh, parts[grid.part(mesh.rank)]), **sizes)
    check(ranks[0], by_transformers(folder, batch))
    assert len({loss for loss, _ in ranks}) == 1


def test_outside_of_an_optimizer_step_routers_are_as_they_were(folder):
    shard = load_policy(folder, dtype="float64")
    balancing = LoadBalancing(shard.model.base_model, COEF, shard.mesh)
    with pytest.raises(ZeroDivisionError), balancing.over(lambda: 1 // 0):
        pass
    assert all(router.balance is None for router in routers_of(shard.model))
    batch = make_batch("actor")
    policy_outputs(shard, batch, trained_positions(batch), 1.0)


def test_a_model_without_experts_is_refused(tmp_path):
    model = load_policy(make_family_model(tmp_path / "qwen3", "qwen3"), dtype="float32").model
    with pytest.raises(ModelError, match=r"no experts whose loads could be balanced; leave out actor\.router_aux"):
        LoadBalancing(model.base_model, COEF, DeviceMesh.solo())
