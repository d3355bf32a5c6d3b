"""The parity table: some steps are the same on every mesh, packed and padded, in one micro-batch and in many.

Four processes are started once; `parity_rank.py` is what they run: here two steps of some cells, of which
`test_the_whole_table` takes three of all. Run as a program, this file writes docs/parity.md:

    PYTHONPATH=tests/distributed:tests/shared python tests/distributed/test_parity.py
"""

import collections
import os
import tempfile
import textwrap
from pathlib import Path

import pytest
import safetensors.torch
import torch
from parity_rank import (
    ALL_MESHES,
    BASE,
    EXPERT_MESHES,
    FAMILIES,
    LOSSES,
    MESHES,
    OF_FAMILIES,
    OF_LOSSES,
    OTHER_MIXTURES,
    WHOLE,
    Case,
    cases,
)
from ranks import TOLERANCES, run_ranks
from tiny_families import make_family_model
from tiny_models import make_tiny_model

from rallypoint.cluster.mesh import Mesh
from rallypoint.parallel.mesh import AXES

pytestmark = pytest.mark.timeout(400)

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


def run_all(folder: Path, *, whole: bool) -> None:
    """Have four ranks take the steps of every case, and write what each of them got into a folder."""
    if whole:
        (folder / WHOLE).touch()
    make_tiny_model(folder / "models" / "qwen3", architecture="qwen3")
    for family in FAMILIES:
        make_family_model(folder / "models" / family, family)
    run_ranks("parity_rank", str(folder / "models"), folder, statuses=[0] * 4, limit_s=380)


def error_of(folder: Path, case: Case) -> dict[str, float]:
    """Return how far a case is from one process with packed rows in one micro-batch, relative to the largest number.

    Under "loss", "grad_norm" and "weights"; ranks that hold copies must hold the same bits.
    """
    base = Case(*BASE, case.role, case.dtype, case.family)
    expected = safetensors.torch.load_file(folder / f"{base}, 0.safetensors")
    grid = Mesh({axis: ALL_MESHES[case.mesh].get(axis, 1) for axis in AXES})
    ranks = [safetensors.torch.load_file(folder / f"{case}, {rank}.safetensors") for rank in range(grid.size)]
    # Each data-parallel part has a loss of its own; its cp, sp and tp peers know the same one.
    found = {**ranks[0], "loss": torch.stack([ranks[rank]["loss"] for rank in grid.leaders]).sum()}
    for rank, got in enumerate(ranks):
        held = [name for name in got if name.startswith("held/")]
        experts = [name for name in held if ".experts." in name]
        for axes, copies in {
            ("dp_replicate", "cp", "sp"): experts,
            ("dp_replicate", "ep", "cp", "sp"): {*held} - {*experts},
        }.items():
            place = grid.coordinates(rank) | dict.fromkeys(axes, 0)
            first = next(other for other in range(grid.size) if grid.coordinates(other) == place)
            same = all(torch.equal(got[name], ranks[first][name]) for name in (*copies, "grad_norm"))
            assert same, f"{case}: rank {rank} is no copy"
    errors: dict[str, float] = collections.defaultdict(float)
    for name, wanted in expected.items():
        if name.startswith("held/"):
            continue
        kind = name if name in ("loss", "grad_norm") else "weights"
        errors[kind] = max(errors[kind], float((found[name] - wanted).abs().max() / wanted.abs().max()))
    return dict(errors)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parity")
    run_all(folder, whole=False)
    return folder


@pytest.mark.parametrize("case", dict.fromkeys(cases(whole=False)), ids=str)
def test_loss_gradient_norm_and_weights_after_some_steps_are_those_of_one_process(folder, case):
    check(folder, case)


@pytest.mark.slow
def test_the_whole_table(tmp_path):
    run_all(tmp_path, whole=True)
    for case in cases(whole=True):
        check(tmp_path, case)


def check(folder: Path, case: Case) -> None:
    """Compare a case with one process."""
    errors = error_of(folder, case)
    assert errors.keys() == {"loss", "grad_norm", "weights"}
    assert max(errors.values()) <= TOLERANCES[case.dtype], f"{case}: {errors}"


def write_page(folder: Path) -> str:
    """Return the table as a page: the largest error of loss, gradient norm and weights in each cell."""
    head = [(rows, cut) for rows in ("packed", "padded") for cut in ("one micro-batch", "many")]
    lines = [
        "# Parity",
        "",
        *textwrap.wrap(
            "Three optimizer steps on every device mesh, compared with the same steps in one process with packed rows "
            "in one micro-batch. A cell is the largest relative difference of the loss, of the gradient norm and of "
            f"any weight after the third step. Bounds: {TOLERANCES['float64']:.0e} in float64, "
            f"{TOLERANCES['float32']:.0e} in float32. `tests/distributed/test_parity.py` tests two steps of "
            "so many cells that any two values of different columns meet, with `make test-slow` all of this, and "
            "writes this page: `PYTHONPATH=tests/distributed:tests/shared python tests/distributed/test_parity.py`. "
            "Ranks are processes on CPUs, connected by gloo; rows are dealt to data-parallel ranks by cost, so that "
            "ranks have "
            "different numbers of rows and micro-batches. Rows of a group begin alike, which is computed once where "
            "they are in one micro-batch. The model is a Qwen3, but for the last table: other families differ within a "
            "layer, which single axes show.",
            118,
            break_on_hyphens=False,
        ),
        "",
    ]
    for role in ("actor", "critic"):
        for dtype in TOLERANCES:
            lines += [
                f"## {role.capitalize()}, {dtype}",
                "",
                "| mesh | " + " | ".join(f"{rows}, {cut}" for rows, cut in head) + " |",
                "|---|" + "---:|" * len(head),
            ]
            for mesh in MESHES:
                cells = [max(error_of(folder, Case(mesh, rows, cut, role, dtype)).values()) for rows, cut in head]
                lines.append(f"| {mesh} | " + " | ".join(f"{cell:.1e}" if cell else "0" for cell in cells) + " |")
            lines.append("")
    lines += [
        "## Experts dealt over ranks (`ep`), float64",
        "",
        "A Qwen3-MoE of two layers with eight experts each, of which a token is sent to three.",
        "",
        "| mesh | " + " | ".join(f"{role}, {rows}, {cut}" for role in ("actor", "critic") for rows, cut in head) + " |",
        "|---|" + "---:|" * 2 * len(head),
    ]
    for mesh in EXPERT_MESHES:
        of_mesh = [Case(mesh, *cell, role, "float64", "qwen3_moe") for role in ("actor", "critic") for cell in head]
        errors = [max(error_of(folder, case).values()) for case in of_mesh]
        lines.append(f"| {mesh} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")
    lines += [
        "",
        "An actor of other mixtures, packed, many:",
        "",
        "| family | " + " | ".join(EXPERT_MESHES) + " |",
        "|---|" + "---:|" * len(EXPERT_MESHES),
    ]
    for family in OTHER_MIXTURES:
        of_meshes = [Case(mesh, "packed", "many", "actor", "float64", family) for mesh in EXPERT_MESHES]
        errors = [f"{max(error_of(folder, case).values()):.1e}" for case in of_meshes]
        lines.append(f"| {family} | " + " | ".join(errors) + " |")
    lines += [
        "",
        "## Other families, actor, float64",
        "",
        "| family | " + " | ".join(", ".join(cell) for cell in OF_FAMILIES[1:]) + " |",
        "|---|" + "---:|" * (len(OF_FAMILIES) - 1),
    ]
    for family in FAMILIES:
        cases_of_it = [Case(*cell, "actor", "float64", family) for cell in OF_FAMILIES[1:]]
        cells = [f"{max(error_of(folder, case).values()):.1e}" for case in cases_of_it]
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Other losses, float64",
        "",
        "Pairs (recipe `dpo`), whose two rows are in one micro-batch, and a teacher's four likeliest tokens (`opd`).",
        "",
        "| loss | " + " | ".join(", ".join((cell[0], cell[2])) for cell in OF_LOSSES[1:]) + " |",
        "|---|" + "---:|" * (len(OF_LOSSES) - 1),
    ]
    for role in LOSSES:
        errors = [error_of(folder, Case(*cell, role, "float64")) for cell in OF_LOSSES[1:]]
        lines.append(f"| {role} | " + " | ".join(f"{max(error.values()):.1e}" for error in errors) + " |")
    lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("RALLYPOINT_TEST_COUNTED", name)  # as tests/conftest.py does
        run_all(Path(name), whole=True)
        PAGE.write_text(write_page(Path(name)), encoding="utf-8")
