"""Files of examples, read row by row; problems are collected, not raised one at a time.

Owns: formats, and how a problem is worded. Must not know: what the columns mean. Rows are numbered as other tools
number them: from 0 in .parquet and .arrow files, lines from 1 in .jsonl and .csv files.

Parquet and Arrow are read through pyarrow, JSON lines and CSV by hand; the `datasets` library would let nulls and mixed
types pass in silence. Nothing is unpickled. The functions that need pyarrow import it themselves, because a config is
checked without it.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import difflib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from rallypoint.errors import DataError

FORMATS = (".parquet", ".arrow", ".jsonl", ".csv")
"""Endings of files that are read; of data sets that have several, the first is taken."""
MAX_SHOWN_PROBLEMS = 20
_MAX_SHOWN_PLACES = 3
_NUMBER, _VALUE = re.compile(r"\d+"), re.compile(r"\d+|'[^']*'")
_ROWS_PER_READ = 8192

Row = Mapping[str, Any]


@dataclasses.dataclass(slots=True)
class Problems:
    """Problems of the data: the first of each kind in words, and where the next ones are.

    >>> problems = Problems()
    >>> for line in (3, 7, 8):
    ...     problems.add(f"a.jsonl, line {line}, column prompt: expected text, found {line}")
    >>> problems.raise_any()
    Traceback (most recent call last):
    rallypoint.errors.DataError: 3 problems in the data:
      - a.jsonl, line 3, column prompt: expected text, found 3
        and 2 more like it: a.jsonl, line 7; a.jsonl, line 8
    """

    kinds: dict[str, list[str]] = dataclasses.field(default_factory=dict[str, list[str]])
    """Text without numbers -> the first problem of that kind, and the places of the next ones."""
    counts: Counter[str] = dataclasses.field(default_factory=Counter[str])
    total: int = 0

    @property
    def has_room(self) -> bool:
        """Whether the text of another problem would be kept."""
        return self.total < MAX_SHOWN_PROBLEMS

    def add(self, problem: str) -> None:
        """Count a problem, and keep its text if it is the first of its kind, or its place, while there is room."""
        what, _, said = problem.partition(", found ")
        kind, self.total = _NUMBER.sub("#", what) + _VALUE.sub("#", said), self.total + 1
        self.counts[kind] += 1
        if kind not in self.kinds and len(self.kinds) < MAX_SHOWN_PROBLEMS:
            self.kinds[kind] = [problem]
        elif kind in self.kinds and len(self.kinds[kind]) <= _MAX_SHOWN_PLACES:
            self.kinds[kind].append(problem.partition(": ")[0].partition(", column ")[0])

    def raise_any(self) -> None:
        """Raise all problems as one error; do nothing if there are none."""
        if not self.total:
            return
        lines, num_kinds = list[str](), len(self.counts)
        first = f"; the first {len(self.kinds)} of {num_kinds} kinds" if num_kinds > len(self.kinds) else ""
        for kind, (problem, *places) in self.kinds.items():
            lines.append(f"  - {problem}")
            if num_more := self.counts[kind] - 1:
                shown = "; ".join(places) + (" ..." if num_more > len(places) else "")
                lines.append(f"    and {num_more:,} more like it: {shown}")
        raise DataError("\n".join([f"{self.total} problem{'s'[: self.total > 1]} in the data{first}:", *lines]))


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return a question that names the nearest known name, or nothing.

    >>> suggestion("promt", ["prompt", "ability"])
    "; did you mean 'prompt'?"
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_url(path: str) -> bool:
    """Whether a path names a file of another file system than the local one.

    >>> is_url("s3://bucket/train.parquet"), is_url("data/train.parquet")
    (True, False)
    """
    return "://" in path


@contextlib.contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """Let a file system's own errors be OSErrors: S3's of credentials and of connections are none."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"there is no {path}") from error
    except (OSError, ValueError, csv.Error):  # the last two are of what is in the file
        raise
    except Exception as error:
        if not is_url(path):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


def open_file(path: str) -> BinaryIO:
    """Open a file for reading, wherever it is."""
    if not is_url(path):
        return Path(path).expanduser().open("rb")
    import fsspec

    system, inside = fsspec.core.url_to_fs(path)
    return cast("BinaryIO", system.open(inside, "rb"))


def fingerprint(url: str) -> str:
    """Return what changes when the file of a URL does: its size, and its tag or time as far as they are known there."""
    import fsspec

    with as_os_errors(url):
        system, path = fsspec.core.url_to_fs(url)
        return str(system.ukey(path))


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A file whose rows can be read."""

    columns: tuple[str, ...] | None
    """Names of the columns; None where every row has its own."""
    unit: Literal["row", "line"]
    """What its numbers count."""
    read: Callable[[Sequence[str], int], Iterator[tuple[int, Row]]]
    """Yields the number and these columns of every row from the n-th on, with a few thousand rows in memory."""
    count: Callable[[], int]
    """Returns the number of rows, without reading their values."""


def open_table(path: str, label: str, problems: Problems) -> Table | None:
    """Return a file as a table; None, with the problem, when it cannot be opened or is not what its name says."""
    try:
        with as_os_errors(path), open_file(path) as file:
            start = file.read(len(_LFS))
        if problem := _disguise(start, Path(path).suffix):
            problems.add(f"{label}: {problem}")
            return None
        match Path(path).suffix:
            case ".parquet" | ".arrow" as kind:
                return _open_arrow(path, kind[1:], label, problems)
            case ".csv":
                return _open_csv(path, label, problems)
            case _:
                return Table(
                    None,
                    "line",
                    lambda _, start: _read_jsonl(path, label, problems, start),
                    lambda: sum(1 for _ in _lines(path)),
                )
    except OSError as error:
        problems.add(f"{label} cannot be read: {error}")
    return None


def check_dataset_rows(path: str) -> str | None:
    """Say whether a file has no rows, or cannot be read, from as little of it as tells that."""
    problems = Problems()
    table = open_table(path, path, problems)
    if table is not None and next(table.read((table.columns or ())[:1], 0), None) is None and not problems.total:
        return f"{path}: the data set is empty (no rows)"
    return next(iter(problems.kinds.values()))[0] if table is None else None


_LFS = b"version https://git-lfs.github.com/spec/"
_MAGIC = {
    _LFS: "is a pointer of Git LFS in place of the data: fetch them with `git lfs pull` in its repository",
    b"\xfd7zXZ\x00": "is compressed with xz: decompress it first (unxz)",
    b"\x1f\x8b": "is compressed with gzip: decompress it first (gunzip)",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd: decompress it first (unzstd)",
    b"BZh": "is compressed with bzip2: decompress it first (bunzip2)",
    b"PK\x03\x04": "is a zip archive: unpack it first",
    b"PAR1": "is a parquet file: let its name end in .parquet",
    b"\xff\xfe": "is UTF-16: write it in UTF-8",
    b"\xfe\xff": "is UTF-16: write it in UTF-8",
}
"""First bytes of files that are not what their names say."""


def _disguise(start: bytes, suffix: str) -> str | None:
    """Return what a file is instead, by its first bytes; None if they tell nothing."""
    if suffix in (".parquet", ".arrow") and not start.startswith((_LFS, b"\xfd7zXZ\x00", b"\x1f\x8b", b"PK")):
        return None  # pyarrow says it
    return next((what for magic, what in _MAGIC.items() if start.startswith(magic)), None)


def _read_jsonl(path: str, label: str, problems: Problems, start: int) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, object) for every line that is not blank."""
    try:
        for number, line in itertools.islice(_lines(path), start, None):
            row = _parse_line(line, f"{label}, line {number}", problems)
            if row is not None:
                yield number, row
    except OSError as error:
        problems.add(f"{label} cannot be read: {error}")


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    with as_os_errors(path), open_file(path) as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if text.strip():
                yield number, text


def _parse_line(line: bytes, where: str, problems: Problems) -> Row | None:
    try:
        row: object = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_distinct)
        if b"\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is not text
    except json.JSONDecodeError as error:
        begins = line.strip() in (b"[", b"{")
        hint = (
            "; a .jsonl file has one whole object a line: `jq -c .` writes it so, `jq -c '.[]'` a list"
            if begins
            else ""
        )
        problems.add(f"{where}: not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}{hint}")
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
    raise ValueError(f"{name} is not a JSON number")


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object without duplicate keys; json would silently keep the last of several values."""
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there {names.count(twice)} times, and only one value would be read")
    return row


def _open_csv(path: str, label: str, problems: Problems) -> Table | None:
    """Return a file of comma-separated values with a line of names; an empty field is null."""

    def lines() -> Iterator[tuple[int, list[str]]]:
        csv.field_size_limit(2**31 - 1)
        number = 1
        try:
            with as_os_errors(path), io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as text:
                reader = csv.reader(text, strict=True)
                for fields in reader:
                    yield number, fields
                    number = reader.line_num + 1
        except UnicodeDecodeError as error:
            problems.add(f"{label}, line {number} or after it: not valid UTF-8: {error.reason}")
        except (csv.Error, OSError) as error:
            problems.add(f"{label}, line {number}: not valid CSV: {error}")

    def rows(_: Sequence[str], start: int) -> Iterator[tuple[int, Row]]:
        filled = (line for line in lines() if line[1])
        for number, fields in itertools.islice(filled, 1 + start, None):
            if len(fields) != len(names):
                problems.add(f"{label}, line {number}: expected {len(names)} fields, found {len(fields)}")
            else:
                yield number, {name: field or None for name, field in zip(names, fields, strict=True)}

    total = problems.total
    _, names = next(lines(), (1, list[str]()))
    if problem := _twice(names):
        problems.add(f"{label}, line 1: {problem}")
    if problems.total > total:
        return None
    return Table(tuple(names), "line", rows, lambda: sum(1 for _, fields in lines() if fields) - 1)


def _twice(columns: Sequence[str]) -> str | None:
    """Say which column is there more than once; only its last values would be read."""
    twice = next((name for name, count in Counter(columns).items() if count > 1), None)
    return None if twice is None else f"the column {twice!r} is there {columns.count(twice)} times"


def _open_arrow(path: str, kind: str, label: str, problems: Problems) -> Table | None:
    """Return a parquet file, or what `datasets` saves: a stream or a file of Arrow batches."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def batches(columns: Sequence[str] | None) -> Iterator[Any]:
        with contextlib.ExitStack() as until:
            until.enter_context(as_os_errors(path))
            file = until.enter_context(open_file(path))
            if kind == "parquet":
                table = until.enter_context(pq.ParquetFile(file))
                yield table.schema_arrow
                yield from table.iter_batches(_ROWS_PER_READ, columns=columns)
                return
            reader = _open_stream(file)
            yield reader.schema
            for batch in reader:
                yield batch if columns is None else batch.select(list(columns))

    def rows(columns: Sequence[str], start: int) -> Iterator[tuple[int, Row]]:
        first = 0
        try:
            for batch in itertools.islice(batches(columns), 1, None):
                skipped = min(max(start - first, 0), batch.num_rows)
                yield from enumerate(batch.slice(skipped).to_pylist(), first + skipped)
                first += batch.num_rows
        except (pa.ArrowException, OSError, ValueError) as error:
            problems.add(_unreadable(label, kind, error))

    def count() -> int:
        if kind == "parquet":
            with as_os_errors(path), open_file(path) as file, pq.ParquetFile(file) as table:
                return cast("int", table.metadata.num_rows)
        return sum(batch.num_rows for batch in itertools.islice(batches(None), 1, None))

    try:
        names = tuple(next(batches(None)).names)
        if problem := _twice(names):
            problems.add(f"{label}: {problem}")
            return None
        return Table(names, "row", rows, count)
    except (pa.ArrowException, OSError) as error:
        problems.add(_unreadable(label, kind, error))
        return None


def _open_stream(file: BinaryIO) -> Any:
    """Return the batches of an Arrow stream, or of an Arrow file, which ends with an index of them."""
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(file)
    except pa.ArrowInvalid:
        file.seek(0)
        whole = pa.ipc.open_file(file)
        return pa.RecordBatchReader.from_batches(
            whole.schema, (whole.get_batch(index) for index in range(whole.num_record_batches))
        )


def _unreadable(label: str, kind: str, error: Exception) -> str:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return f"{label} cannot be read as {kind}, it may be damaged or incomplete: {reason}"


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
