"""Passes that choose the experts that rollouts were sampled with: same numbers, same gradients, on every mesh."""

import dataclasses
import itertools
import re

import pytest
import torch
from grids import thinned
from parity_rank import make_batch
from tiny_families import make_family_model

from rallypoint.cluster.mesh import Mesh
from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine, policy_outputs, trained_positions
from rallypoint.errors import ModelError
from rallypoint.generation import NativeEngine, SamplingParams, generate
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard
from rallypoint.models.kinds.experts import routers_of
from rallypoint.models.shard import gather
from rallypoint.parallel import DeviceMesh
from rallypoint.parallel.mesh import AXES
from rallypoint.roles.dealing import deal
from rallypoint.types import Metrics, PerToken, Prompts, offsets_from_lengths

PARAMS = SamplingParams(max_new_tokens=24, seed=3)


FAMILIES = ["gpt_oss", "qwen3_moe", "glm4_moe"]


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    return make_family_model(tmp_path / request.param, request.param)


def sampled(model, **options):
    """Return rollouts of a model that records its experts."""
    prompts = Prompts(
        offsets=offsets_from_lengths(torch.tensor([5, 9, 2, 40])),
        tokens=torch.arange(56) % 19 + 1,
        prompt_index=torch.arange(4),
    )
    engine = NativeEngine(model, records_experts=True, **options)
    return generate(engine, prompts, PARAMS, version=0, group_size=4)


def logprobs_of(model, batch):
    with torch.no_grad():
        return policy_outputs(ModelShard.whole(model), batch, trained_positions(batch), 1.0).logprobs


def gap(model, batch):
    """Return how far the logprobs of trainer and sampler are apart, at most and on average."""
    difference = (logprobs_of(model, batch) - batch.rollout_logprobs[batch.loss_mask]).abs()
    return float(difference.max()), float(difference.mean())


def plant_ties(model):
    """Make experts 2n + 1 as likely as 2n up to rounding, while what they do stays different."""
    with torch.no_grad():
        for router in routers_of(model):
            for tensor in (*router.parameters(), *router.buffers()):
                tensor[1::2] = tensor[::2]


def disturb(model, size):
    """Change the routers of a model by as much as rounding does."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in routers_of(model):
            router.weight *= 1 + size * torch.randn(router.weight.shape, generator=generator)


def test_the_trainer_says_what_the_sampler_said_although_rounding_would_choose_other_experts(folder):
    model = load_policy(folder, dtype="float32").model
    plant_ties(model)
    batch = sampled(model)
    assert gap(model, batch)[0] < 1e-4
    disturb(model, 1e-7)
    largest, _ = gap(model, dataclasses.replace(batch, experts=None))
    assert largest > 0.1
    assert gap(model, batch)[0] < 1e-4


def test_in_bfloat16_the_gap_shrinks(folder):
    model = load_policy(folder, dtype="bfloat16").model
    batch = sampled(model)
    with_replay, without = gap(model, batch), gap(model, dataclasses.replace(batch, experts=None))
    assert with_replay[1] < without[1]


def test_the_experts_that_the_trainer_would_choose_change_no_bit(folder):
    model = load_policy(folder, dtype="float32").model
    batch = sampled(model)
    without = dataclasses.replace(batch, experts=None)
    assert torch.equal(logprobs_of(model, batch), logprobs_of(model, without))
    # Zeros leave it to the router, and the pass before leaves nothing behind.
    nothing = dataclasses.replace(batch, experts=torch.zeros_like(batch.experts))
    assert torch.equal(logprobs_of(model, nothing), logprobs_of(model, without))


def replayed_batch(num_routers):
    """Return what an actor learns from, of which any experts were recorded for most tokens."""
    batch, generator = make_batch("actor"), torch.Generator().manual_seed(2)
    chosen = torch.rand(batch.num_tokens, num_routers, 8, generator=generator).topk(3).indices + 1
    chosen[::7] = 0
    return dataclasses.replace(batch, experts=chosen.flatten(1).to(torch.uint8))


def gradients(folder, mesh, part, activations="checkpoint"):
    """Return gradients, and the logprobs of a part."""
    shard = load_policy(folder, dtype="float64", mesh=mesh)
    engine = TrainingEngine(shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=48, activations=activations)
    engine.accumulate(
        part, lambda rows, at: (policy_outputs(shard, rows, at, 1.0).logprobs.sum(), Metrics()), denominator=100.0
    )
    # As the optimizer sees them.
    engine._sharding.reduce_and_clip(lambda: [engine.weights], 1e9)
    found = {name: weight.grad for name, weight in engine.weights.items()}
    logprobs = engine.evaluate(part, lambda rows, at: policy_outputs(shard, rows, at, 1.0).logprobs)
    return dict(gather(found, shard.parts, mesh)), logprobs.values


MESHES = {
    "ep2": {"ep": 2},
    "shard2": {"dp_shard": 2},
    "tp2": {"tp": 2},
    "sp2": {"sp": 2},
    "cp2": {"cp": 2},
    "ep2 x sp2": {"ep": 2, "sp": 2},
    "shard2 x tp2": {"dp_shard": 2, "tp": 2},
}


@pytest.mark.parametrize(
    ("folder", "name"),
    thinned(itertools.product(FAMILIES, MESHES), *zip(itertools.cycle(FAMILIES), MESHES, strict=False)),
    indirect=["folder"],
)
def test_every_mesh_chooses_the_recorded_experts(on_mesh, folder, name):
    """Routers take what was recorded wherever its tokens are: always each mesh with one family."""
    sizes = MESHES[name]
    num_routers = len(routers_of(load_policy(folder, dtype="float32").model))
    batch, grid = replayed_batch(num_routers), Mesh({axis: sizes.get(axis, 1) for axis in AXES})
    parts, place = deal(batch, grid.num_parts, 0.01)
    expected, logprobs = gradients(folder, DeviceMesh.solo(), batch, "keep")
    assert not torch.allclose(logprobs, gradients(folder, DeviceMesh.solo(), make_batch("actor"))[1])
    assert all(bool(grad.any()) for name, grad in expected.items() if re.search(r"(gate|router)\.weight", name))
    ranks = on_mesh(lambda mesh: gradients(folder, mesh, parts[grid.part(mesh.rank)]), **sizes)
    for name, wanted in expected.items():
        torch.testing.assert_close(ranks[0][0][name], wanted, rtol=1e-10, atol=1e-12)
    joined = PerToken.join(
        [PerToken(offsets=parts[grid.part(rank)].offsets, values=ranks[rank][1]) for rank in grid.leaders]
    )
    torch.testing.assert_close(joined.rows(place).values, logprobs, rtol=1e-6, atol=1e-6)


def test_experts_of_another_model_are_refused(folder):
    model = load_policy(folder, dtype="float32").model
    batch = sampled(model)
    with pytest.raises(
        ModelError, match=r"in 2 bytes, but this model has \d routers that choose 3 experts each, which"
    ):
        logprobs_of(model, dataclasses.replace(batch, experts=batch.experts[:, :2]))
