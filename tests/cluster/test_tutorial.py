"""The tutorial runs, and shows what it says it shows.

To store new outputs after a change of the notebook: `.venv/bin/python tests/cluster/test_tutorial.py`.
"""

import os
import platform
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from ray_forks import forked_workers

TUTORIAL = Path(__file__).parents[2] / "examples" / "cluster" / "tutorial.ipynb"
VERSION = 4
CELL_TIMEOUT_S = 60


def executed(folder: Path) -> NotebookNode:
    """Return the tutorial as it runs in a kernel of its own, which is started in this folder and uses no other."""
    notebook = nbformat.read(TUTORIAL, VERSION)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    with forked_workers():
        client.execute(env={**os.environ, "TMPDIR": str(folder), "IPYTHONDIR": str(folder / "ipython")})
    return notebook


def results(notebook: NotebookNode) -> Iterator[tuple[str, list[str]]]:
    """Yield the id of every cell of code, and what it shows.

    A picture is shown as that. Warnings of libraries about this machine (a missing package, a font) are no results.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown = [output for output in cell.outputs if output.get("name") != "stderr"]
            printed = "".join(output.text for output in shown if "text" in output)  # however many messages brought it
            yield cell.id, [printed, *(_shown(output) for output in shown if "text" not in output)]


def _shown(output: NotebookNode) -> str:
    return "a picture" if "image/png" in output.data else output.data["text/plain"]


@pytest.fixture(scope="module")
def tutorial() -> NotebookNode:
    return nbformat.read(TUTORIAL, VERSION)


def test_every_cell_of_the_tutorial_shows_what_is_stored(tutorial):
    with tempfile.TemporaryDirectory() as folder:  # short, because Ray's sockets are in it
        found = dict(results(executed(Path(folder))))
        assert [*Path(folder).glob("tutorial-*"), *Path(folder).glob("rally-*")] == [], "it leaves nothing behind"
    assert found == dict(results(tutorial))


def test_the_tutorial_is_stored_whole_with_its_picture(tutorial):
    nbformat.validate(tutorial)
    code = [cell for cell in tutorial.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert sum(shown.count("a picture") for _, shown in results(tutorial)) == 1


def test_the_tutorial_tells_nothing_of_the_machine_it_ran_on(tutorial):
    texts = [cell.source for cell in tutorial.cells] + [text for _, shown in results(tutorial) for text in shown]
    text = "\n".join(texts)
    assert platform.node() not in text
    assert re.findall(r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|Users)/\S*", text) == []
    assert [
        cell.id for cell in tutorial.cells for output in cell.get("outputs", []) if output.get("name") == "stderr"
    ] == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(Path(folder))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, TUTORIAL)
