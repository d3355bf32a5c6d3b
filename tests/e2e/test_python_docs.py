"""The code in docs/python.md, run from its first line to its last."""

from docs_blocks import blocks
from tiny_models import make_tiny_model

from rallypoint.config import RECIPES


def test_the_code_of_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", max_positions=1024)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks("python", "python"):
        exec(compile(block, "docs/python.md", "exec"), names)
    del RECIPES["Mine"]  # other tests of this process list them
