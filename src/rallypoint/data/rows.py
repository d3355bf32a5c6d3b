"""Conversations as token ids, with the tokens that are trained: the turns of the assistant, and nothing else.

Owns: which tokens those are. Must not know: models, tensors.

    <user> 2 + 2 = ? <assistant> 4 <eos> <user> and + 1 ? <assistant> 5 <eos>
                                 ------                               -------  trained

A turn begins behind the cue that the template puts before it when an answer is asked for, and ends with the token that
ends a response; what the template writes behind that, such as a line break, is context. A template with
`{% generation %}` says itself what is the assistant's. The row ends with its last trained token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from rallypoint.data.conversations import Conversation, Conversations
from rallypoint.data.files import Problems
from rallypoint.data.legible import Legibility
from rallypoint.data.template import MEND_TEMPLATE, left_out, special_ids, template_errors
from rallypoint.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PER_CALL = 1024
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What a template says that its author has marked the assistant's turns with."""


_Written = tuple["NDArray[np.int32]", "NDArray[np.bool_]"]
"""Token ids of a row, and which of them are trained: each [T]."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedExample:
    """A conversation as a row of token ids, or a pair as the chosen and the rejected one."""

    name: str
    rows: tuple[_Written, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of token ids end to end; an example is one of them, or the chosen and the rejected one."""

    tokens: NDArray[np.int32]
    """[T]."""
    is_trained: NDArray[np.bool_]
    """[T]."""
    offsets: NDArray[np.int64]
    """[B + 1]: row b is tokens offsets[b] to offsets[b + 1]."""
    names: tuple[str, ...]
    """Names of the examples."""
    rows_per_example: int
    dropped: tuple[str, ...]
    """Names of the examples that were too long, with on_too_long="drop", or had no trained token left; with "error" it
    is empty."""
    truncated: tuple[str, ...]
    """Names of the examples whose end was cut off, with on_too_long="truncate"."""
    is_part: bool = False
    """Whether there are more examples than were read."""
    bad: tuple[str, ...] = ()
    """Examples that cannot be used and were left out, each with the reason; see `Conversations.may_drop`."""
    shortened: tuple[str, ...] = ()
    """Names of the examples of which the template leaves out a part of a trained turn, one for each such turn."""
    with_tools: tuple[str, ...] = ()
    """Names of the examples that have tools, of which the template is not told."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, example: int) -> EncodedExample:
        first, num = example * self.rows_per_example, self.rows_per_example
        parts = [slice(*self.offsets[row : row + 2].tolist()) for row in range(first, first + num)]
        return EncodedExample(self.names[example], tuple((self.tokens[part], self.is_trained[part]) for part in parts))

    def digests(self) -> Iterator[bytes]:
        """Yield a digest of each example, the same for examples whose tokens and masks are equal."""
        bounds = self.offsets[:: self.rows_per_example].tolist()
        lengths = np.diff(self.offsets).reshape(-1, self.rows_per_example)
        for example, (start, stop) in enumerate(itertools.pairwise(bounds)):
            parts = lengths[example], self.tokens[start:stop], self.is_trained[start:stop]
            yield hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest()

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row."""
        return int(np.diff(self.offsets).max())

    def counts(self) -> dict[str, float]:
        """Return what there is to know of them, for the metrics."""
        return {
            "data/num_examples": len(self),
            "data/num_tokens": len(self.tokens),
            "data/num_trained_tokens": int(self.is_trained.sum()),
        }


def encode_rows(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Conversations,
    *,
    stop_tokens: Sequence[int],
    max_row_tokens: int,
    on_too_long: Literal["error", "drop", "truncate"] = "error",
    num_ids: int | None = None,
    may_be_empty: bool = False,
) -> EncodedRows:
    """Write every conversation in the tokenizer's chat template, as token ids.

    Args:
        tokenizer: the model's own.
        conversations: the examples, at least one.
        stop_tokens: ids that end a response.
        max_row_tokens: the longest that a row may be, template included.
        on_too_long: what happens to longer ones; "truncate" keeps their first tokens.
        num_ids: token ids that the model has; None to skip that check.
        may_be_empty: whether all of them may be left out.

    Raises:
        DataError: all examples with a problem together; or none is left.
    """
    problems, writer = Problems(), _Writer(tokenizer, frozenset(stop_tokens))
    legibility = Legibility.of(tokenizer, conversations.texts)
    kept: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    names, dropped, truncated, bad = list[str](), list[str](), list[str](), list(conversations.bad)
    for name, rows, written in _written(writer, conversations, problems):
        longest, each = max(len(ids) for ids, _ in written), zip(rows, written, strict=True)
        problem = next(filter(None, (_problem(row, ids, legibility, num_ids) for row, (ids, _) in each)), None)
        if problem is not None and name in conversations.may_drop:
            bad.append(f"{name} ({problem})")
            continue
        if problem := problem or (_misfit(written, max_row_tokens) if on_too_long == "error" else None):
            problems.add(f"{name}: {problem}")
            continue
        cut = [(ids[:max_row_tokens], trained[:max_row_tokens]) for ids, trained in written]
        if (longest > max_row_tokens and on_too_long == "drop") or not all(trained.any() for _, trained in cut):
            dropped.append(name)
            continue
        names.append(name)
        kept += cut
        truncated += [name] * (longest > max_row_tokens)
    problems.raise_any()
    if not kept and not may_be_empty:
        raise _none_left(dropped, bad, max_row_tokens)
    return EncodedRows(
        tokens=np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in kept)]),
        is_trained=np.concatenate([np.empty(0, np.bool_), *(trained for _, trained in kept)]),
        offsets=np.array([0, *(len(ids) for ids, _ in kept)]).cumsum(),
        names=tuple(names),
        rows_per_example=len(conversations.examples[0]),
        dropped=tuple(dropped),
        truncated=tuple(truncated),
        is_part=conversations.is_part,
        bad=tuple(bad),
        shortened=tuple(writer.shortened),
        with_tools=conversations.with_tools,
    )


def _none_left(dropped: Sequence[str], bad: Sequence[str], max_row_tokens: int) -> DataError:
    unusable = f", or cannot be used; the first of these is {bad[0]}" if bad else ""
    return DataError(
        f"no example is left: all {len(dropped) + len(bad)} are longer than {max_row_tokens} tokens{unusable}"
    )


def _misfit(written: Sequence[_Written], max_row_tokens: int) -> str | None:
    if (longest := max(len(ids) for ids, _ in written)) > max_row_tokens:
        return (
            f"the row has {longest} tokens, but data.max_row_tokens is {max_row_tokens}; raise it, or drop or truncate "
            "such rows (data.on_too_long)"
        )
    if not all(trained.any() for _, trained in written):
        return "no token of it would be trained: the template's {% generation %} holds none of it"
    return None


def _problem(row: Conversation, ids: NDArray[np.int32], legibility: Legibility, num_ids: int | None) -> str | None:
    if problem := legibility.problem(_as_template_takes(row), ids.tolist()):
        return problem
    if num_ids is not None and int(ids.max()) >= num_ids:
        place = int((ids >= num_ids).argmax())
        return (
            f"token {place} of the row has the id {ids[place]}, but the model knows 0 to {num_ids - 1}; use the "
            "tokenizer that the model was trained with"
        )
    return None


def _written(
    writer: _Writer, conversations: Conversations, problems: Problems
) -> Iterator[tuple[str, tuple[Conversation, ...], list[_Written]]]:
    """Yield every example that fits the template: its name, its conversations, and what they were written as."""
    for start in range(0, len(conversations.names), _PER_CALL):
        part = slice(start, start + _PER_CALL)
        spans: list[tuple[str, tuple[Conversation, ...], list[_Turns]]] = []
        for name, rows in zip(conversations.names[part], conversations.examples[part], strict=True):
            try:
                spans.append((name, rows, [writer.turns(row) for row in rows]))
            except template_errors() as error:
                problems.add(f"{name}: it does not fit the chat template: {error}")
        encoded = iter(writer.encode([turns for _, _, each in spans for turns in each]))
        for name, rows, each in spans:
            found = [next(encoded) for _ in each]
            wrong = next((problem for problem in found if isinstance(problem, str)), None)
            if wrong is not None:
                problems.add(f"{name}: {wrong}")
            else:
                writer.shortened += [name] * sum(turns.num_shortened for turns in each)
                yield name, rows, cast("list[_Written]", found)


_MARK_THEM = "mark the assistant's turns in the template with {% generation %} and {% endgeneration %}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Turns:
    """A conversation in the template, and where in its text the turns to train begin and end."""

    row: Conversation
    text: str
    spans: tuple[tuple[int, int], ...]

    @property
    def trained(self) -> list[int]:
        """Indices of the messages to train."""
        enumerated = enumerate(self.row.messages)
        return [index for index, one in enumerated if one.role == "assistant" and index >= self.row.first_trained]

    @property
    def num_shortened(self) -> int:
        """Number of turns to train that are not whole in the text, whatever blanks it has."""
        said = [self.row.messages[index].content for index in self.trained]
        texts = [self.text[start:stop] for start, stop in self.spans]
        if len(texts) != len(said):  # marks need not be one for each turn
            texts = [self.text] * len(said)
        return sum(
            one.strip() not in text and _dense(one) not in _dense(text) for one, text in zip(said, texts, strict=True)
        )


def _dense(text: str) -> str:
    return "".join(text.split())


class _Writer:
    """Writes conversations, and finds the turns of the assistant in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_tokens: frozenset[int]) -> None:
        self._tokenizer, self._stops = tokenizer, stop_tokens
        self.shortened: list[str] = []
        """See `EncodedRows.shortened`."""
        self._is_marked = bool(_MARKED.search(str(tokenizer.chat_template)))
        if not tokenizer.is_fast:
            raise DataError(
                "the tokenizer does not say where in a text its tokens are (it is not a fast one), so that the turns "
                "of the assistant cannot be found; save it as tokenizer.json"
            )

    def turns(self, row: Conversation) -> _Turns:
        """Write a conversation.

        Raises:
            ValueError: a message is not in the text, there is nothing before a turn, or the template writes it in
                another way when an answer is asked for.
        """
        messages = _as_template_takes(row)
        if self._is_marked:
            begin = len(self._text(messages[: row.first_trained], cue=True)) if row.first_trained else 0
            text, marked = _render_marked(self._tokenizer, messages)
            _check_whole(messages, text)
            return _Turns(row, text, tuple(span for span in marked if span[0] >= begin))
        text, starts = self._text(messages, cue=False), list[int]()
        _check_whole(messages, text)
        for index, message in enumerate(row.messages):
            if message.role != "assistant" or index < row.first_trained:
                continue
            if index == 0:
                raise ValueError(
                    "it begins with the assistant, and a template writes the cue of a turn behind another one; put a "
                    f"turn of the user or the system before it, or {_MARK_THEM}"
                )
            before = self._text(messages[:index], cue=True)
            if not text.startswith(before):
                raise ValueError(
                    f"what is before message {index} is written in another way when an answer is asked for, so that it "
                    f"cannot be found where the turn begins; {_MARK_THEM}"
                )
            starts.append(len(before))
        return _Turns(row, text, tuple(zip(starts, [*starts[1:], len(text)], strict=True)))

    def encode(self, rows: Sequence[_Turns]) -> Iterator[_Written | str]:
        """Yield the ids of each row and which are trained, to its last trained one; or what is wrong."""
        if not rows:
            return
        encoded = self._tokenizer([row.text for row in rows], add_special_tokens=False, return_offsets_mapping=True)
        all_ids = cast("list[list[int]]", encoded["input_ids"])
        for row, ids, places in zip(rows, all_ids, cast("Any", encoded["offset_mapping"]), strict=True):
            begins = np.array([start for start, _ in places], dtype=np.int64)
            trained, problem = np.zeros(len(ids), dtype=np.bool_), None
            for turn, (start, stop) in enumerate(row.spans):
                first, last = map(int, np.searchsorted(begins, (start, stop)))
                ends = [place for place in range(first, last) if ids[place] in self._stops]
                # Several marks may make a turn, of which the last one has its end.
                is_end = not self._is_marked or (turn == len(row.spans) - 1 and first < last)
                if is_end and not ends:
                    problem = self._unended(row.row, row.trained[-1 if self._is_marked else turn])
                    break
                trained[first : last if self._is_marked else ends[0] + 1] = True
            trained[:1] = False  # nothing precedes it
            length = int(trained.nonzero()[0].max(initial=-1)) + 1
            yield problem or (np.array(ids[:length], dtype=np.int32), trained[:length])

    def _unended(self, row: Conversation, index: int) -> str:
        """Say that a turn does not end with a token that ends a response, and what makes it so."""
        turn, special = self._alone(row, index), special_ids(self._tokenizer)
        ids = cast("list[int]", self._tokenizer(turn, add_special_tokens=False)["input_ids"])
        last = next((token for token in reversed(ids) if token in special), None)
        never = "a model trained on it would never end its answer"
        if last in self._stops and self._is_marked:
            return (
                f"the template's {{% generation %}} leaves out {self._named(last)}, which ends a turn of the "
                f"assistant: {never}; put {{% endgeneration %}} behind it"
            )
        said = f"the chat template does not end a turn of the assistant with {self._named(*sorted(self._stops))}"
        if last is not None and last not in self._stops:
            name = self._named(last)
            return f"{said}, but with {name}: {never}; set model.tokenizer.eos_token={name}"
        return (
            f"{said}, but writes {turn[-40:]!r}: {never}; put eos_token behind the content of the assistant's messages "
            "in a template of your own, and set model.tokenizer.chat_template=FILE"
        )

    def _alone(self, row: Conversation, index: int) -> str:
        """Return what the template writes for one turn of the assistant, without what follows."""
        messages = _as_template_takes(row)
        if self._is_marked:
            text, marked = _render_marked(self._tokenizer, messages[: index + 1])
            return text[marked[-1][0] :] if marked else text
        begin = len(self._text(messages[:index], cue=True))
        return self._text(messages[: index + 1], cue=False)[begin:]

    def _named(self, *tokens: int) -> str:
        return ", ".join(repr(str(self._tokenizer.decode([token]))) for token in tokens)

    def _text(self, messages: list[dict[str, str]], *, cue: bool) -> str:
        written = self._tokenizer.apply_chat_template(messages, add_generation_prompt=cue, tokenize=False)
        return cast("str", written)


def _render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, and where the template says that the assistant speaks."""
    from transformers.utils import chat_template_utils

    render = cast(
        "Callable[..., tuple[list[str], list[list[tuple[int, int]]]]]", chat_template_utils.render_jinja_template
    )
    texts, marked = render(
        conversations=[messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], marked[0]


def _check_whole(messages: list[dict[str, str]], text: str) -> None:
    # What an answer loses is counted; see `num_shortened`.
    others = [one if one["role"] != "assistant" else {**one, "content": ""} for one in messages]
    if (problem := left_out(others, text)) is not None:
        raise ValueError(f"{problem}; {MEND_TEMPLATE}")


def _as_template_takes(row: Conversation) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in row.messages]
