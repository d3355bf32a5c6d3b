"""The wheel: what is in it, and that it trains in an environment that has nothing of the repository."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from rallypoint import __version__
from rallypoint.environments.reward import NEEDS
from rallypoint.observability.trackers import TRACKERS

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")
TINY = (
    "model.create={hidden_size: 16, num_layers: 1, num_heads: 2, num_key_value_heads: 1, intermediate_size: 32}",
    "data.generate={num_digits: 3, num_train_prompts: 64, num_validation_prompts: 8}",
    "rollout={num_prompts: 4, group_size: 2, max_response_tokens: 4}",
    "cluster={runtime: inline, pools: {main: [1]}}",
    "actor.num_mini_batches=1",
    "trainer={num_steps: 2, name: tiny}",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a copy, so that nothing is left in the repository; without a network, by the setuptools here."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        _ = shutil.copytree(source, copy / name, ignore=ignored) if source.is_dir() else shutil.copy(source, copy)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(copy / "dist"), str(copy))
    [built] = (copy / "dist").iterdir()
    return built


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path):
    assert wheel.name == f"rallypoint-{__version__}-py3-none-any.whl"
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = ROOT / "src" / "rallypoint"
    ours = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files == {str(path.relative_to(package.parent)) for path in ours}
    assert {"rallypoint/py.typed", "rallypoint/recipes/math-dapo.yaml"} <= files


def test_the_wheel_trains_in_an_environment_of_its_own_from_a_folder_of_its_own(wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    _pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    # What it depends on is that of this environment: torch is too large to be installed by a test.
    [site] = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "empty").mkdir()
    free = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def rally(*arguments: str) -> str:
        command = [str(python.with_name("rally")), *arguments]
        done = subprocess.run(command, cwd=tmp_path / "empty", env=free, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert rally("--version") == f"rallypoint {__version__}\n"
    where = [str(python), "-c", "import rallypoint; print(rallypoint.__file__)"]
    told = subprocess.run(where, cwd=tmp_path / "empty", env=free, capture_output=True, text=True, check=True).stdout
    assert Path(told.strip()).is_relative_to(site)
    assert "64 prompts x 16 = 1024 rows" in rally("train", "math-dapo", "--dry-run", "--on", "H100")
    rally("train", "digits-grpo", *TINY)
    assert (tmp_path / "empty" / "runs" / "tiny" / "checkpoints" / "step_000002").is_dir()


def test_every_extra_that_an_error_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"(?:find_missing|find_unusable|why_not)\(.+['\"]([\w-]+)['\"]\)", text))
    named |= {extra for group in re.findall(r"\.\[([\w,-]+)\]'", text) for extra in group.split(",")}
    named |= {extra for _, extra in NEEDS.values()} | set(TRACKERS)
    assert {"ray", "serve", "plot", "math"} <= named
    assert named <= extras.keys()
