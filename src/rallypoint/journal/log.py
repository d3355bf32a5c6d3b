"""The file of the journal: one JSON object a line, only ever appended to.

    {"n": 4, "time": 1764100000.25, "before": "5a1f09c2d3e4b687", "kind": "StepDone", "step": 1, "metrics": {...}, ...}

Owns: numbers, times and the hash of the line before, which shows that no line was lost, changed or put in between.
Must not know: what an event means.

Readers that subscribe get every event once it is written, in its order.

Lines reach the operating system before `append` returns, so that a killed process loses none. At worst the last one is
torn (no newline at its end): readers leave it out, and the next writer removes it. Nothing else is ever removed: a
resume supersedes lines (`state.py`), and what a killed start did stays readable.

While the disk takes nothing, lines wait in memory, in their order. `sync` raises until all are written, so no
checkpoint counts before its journal does: what a kill would lose is what a resume does again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Self, TypeAlias

import xxhash

from rallypoint import failpoints
from rallypoint.disk import Outage, naming
from rallypoint.errors import DiskError, RunFolderError
from rallypoint.journal.events import Event, Level, Said, event_of, fields_of

_TAIL = 64 * 1024
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_FIRST = ""
"""What the first line has in place of the hash of the line before."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An event with its place in the journal."""

    number: int
    """Counted from 1; 0 for one that is not kept."""
    time_s: float
    """When it was written: seconds since the epoch, by the clock of that machine."""
    event: Event


Reader: TypeAlias = Callable[[Entry], None]
"""Takes every event, in the thread that appends it."""


class Journal:
    """Appends events to a run's journal, from any thread; of one process at a time, which the run's lock ensures."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open the file, which may exist, and remove a torn last line.

        Args:
            path: of it; `/dev/null` keeps nothing.
            clock: tells seconds since the epoch.

        Raises:
            RunFolderError: its last line is damaged, so that it cannot be continued.
            DiskError: it cannot be written.
        """
        self.path, self._clock = path, clock
        self._lock = threading.RLock()  # a reader may have something to say
        self._readers: list[tuple[Reader, Outage]] = []
        self._unwritten = bytearray()
        self._outage = Outage(self.say, "its lines wait in memory")
        with naming(path):
            self._file = path.open("a+b", buffering=0)
            self._number, self._before = self._last()

    def subscribe(self, *readers: Reader) -> None:
        """Give readers every event from now on; one that cannot write what it makes of an event gets the next one."""
        meanwhile = "training goes on, and the journal has all of it"
        self._readers += [(reader, Outage(self.say, meanwhile)) for reader in readers]

    def say(self, text: str, *, level: Level = "note") -> None:
        """Append a message for the user; of a journal that is closed, readers get it still."""
        said = Said(text=text, level=level)
        if self.is_closed:  # as of a tracker that hangs
            self.tell(said)
        else:
            self.append(said)

    def tell(self, event: Event) -> None:
        """Give readers an event that is not kept."""
        with self._lock:
            self._deliver(Entry(0, self._clock(), event))

    def append(self, *events: Event) -> None:
        """Append events, a line each; while the disk takes nothing they wait in memory, and `sync` raises."""
        with self._lock:
            number, before, lines, entries = self._number, self._before, list[bytes](), list[Entry]()
            for event in events:
                number += 1
                entries.append(Entry(number, round(self._clock(), 3), event))
                head = {"n": number, "time": entries[-1].time_s, "before": before, "kind": type(event).__name__}
                line = _JSON.encode(head | fields_of(event)).encode(errors="replace")
                before = _hash(line)
                lines.append(line + b"\n")
            failure = None
            try:
                if failpoints.armed is not None:
                    with naming(self.path):
                        for event in events:
                            failpoints.fail(failpoints.armed.due(type(event).__name__, event))
            except DiskError as error:
                failure = error
            self._unwritten += b"".join(lines)
            self._number, self._before = number, before
            try:
                if failure is None:
                    self._write()
            except DiskError as error:
                failure = error
            for entry in entries:
                self._deliver(entry)
            if failure is None:
                self._outage.ends("the journal is written again, and complete")
            else:
                self._outage.lasts(failure)

    def _write(self) -> None:
        """Write all lines that wait.

        Raises:
            DiskError: the disk is full or not writable.
        """
        with naming(self.path, len(self._unwritten)):
            while self._unwritten:
                del self._unwritten[: self._file.write(self._unwritten)]

    def _deliver(self, entry: Entry) -> None:
        for reader, outage in self._readers:
            try:
                reader(entry)
            except DiskError as error:
                outage.lasts(error)

    def sync(self) -> None:
        """Flush all lines to the disk, so that no power cut takes those before a checkpoint.

        Raises:
            DiskError: the disk is full or not writable, or the file was moved away or removed.
        """
        with self._lock, naming(self.path):
            self._write()
            os.fsync(self._file.fileno())
            if not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                raise FileNotFoundError(errno.ENOENT, "another file has taken its place")

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more events."""
        return self._file.closed

    def close(self) -> None:
        """Close the file.

        Raises:
            DiskError: lines that waited could not be written.
        """
        with self._lock, contextlib.closing(self._file):
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(DiskError):  # which may be that error
            self.close()

    def _last(self) -> tuple[int, str]:
        """Return the number and the hash of the last whole line, and cut off what follows it."""
        size = self._file.seek(0, os.SEEK_END)
        span = _TAIL
        while True:
            self._file.seek(max(0, size - span))
            *whole, torn = self._file.read().split(b"\n")
            if len(whole) > 1 or span >= size:
                break
            span *= 4
        if torn:
            self._file.truncate(size - len(torn))
        if not whole:
            return 0, _FIRST
        return _parse(self.path, whole[-1])[0].number, _hash(whole[-1])


_HEAD = re.compile(
    rb'\{"n": (\d+), "time": [^,]+, "before": "(\w*)", "kind": "(\w+)"'
    rb'(?:, "prompt": (\d+), "validation": (?:(null)|\d+))?'
)


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
    """A line that is read later, see `JournalTail`."""

    place: int
    """Byte of the file at which it begins."""
    prompt: int | None
    """Index in the run of the prompt that it is about; None if it is about none, or of a validation."""


class JournalTail:
    """Reads a journal as it grows: each call of `read` yields what is new, and a torn last line waits for its end."""

    def __init__(self, path: Path, *, later: Collection[str] = ()) -> None:
        """Begin before the first line.

        Args:
            path: of the journal, which may not be there yet.
            later: names of kinds that are many: `read` yields where their lines stand, and `at` reads one.
        """
        self.path, self._later = path, frozenset(kind.encode() for kind in later)
        self._offset, self._number, self._before = 0, 0, _FIRST

    def read(self) -> Iterator[Entry | Later]:
        """Yield entries, and where lines of the kinds stand that are read later.

        Raises:
            RunFolderError: a line is damaged, missing, or of a version of rallypoint that writes other events.
        """
        if not self.path.is_file() or self.path.stat().st_size == self._offset:
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")[:-1]
        for line in lines:
            head = _HEAD.match(line) if self._later else None
            if head is not None and head[3] in self._later:
                number, expected = int(head[1]), head[2].decode()
                found = Later(self._offset, int(head[4]) if head[5] else None)
            else:
                found, expected = _parse(self.path, line, self._number + 1)
                number = found.number
            if (number, expected) != (self._number + 1, self._before):
                raise RunFolderError(
                    f"{self.path}, line {self._number + 1}: expected number {self._number + 1} after a line with the "
                    f"hash {self._before or 'of none'}, found number {number} after {expected or 'none'}: a line "
                    "before it was changed or removed"
                )
            self._offset, self._number, self._before = self._offset + len(line) + 1, number, _hash(line)
            yield found

    def at(self, place: int) -> Entry:
        """Return the entry whose line begins at a byte of the file.

        Raises:
            RunFolderError: it is damaged.
        """
        with self.path.open("rb") as file:
            file.seek(place)
            return _parse(self.path, file.readline().rstrip(b"\n"))[0]


def read_journal(path: Path) -> Iterator[Entry]:
    """Yield what a journal has, oldest first; nothing of a file that is not there.

    Raises:
        RunFolderError: a line is damaged, missing, or of a version of rallypoint that writes other events.
    """
    for entry in JournalTail(path).read():
        assert isinstance(entry, Entry), "nothing is read later"
        yield entry


def _parse(path: Path, line: bytes, number: int | None = None) -> tuple[Entry, str]:
    """Return the entry of a line, and the hash that it has of the line before."""
    where = f"{path}, {'last line' if number is None else f'line {number}'}"
    try:
        found = json.loads(line)
        place, time_s, before, kind = (found.pop(name) for name in ("n", "time", "before", "kind"))
    except (ValueError, KeyError, AttributeError) as error:
        raise RunFolderError(f"{where} is damaged ({type(error).__name__}: {error}); restore the file") from error
    try:
        return Entry(int(place), float(time_s), event_of(kind, found)), str(before)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{where}: expected an event of this version of rallypoint, found {kind} with {', '.join(found)} "
            f"({error}); read it with the version that wrote it"
        ) from error


def _hash(line: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(line)
