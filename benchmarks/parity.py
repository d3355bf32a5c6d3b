"""Steps on a device in bfloat16 beside the same steps on the CPU in float64: the largest errors, and their bounds.

    python benchmarks/parity.py                   # on the accelerator that torch finds
    python benchmarks/parity.py --device cpu      # what bfloat16 alone does

The steps and bounds are those of tests/gpu/test_parity.py; this prints the numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from figures import Table

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "shared"), str(TESTS / "distributed")]

from rounded_steps import BOUNDS, errors_of, make_rounded_model, take_steps  # noqa: E402 - found by the line above

COLUMNS = {
    "role": "",
    "rows": "",
    "losses": ".4f",
    "first norm": ".4f",
    "norms": ".4f",
    "changes": ".4f",
    "worst change": ".4f",
    "fine": "",
}


def main(arguments: list[str] | None = None) -> None:
    """Print the table; `arguments` are those of the command line by default. Ends with 1 if an error is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--roles", nargs="+", default=["actor", "critic"], choices=["actor", "critic"])
    parser.add_argument("--json", type=Path, help="a file to which every row is appended, too")
    wanted = parser.parse_args(arguments)
    device = (
        torch.device(wanted.device) if wanted.device else torch.accelerator.current_accelerator(check_available=True)
    )
    if device is None:
        raise SystemExit("no accelerator was found; --device cpu shows that it runs")
    table, is_fine = Table(COLUMNS, wanted.json), True
    with tempfile.TemporaryDirectory() as folder:
        model = make_rounded_model(Path(folder))
        for role in wanted.roles:
            expected = take_steps(model, role, "float64")
            for rows in ("packed", "padded"):
                found = take_steps(model, role, "bfloat16", device=device, padded=rows == "padded")
                errors = errors_of(found, expected)
                fine = all(error <= BOUNDS[name] for name, error in errors.items())  # NaN is not
                is_fine = is_fine and fine
                worst = errors.pop("worst change")
                table.add(role=role, rows=rows, **errors, worst_change=worst, fine="yes" if fine else "NO")
    if not is_fine:
        raise SystemExit(f"beyond the bounds {BOUNDS}")


if __name__ == "__main__":
    main()
