"""The lines that benchmarks/accelerator.py prints, for tests on a CPU and on an accelerator."""

import contextlib
import importlib
import io
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run_benchmark(*arguments: str, name: str = "accelerator") -> list[dict[str, str]]:
    """Run the script in this process and return its table: of each line, the cells by the names of their columns."""
    sys.path.append(str(FOLDER))  # the scripts import each other
    try:
        script = importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        script.main([*arguments])
    lines = [line for line in said.getvalue().splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]
