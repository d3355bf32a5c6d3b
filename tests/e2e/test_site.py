"""The documentation site: built strictly, with references that are made of the code."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from rallypoint.cli.main import app
from rallypoint.config import RunConfig, leaves, shipped_recipes

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocs", reason="needs the extra docs")


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_of_docs", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_commands_has_each_command_with_each_of_its_options(site):
    page = site.commands_page()
    group: Any = typer.main.get_command(app)
    assert {"train", "config", "recipes", "eval", "serve", "engine"} <= set(group.commands)
    for name, command in group.commands.items():
        inside = vars(command).get("commands", {})
        for title, one in ({f"{name} {sub}": one for sub, one in inside.items()} or {name: command}).items():
            assert f"## rally {title}\n\n{one.help}" in page
            for parameter in one.params:
                assert parameter.param_type_name == "argument" or f"`{parameter.opts[0]}" in page


def test_the_reference_of_keys_has_each_key_with_what_it_takes(site):
    page = site.config_page()
    for key, info in leaves(RunConfig).items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{key}` |")]
        assert (info.description or "").replace("|", r"\|") in row


def test_the_reference_of_recipes_has_each_recipe(site):
    assert all(f"| `{name}` |" in site.recipes_page() for name in shipped_recipes())


def test_a_list_gets_an_empty_line_before_it_but_not_in_code(site):
    assert site.spaced("these:\n- one\n- two") == "these:\n\n- one\n- two"
    assert site.spaced("```\nkeys:\n- one\n```") == "```\nkeys:\n- one\n```"


def build(folder: Path, docs: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder of pages below another folder."""
    text = (ROOT / "mkdocs.yml").read_text()
    text = text.replace("docs_dir: docs", f"docs_dir: {docs}").replace("- docs/site.py", f"- {ROOT}/docs/site.py")
    (folder / "mkdocs.yml").write_text(text)
    command = [str(Path(sys.executable).with_name("mkdocs")), "build", "--config-file", str(folder / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_site_builds_and_every_link_leads_somewhere(tmp_path: Path):
    done = build(tmp_path, ROOT / "docs")
    assert done.returncode == 0, done.stderr
    built = tmp_path / "build" / "site"
    assert "actor.optimizer.lr" in (built / "reference" / "config.html").read_text()
    assert (built / "repository" / "index.html").is_file()
    assert not list(built.rglob("*.py"))


def test_a_link_or_an_anchor_that_leads_nowhere_fails_the_build(tmp_path: Path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "cpu.md").open("a") as page:
        page.write("\n[a page](nowhere.md), [a part](data.md#nope), [a file](../Makefile)\n")
    done = build(tmp_path, tmp_path / "docs")
    assert done.returncode == 1
    assert done.stderr.count("WARNING") == 2, done.stderr
    assert "'nowhere.md'" in done.stderr
    assert "'#nope'" in done.stderr
