"""What a teacher reads that its student does not: a hint behind each prompt, made of the example's ground truth.

Owns: rows whose prompts have other tokens, and the way back to the tokens of the student. Must not know: who the
teacher is. A prompt (1 2) was answered with 7 8; with a hint it is 1 2 5 6 9:

    tokens     1  2  7  8             said of them         0  0  -1.2  -0.3
    shown      1  2  5  6  9  7  8    said of these        0  0  0  0  0  -1.2  -0.3
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rallypoint.data import EncodedPrompts, Message, encode_prompts
from rallypoint.errors import DataError
from rallypoint.types import Sequences, offsets_from_lengths


@dataclasses.dataclass(frozen=True, slots=True)
class Hints:
    """The prompts of a run, each with its hint."""

    token_ids: Sequence[Sequence[int]]
    """Of every example of the data."""

    @classmethod
    def of(
        cls, hint: str, train: EncodedPrompts, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int
    ) -> Hints:
        """Write a hint behind the last message of every prompt.

        Args:
            hint: text with `{ground_truth}`.
            train: the prompts.
            tokenizer: of the models that read them.
            max_prompt_tokens: the longest that a prompt with its hint may be.

        Raises:
            DataError: some are longer, or have text that the tokenizer does not know.
        """
        examples = [
            dataclasses.replace(
                one,
                prompt=(
                    *one.prompt[:-1],
                    Message(
                        one.prompt[-1].role,
                        one.prompt[-1].content + hint.replace("{ground_truth}", str(one.ground_truth)),
                    ),
                ),
            )
            for one in train.examples
        ]
        try:
            found = encode_prompts(tokenizer, examples, max_prompt_tokens=max_prompt_tokens)
        except DataError as error:
            raise DataError(f"with teacher.hint behind each prompt: {error}") from error
        return cls(found.token_ids)

    def shown(self, batch: Sequences, examples: Sequence[int]) -> Sequences:
        """Return the rows as the teacher reads them.

        Args:
            batch: B rows.
            examples: of each, the number of the example that it answers.
        """
        prompts = [torch.tensor(self.token_ids[example]) for example in examples]
        starts, stops = (batch.offsets[:-1] + batch.num_prompt_tokens).tolist(), batch.offsets[1:].tolist()
        answers = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        tokens = [part for prompt, at in zip(prompts, answers, strict=True) for part in (prompt, batch.tokens[at])]
        masks = [
            part
            for prompt, at in zip(prompts, answers, strict=True)
            for part in (torch.zeros(len(prompt), dtype=torch.bool), batch.loss_mask[at])
        ]
        lengths = [len(prompt) + at.stop - at.start for prompt, at in zip(prompts, answers, strict=True)]
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
