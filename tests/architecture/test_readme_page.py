"""The README shows the page as it is."""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_readme_shows_train_step_as_it_stands_in_ppo():
    source = (ROOT / "src/rallypoint/recipes/ppo.py").read_text()
    step = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AsyncFunctionDef) and node.name == "train_step"
    )
    page = textwrap.dedent("\n".join(source.splitlines()[step.lineno - 1 : step.end_lineno]))
    assert page in (ROOT / "README.md").read_text()


def test_the_first_picture_is_the_page_of_the_demo_run():
    first = re.search(r"!\[(.*?)\]\((.*?)\)", (ROOT / "README.md").read_text())
    assert first is not None
    assert first.groups() == ("The page of the demo run: reward, validations, health", "docs/view.png")
    assert (ROOT / "docs/view.png").is_file()
