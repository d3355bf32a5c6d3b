"""The notebooks of examples/notebooks run from their first cell to their last, the second in the folder of the first.

To look at their outputs: `.venv/bin/python tests/e2e/test_notebooks.py FOLDER`, which writes them there.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from ray_forks import forked_workers

from rallypoint import load_run

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"


def executed(name: str, folder: Path) -> NotebookNode:
    """Run a notebook in a kernel of its own, which is started in a folder."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    metadata = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=100, kernel_name="python3", record_timing=False, resources=metadata)
    with forked_workers():
        client.execute(env={**os.environ, "IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1"})
    return notebook


def shown(notebook: NotebookNode) -> str:
    """Everything that the cells show, as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or str(output.get("data")) for output in outputs)


def test_the_notebooks_train_and_read_a_run(tmp_path: Path):
    training = executed("train", tmp_path)
    text = shown(training)
    assert "Run('" in text
    assert "image/png" in text
    assert "<pre" in text, "the panel is HTML"
    assert "LlamaForCausalLM" in text
    run = load_run(tmp_path / "runs" / "own-digits")
    rewards = [metrics["reward/mean"] for metrics in run.metrics if "reward/mean" in metrics]
    assert rewards[0] < 0.7, "of 2: what a model that knows nothing earns"
    assert run.best.score > 1.3, f"it learns; found {rewards}"
    reading = shown(executed("read_a_run", tmp_path))
    assert "Best(step=" in reading
    assert all(not cell.outputs for cell in nbformat.read(NOTEBOOKS / "train.ipynb", 4).cells if "outputs" in cell)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(exist_ok=True)
    for each in ("train", "read_a_run"):
        nbformat.write(executed(each, target), target / f"{each}.ipynb")
