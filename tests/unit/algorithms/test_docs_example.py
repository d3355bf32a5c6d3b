"""The functions of docs/algorithms.md run, and keep to every rule."""

from docs_blocks import DOCS, blocks

from rallypoint.algorithms import ADVANTAGES, CORRECTIONS, OBJECTIVES


def test_the_functions_of_the_page_run_and_keep_to_every_rule():
    names: dict[str, object] = {}
    for block in blocks("algorithms", "python"):
        exec(block, names)
    assert {"my_loss", "my_advantage"} <= names.keys()


def test_every_name_is_on_the_page():
    page = (DOCS / "algorithms.md").read_text()
    assert [n for n in (*ADVANTAGES, *OBJECTIVES, *CORRECTIONS) if f"| `{n}`" not in page] == []
