"""Data sets in the field's common schema, checked when they are loaded.

Owns: the columns and what they mean. Must not know: tokenizers, tensors. Invariant: a `Dataset` that
exists has no bad row.

| column         | what                                                            | when it is absent        |
|----------------|-----------------------------------------------------------------|--------------------------|
| `prompt`       | a list of messages, or text: one message of the user            | error                    |
| `tools`        | function schemas of the tools that the prompt's answer may call | none                     |
| `reward_model` | {ground_truth}; `style` and anything else is ignored            | column `ground_truth`    |
| `ground_truth` | read only where `reward_model` is absent                        | error (unless waived)    |
| `data_source`  | text that the reward function may choose by                     | the file's name, no end  |
| `ability`      | text                                                            | ""                       |
| `extra_info`   | an object for the reward function                               | {}                       |

A data set may say that its columns have other names. Other columns are ignored, unless a column is missing and another
has nearly its name, or the name that other data sets use for it (`question`, `answer`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast, overload

from rallypoint.data.columns import Columns
from rallypoint.data.files import FORMATS, Problems, Row, Table, found, open_table
from rallypoint.data.generators import is_generator, open_generator
from rallypoint.data.locate import DataSet, labelled
from rallypoint.data.messages import ChatMessage, Message, read_messages, read_tools, without_nulls
from rallypoint.errors import DataError

JSONValue: TypeAlias = "str | int | float | bool | list[JSONValue] | dict[str, JSONValue] | None"

_KINDS: dict[type, str] = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One row of a data set."""

    name: str
    """File and row (from 0; for .jsonl the line, from 1), as in `train.parquet:17`; errors name it."""
    data_source: str
    prompt: tuple[Message, ...]
    ability: str
    ground_truth: JSONValue
    """None only where the data set was loaded without requiring it."""
    extra_info: dict[str, Any]
    part: int = 0
    """Place of its data set among those that are loaded together."""
    tools: tuple[ChatMessage, ...] = ()
    """OpenAI's function schemas, which its prompt tells the model of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset(Sequence[Example]):
    """Examples in the order of their files."""

    examples: tuple[Example, ...]
    is_part: bool = False
    """Whether its files have more rows than were read."""

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self.examples[index]


def load_dataset(
    paths: Sequence[str | Path | DataSet], *, require_ground_truth: bool = True, max_rows: int | None = None
) -> Dataset:
    """Read data sets, one after another.

    Args:
        paths: the data sets, or paths of such; `~` is the home folder.
        require_ground_truth: False lets rows without a ground truth pass, for rewards that need none.
        max_rows: most good rows to read; None for all.

    Raises:
        DataError: the problems of all the files together, each with its file, row and column.
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths: expected a list of paths, found one path: write [{str(paths)!r}]")
    if not paths:
        raise DataError(f"no data file is given: expected at least one, that ends in {', '.join(FORMATS)}")
    problems = Problems()
    examples: list[Example] = []
    is_part = False
    for part, dataset, file, label in labelled(paths, problems):
        before, total = len(examples), problems.total
        rows = read_examples(dataset, file, label, problems, require_ground_truth=require_ground_truth)
        read = itertools.islice(rows, None if max_rows is None else max_rows - len(examples))
        examples += (dataclasses.replace(one, part=part) for one in read) if part else read
        has_more = len(examples) == max_rows and next(rows, None) is not None
        is_part = is_part or has_more
        rows.close()
        if len(examples) == before and not has_more and problems.total == total:
            problems.add(f"{file} has no rows")
    problems.raise_any()
    return Dataset(tuple(examples), is_part)


def open_rows(dataset: DataSet, file: str, label: str, problems: Problems) -> Table | None:
    """Return a file, or a generator, as a table; None, with the problem, where there is none."""
    if is_generator(file):
        return open_generator(file, dataset.generator, problems)
    return open_table(file, label, problems)


def read_examples(
    dataset: DataSet, file: str, label: str, problems: Problems, start: int = 0, *, require_ground_truth: bool = True
) -> Generator[Example, None, None]:
    """Yield the examples of a file from the n-th row on; a row with a problem is reported, and none."""
    table = open_rows(dataset, file, label, problems)
    if table is None:
        return
    columns = Columns(dataset, label, table.unit, require_ground_truth, problems)
    if table.columns is not None and not columns.are_there(table.columns):
        return
    reader = _RowReader(columns, dataset.name, label, table.unit, problems)
    try:
        for number, row in table.read(columns.wanted(table.columns or ()), start):
            example = reader.read(number, row)
            if example is not None:
                yield example
    finally:  # also where no more rows are wanted
        columns.report()


class _RowReader:
    """Turns the rows of one file into examples, and collects problems."""

    def __init__(self, columns: Columns, source: str, label: str, unit: str, problems: Problems) -> None:
        self._columns, self._source, self._label, self._unit = columns, source, label, unit
        self._problems = problems
        self._kinds: dict[str, tuple[str, int]] = {}

    def read(self, number: int, row: Row) -> Example | None:
        """Return the example of one row; None if it has a problem."""
        where = f"{self._label}, {self._unit} {number}"
        if not self._columns.are_in(tuple(row), where):
            return None
        row, problems = _split_answer(self._columns.ours(row)), list[tuple[str, str]]()
        said = {name: row.get(name) for name in ("prompt", "tools")}
        if self._unit == "row":
            said = {name: without_nulls(value) for name, value in said.items()}
        prompt, tools = _read_prompt(said["prompt"], problems), read_tools(said["tools"], problems)
        data_source = row.get("data_source", self._source)
        if not isinstance(data_source, str):
            problems.append(("data_source", f"expected text, found {found(data_source)}"))
        ability = row.get("ability") or ""
        if not isinstance(ability, str):
            problems.append(("ability", f"expected text, found {found(ability)}"))
        extra_info = {} if row.get("extra_info") is None else row["extra_info"]
        if not isinstance(extra_info, dict):
            problems.append(("extra_info", f"expected an object, found {found(extra_info)}"))
        ground_truth = self._read_ground_truth(number, str(data_source), row, problems)
        for column, problem in problems:
            self._problems.add(f"{where}, column {self._columns.theirs(column)}: {problem}")
        if problems:
            return None
        return Example(
            name=f"{self._label}:{number}",
            data_source=sys.intern(str(data_source)),
            prompt=prompt,
            ability=sys.intern(ability),
            ground_truth=ground_truth,
            extra_info=cast("dict[str, Any]", extra_info),
            tools=tools,
        )

    def _read_ground_truth(self, number: int, data_source: str, row: Row, problems: list[tuple[str, str]]) -> JSONValue:
        column, value = "ground_truth", row.get("ground_truth")
        if row.get("reward_model") is not None or "ground_truth" not in row:
            column, reward_model = "reward_model", row.get("reward_model")
            if isinstance(reward_model, dict) and "ground_truth" in reward_model:
                column, value = "reward_model.ground_truth", cast("JSONValue", reward_model["ground_truth"])
            elif self._columns.require_ground_truth or reward_model is not None:
                problems.append((column, f"expected an object with 'ground_truth', found {found(reward_model)}"))
                return None
        if value is None:
            if self._columns.require_ground_truth:
                problems.append((column, "expected the right answer, found null"))
            return None
        if not _is_finite(value):
            problems.append((column, f"expected the right answer, found {_not_finite(value)}"))
            return None
        kind = _KINDS.get(type(value))
        if kind is None:
            problems.append((column, f"expected text, a number, a list or an object, found {found(value)}"))
            return None
        # A reward function that compares "5" with 5 always gives 0, so the rows of one source must agree.
        usual, first = self._kinds.setdefault(data_source, (kind, number))
        if kind != usual:
            problems.append(
                (column, f"expected {usual} as in {self._unit} {first} of {data_source!r}, found {found(value)}")
            )
        return value


def _split_answer(row: Row) -> Row:
    """Take the answer of a conversation, where one column of messages is both prompt and ground truth."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or prompt is not row.get("ground_truth") or not prompt:
        return row
    last: object = prompt[-1]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(last, dict) or last.get("role") != "assistant":  # pyright: ignore[reportUnknownMemberType]
        return {**row, "ground_truth": None}
    return {**row, "prompt": prompt[:-1], "ground_truth": last.get("content")}  # pyright: ignore[reportUnknownMemberType]


def _read_prompt(value: object, problems: list[tuple[str, str]]) -> tuple[Message, ...]:
    num, messages = len(problems), read_messages(value, "prompt", "user", problems)
    if len(problems) == num and messages[-1].role == "assistant":
        last = len(messages) - 1
        problems.append((f"prompt[{last}].role", "expected the prompt to end before the answer, found 'assistant'"))
    return messages


def _is_finite(value: JSONValue) -> bool:
    """Whether no number in a value is NaN, which equals nothing and is what pandas writes for absent ones."""
    match value:
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_is_finite, value))
        case dict():
            return all(map(_is_finite, value.values()))
        case _:
            return True


def _not_finite(value: JSONValue) -> str:
    return found(value) if isinstance(value, float) else f"{found(value)} with a NaN or an infinity in it"
