"""Conversations as token ids, with the tokens that are trained: the turns of the assistant, and nothing else.

Owns: which tokens those are. Must not know: models, tensors.

    <user> 2 + 2 = ? <assistant> 4 <eos> <user> and + 1 ? <assistant> 5 <eos>
                                 ------                               -------  trained

A turn begins after the cue that the template puts before it when an answer is asked for, and ends with the token that
ends a response; what the template writes after that, such as a line break, is context. A row is tokenized as sampling
sees it: the text up to a cue, then the answer, so that no token is of both (`Assistant: ` and `yes`, not ` yes`). A
template with `{% generation %}` says itself what is the assistant's, from the token in which that begins. The row ends
with its last trained token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, cast

from rallypoint.data.chat_text import TurnFinder
from rallypoint.data.conversations import Conversation, Conversations, TrainedTurns
from rallypoint.data.encoded_rows import EncodedRows, Written
from rallypoint.data.files import Problems
from rallypoint.data.legible import Legibility
from rallypoint.data.template import special_ids, template_errors
from rallypoint.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

_PER_CALL = 1024


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
    bad, writer = _Bad(conversations.may_drop, list(conversations.bad)), _Writer(tokenizer, frozenset(stop_tokens))
    legibility = Legibility.of(tokenizer, conversations.texts)
    most = max_row_tokens if on_too_long == "truncate" else None
    kept: list[Written] = []
    names, dropped, truncated = list[str](), list[str](), list[str]()
    for name, rows, written in _written(writer, conversations, bad):
        longest = max(len(ids) for ids, _ in written)
        cut = [(ids[:most], trained[:most]) for ids, trained in written]
        problem = _problem(rows, written, cut, legibility, num_ids)
        if problem is not None:
            bad.add(name, problem)
            continue
        if on_too_long == "error" and (problem := _misfit(written, max_row_tokens)):
            bad.problems.add(f"{name}: {problem}")
            continue
        if (longest > max_row_tokens and on_too_long == "drop") or not all(trained.any() for _, trained in cut):
            dropped.append(name)
            continue
        names.append(name)
        kept += cut
        truncated += [name] * (longest > max_row_tokens)
    bad.problems.raise_any()
    if not kept and not may_be_empty:
        raise _none_left(dropped, bad.left_out, max_row_tokens)
    return EncodedRows(
        *_joined(kept),
        names=tuple(names),
        rows_per_example=len(conversations.examples[0]),
        dropped=tuple(dropped),
        truncated=tuple(truncated),
        is_part=conversations.is_part,
        bad=tuple(bad.left_out),
        shortened=tuple(writer.shortened),
        misaligned=tuple(writer.misaligned),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Bad:
    """Examples that cannot be used."""

    may_drop: Set[str]
    """Names of those that are left out if so."""
    left_out: list[str]
    """Those that were, each with the reason."""
    problems: Problems = dataclasses.field(default_factory=Problems)
    """What is wrong with the others."""

    def add(self, name: str, problem: str) -> None:
        """Take one that cannot be used."""
        if name in self.may_drop:
            self.left_out.append(f"{name} ({problem})")
        else:
            self.problems.add(f"{name}: {problem}")


def _joined(rows: Sequence[Written]) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]:
    """Return the tokens of all rows, which of them are trained, and where each row begins and ends."""
    import numpy as np

    tokens = np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in rows)])
    is_trained = np.concatenate([np.empty(0, np.bool_), *(trained for _, trained in rows)])
    return tokens, is_trained, np.array([0, *(len(ids) for ids, _ in rows)]).cumsum()


def _none_left(dropped: Sequence[str], bad: Sequence[str], max_row_tokens: int) -> DataError:
    unusable = f", or cannot be used; the first of these is {bad[0]}" if bad else ""
    return DataError(
        f"no example is left: all {len(dropped) + len(bad)} are longer than {max_row_tokens} tokens{unusable}"
    )


def _misfit(written: Sequence[Written], max_row_tokens: int) -> str | None:
    if (longest := max(len(ids) for ids, _ in written)) > max_row_tokens:
        return (
            f"the row has {longest} tokens, but data.max_row_tokens is {max_row_tokens}; raise it, or drop or truncate "
            "such rows (data.on_too_long)"
        )
    if not all(trained.any() for _, trained in written):
        return "no token of it would be trained: the template's {% generation %} holds none of it"
    return None


def _problem(
    rows: Sequence[Conversation],
    written: Sequence[Written],
    cut: Sequence[Written],
    legibility: Legibility,
    num_ids: int | None,
) -> str | None:
    each = zip(rows, written, strict=True)
    problem = next(filter(None, (_problem_of_row(row, ids, legibility, num_ids) for row, (ids, _) in each)), None)
    if problem or len(cut) == 1 or not cut[0][1].any() or cut[0][0].tolist() != cut[1][0].tolist():
        return problem
    same = "expected a pair that differs, but the chosen and the rejected answer are the same tokens"
    if any(len(ids) > len(short) for (ids, _), (short, _) in zip(written, cut, strict=True)):
        return f"{same} when cut at data.max_row_tokens={len(cut[0][0])}; raise it, or set data.on_too_long=drop"
    return (
        f"{same}: the chat template or the tokenizer leaves out what differs, such as blanks, or reasoning in an "
        "earlier turn; leave the pair out (on_bad_row=drop beside its path), or set model.tokenizer.chat_template=FILE"
    )


def _problem_of_row(
    row: Conversation, ids: NDArray[np.int32], legibility: Legibility, num_ids: int | None
) -> str | None:
    if problem := legibility.problem([one.fields for one in row.messages], ids.tolist(), row.tools):
        return problem
    if num_ids is not None and int(ids.max()) >= num_ids:
        place = int((ids >= num_ids).argmax())
        return (
            f"token {place} of the row has the id {ids[place]}, but the model knows 0 to {num_ids - 1}; use the "
            "tokenizer that the model was trained with"
        )
    return None


def _written(
    writer: _Writer, conversations: Conversations, bad: _Bad
) -> Iterator[tuple[str, tuple[Conversation, ...], Sequence[Written]]]:
    """Yield every example that fits the template: its name, its conversations, and what they were written as."""
    for start in range(0, len(conversations.names), _PER_CALL):
        part = slice(start, start + _PER_CALL)
        spans: list[tuple[str, tuple[Conversation, ...], list[TrainedTurns]]] = []
        for name, rows in zip(conversations.names[part], conversations.examples[part], strict=True):
            try:
                spans.append((name, rows, [writer.turns(row) for row in rows]))
            except template_errors() as error:
                bad.add(name, f"it does not fit the chat template: {error}")
        encoded = iter(writer.encode([turns for _, _, each in spans for turns in each]))
        for name, rows, each in spans:
            found, fits = zip(*(next(encoded) for _ in each), strict=True)
            wrong = next((problem for problem in found if isinstance(problem, str)), None)
            if wrong is not None:
                bad.add(name, wrong)
            else:
                writer.shortened += [name] * sum(turns.num_shortened for turns in each)
                writer.misaligned += [] if all(fits) else [name]
                yield name, rows, cast("Sequence[Written]", found)


class _Writer:
    """Writes conversations as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_tokens: frozenset[int]) -> None:
        self._tokenizer, self._stops = tokenizer, stop_tokens
        self.shortened: list[str] = []
        """See `EncodedRows.shortened`."""
        self.misaligned: list[str] = []
        """See `EncodedRows.misaligned`."""
        self._finder = TurnFinder(tokenizer)
        self.turns, self._is_marked = self._finder.turns, self._finder.is_marked
        if not tokenizer.is_fast:
            raise DataError(
                "the tokenizer does not say where in a text its tokens are (it is not a fast one), so that the turns "
                "of the assistant cannot be found; save it as tokenizer.json"
            )

    def encode(self, rows: Sequence[TrainedTurns]) -> Iterator[tuple[Written | str, bool]]:
        """Yield the ids of each row and which are trained, to its last trained one; or what is wrong.

        With it comes whether a model that is asked for a turn sees the tokens that stand before it here.
        """
        import numpy as np

        if not rows:
            return
        encoded = self._tokenizer([row.text for row in rows], add_special_tokens=False, return_offsets_mapping=True)
        all_ids = cast("list[list[int]]", encoded["input_ids"])
        for row, whole, places, pieces in zip(
            rows, all_ids, cast("Any", encoded["offset_mapping"]), self._pieces(rows), strict=True
        ):
            ids, turns, fits = self._places(row, whole, places, pieces)
            trained, problem = np.zeros(len(ids), dtype=np.bool_), None
            for turn, (first, last) in enumerate(turns):
                ends = [place for place in range(first, last) if ids[place] in self._stops]
                # Several marks may make a turn, of which the last one has its end.
                is_end = not self._is_marked or (turn == len(turns) - 1 and first < last)
                if is_end and not ends:
                    problem = self._unended(row, row.trained[-1 if self._is_marked else turn])
                    break
                trained[first : last if self._is_marked else ends[0] + 1] = True
            trained[:1] = False  # nothing precedes it
            length = int(trained.nonzero()[0].max(initial=-1)) + 1
            yield problem or (np.array(ids[:length], dtype=np.int32), trained[:length]), fits

    def _pieces(self, rows: Sequence[TrainedTurns]) -> Iterator[list[list[int]]]:
        """Yield the ids of the text up to the first cue, and of that after each cue up to the next, as sampling does.

        A piece is tokenized after the end of a response, for some tokenizers put a blank before the first word.
        """
        lead, texts = str(self._tokenizer.eos_token), list[str]()
        for row in rows:
            first, *others = itertools.pairwise((0, *(cue for cue in row.cues if cue > 0), len(row.text)))
            texts += [row.text[slice(*first)], *(lead + row.text[slice(*part)] for part in others)]
        ids = iter(cast("list[list[int]]", self._tokenizer(texts, add_special_tokens=False)["input_ids"]))
        for row in rows:
            yield [next(ids), *(next(ids)[1:] for cue in row.cues if cue > 0)]

    def _places(
        self, row: TrainedTurns, whole: list[int], places: Sequence[tuple[int, int]], pieces: list[list[int]]
    ) -> tuple[list[int], list[tuple[int, int]], bool]:
        """Return the ids of a row, each turn as [start, stop) in them, and whether sampling would see the same ids.

        Args:
            row: text of the row.
            whole: ids of the text, tokenized as a whole.
            places: [start, stop) of each of these in the text.
            pieces: ids of the text, tokenized in pieces.
        """
        joined = [*itertools.chain.from_iterable(pieces)]
        if not self._is_marked and (joined == whole or self._decode(joined) == self._decode(whole)):
            starts = [*itertools.accumulate(map(len, pieces))]
            # A template that renders the conversation again for a later turn gives the tokens of `whole`.
            fits = joined == whole or all(self._is_seen(row, joined, cue) for cue in row.cues[1:])
            return joined, [*itertools.pairwise(starts)], fits
        import numpy as np

        begins, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        turns = [
            (int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(begins, stop)))
            for start, stop in row.spans
        ]
        fits = (joined == whole and -1 not in row.cues) or all(self._is_seen(row, whole, cue) for cue in row.cues)
        return whole, turns, fits

    def _is_seen(self, row: TrainedTurns, whole: list[int], cue: int) -> bool:
        """Return whether a row's ids begin with those of its text up to a cue."""
        seen = cast("list[int]", self._tokenizer(row.text[: max(cue, 0)], add_special_tokens=False)["input_ids"])
        return cue >= 0 and whole[: len(seen)] == seen

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _unended(self, turns: TrainedTurns, index: int) -> str:
        """Say that a turn does not end with a token that ends a response, and what makes it so."""
        turn, special = self._finder.alone(turns, index), special_ids(self._tokenizer)
        ids = cast("list[int]", self._tokenizer(turn, add_special_tokens=False)["input_ids"])
        last = next((token for token in reversed(ids) if token in special), None)
        never = "a model trained on it would never end its answer"
        if last in self._stops and self._is_marked:
            return (
                f"the template's {{% generation %}} leaves out {self._named(last)}, which ends a turn of the "
                f"assistant: {never}; put {{% endgeneration %}} after it"
            )
        if last in self._stops:
            return (
                f"the chat template ends a turn of the assistant with {self._named(last)} only if nothing follows, and "
                f"message {index} has another one after it: {never}; give what is before the last answer as 'prompt', "
                "and that alone as 'completion'"
            )
        said = f"the chat template does not end a turn of the assistant with {self._named(*sorted(self._stops))}"
        if last is not None:
            name = self._named(last)
            return f"{said}, but with {name}: {never}; set model.tokenizer.eos_token={name}"
        return (
            f"{said}, but writes {turn[-40:]!r}: {never}; put eos_token after the content of the assistant's messages "
            "in a template of your own, and set model.tokenizer.chat_template=FILE"
        )

    def _named(self, *tokens: int) -> str:
        return ", ".join(repr(str(self._tokenizer.decode([token]))) for token in tokens)
