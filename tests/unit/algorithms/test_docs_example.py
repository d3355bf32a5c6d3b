"""The functions of docs/algorithms.md run, and keep to every rule."""

import re
from pathlib import Path

from rallypoint.algorithms import ADVANTAGES, CORRECTIONS, OBJECTIVES

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()


def test_the_functions_of_the_page_run_and_keep_to_every_rule():
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    for block in code:
        exec(block, names)
    assert {"my_loss", "my_advantages"} <= names.keys()


def test_every_name_is_on_the_page():
    assert [n for n in (*ADVANTAGES, *OBJECTIVES, *CORRECTIONS) if f"| `{n}`" not in PAGE] == []
