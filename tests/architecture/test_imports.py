"""What may import what, and what must not be imported at all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from forks import run_forked

import rallypoint

ROOT = Path(__file__).parents[2]
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def python(code: str, *arguments: str, cwd: Path = ROOT, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(path)} if path else {})},
        check=False,
    )


def test_imports_point_down():
    done = python(LINT)
    assert done.returncode == 0, done.stdout
    assert re.search(r"Contracts: \d+ kept, 0 broken", done.stdout)


def test_a_new_folder_fails_until_it_has_its_place_and_an_import_that_points_up_fails(tmp_path: Path):
    shutil.copytree(ROOT / "src" / "rallypoint", tmp_path / "src" / "rallypoint")
    shutil.copy(ROOT / ".importlinter", tmp_path)
    package = tmp_path / "src" / "rallypoint"
    (package / "novelty").mkdir()
    (package / "novelty" / "__init__.py").write_text("")
    (package / "types" / "upward.py").write_text("import rallypoint.roles.actor\n")
    (package / "data" / "cluster.py").write_text("import ray\n")
    done = python(LINT, cwd=tmp_path, path=tmp_path / "src")
    assert done.returncode != 0
    assert "rallypoint.novelty" in done.stdout + done.stderr
    (package / "novelty" / "__init__.py").unlink()
    (package / "novelty").rmdir()
    done = python(LINT, cwd=tmp_path, path=tmp_path / "src")
    assert done.returncode != 0
    assert "rallypoint.types.upward -> rallypoint.roles.actor" in done.stdout
    assert "rallypoint.data.cluster -> ray" in done.stdout


LIGHTWEIGHT = """
import importlib, sys
for name in ("", ".config", ".data", ".prepare.preflight", ".cli.main", ".library.launch"):
    importlib.import_module("rallypoint" + name)
    print(name, [heavy for heavy in ("torch", "ray", "transformers", "pyarrow") if heavy in sys.modules])
"""


def test_what_checks_a_config_imports_neither_torch_nor_ray():
    done = python(LIGHTWEIGHT)
    assert (done.stdout.count("[]"), done.stdout.count("\n")) == (6, 6), done.stdout + done.stderr


LIGHT = """
import sys, rallypoint
assert "train" in dir(rallypoint) and not {"torch", "rich", "rallypoint.library"} & sys.modules.keys()
try:
    rallypoint.trian
except AttributeError as error:
    print(error)
"""


def test_the_names_of_the_library_are_there_and_imported_when_they_are_used():
    done = python(LIGHT)
    assert done.stdout.splitlines() == ["module 'rallypoint' has no attribute 'trian'"], done.stderr
    assert rallypoint.train.__module__ == "rallypoint.library.training"


WITHOUT_RAY = """
import importlib, pkgutil, sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ModuleNotFoundError("ray is not installed here", name="ray")

assert "ray" not in sys.modules, "whatever was imported before this was so without it"
sys.meta_path.insert(0, NoRay())
import rallypoint
names = [found.name for found in pkgutil.walk_packages(rallypoint.__path__, "rallypoint.")]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error.name)
assert len(names) > 50, names

from pathlib import Path
from rallypoint.cluster import open_runtime
from rallypoint.errors import ClusterError
options = dict(log_folder=Path("."), object_store_gib=1.0, placement_timeout_s=1.0, say=print)
assert open_runtime("inline", **options)
try:
    open_runtime("ray", **options)
except ClusterError as error:
    assert "cluster.runtime=inline" in str(error)
else:
    raise AssertionError("ray was found")
"""


def test_everything_but_the_ray_runtime_works_where_ray_is_not_installed():
    done = run_forked("-c", WITHOUT_RAY)
    assert done.returncode == 0, done.stderr
    modules = ("ray_cluster", "ray_process", "ray_runtime", "rendezvous.ray")
    assert done.stdout.splitlines() == [f"rallypoint.cluster.{module} ray" for module in modules]


def test_tokenizers_are_loaded_in_one_place_which_has_them_decode_text_as_it_was_sampled():
    """`load_pair` gives users what other tools load; a tokenizer of ours that decodes is from `load_tokenizer`."""
    package = ROOT / "src" / "rallypoint"
    loads = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if "Tokenizer.from_pretrained" in file.read_text() or "clean_up_tokenization_spaces=True" in file.read_text()
    }
    assert loads == {"data/tokenizer.py", "library/run.py"}


def test_the_kinds_of_transport_have_their_names_in_one_file():
    """The others ask a kind what it is; `cluster` has a rule of dispatch that is called broadcast, too."""
    package = ROOT / "src" / "rallypoint"
    rest = [file for file in package.rglob("*.py") if file.parent.name != "cluster"]
    names = {str(file.relative_to(package)) for file in rest if re.search('"(ipc|broadcast)"', file.read_text())}
    assert names == {"transport_kinds.py"}
