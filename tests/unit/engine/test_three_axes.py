"""Three axes of a mesh at a time: eight ranks, as threads, take the steps of one; pairs are in tests/distributed."""

import pytest
import torch
from parity_rank import Case, Models, make_batch, run
from tiny_families import make_family_model

from rallypoint.cluster.mesh import Mesh
from rallypoint.parallel import DeviceMesh
from rallypoint.parallel.mesh import AXES
from rallypoint.roles.dealing import deal

SIZES = {"dp_replicate": 2, "sp": 2, "tp": 2}


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2"])
def test_eight_ranks_that_share_rows_tokens_and_matrices_take_the_steps_of_one(on_mesh, tmp_path, family):
    """A mixture routes tokens that two ranks have to experts that two ranks have; Gemma 2 caps what both share."""
    make_family_model(tmp_path / family, family)
    case = Case("dp2 x sp2 x tp2", "packed", "many", "actor", "float64", family)
    batch, grid = make_batch("actor"), Mesh({axis: SIZES.get(axis, 1) for axis in AXES})
    parts = deal(batch, grid.num_parts, 0.01)[0]

    def steps(mesh, part):
        return run(case, Models(str(tmp_path), mesh), part, batch.num_loss_tokens)

    found = on_mesh(lambda mesh: steps(mesh, parts[grid.part(mesh.rank)]), **SIZES)
    expected = steps(DeviceMesh.solo(), batch)
    whole = found[0] | {"loss": torch.stack([found[rank]["loss"] for rank in grid.leaders]).sum()}
    for name, wanted in expected.items():
        if not name.startswith("held/"):
            assert (whole[name] - wanted).abs().max() <= 1e-12 * wanted.abs().max(), name
    for rank, got in enumerate(found):
        copied = next(other for other in range(8) if grid.coordinates(other)["tp"] == grid.coordinates(rank)["tp"])
        copies = [name for name in got if name.startswith("held/")] + ["grad_norm"]
        assert all(torch.equal(got[name], found[copied][name]) for name in copies), f"rank {rank} is no copy"
