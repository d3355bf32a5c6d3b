"""Files of examples, read row by row; problems are collected, not raised one at a time.

Owns: paths, formats, and how a problem is worded. Must not know: what the columns mean. Rows are numbered
as other tools number them: from 0 in a .parquet file, lines from 1 in a .jsonl file.

Parquet is read through pyarrow and JSON lines by hand; the `datasets` library would let nulls and mixed
types pass in silence. Nothing is unpickled. The functions that need pyarrow import it themselves, because
a config is checked without it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rallypoint.errors import DataError

EXTENSIONS = (".parquet", ".jsonl")
MAX_SHOWN_PROBLEMS = 20
_ROWS_PER_READ = 8192

Row = Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class Problems:
    """Problems of the data: the text of the first twenty, and their number."""

    shown: list[str] = dataclasses.field(default_factory=list[str])
    total: int = 0

    @property
    def has_room(self) -> bool:
        """Whether the text of another problem would be kept."""
        return len(self.shown) < MAX_SHOWN_PROBLEMS

    def add(self, problem: str) -> None:
        """Count a problem, and keep its text while there is room."""
        self.total += 1
        if self.has_room:
            self.shown.append(problem)

    def raise_any(self) -> None:
        """Raise all problems as one error; do nothing if there are none."""
        if self.total:
            noun = "problem" if self.total == 1 else "problems"
            first = f"; the first {len(self.shown)}" if self.total > len(self.shown) else ""
            lines = "\n".join(f"  - {problem}" for problem in self.shown)
            raise DataError(f"{self.total} {noun} in the data{first}:\n{lines}")


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return a question that names the nearest known name, or nothing.

    >>> suggestion("promt", ["prompt", "ability"])
    "; did you mean 'prompt'?"
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_dataset_path(path: str | Path) -> str | None:
    """Return what is wrong with a path, before anything is read; None if nothing is."""
    file = Path(path).expanduser()
    if file.is_dir():
        inside = sorted(entry.name for entry in file.iterdir() if entry.suffix in EXTENSIONS)
        hint = f"name its files instead: {', '.join(inside[:5])}" if inside else "it holds no .parquet or .jsonl file"
        return f"{path} is a folder, expected a file; {hint}"
    if not file.exists():
        siblings = [entry.name for entry in file.parent.iterdir()] if file.parent.is_dir() else []
        missing = "file" if file.parent.is_dir() else f"folder {file.parent}"
        return f"{path} does not exist (no such {missing}){suggestion(file.name, siblings)}"
    if file.suffix not in EXTENSIONS:
        hint = " (write one JSON object a line)" if file.suffix == ".json" else ""
        return f"{path}: expected a file that ends in .parquet or .jsonl{hint}, found {file.suffix or 'no ending'}"
    return f"{path} is empty (0 bytes)" if file.stat().st_size == 0 else None


def check_dataset_rows(path: str | Path) -> str | None:
    """Say whether a file that `check_dataset_path` accepts has no rows, from a parquet file's footer alone."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = Path(path).expanduser()
    try:
        if file.suffix == ".parquet":
            empty = pq.read_metadata(file).num_rows == 0
        else:
            with file.open("rb") as lines:
                empty = not any(line.strip() for line in lines)
    except (pa.ArrowException, OSError) as error:
        return _unreadable(str(path), error)
    return f"{path}: the data set is empty (no rows)" if empty else None


def read_jsonl(path: Path, label: str, problems: Problems) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, object) for every line that is not blank."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = _parse_line(line, f"{label}, line {number}", problems)
                    if row is not None:
                        yield number, row
    except OSError as error:
        problems.add(f"{label} cannot be read: {error}")


def _parse_line(line: bytes, where: str, problems: Problems) -> Row | None:
    try:
        row: object = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
        if b"\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except json.JSONDecodeError as error:
        problems.add(f"{where}: not valid JSON: {error.msg} at column {error.colno}")
        return None
    except UnicodeEncodeError as error:
        problems.add(f"{where}: not valid JSON: {error.object[error.start]!r} is half a character")
        return None
    except UnicodeDecodeError as error:
        problems.add(f"{where}: not valid UTF-8: {error.reason} at byte {error.start + 1}")
        return None
    except (ValueError, RecursionError) as error:
        problems.add(f"{where}: not valid JSON: {error}")
        return None
    if not isinstance(row, dict):
        problems.add(f"{where}: expected a JSON object, found {found(row)}")
        return None
    return row  # pyright: ignore[reportUnknownVariableType] - the keys of a JSON object are text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object without duplicate keys; json would silently keep the last of several values."""
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there {names.count(twice)} times, and only one value would be read")
    return row


def parquet_columns(path: Path, label: str, problems: Problems) -> list[str] | None:
    """Return the names of a parquet file's columns; None when it cannot be opened."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        problems.add(_unreadable(label, error))
        return None


def read_parquet(path: Path, columns: list[str], label: str, problems: Problems) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 0, these columns) for every row, with a few thousand rows in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    start = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_PER_READ, columns=columns):
                yield from enumerate(batch.to_pylist(), start)
                start += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problems.add(_unreadable(label, error))


def _unreadable(label: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{label} cannot be read as parquet, it may be damaged or incomplete: {reason}"


def found(value: object) -> str:
    """Describe a value in an error, shortened.

    >>> found(None), found("abc"), found([1, 2]), found({"role": "user"}), found(True), found(2.5)
    ('null', "text 'abc'", 'a list of 2', "an object with 'role'", 'True', 'number 2.5')
    """
    match value:
        case None:
            shown = "null"
        case bool():
            shown = str(value)
        case str():
            shown = f"text {value!r}" if len(value) <= 40 else f"text {value[:40]!r}..."
        case int() | float():
            shown = f"number {value}"
        case list():
            shown = f"a list of {len(cast('list[object]', value))}" if value else "an empty list"
        case dict():
            names = ", ".join(repr(key) for key in list(cast("dict[object, object]", value))[:6])
            shown = f"an object with {names}" if names else "an empty object"
        case _:
            shown = type(value).__name__
    return shown
