"""What a teacher reads that its student does not: a hint behind each prompt.

It is made of the example's ground truth, or of what the reward function says of the student's answer. Owns: rows whose
prompts have other tokens, and the way back to the tokens of the student. Must not know: who the teacher is. A prompt
(1 2) was answered with 7 8; with a hint it is 1 2 5 6 9:

    tokens     1  2  7  8             said of them         0  0  -1.2  -0.3
    shown      1  2  5  6  9  7  8    said of these        0  0  0  0  0  -1.2  -0.3
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rallypoint.data import EncodedPrompts, Example, Legibility, Message, encode_legible, encode_prompts
from rallypoint.errors import DataError
from rallypoint.types import Sequences, offsets_from_lengths

_MOST_CUTS = 4
"""Attempts to cut a text by its tokens: what stands before a cut may be other tokens without what stood behind."""
_CHARACTERS_PER_TOKEN = 1000
"""More than any token has."""


@dataclasses.dataclass(slots=True)
class Hints:
    """What stands behind the prompts of a run, and how it becomes tokens."""

    hint: str
    """Text with `{ground_truth}`, of the example, or `{feedback}`, of the reward function on a response, or both."""
    train: EncodedPrompts
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    """The longest that a prompt with its hint may be."""
    token_ids: Sequence[Sequence[int]] = ()
    """Prompt of every example with its hint; nothing if that depends on the response."""
    legibility: Legibility | None = None
    """Legibility of all texts so far, if it depends on the response: a vocabulary takes long to look through."""

    @classmethod
    def of(
        cls, hint: str, train: EncodedPrompts, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int
    ) -> Hints:
        """Write a hint behind the last message of every prompt, if it is the same for all responses.

        Raises:
            DataError: some are longer than they may be, or have text that the tokenizer does not know.
        """
        hints = cls(hint, train, tokenizer, max_prompt_tokens)
        hinted = [hints._hinted(example, "") for example in train.examples]
        if "{feedback}" in hint:
            texts = (message.content for example in hinted for message in example.prompt)
            return dataclasses.replace(hints, legibility=Legibility.of(tokenizer, texts))
        try:
            encoded = encode_prompts(tokenizer, hinted, max_prompt_tokens=max_prompt_tokens)
        except DataError as error:
            raise DataError(f"with teacher.hint behind each prompt: {error}") from error
        return dataclasses.replace(hints, token_ids=encoded.token_ids)

    def prompts(self, examples: Sequence[int], feedback: Sequence[str]) -> list[Sequence[int] | None]:
        """Return the prompt of each row as the teacher reads it; None without feedback, or if none of it fits.

        Feedback that is too long is cut, and such that cannot be shown, for it has control tokens, is not: nothing that
        a reward function says may end a run. All rows are encoded in one call; call it beside the event loop.

        Args:
            examples: of each row, the number of the example that it answers.
            feedback: of each, what the reward function says of it.
        """
        if self.legibility is None:
            return [self.token_ids[example] for example in examples]
        self.legibility = self.legibility.with_texts(feedback)
        most = _CHARACTERS_PER_TOKEN * self.max_prompt_tokens
        left = {row: said[:most] for row, said in enumerate(feedback) if said}
        found: list[Sequence[int] | None] = [None] * len(examples)
        for attempt in range(1 + _MOST_CUTS):
            hinted = [self._hinted(self.train.examples[examples[row]], said) for row, said in left.items()]
            encoded = zip(left, encode_legible(self.tokenizer, hinted, self.legibility), strict=True)
            written = {row: ids for row, ids in encoded if ids is not None}
            excess = {row: len(ids) - self.max_prompt_tokens for row, ids in written.items()}
            for row, ids in written.items():
                found[row] = ids if excess[row] <= 0 else None
            left = self._cut({row: (left[row], num + attempt) for row, num in excess.items() if num > 0})
        return found

    def _cut(self, texts: Mapping[int, tuple[str, int]]) -> dict[int, str]:
        """Return texts without so many tokens at their end; not those of which nothing is left."""
        if not texts:
            return {}
        said, is_fast = [text for text, _ in texts.values()], bool(self.tokenizer.is_fast)
        encoded = self.tokenizer(said, add_special_tokens=False, return_offsets_mapping=is_fast)
        kept: dict[int, str] = {}
        for place, (row, (text, num)) in enumerate(texts.items()):
            length = len(cast("list[list[int]]", encoded["input_ids"])[place])
            if length <= num:
                continue
            # A slow tokenizer does not say where in the text its tokens are.
            places = cast("list[list[tuple[int, int]]]", encoded["offset_mapping"])[place] if is_fast else ()
            stop = places[length - num - 1][1] if places else len(text) * (length - num) // length
            if stop:
                kept[row] = text[:stop]
        return kept

    def _hinted(self, example: Example, feedback: str) -> Example:
        texts = {"ground_truth": str(example.ground_truth), "feedback": feedback}
        hint = re.sub(r"\{(ground_truth|feedback)\}", lambda place: texts[place[1]], self.hint)
        *before, last = example.prompt
        return dataclasses.replace(example, prompt=(*before, Message(last.role, last.content + hint)))


def shown(batch: Sequences, prompts: Sequence[Sequence[int]]) -> Sequences:
    """Return rows with other prompts.

    Args:
        batch: B rows.
        prompts: of each, the tokens that stand before its first trained one.
    """
    before = [torch.tensor(prompt) for prompt in prompts]
    starts, stops = (batch.offsets[:-1] + batch.num_prompt_tokens).tolist(), batch.offsets[1:].tolist()
    answers = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
    tokens = [part for prompt, at in zip(before, answers, strict=True) for part in (prompt, batch.tokens[at])]
    masks = [
        part
        for prompt, at in zip(before, answers, strict=True)
        for part in (torch.zeros(len(prompt), dtype=torch.bool), batch.loss_mask[at])
    ]
    lengths = [len(prompt) + at.stop - at.start for prompt, at in zip(before, answers, strict=True)]
    return Sequences(
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        tokens=torch.cat(tokens),
        loss_mask=torch.cat(masks),
        prompt_index=batch.prompt_index,
        sample_index=batch.sample_index,
    )


def said_of(batch: Sequences, shown: Sequences, said: Tensor) -> Tensor:
    """Return what was said of shown rows at the same tokens of the student's rows: [T', ...] -> [T, ...], else zero."""
    found = said.new_zeros(batch.num_tokens, *said.shape[1:])
    found[batch.loss_mask] = said[shown.loss_mask]
    return found
