"""What a teacher reads that its student does not: a hint behind each prompt.

It is made of the example's ground truth, or of what the reward function says of the student's answer. Owns: rows whose
prompts have other tokens, and the way back to the tokens of the student. Must not know: who the teacher is. A prompt
(1 2) was answered with 7 8; with a hint it is 1 2 5 6 9:

    tokens     1  2  7  8             said of them         0  0  -1.2  -0.3
    shown      1  2  5  6  9  7  8    said of these        0  0  0  0  0  -1.2  -0.3
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rallypoint.data import EncodedPrompts, Example, Message, encode_prompts
from rallypoint.errors import DataError
from rallypoint.types import Sequences, offsets_from_lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Hints:
    """What stands behind the prompts of a run, and how it becomes tokens."""

    hint: str
    """Text with `{ground_truth}`, of the example, or `{feedback}`, of the reward function on a response, or both."""
    train: EncodedPrompts
    tokenizer: PreTrainedTokenizerBase
    max_prompt_tokens: int
    """The longest that a prompt with its hint may be."""
    token_ids: Sequence[Sequence[int]]
    """Prompt of every example with its hint; nothing if that depends on the response."""

    @classmethod
    def of(
        cls, hint: str, train: EncodedPrompts, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int
    ) -> Hints:
        """Write a hint behind the last message of every prompt, if it is the same for all responses.

        Raises:
            DataError: some are longer than they may be, or have text that the tokenizer does not know.
        """
        hints = cls(hint, train, tokenizer, max_prompt_tokens, ())
        if "{feedback}" in hint:
            return hints
        try:
            encoded = hints._encoded([hints._hinted(example, "") for example in train.examples])
        except DataError as error:
            raise DataError(f"with teacher.hint behind each prompt: {error}") from error
        return dataclasses.replace(hints, token_ids=encoded)

    def prompts(self, examples: Sequence[int], feedback: Sequence[str]) -> list[Sequence[int] | None]:
        """Return the prompt of each row as the teacher reads it; None without feedback, or if none of it fits.

        Args:
            examples: of each row, the number of the example that it answers.
            feedback: of each, what the reward function says of it.
        """
        if self.token_ids:
            return [self.token_ids[example] for example in examples]
        asked = zip(examples, feedback, strict=True)
        return [self._with_feedback(self.train.examples[example], said) for example, said in asked]

    def _with_feedback(self, example: Example, feedback: str) -> Sequence[int] | None:
        """Cut feedback that is too long; nothing that a reward function says may end a run, such as control tokens."""
        for share in (1.0, 0.5, 0.25, 0.125) if feedback else ():
            with contextlib.suppress(DataError):
                return self._encoded([self._hinted(example, feedback[: max(1, int(share * len(feedback)))])])[0]
        return None

    def _hinted(self, example: Example, feedback: str) -> Example:
        texts = {"ground_truth": str(example.ground_truth), "feedback": feedback}
        hint = re.sub(r"\{(ground_truth|feedback)\}", lambda place: texts[place[1]], self.hint)
        *before, last = example.prompt
        return dataclasses.replace(example, prompt=(*before, Message(last.role, last.content + hint)))

    def _encoded(self, examples: Sequence[Example]) -> Sequence[Sequence[int]]:
        return encode_prompts(self.tokenizer, examples, max_prompt_tokens=self.max_prompt_tokens).token_ids


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
