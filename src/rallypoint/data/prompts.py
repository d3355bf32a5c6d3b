"""Prompts as token ids: the chat template, and which prompts are refused, dropped, truncated or repeated.

Owns: which prompts of a data set a run has. Must not know: models, tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, cast

from rallypoint.data.chat_text import chat_texts
from rallypoint.data.dataset import Example
from rallypoint.data.files import Problems
from rallypoint.data.legible import Legibility
from rallypoint.data.messages import ChatMessage, schemas_text, whole_text
from rallypoint.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROMPTS_PER_CALL = 1024
_CHARACTERS_PER_TOKEN = 1000
"""More than any token has: a longer text need not be encoded, which takes seconds a megabyte, to be too long."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """Prompts that fit, as token ids, with the examples they came from."""

    token_ids: tuple[tuple[int, ...], ...]
    examples: tuple[Example, ...]
    """One for each entry of `token_ids`."""
    dropped: tuple[str, ...]
    """Names of the examples that were too long, with on_too_long="drop"."""
    truncated: tuple[str, ...]
    """Names of the examples whose beginning was cut off, with on_too_long="truncate"."""
    is_part: bool = False
    """Whether there are more prompts than were read."""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: int) -> tuple[tuple[int, ...], Example]:
        return self.token_ids[place], self.examples[place]

    @property
    def sources(self) -> list[str]:
        """What the rows are of, each once."""
        return sorted({example.data_source for example in self.examples})

    def counts(self) -> dict[str, float]:
        """Return what there is to know of them, for the metrics."""
        return {"data/num_prompts": len(self), "data/num_distinct": self.num_distinct}

    @property
    def num_distinct(self) -> int:
        """Number of prompts with distinct tokens."""
        return len(set(self.token_ids))

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.token_ids))

    def repeats(self) -> list[tuple[Example, Example]]:
        """Return pairs of examples with the same prompt: the first one, and each later one."""
        firsts: dict[tuple[int, ...], Example] = {}
        pairs = [(firsts.setdefault(ids, one), one) for ids, one in zip(self.token_ids, self.examples, strict=True)]
        return [(first, one) for first, one in pairs if first is not one]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    max_prompt_tokens: int,
    on_too_long: Literal["error", "drop", "truncate"] = "error",
    num_ids: int | None = None,
    may_be_empty: bool = False,
) -> EncodedPrompts:
    """Write every prompt in the tokenizer's chat template, with the cue for the assistant, as token ids.

    Args:
        tokenizer: the model's own.
        examples: rows of a data set.
        max_prompt_tokens: the longest that a prompt may be, template included.
        on_too_long: what happens to longer ones; "truncate" keeps their last tokens.
        num_ids: token ids that the model has; None to skip that check.
        may_be_empty: whether all of them may be left out.

    Raises:
        DataError: a prompt has no tokens, ids that the model does not know, or more than max_prompt_tokens (with
            on_too_long="error"), cannot be written in the template, has text that the tokenizer does not know, or text
            that is a control token; or none is left. All such examples are named together.
    """
    problems = Problems()
    legibility = Legibility.of(tokenizer, texts_of(examples))
    kept: list[tuple[tuple[int, ...], Example]] = []
    dropped, truncated = list[str](), list[str]()
    if on_too_long != "truncate":
        examples = _without_huge(examples, max_prompt_tokens, dropped if on_too_long == "drop" else problems)
    for example, ids in _encode(tokenizer, examples, problems):
        unknown = next((place for place, token in enumerate(ids) if num_ids is not None and token >= num_ids), None)
        if not ids:
            problems.add(f"{example.name}: the chat template makes no token of the prompt")
        elif len(ids) > max_prompt_tokens and on_too_long == "drop":
            dropped.append(example.name)
        elif problem := legibility.problem(_conversation(example), ids, example.tools, in_words=problems.has_room):
            problems.add(f"{example.name}: {problem}")
        elif unknown is not None:
            problems.add(
                f"{example.name}: token {unknown} of the prompt has the id {ids[unknown]}, but the model knows 0 to "
                f"{cast('int', num_ids) - 1}; use the tokenizer that the model was trained with"
            )
        elif len(ids) <= max_prompt_tokens:
            kept.append((ids, example))
        elif on_too_long == "truncate":
            truncated.append(example.name)
            kept.append((ids[-max_prompt_tokens:], example))
        else:
            problems.add(
                f"{example.name}: the prompt has {len(ids)} tokens, but max_prompt_tokens is {max_prompt_tokens}; "
                "raise it, or drop or truncate such prompts"
            )
    problems.raise_any()
    if not kept and not may_be_empty:
        raise DataError(f"no prompt is left: all {len(dropped)} are longer than {max_prompt_tokens} tokens")
    token_ids, rows = tuple(ids for ids, _ in kept), tuple(example for _, example in kept)
    return EncodedPrompts(token_ids, rows, dropped=tuple(dropped), truncated=tuple(truncated))


def encode_legible(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], legibility: Legibility
) -> list[tuple[int, ...] | None]:
    """Write prompts as `encode_prompts` does, of any length; None in place of one that would be a problem there.

    Args:
        tokenizer: the model's own.
        examples: no two the same object.
        legibility: of all their texts.
    """
    encoded = {id(example): ids for example, ids in _encode(tokenizer, examples, Problems())}

    def is_good(example: Example, ids: tuple[int, ...]) -> bool:
        return bool(ids) and legibility.problem(_conversation(example), ids, example.tools, in_words=False) is None

    found = [(example, encoded.get(id(example), ())) for example in examples]
    return [ids if is_good(example, ids) else None for example, ids in found]


def _without_huge(examples: Sequence[Example], max_prompt_tokens: int, fate: list[str] | Problems) -> Sequence[Example]:
    """Leave out the prompts that are too long by their characters alone; their names, or problems, go to `fate`."""
    kept, most = list[Example](), _CHARACTERS_PER_TOKEN * max_prompt_tokens
    for example in examples:
        size = sum(map(len, texts_of([example])))
        if size <= most:
            kept.append(example)
        elif isinstance(fate, list):
            fate.append(example.name)
        else:
            fate.add(
                f"{example.name}: the prompt has {size:,} characters, but max_prompt_tokens is {max_prompt_tokens}; "
                "drop such prompts"
            )
    return kept


def _encode(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], problems: Problems
) -> Iterator[tuple[Example, tuple[int, ...]]]:
    for start in range(0, len(examples), _PROMPTS_PER_CALL):
        part = examples[start : start + _PROMPTS_PER_CALL]
        texts, fitting = list[str](), list[Example]()
        given = [(_conversation(example), example.tools) for example in part]
        for example, found in zip(part, chat_texts(tokenizer, given), strict=True):
            if isinstance(found, ModelError):
                problems.add(f"{example.name}: {found}")
            else:
                texts.append(found)
                fitting.append(example)
        rows = cast("list[list[int]]", tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []
        yield from ((example, tuple(row)) for example, row in zip(fitting, rows, strict=True))


def _conversation(example: Example) -> list[ChatMessage]:
    """Return a prompt as chat templates take it."""
    return [message.fields for message in example.prompt]


def texts_of(examples: Sequence[Example]) -> Iterator[str]:
    """Yield everything that is said in prompts, and of their tools."""
    for example in examples:
        yield from (whole_text(message.fields) for message in example.prompt)
    yield from {id(example.tools): schemas_text(example.tools) for example in examples}.values()
