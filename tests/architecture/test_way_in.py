"""The way into the code: a picture that shows what is, a reading path that is short, and a word at every door."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rallypoint"
AGAIN = "run: python docs/house.py"

spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)

GUIDE = house.GUIDE.read_text(encoding="utf-8")
PATH = house.READING_PATH.findall(GUIDE)


def test_the_picture_of_the_house_is_that_of_the_import_contract():
    assert house.PICTURE.read_text(encoding="utf-8") == house.picture(), AGAIN
    assert "docs/house.svg" in GUIDE


def test_help_and_a_wrong_argument_draw_nothing(tmp_path):
    (tmp_path / "docs").mkdir()
    script = shutil.copy(ROOT / "docs" / "house.py", tmp_path / "docs")
    helped, refused = (
        subprocess.run([sys.executable, script, argument], capture_output=True, text=True, check=False)
        for argument in ("--help", "--no-such")
    )
    assert helped.returncode == 0, helped.stderr
    assert "Draw docs/house.svg" in helped.stdout
    assert refused.returncode == 2
    assert "--no-such" in refused.stderr


def test_the_numbers_of_the_reading_path_are_true():
    assert house.guide(GUIDE) == GUIDE, AGAIN


def test_the_reading_path_is_eight_files_and_at_most_1900_lines():
    assert len(PATH) == 8
    assert sum(map(house.num_lines, PATH)) <= 1900


def test_the_reading_path_passes_the_page_the_sampling_the_loss_and_the_group():
    folders = {path.split("/")[2] for path in PATH}
    assert {"recipes", "sampling", "roles", "algorithms", "engine", "cluster"} & folders >= {
        "recipes",
        "sampling",
        "roles",
        "algorithms",
        "engine",
        "cluster",
    }
    assert {"src/rallypoint/sampling/source.py", "src/rallypoint/roles/rollout.py"} <= set(PATH)


def test_every_file_that_the_reading_order_names_is_there():
    order = GUIDE[GUIDE.index("## Reading order") : GUIDE.index("## Tests")]
    files = re.findall(r"`(?:src/rallypoint/)?([\w/]+\.py)`", order)
    assert len(files) > 50
    assert [file for file in files if not (PACKAGE / file).is_file()] == []


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("__init__.py")), ids=lambda file: str(file.parent.relative_to(PACKAGE))
)
def test_every_folder_says_what_lives_there_and_what_must_not(file):
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    assert re.search(r"^Must not know: \S", docstring, flags=re.MULTILINE), (
        "say in the first line what lives in this folder, and in another one what it must not know"
    )
