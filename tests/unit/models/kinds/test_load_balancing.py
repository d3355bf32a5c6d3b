"""The loss for routers beside transformers' own, in value and gradient, on every mesh and in every cut.

transformers has none for routers with a bias: there it is the formula.
"""

import itertools
import math
import re

import pytest
import torch
from grids import thinned
from parity_rank import make_batch
from tiny_families import make_family_model
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rallypoint.cluster.mesh import Mesh
from rallypoint.config import OptimizerConfig
from rallypoint.engine import TokenStream, TrainingEngine, choosing_tokens, policy_outputs, trained_positions
from rallypoint.errors import ModelError
from rallypoint.model_files import load_policy
from rallypoint.models import BiasUpdate, LoadBalancing, PackedRows
from rallypoint.models.kinds.experts import routers_of
from rallypoint.models.shard import gather
from rallypoint.parallel import DeviceMesh
from rallypoint.parallel.mesh import AXES
from rallypoint.roles.dealing import deal
from rallypoint.types import Metrics

COEF = 0.25


FAMILIES = ("gpt_oss", "qwen3_moe", "glm4_moe")


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    return make_family_model(tmp_path / request.param, request.param)


def by_formula(scores, chosen):
    """Return the loss of a layer, whose shares are sigmoids divided by their sum."""
    shares = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    sent = torch.bincount(chosen.flatten(), minlength=8) / len(chosen)
    return 8 * (sent * shares.mean(0)).sum()


def by_transformers(folder, batch):
    """Return the loss of every layer for rows computed alone, their mean, and its gradients."""
    model = load_policy(folder, dtype="float64").model
    offsets, tokens, _ = choosing_tokens(batch, trained_positions(batch))
    rows, routed = PackedRows(offsets, model.device), []
    hooks = [router.register_forward_hook(lambda *passed: routed.append(passed[2])) for router in routers_of(model)]
    model.base_model(input_ids=tokens.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows)
    del hooks
    is_biased = folder.endswith("glm4_moe")
    loss = torch.stack(
        [
            by_formula(scores, chosen) if is_biased else load_balancing_loss_func((scores,), 8, 3)
            for scores, _, chosen in routed
        ]
    ).mean()
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
    engine._sharding.reduce_and_clip(lambda: [engine.weights], 1e9)
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


MESHES = {
    "ep2": {"ep": 2},
    "shard2": {"dp_shard": 2},
    "dp2": {"dp_replicate": 2},
    "tp2": {"tp": 2},
    "sp2": {"sp": 2},
    "ep2 x cp2": {"ep": 2, "cp": 2},
    "ep2 x tp2": {"ep": 2, "tp": 2},
}


@pytest.mark.parametrize(
    ("folder", "name"),
    thinned(itertools.product(FAMILIES, MESHES), *zip(itertools.cycle(FAMILIES), MESHES, strict=False)),
    indirect=["folder"],
)
def test_ranks_compute_that_of_one_process(on_mesh, folder, name):
    """Ranks add up what routers count, whatever family counts: always each mesh with one of three."""
    sizes, batch = MESHES[name], make_batch("actor")
    grid = Mesh({axis: sizes.get(axis, 1) for axis in AXES})
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


RATE = 0.01


def biases_after(folder, mesh, part, max_tokens=48, activations="checkpoint", num_steps=2):
    """Return the biases of all routers after optimizer steps that change no weight."""
    shard = load_policy(folder, dtype="float64", mesh=mesh)
    engine = TrainingEngine(
        shard, optimizer=OptimizerConfig(lr=1e-30), max_tokens_per_micro_batch=max_tokens, activations=activations
    )
    update = BiasUpdate(shard.model.base_model, RATE, mesh)

    def loss(rows, at):
        return policy_outputs(shard, rows, at, 1.0).logprobs.sum(), Metrics()

    for step in range(1, num_steps + 1):
        with update.after():
            engine.train(part, loss, denominator=100.0, step=step, num_steps=num_steps)
        engine.evaluate(part, lambda rows, at: loss(rows, at)[0].expand(len(at)))  # is not counted
    return {name: each.clone() for name, each in shard.trained().items() if name.endswith("correction_bias")}


def biases_by_formula(folder, batch, num_steps=2):
    """Return the same from the choices for rows computed alone, token by token."""
    model = load_policy(folder, dtype="float64").model
    offsets, tokens, _ = choosing_tokens(batch, trained_positions(batch))
    rows, routed = PackedRows(offsets, model.device), []
    for router in routers_of(model):
        router.register_forward_hook(lambda *passed: routed.append(passed[2][2]))
    for _ in range(num_steps):
        routed.clear()
        with torch.no_grad():
            model.base_model(input_ids=tokens.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows)
        for router, chosen in zip(routers_of(model), routed, strict=True):
            counts = [int((chosen == expert).sum()) for expert in range(8)]
            for expert, count in enumerate(counts):
                if count != sum(counts) / 8:
                    router.e_score_correction_bias[expert] += RATE if count < sum(counts) / 8 else -RATE
    return {name: each for name, each in model.named_buffers() if name.endswith("correction_bias")}


@pytest.fixture
def biased(tmp_path):
    return make_family_model(tmp_path / "glm4_moe", "glm4_moe")


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("max_tokens", [48, 10_000])
def test_biases_follow_the_loads_of_a_step_whatever_the_cut(biased, max_tokens, activations):
    batch = make_batch("actor")
    found, expected = (
        biases_after(biased, DeviceMesh.solo(), batch, max_tokens, activations),
        biases_by_formula(biased, batch),
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], wanted) for name, wanted in expected.items())
    before = load_policy(biased, dtype="float64").tensors()
    assert all(bool((wanted != before[name]).any()) for name, wanted in expected.items())


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_biases_have_the_same_bits_on_every_mesh(on_mesh, biased, sizes):
    batch, grid = make_batch("actor"), Mesh({axis: sizes.get(axis, 1) for axis in AXES})
    parts = deal(batch, grid.num_parts, 0.01)[0]
    expected = biases_by_formula(biased, batch)
    for found in on_mesh(lambda mesh: biases_after(biased, mesh, parts[grid.part(mesh.rank)]), **sizes):
        assert all(torch.equal(found[name], wanted) for name, wanted in expected.items())


def test_a_step_that_fails_moves_no_bias(biased):
    shard = load_policy(biased, dtype="float64")
    before = {name: each.clone() for name, each in shard.tensors().items()}
    with pytest.raises(ZeroDivisionError), BiasUpdate(shard.model.base_model, RATE, shard.mesh).after():
        math.sqrt(1 // 0)
    assert all(torch.equal(each, before[name]) for name, each in shard.tensors().items())
    assert all(router.count is None for router in routers_of(shard.model))


def test_routers_without_a_bias_are_refused(tmp_path):
    model = load_policy(make_family_model(tmp_path / "qwen3_moe", "qwen3_moe"), dtype="float32").model
    with pytest.raises(ModelError, match=r"no routers with a bias; models of type .*glm4_moe have\. Leave out actor\."):
        BiasUpdate(model.base_model, RATE, DeviceMesh.solo())
