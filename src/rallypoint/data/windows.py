"""Prompts and examples that are read as a run needs them, for data that do not fit in memory.

Owns: which rows are in memory, and which of them has which number. Must not know: models, tensors. There is no state to
save: what has a number follows from the files and the seed, whatever was asked before.

Files are read in order, a window of rows at a time, and each window has an order of its own. So a row is admitted at
most a window sooner or later than it stands in the file, every row once an epoch. Two windows are held: the admissions
of a step may straddle their border.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from rallypoint.data.conversations import Kind, NamedExample, read_conversations
from rallypoint.data.dataset import Example, open_rows, read_examples
from rallypoint.data.encoded_rows import EncodedExample, EncodedRows
from rallypoint.data.files import Problems
from rallypoint.data.locate import DataSet, labelled
from rallypoint.data.prompts import EncodedPrompts
from rallypoint.data.stream import permutation, share_of
from rallypoint.errors import DataError

ExampleT = TypeVar("ExampleT")
ItemT = TypeVar("ItemT")
_NUM_HELD = 2


class RowStream(Generic[ExampleT]):
    """The rows of data sets one after another, read from any place on."""

    def __init__(
        self,
        paths: Sequence[str | Path | DataSet],
        read: Callable[[DataSet, str, str, Problems, int], Iterator[ExampleT]],
    ) -> None:
        """Find the files; `read` yields the examples of one from its n-th row on.

        Raises:
            DataError: a data set has none.
        """
        problems = Problems()
        self._files = [(dataset, file, label) for _, dataset, file, label in labelled(paths, problems)]
        problems.raise_any()
        self._read = read
        self._counts: dict[int, int] = {}

    @staticmethod
    def of_prompts(paths: Sequence[str | Path | DataSet], *, require_ground_truth: bool = True) -> RowStream[Example]:
        """Return the prompts of data sets; see `load_dataset`."""
        return RowStream(paths, functools.partial(read_examples, require_ground_truth=require_ground_truth))

    @staticmethod
    def of_conversations(paths: Sequence[str | Path | DataSet], kind: Kind) -> RowStream[NamedExample]:
        """Return the conversations, or pairs of them, of data sets."""
        return RowStream(paths, functools.partial(read_conversations, kind=kind))

    def read(self, start: int, problems: Problems) -> Iterator[ExampleT]:
        """Yield the examples from the n-th row on; a row with a problem is reported, and none."""
        for place, (dataset, file, label) in enumerate(self._files):
            if start and start >= self._count(place):
                start -= self._count(place)
                continue
            yield from self._read(dataset, file, label, problems, start)
            start = 0

    def count(self) -> int:
        """Return the number of rows; files without an index, such as .jsonl, are read to their end once."""
        return sum(map(self._count, range(len(self._files))))

    def _count(self, place: int) -> int:
        if place not in self._counts:
            dataset, file, label = self._files[place]
            table = open_rows(dataset, file, label, problems := Problems())
            problems.raise_any()
            self._counts[place] = 0 if table is None else table.count()
        return self._counts[place]


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """A window that was read: its place in the data, and its numbers."""

    epoch: int
    row: int
    """Number of its first row."""
    first: int
    """Number of its first item."""
    size: int
    """Items in it; fewer than its rows where some were left out."""
    is_last: bool
    """Whether the epoch ends with it."""


class Windows(Generic[ExampleT, ItemT]):
    """The items of some data sets by their numbers, from 0, over all epochs."""

    def __init__(
        self,
        rows: RowStream[ExampleT],
        encode: Callable[[Sequence[ExampleT]], Sequence[ItemT]],
        *,
        num_rows: int,
        seed: int,
        shuffle: bool = True,
        part: int = 0,
        keeps_all: bool = False,
    ) -> None:
        """Read nothing yet.

        Args:
            rows: of the data sets.
            encode: makes items of the rows of a window; it may leave some out.
            num_rows: rows of a window.
            seed: of the orders.
            shuffle: False keeps the order of the files.
            part: which of several streams of a run this is; each has orders of its own.
            keeps_all: whether `encode` never leaves a row out: a window far ahead is then found without reading those
                before it.
        """
        self._rows, self._encode, self._num_rows = rows, encode, num_rows
        self._seed, self._shuffle, self._part, self._keeps_all = seed, shuffle, part, keeps_all
        self._known: list[_Window] = []
        self._held: dict[_Window, Sequence[ItemT]] = {}
        self._problems, self._reader, self._at = Problems(), iter(list[ExampleT]()), (-1, 0)

    def __getitem__(self, number: int) -> ItemT:
        """Return an item.

        Raises:
            DataError: a row of its window is bad; or no row is left.
        """
        if self._known and number < self._known[0].first:
            self._known.clear()
        if self._keeps_all and number >= self._end + self._num_rows and (count := self._rows.count()):
            epoch, place = divmod(number, count)
            row = place - place % self._num_rows
            self._known = [self._read(epoch, row, epoch * count + row)]
        while number >= self._end:
            self._known.append(self._next())
        window = self._known[bisect.bisect(self._known, number, key=lambda one: one.first) - 1]
        if window not in self._held:
            self._read(window.epoch, window.row, window.first)
        return self._held[window][number - window.first]

    @property
    def num_held(self) -> int:
        """Number of items in memory."""
        return sum(map(len, self._held.values()))

    @property
    def _end(self) -> int:
        """The first number after the windows that are known."""
        return self._known[-1].first + self._known[-1].size if self._known else 0

    def _next(self) -> _Window:
        """Read the next window that has items."""
        epoch, row, num_ends = 0, 0, 0
        if self._known:
            last = self._known[-1]
            epoch, row = (last.epoch + 1, 0) if last.is_last else (last.epoch, last.row + self._num_rows)
        while not (window := self._read(epoch, row, self._end)).size:
            epoch, row = (epoch + 1, 0) if window.is_last else (epoch, row + self._num_rows)
            num_ends += window.is_last
            if num_ends > 1:
                raise DataError("nothing is left of the data: the files have no rows, or all of them are too long")
        return window

    def _read(self, epoch: int, row: int, first: int) -> _Window:
        if self._at != (epoch, row):
            self._problems = Problems()
            self._reader = self._rows.read(row, self._problems)
        self._at = (epoch, row + self._num_rows)
        examples = list(itertools.islice(self._reader, self._num_rows))
        self._problems.raise_any()
        items = self._encode(examples) if examples else list[ItemT]()
        window = _Window(epoch, row, first, len(items), is_last=len(examples) < self._num_rows)
        if self._shuffle:
            order = permutation(len(items), (self._seed, epoch, self._part, row))
            items = [items[place] for place in order]
        if items:
            self._held[window] = items
            for oldest in list(self._held)[:-_NUM_HELD]:
                del self._held[oldest]
        return window


class StreamedPrompts:
    """The training prompts of a run by the numbers of their admissions; as `EncodedPrompts` where all are in memory."""

    is_part = True

    def __init__(
        self,
        parts: Sequence[RowStream[Example]],
        encode: Callable[[Sequence[Example]], EncodedPrompts],
        tell: Callable[[EncodedPrompts], None],
        *,
        num_rows: int,
        seed: int,
        shuffle: bool,
        weights: Sequence[float] = (1.0,),
        keeps_all: bool = False,
    ) -> None:
        """Read the first window of each part.

        Args:
            parts: data sets that are mixed, each of one or more.
            encode: makes prompts of rows.
            tell: called with the prompts of every window, of which some may have been too long.
            num_rows: rows that are held at most, in all parts together: a window of each has half of its share.
            seed: of the run.
            shuffle: whether windows are shuffled.
            weights: of the parts.
            keeps_all: see `Windows`.

        Raises:
            DataError: one of these rows is bad.
        """
        self.tell = tell
        self._parts, self._weights, self._encode = parts, weights, encode
        each = max(1, num_rows // (_NUM_HELD * len(parts)))
        self.windows = [
            Windows(rows, self._pairs, num_rows=each, seed=seed, shuffle=shuffle, part=part, keeps_all=keeps_all)
            for part, rows in enumerate(parts)
        ]
        first = [windows[0] for windows in self.windows]
        self.sources = sorted({example.data_source for _, example in first})
        self.max_tokens = max(len(ids) for ids, _ in first)

    def _pairs(self, examples: Sequence[Example]) -> list[tuple[tuple[int, ...], Example]]:
        found = self._encode(examples)
        self.tell(found)
        return list(zip(found.token_ids, found.examples, strict=True))

    def __len__(self) -> int:
        """Return the number of rows, too long ones included; they are counted when this is first asked for."""
        return sum(rows.count() for rows in self._parts)

    def __getitem__(self, admission: int) -> tuple[tuple[int, ...], Example]:
        """Return the prompt that the admission with this number (from 0) admits."""
        part, number = share_of(self._weights, admission)
        return self.windows[part][number]

    def example_index(self, admission: int) -> int:
        """Return the number by which an admission is known here: itself."""
        return admission


class StreamedRows:
    """The examples of a run by the numbers of their admissions; as `EncodedRows` where all are in memory."""

    is_part = True

    def __init__(
        self,
        rows: RowStream[NamedExample],
        encode: Callable[[Sequence[NamedExample]], EncodedRows],
        tell: Callable[[EncodedRows], None],
        *,
        num_rows: int,
        seed: int,
        shuffle: bool,
        keeps_all: bool = False,
    ) -> None:
        """Read the first window; see `StreamedPrompts` for the arguments.

        Raises:
            DataError: one of its rows is bad.
        """
        self.tell, self._rows, self._encode = tell, rows, encode
        each = max(1, num_rows // _NUM_HELD)
        self.windows = Windows(rows, self._examples, num_rows=each, seed=seed, shuffle=shuffle, keeps_all=keeps_all)
        self.windows[0]

    def _examples(self, read: Sequence[NamedExample]) -> list[EncodedExample]:
        found = self._encode(read)
        self.tell(found)
        return [found[example] for example in range(len(found))]

    def __len__(self) -> int:
        """Return the number of examples, too long ones included; they are counted when this is first asked for."""
        return self._rows.count()

    def __getitem__(self, admission: int) -> EncodedExample:
        """Return the example that the admission with this number (from 0) admits."""
        return self.windows[admission]

    def example_index(self, admission: int) -> int:
        """Return the number by which an admission is known here: itself."""
        return admission
