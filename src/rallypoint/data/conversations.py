"""Conversations to be trained on as they are, and pairs of them of which one is preferred, checked when loaded.

Owns: the columns, which messages are trained, and where in the text of the chat template they are. Must not know:
tokenizers, tensors.

| an example is  | columns                 | what                                                                   |
|----------------|-------------------------|------------------------------------------------------------------------|
| a conversation | `messages`              | a list of messages; every turn of the assistant is trained             |
|                | `prompt`, `completion`  | each text (a message of the user, of the assistant) or messages        |
| a pair         | `prompt`, `chosen`,     | the same, with two completions                                         |
|                | `rejected`              |                                                                        |
|                | `chosen`, `rejected`    | two whole lists of messages, which begin alike; what differs is judged |

Turns of the assistant in a prompt, or in what a pair begins with, are not trained. `tools` has the function schemas of
what the assistant may call. Other columns are ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeAlias

from rallypoint.data.columns import NamedColumns, quoted
from rallypoint.data.dataset import open_rows
from rallypoint.data.files import Problems, Row, suggestion
from rallypoint.data.locate import DataSet, labelled
from rallypoint.data.messages import (
    ChatMessage,
    Message,
    read_messages,
    read_tools,
    reasoning_in,
    schemas_text,
    whole_text,
    without_nulls,
)
from rallypoint.errors import DataError

Kind = Literal["conversations", "pairs"]
_TOOLS = "tools"
_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", _TOOLS)
_FORMS: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "conversations": (("messages",), ("prompt", "completion")),
    "pairs": (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
}
"""Columns of each form, the one that is looked for first in front."""
_ELSEWHERE = {
    "messages": ("conversations", "conversation", "dialog", "turns"),
    "prompt": ("instruction", "question", "query", "problem", "input"),
    "completion": ("response", "output", "answer", "solution", "target"),
    "chosen": ("preferred", "win", "better", "response_chosen", "answer_chosen"),
    "rejected": ("dispreferred", "lose", "worse", "response_rejected", "answer_rejected"),
}
"""Names of these columns in other data sets."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that end with a turn of the assistant."""

    messages: tuple[Message, ...]
    first_trained: int = 0
    """Index of the first message whose turn may be trained; turns of the assistant before it are context."""
    tools: tuple[ChatMessage, ...] = ()
    """OpenAI's function schemas, which the template is told of."""


NamedExample: TypeAlias = tuple[str, tuple[Conversation, ...]]
"""File and row of an example, as in `train.parquet:17`, and its conversation, or the chosen and the rejected one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conversations:
    """Examples in the order of their files: a conversation each, or the chosen and the rejected one."""

    names: tuple[str, ...]
    """File and row of each, as in `train.parquet:17`."""
    examples: tuple[tuple[Conversation, ...], ...]
    is_part: bool = False
    """Whether its files have more rows than were read."""
    bad: tuple[str, ...] = ()
    """Rows that cannot be used and were left out, each with the reason."""
    may_drop: frozenset[str] = frozenset()
    """Names of the examples that are also left out if the chat template cannot render them."""

    @property
    def texts(self) -> Iterator[str]:
        """Everything that is said in them."""
        each = [row for rows in self.examples for row in rows]
        yield from (whole_text(message.fields) for row in each for message in row.messages)
        yield from {id(row.tools): schemas_text(row.tools) for row in each}.values()

    @classmethod
    def of(cls, read: Sequence[NamedExample], *, is_part: bool = False) -> Self:
        """Return examples that were read."""
        return cls(tuple(name for name, _ in read), tuple(example for _, example in read), is_part)


def load_conversations(
    paths: Sequence[str | Path | DataSet], kind: Kind, *, max_rows: int | None = None
) -> Conversations:
    """Read data sets, one after another.

    Args:
        paths: the data sets, or paths of such; `~` is the home folder.
        kind: what an example is.
        max_rows: most good rows to read; None for all.

    Raises:
        DataError: the problems of all the files together, each with its file, row and column; or no row is left.
    """
    problems, is_part, bad, may_drop = Problems(), False, list[str](), set[str]()
    read: list[NamedExample] = []
    for _, dataset, file, label in labelled(paths, problems):
        before, total = len(read), problems.total + len(bad)
        rows = read_conversations(
            dataset, file, label, problems, kind=kind, bad=bad if dataset.drops_bad_rows else None
        )
        read += itertools.islice(rows, None if max_rows is None else max_rows - len(read))
        has_more = len(read) == max_rows and next(rows, None) is not None
        is_part = is_part or has_more
        may_drop.update(name for name, _ in read[before:] if dataset.drops_bad_rows)
        if len(read) == before and not has_more and problems.total + len(bad) == total:
            problems.add(f"{file} has no rows")
    problems.raise_any()
    if not read and bad:
        raise DataError(f"no example is left: none of {len(bad):,} can be used; the first is {bad[0]}")
    return dataclasses.replace(Conversations.of(read, is_part=is_part), bad=tuple(bad), may_drop=frozenset(may_drop))


def read_conversations(
    dataset: DataSet,
    file: str,
    label: str,
    problems: Problems,
    start: int = 0,
    *,
    kind: Kind,
    bad: list[str] | None = None,
) -> Generator[NamedExample, None, None]:
    """Yield the examples of a file from the n-th row on; a row with a problem is reported, and none.

    A problem of its own is added to `bad` instead, if that is given.
    """
    table = open_rows(dataset, file, label, problems)
    if table is None:
        return
    columns = _Columns(dataset, _COLUMNS)
    if table.columns is not None and not columns.are_there(table.columns, kind, label, problems):
        return
    misfits: Counter[tuple[str, ...]] = Counter()
    for number, row in table.read(columns.wanted(table.columns or ()), start):
        where = f"{label}, {table.unit} {number}"
        present = tuple(name for name, value in row.items() if value is not None)
        # The same columns as in a row before are the same problem.
        form = None if present in misfits else columns.form(present, kind, where, problems)
        if form is None:
            misfits[present] += 1
            continue
        wrong: list[tuple[str, str]] = []
        ours = {name: row.get(columns.theirs(name)) for name in (*form, _TOOLS)}
        if table.unit == "row":
            ours = {name: without_nulls(value) for name, value in ours.items()}
        example = _read_conversation(ours, form, wrong) if kind == "conversations" else _read_pair(ours, form, wrong)
        tools = read_tools(ours[_TOOLS], wrong)
        said = [f"column {columns.theirs(column)}: {problem}" for column, problem in wrong]
        if said and bad is not None:
            bad.append(f"{label}:{number} ({said[0]})")
        else:
            for problem in said:
                problems.add(f"{where}, {problem}")
        if not wrong:
            yield f"{label}:{number}", tuple(dataclasses.replace(one, tools=tools) for one in example)
    for present, count in misfits.items():
        if count > 1:
            problems.add(f"{label}: {count - 1:,} more rows have {quoted(present)}, too")


class _Columns(NamedColumns):
    """The columns of a file of conversations, or of pairs."""

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Return which columns of a table are read."""
        wanted = set(map(self.theirs, _COLUMNS))
        return [name for name in names if name in wanted]

    def are_there(self, names: Sequence[str], kind: Kind, where: str, problems: Problems) -> bool:
        """Return whether a table has all columns of a form, and those that were named; report what is missing."""
        if _TOOLS in self._theirs and self._theirs[_TOOLS] not in names:
            problems.add(self.misnamed(_TOOLS, names, where))
            return False
        return self.form(names, kind, where, problems) is not None

    def form(self, names: Sequence[str], kind: Kind, where: str, problems: Problems) -> tuple[str, ...] | None:
        """Return which columns are read, by our names; report it if none of the forms is whole."""
        form = next((form for form in _FORMS[kind] if {*map(self.theirs, form)} <= set(names)), None)
        if form is not None:
            return form
        # The form of which most is there, was named, or has the name of other data sets, is the one that was meant.
        strangers = [name for name in names if name not in _COLUMNS]
        likely = {
            own: one for own, known in _ELSEWHERE.items() if (one := next(filter(strangers.__contains__, known), None))
        }
        there = {own for own in _COLUMNS if self.theirs(own) in names} | {*self._theirs, *likely}
        meant = max(_FORMS[kind], key=lambda form: len(set(form) & there))
        missing, *others = [own for own in meant if self.theirs(own) not in names]
        if missing in self._theirs:
            problems.add(self.misnamed(missing, names, where))
            return None
        hint = suggestion(missing, strangers)
        if not hint and missing in likely:
            hint = self._renamed({own: likely[own] for own in (missing, *others) if own in likely}, names)
        forms = " or ".join(" and ".join(map(repr, form)) for form in _FORMS[kind])
        problems.add(f"{where}: column '{missing}' is missing{hint or f'; expected {forms}, found {quoted(names)}'}")
        return None

    def _renamed(self, likely: Mapping[str, str], names: Sequence[str]) -> str:
        """Return the keys by which the columns of another data set are read as ours."""
        keys = " ".join(f"{self._key}.{own}={name}" for own, name in likely.items())
        hint = f"; {' and '.join(map(repr, likely.values()))} may be {'it' if len(likely) == 1 else 'them'}: set {keys}"
        if likely.get("prompt") == "instruction" and "input" in names:
            hint += "; column 'input' is not read then: write what it says into 'instruction' first"
        return hint


def _read_conversation(row: Row, form: tuple[str, ...], wrong: list[tuple[str, str]]) -> tuple[Conversation, ...]:
    if form == ("messages",):
        messages = read_messages(row["messages"], "messages", None, wrong)
        if not wrong and not any(message.role == "assistant" for message in messages):
            wrong.append(("messages", "expected a turn of the assistant, which is what is trained; found none"))
        return (Conversation(messages),)
    prompt = read_messages(row["prompt"], "prompt", "user", wrong)
    completion = read_messages(row["completion"], "completion", "assistant", wrong)
    _check_answer(completion, "completion", wrong)
    return (Conversation((*prompt, *completion), len(prompt)),)


def _read_pair(row: Row, form: tuple[str, ...], wrong: list[tuple[str, str]]) -> tuple[Conversation, ...]:
    answers = [read_messages(row[name], name, "assistant", wrong) for name in ("chosen", "rejected")]
    if wrong:
        return ()
    are_whole = [answer[0].role in ("system", "user") for answer in answers]
    if all(are_whole):
        chosen, rejected = answers
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
        prompt, num = (), sum(1 for _ in alike)
        if num < min(map(len, answers)) and {answer[num].role for answer in answers} & {"system", "user"}:
            said = f"the same messages as in 'chosen' up to an answer of the assistant, found another message {num}"
            wrong.append(("rejected", f"expected {said}"))
            return ()
    elif any(are_whole):
        wrong.append(("rejected", "expected whole conversations in both of 'chosen' and 'rejected', or in none"))
        return ()
    elif "prompt" not in form:
        wrong.append(("chosen", "expected messages that begin with the user's, or a column 'prompt' beside it"))
        return ()
    else:
        prompt = read_messages(row["prompt"], "prompt", "user", wrong)
        num = len(prompt)
    whole = [(*prompt, *answer) for answer in answers]
    if whole[0] == whole[1]:
        wrong.append(("rejected", "expected another answer than that in 'chosen', found the same"))
    for name, messages in zip(("chosen", "rejected"), whole, strict=True):
        _check_answer(messages[num:], name, wrong)
    return tuple(Conversation(messages, num) for messages in whole)


def _check_answer(messages: Sequence[Message], name: str, wrong: list[tuple[str, str]]) -> None:
    if not wrong and (not messages or messages[-1].role != "assistant"):
        role = repr(messages[-1].role) if messages else "nothing after what both have in common"
        wrong.append((name, f"expected an answer that ends with a turn of the assistant, found {role}"))


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedTurns:
    """A conversation in the template, and where in its text the turns to train begin and end."""

    row: Conversation
    messages: Sequence[ChatMessage]
    """Its messages as the template takes them."""
    text: str
    spans: tuple[tuple[int, int], ...]
    cues: tuple[int, ...]
    """Where in the text the cue of each turn to train ends: a model that generates the turn begins there."""

    @property
    def trained(self) -> list[int]:
        """Indices of the messages to train."""
        enumerated = enumerate(self.row.messages)
        return [index for index, one in enumerated if one.role == "assistant" and index >= self.row.first_trained]

    @property
    def num_shortened(self) -> int:
        """Number of turns to train that are not whole in the text, whatever blanks it has."""
        said = [self.row.messages[index].fields for index in self.trained]
        texts = [self.text[start:stop] for start, stop in self.spans]
        if len(texts) != len(said):  # marks need not be one for each turn
            texts = [self.text] * len(said)
        return sum(
            not all(_is_in(part, text) for part in (str(one["content"]), reasoning_in(one)))
            for one, text in zip(said, texts, strict=True)
        )


def _is_in(part: str, text: str) -> bool:
    return part.strip() in text or "".join(part.split()) in "".join(text.split())
