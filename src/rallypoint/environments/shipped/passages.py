"""Passages that can be searched by words (BM25): an index in one file, made once, that any number of processes read.

Owns: the index, which is SQLite's own full-text search (FTS5). Must not know: tools, episodes. What is read stays in
the system's page cache, which all processes share: an index may be larger than memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.data.files import FORMATS, Problems, open_table, suggestion
from rallypoint.errors import DataError, EnvironmentFailedError

_LOG = logging.getLogger(__name__)
_SAMPLE_BYTES = 2**20
_TEXT = ("text", "contents", "passage")
"""Columns that a passage's text may have as its name, and below its title's."""
_MAX_WORDS = 64
"""Words of a query that are looked for."""
_WORD = re.compile(r"[^\W_]+")
"""A word as SQLite cuts a text: an underline ends one."""
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at be but by do does did for from had has have he her his how i if in into is it its no not "
        "of on or such that the their then there these they this to was were what when where which who whom whose why "
        "will with you",
    )
)
"""Words that nearly every passage has: they hardly change an order, and would have all passages read."""


def check_passages(corpus: str) -> str | None:
    """Say why a file cannot be one of passages, from its name; whether it is there, `Passages.of` says.

    >>> check_passages("wiki.jsonl.gz")
    "the passages 'wiki.jsonl.gz': expected a file that ends in .parquet, .arrow, .jsonl, .csv; gunzip it first"
    """
    if corpus.endswith(FORMATS):
        return None
    hint = "; gunzip it first" if corpus.endswith(".gz") else ""
    return f"the passages {corpus!r}: expected a file that ends in {', '.join(FORMATS)}{hint}"


class Passages:
    """An index that is open for reading; threads may share it."""

    def __init__(self, path: Path) -> None:
        """Open an index; `Passages.of` makes it first."""
        self.path = path
        self._own = threading.local()

    @classmethod
    def of(cls, corpus: str | Path) -> Passages:
        """Return the index of a file of passages, made now if there is none yet, or the file has changed.

        It lies beside the file, as `FILE.bm25`, or in the user's cache if that folder cannot be written.

        Args:
            corpus: .jsonl, .parquet, .arrow or .csv with a column `text` and, if there are titles, `title`; or with
                `contents`, whose first line is the title, as corpora of Search-R1 have it.

        Raises:
            DataError: it cannot be read, or has no such column.
        """
        source = Path(corpus).expanduser()
        try:
            found = source.stat()
        except OSError as error:
            raise DataError(f"the passages {corpus} cannot be read: {error.strerror}") from None
        state = f"2 {found.st_size} {found.st_mtime_ns} {_samples_digest(source, found.st_size)}"
        places = _places(source)
        for place in places:
            if place.is_file() and _state_of(place) == state:
                return cls(place)
        place = next((each for each in places if _can_be_written(each.parent)), None)
        if place is None:
            raise DataError(
                f"the index of the passages {corpus} belongs beside them, or in {places[-1].parent}, and neither "
                "folder can be written; set XDG_CACHE_HOME to one that can"
            )
        _write(place, _read(source), state)
        return cls(place)

    def __len__(self) -> int:
        return int(self._connection.execute("select count(*) from passages").fetchone()[0])

    def search(self, query: str, top_k: int) -> list[tuple[str, str]]:
        """Return title and text of the passages that match best, the best first.

        Args:
            query: words, of which a passage needs one; rare ones weigh more (BM25, k1=1.2, b=0.75, Porter's stems).
            top_k: passages at most.

        Raises:
            EnvironmentFailedError: the index cannot be read.
        """
        words = list(dict.fromkeys(_WORD.findall(query.lower())))
        words = [word for word in words if word not in _COMMON] or words
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in words[:_MAX_WORDS])
        try:
            found = self._connection.execute(
                "select title, text from passages where passages match ? order by rank, rowid limit ?", (asked, top_k)
            )
            return found.fetchall()
        except sqlite3.Error as error:
            raise EnvironmentFailedError(f"the index {self.path} cannot be read: {error}; remove it") from error

    @property
    def _connection(self) -> sqlite3.Connection:
        if getattr(self._own, "process", None) != os.getpid():  # of a thread, and not of a parent that was forked
            self._own.connection, self._own.process = _opened(self.path), os.getpid()
        connection: sqlite3.Connection = self._own.connection
        return connection


def _places(source: Path) -> Sequence[Path]:
    """Return where the index of a file may lie, the better place first."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "rallypoint" / "passages"
    digest = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]
    return source.with_name(f"{source.name}.bm25"), cache / f"{source.name}-{digest}.bm25"


def _can_be_written(folder: Path) -> bool:
    """Return whether files can be made in a folder, which is made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _samples_digest(source: Path, size: int) -> str:
    """Return a digest of a file's beginning, middle and end: copies may keep size and time of what they replace."""
    digest = hashlib.blake2b(digest_size=16)
    with source.open("rb") as file:
        for place in (0, size // 2, size - _SAMPLE_BYTES):
            file.seek(max(0, place))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False)


def _state_of(place: Path) -> str | None:
    with contextlib.suppress(sqlite3.DatabaseError), contextlib.closing(_opened(place)) as index:
        return str(index.execute("select state from made").fetchone()[0])
    return None


def _write(place: Path, passages: Iterable[tuple[str, str]], state: str) -> None:
    """Make an index under a name of its own, and put it where it belongs when it is complete."""
    _LOG.warning("making an index of passages, once: %s", place)
    begun, part = time.monotonic(), place.with_name(f"{place.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with contextlib.closing(sqlite3.connect(part)) as index:
            index.executescript("pragma journal_mode=off; pragma synchronous=off; pragma cache_size=-262144;")
            # A passage counts for the words that it has, wherever: no places of words are kept.
            options = "tokenize='porter unicode61', detail=column"
            index.execute(f"create virtual table passages using fts5(title, text, {options})")
            index.executemany("insert into passages values (?, ?)", passages)
            index.execute("insert into passages(passages) values ('optimize')")
            index.execute("create table made as select ? as state", (state,))
            index.commit()
        part.replace(place)
    except (sqlite3.Error, OSError) as error:
        raise DataError(f"the index of passages {place} cannot be made: {error}; give its folder room") from error
    finally:
        part.unlink(missing_ok=True)
    _LOG.warning("%s: made in %.0f s", place, time.monotonic() - begun)


def _read(source: Path) -> Iterator[tuple[str, str]]:
    problems = Problems()
    table = open_table(str(source), source.name, problems)
    if table is None:
        problems.raise_any()
        raise AssertionError("a table that could not be opened has a problem")
    wanted = [name for name in ("title", *_TEXT) if table.columns is None or name in table.columns]
    num_read = 0
    for place, row in table.read(wanted, 0):
        yield _passage(row, f"{source.name}, {table.unit} {place}", table.columns or tuple(row))
        num_read += 1
    problems.raise_any()
    if not num_read:
        raise DataError(f"{source} has no passages")


def _passage(row: Mapping[str, Any], where: str, columns: Sequence[str]) -> tuple[str, str]:
    r"""Return title and text of a row.

    >>> _passage({"contents": '"Rome"\nA city.'}, "", ()), _passage({"title": "Rome", "text": "A city."}, "", ())
    (('Rome', 'A city.'), ('Rome', 'A city.'))
    """
    text = next((row[name] for name in _TEXT if isinstance(row.get(name), str)), None)
    if text is None:
        near = next(filter(None, (suggestion(name, _TEXT) for name in columns)), "")
        raise DataError(f"{where}: expected a column `text` with text, found {', '.join(columns)}{near}")
    title = row.get("title")
    if title is None and "contents" in row:
        title, _, text = text.partition("\n")
    return str(title or "").strip('"'), str(text)
