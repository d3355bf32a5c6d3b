"""The notebooks of examples/notebooks run from their first cell to their last, the second in the folder of the first.

`make test` has the first train for a twelfth of its steps, and `make test-slow` until it has learned.

A kernel takes seconds to import torch, so one runs both, and forgets the names of the first in between. To look at
their outputs: `.venv/bin/python tests/e2e/test_notebooks.py FOLDER`, which writes them there.
"""

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from ray_forks import forked_workers

from rallypoint import load_run

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
WHOLE = 60
"""Steps that the first trains at most."""


def executed(folder: Path, *, num_steps: int = WHOLE) -> tuple[NotebookNode, NotebookNode]:
    """Run both in a kernel that is started in a folder."""
    training, reading = (nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4) for name in ("train", "read_a_run"))
    (trains,) = (cell for cell in training.cells if f"num_steps={WHOLE}," in cell.source)
    trains.source = trains.source.replace(f"num_steps={WHOLE},", f"num_steps={num_steps},")
    forget = nbformat.v4.new_code_cell("%reset -f")
    both = nbformat.from_dict({**training, "cells": [*training.cells, forget, *reading.cells]})
    metadata = {"metadata": {"path": str(folder)}}
    client = NotebookClient(both, timeout=100, kernel_name="python3", record_timing=False, resources=metadata)
    with forked_workers():
        client.execute(env={**os.environ, "IPYTHONDIR": str(folder / "ipython"), "OMP_NUM_THREADS": "1"})
    end = len(training.cells)
    training.cells, reading.cells = both.cells[:end], both.cells[end + 1 :]
    return training, reading


def shown(notebook: NotebookNode) -> str:
    """Everything that the cells show, as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(output.get("text") or str(output.get("data")) for output in outputs)


@pytest.mark.parametrize("num_steps", [5, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_the_notebooks_train_and_read_a_run(tmp_path: Path, num_steps: int):
    training, reading = executed(tmp_path, num_steps=num_steps)
    text = shown(training)
    assert "Run('" in text
    assert "image/png" in text
    assert "<pre" in text, "the panel is HTML"
    assert "LlamaForCausalLM" in text
    run = load_run(tmp_path / "runs" / "own-digits")
    rewards = [metrics["reward/mean"] for metrics in run.metrics if "reward/mean" in metrics]
    assert rewards[0] < 0.7, "of 2: what a model that knows nothing earns"
    best = 1.3 if num_steps == WHOLE else rewards[0]
    assert run.best.score > best, f"it learns; found {rewards}"
    assert "Best(step=" in shown(reading)
    assert all(not cell.outputs for cell in nbformat.read(NOTEBOOKS / "train.ipynb", 4).cells if "outputs" in cell)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(exist_ok=True)
    for each, outcome in zip(("train", "read_a_run"), executed(target), strict=True):
        nbformat.write(outcome, target / f"{each}.ipynb")
