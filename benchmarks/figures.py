"""A table that is printed as it grows, and written as lines of JSON where somebody else reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class Table:
    """Rows under the same columns."""

    def __init__(self, columns: Mapping[str, str], json_file: Path | None = None) -> None:
        """Begin with no row.

        Args:
            columns: title -> how its values are written, as `format` takes it.
            json_file: each row is appended to it as a line, too, with unrounded values.
        """
        self._columns, self._file, self._has_begun = columns, json_file, False

    def add(self, **row: object) -> None:
        """Print a row, whose values come in the order of the columns."""
        assert len(row) == len(self._columns), (list(row), list(self._columns))
        if not self._has_begun:
            rules = ("---:" if written else "---" for written in self._columns.values())
            print(f"| {' | '.join(self._columns)} |\n|{'|'.join(rules)}|", flush=True)
            self._has_begun = True
        cells = [format(value, written) for value, written in zip(row.values(), self._columns.values(), strict=True)]
        print(f"| {' | '.join(cells)} |", flush=True)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                # JSON has no NaN, which stands for what could not be measured.
                known = {name: None if value != value else value for name, value in row.items()}
                file.write(json.dumps(known) + "\n")
