"""Data sets in the field's common schema, checked when they are loaded.

Owns: the columns and what they mean. Must not know: tokenizers, tensors. Invariant: a `Dataset` that
exists has no bad row.

| column         | what                                                            | when it is absent        |
|----------------|-----------------------------------------------------------------|--------------------------|
| `prompt`       | a list of {role, content}, or text: one message of the user     | error                    |
| `reward_model` | {ground_truth}; `style` and anything else is ignored            | column `ground_truth`    |
| `ground_truth` | read only where `reward_model` is absent                        | error (unless waived)    |
| `data_source`  | text that the reward function may choose by                     | the file's name, no end  |
| `ability`      | text                                                            | ""                       |
| `extra_info`   | an object for the reward function                               | {}                       |

Other columns are ignored, unless a column is missing and another has nearly its name, or the name that other data sets
use for it (`question`, `answer`).
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, overload

from rallypoint.data.files import (
    Problems,
    Row,
    check_dataset_path,
    found,
    parquet_columns,
    read_jsonl,
    read_parquet,
    suggestion,
)
from rallypoint.errors import DataError

JSONValue: TypeAlias = "str | int | float | bool | list[JSONValue] | dict[str, JSONValue] | None"
Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")

_COLUMNS = ("prompt", "reward_model", "ground_truth", "data_source", "ability", "extra_info")
_ELSEWHERE = {
    "prompt": ("question", "problem", "instruction", "query", "input", "messages", "conversations"),
    "reward_model": ("answer", "solution", "final_answer", "expected_answer", "target", "output", "label"),
}
"""Names of these columns in other data sets, the likeliest first; the second is our `ground_truth`."""
_KINDS: dict[type, str] = {
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


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
    paths: Sequence[str | Path], *, require_ground_truth: bool = True, max_rows: int | None = None
) -> Dataset:
    """Read .parquet and .jsonl files, one after another.

    Args:
        paths: the files; `~` is the home folder.
        require_ground_truth: False lets rows without a ground truth pass, for rewards that need none.
        max_rows: most good rows to read; None for all.

    Raises:
        DataError: the problems of all the files together, each with its file, row and column.
    """
    if isinstance(paths, str | Path):
        raise TypeError(f"paths: expected a list of paths, found one path: write [{str(paths)!r}]")
    if not paths:
        raise DataError("no data file is given: expected at least one .parquet or .jsonl file")
    problems = Problems()
    examples: list[Example] = []
    is_part = False
    for path, label in zip(paths, labels(paths), strict=True):
        problem = check_dataset_path(path)
        if problem is not None:
            problems.add(problem)
            continue
        before, total = len(examples), problems.total
        rows = _load_file(Path(path).expanduser(), label, require_ground_truth, problems)
        examples += itertools.islice(rows, None if max_rows is None else max_rows - len(examples))
        has_more = len(examples) == max_rows and next(rows, None) is not None
        is_part = is_part or has_more
        rows.close()
        if len(examples) == before and not has_more and problems.total == total:
            problems.add(f"{path} has no rows")
    problems.raise_any()
    return Dataset(tuple(examples), is_part)


def labels(paths: Sequence[str | Path]) -> list[str]:
    """Name files by their last part, or as they were given where two distinct paths share it."""
    shared = Counter(Path(path).name for path in {str(path) for path in paths})
    return [str(path) if shared[Path(path).name] > 1 else Path(path).name for path in paths]


def _load_file(
    path: Path, label: str, require_ground_truth: bool, problems: Problems
) -> Generator[Example, None, None]:
    reader = _RowReader(path, label, require_ground_truth, problems)
    if path.suffix == ".parquet":
        names = parquet_columns(path, label, problems)
        if names is None or not reader.has_columns(names, label):
            return
        rows = read_parquet(path, [name for name in _COLUMNS if name in names], label, problems)
    else:
        rows = read_jsonl(path, label, problems)
    try:
        for number, row in rows:
            example = reader.read(number, row)
            if example is not None:
                yield example
    finally:  # also where no more rows are wanted
        reader.report_columns()


class _RowReader:
    """Turns the rows of one file into examples, and collects problems."""

    def __init__(self, path: Path, label: str, require_ground_truth: bool, problems: Problems) -> None:
        self._stem = path.stem
        self._label = label
        self._unit = "row" if path.suffix == ".parquet" else "line"
        self._require_ground_truth = require_ground_truth
        self._problems = problems
        self._checked_columns: set[tuple[str, ...]] = set()
        self._bad_columns: dict[tuple[str, ...], tuple[list[str], int]] = {}
        self._lookalikes: set[str] = set()
        self._kinds: dict[str, tuple[str, int]] = {}

    def has_columns(self, names: Iterable[str], where: str) -> bool:
        """Return whether all required columns are there, and report names that are nearly right."""
        names = list(names)
        missing = [self._missing(column, names, where) for column in self._required(names)]
        for problem in missing:
            self._problems.add(problem)
        self._find_lookalikes(names, where)
        return not missing

    def _required(self, names: Sequence[str]) -> list[str]:
        required = [] if "prompt" in names else ["prompt"]
        if self._require_ground_truth and not {"reward_model", "ground_truth"} & set(names):
            required.append("reward_model")
        return required

    def _missing(self, column: str, names: Sequence[str], where: str) -> str:
        strangers = [name for name in names if name not in _COLUMNS]
        hint = suggestion(column, strangers)
        if not hint and (elsewhere := next((name for name in _ELSEWHERE[column] if name in names), None)):
            own = "ground_truth" if column == "reward_model" else column
            hint = f"; {elsewhere!r} may be it: write the file with {own!r} in its place (docs/data.md shows how)"
        return f"{where}: column '{column}' is missing{hint or f'; found {quoted(names)}'}"

    def _find_lookalikes(self, names: Sequence[str], where: str) -> None:
        strangers = [name for name in names if name not in _COLUMNS]
        for column in set(_COLUMNS) - set(names) - set(self._required(names)):
            for name in difflib.get_close_matches(column, strangers, n=1, cutoff=0.85):
                if name not in self._lookalikes:
                    self._lookalikes.add(name)
                    self._problems.add(f"{where}: unknown column '{name}'; did you mean '{column}'?")

    def _check_columns(self, columns: tuple[str, ...], where: str) -> bool:
        """Return whether a line has the required columns; lines that lack the same ones are one problem."""
        if missing := self._required(columns):
            usual = [self._missing(column, columns, where) for column in missing], 0
            first, count = self._bad_columns.get(columns, usual)
            self._bad_columns[columns] = first, count + 1
        else:
            self._checked_columns.add(columns)
            self._find_lookalikes(columns, where)
        return not missing

    def report_columns(self) -> None:
        """Report the lines that lack a column; call it when the file has been read."""
        for missing, count in self._bad_columns.values():
            for problem in missing:
                more = f" (and {count - 1:,} {self._unit}s more)" if count > 1 else ""
                self._problems.add(problem + more)

    def read(self, number: int, row: Row) -> Example | None:
        """Return the example of one row; None if it has a problem."""
        where = f"{self._label}, {self._unit} {number}"
        columns = tuple(row)
        if columns not in self._checked_columns and not self._check_columns(columns, where):
            return None
        problems: list[tuple[str, str]] = []
        prompt = _read_prompt(row["prompt"], problems)
        data_source = row.get("data_source", self._stem)
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
            self._problems.add(f"{where}, column {column}: {problem}")
        if problems:
            return None
        return Example(
            name=f"{self._label}:{number}",
            data_source=sys.intern(str(data_source)),
            prompt=prompt,
            ability=sys.intern(ability),
            ground_truth=ground_truth,
            extra_info=cast("dict[str, Any]", extra_info),
        )

    def _read_ground_truth(self, number: int, data_source: str, row: Row, problems: list[tuple[str, str]]) -> JSONValue:
        column, value = "ground_truth", row.get("ground_truth")
        if row.get("reward_model") is not None or "ground_truth" not in row:
            column, reward_model = "reward_model", row.get("reward_model")
            if isinstance(reward_model, dict) and "ground_truth" in reward_model:
                column, value = "reward_model.ground_truth", cast("JSONValue", reward_model["ground_truth"])
            elif self._require_ground_truth or reward_model is not None:
                problems.append((column, f"expected an object with 'ground_truth', found {found(reward_model)}"))
                return None
        if value is None:
            if self._require_ground_truth:
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


def _read_prompt(value: object, problems: list[tuple[str, str]]) -> tuple[Message, ...]:
    if isinstance(value, str):
        if not value.strip():
            problems.append(("prompt", no_text(value)))
        elif value.lstrip().startswith(("[{", "{")) and '"role"' in value:
            problems.append(("prompt", f"expected a list of messages, found the same written as {found(value)}"))
        return (Message("user", value),)
    if not isinstance(value, list) or not value:
        problems.append(("prompt", f"expected a list of messages or text, found {found(value)}"))
        return ()
    values = cast("list[object]", value)
    messages: list[Message] = []
    for index, entry in enumerate(values):
        problem = message_problem(entry)
        if problem is not None:
            part, text = problem
            problems.append((f"prompt[{index}]{part}", text))
        else:
            fields = cast("dict[str, str]", entry)
            messages.append(Message(cast("Role", sys.intern(fields["role"])), fields["content"]))
    if len(messages) == len(values) and messages[-1].role == "assistant":
        last = len(messages) - 1
        problems.append((f"prompt[{last}].role", "expected the prompt to end before the answer, found 'assistant'"))
    return tuple(messages)


def message_problem(message: object) -> tuple[str, str] | None:
    """Return which part of a message is wrong, and how."""
    if not isinstance(message, dict):
        return "", f"expected an object with 'role' and 'content', found {found(message)}"
    fields = cast("dict[str, object]", message)
    for name in ("role", "content"):
        if name not in fields:
            return "", f"expected '{name}'{suggestion(name, list(fields)) or f', found {found(fields)}'}"
        if not isinstance(fields[name], str):
            return f".{name}", f"expected text, found {found(fields[name])}"
    role, content = cast("str", fields["role"]), cast("str", fields["content"])
    if role not in ROLES:
        return ".role", f"expected one of {', '.join(ROLES)}, found {role!r}{suggestion(role.lower(), ROLES)}"
    if not content.strip():
        return ".content", no_text(content)
    # A chat template may show these; dropped in silence, the prompt would be another one.
    strangers = [name for name, field in fields.items() if name not in ("role", "content") and field is not None]
    return (f".{strangers[0]}", "expected only 'role' and 'content' in a message") if strangers else None


def no_text(text: str) -> str:
    """Say what a text without anything to read is."""
    return f"expected text, found {'only blanks' if text else 'empty text'}"


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


def quoted(names: Sequence[str]) -> str:
    """List names of columns."""
    return ", ".join(map(repr, names)) or "no column"
