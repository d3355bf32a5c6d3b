"""The lines that benchmarks/accelerator.py prints, for tests on a CPU and on an accelerator."""

import contextlib
import io
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accelerator.py"


def run_benchmark(*arguments: str) -> list[dict[str, str]]:
    """Run the script in this process and return its table: of each line, the cells by the names of their columns."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(SCRIPT))["main"]([*arguments])
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in said.getvalue().splitlines())
    return [dict(zip(head, row, strict=True)) for row in rows]
