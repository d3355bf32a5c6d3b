"""The prompts of a run: which examples they are, in which order, and those of the validation.

Owns: what an index in the run stands for. Must not know: how prompts are sampled, or when.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rallypoint.config import RunConfig
from rallypoint.config.sections.material import path_of, weight_of
from rallypoint.data.dataset import Example
from rallypoint.data.prompts import EncodedPrompts
from rallypoint.data.stream import Mixture, PromptStream
from rallypoint.data.windows import StreamedPrompts
from rallypoint.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with the example that it was made of."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    example: Example
    """Row of the data set that it comes from."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptSets:
    """The prompts of training and of validation, and the tokenizer that encoded them."""

    train: EncodedPrompts | StreamedPrompts
    validation: EncodedPrompts | None
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[int, ...]

    def of_validation(self, most: int | None) -> dict[int, Prompt] | None:
        """Return at most `most` prompts of the validation set, by their position; None without a set."""
        if self.validation is None:
            return None
        num = len(self.validation)
        return {index: Prompt(*self.validation[index]) for index in range(num if most is None else min(num, most))}


class TrainingPrompts:
    """The prompts of training, by their index in the run."""

    def __init__(self, config: RunConfig, train: EncodedPrompts | StreamedPrompts) -> None:
        """Order the prompts of one set, or of several with weights; streamed prompts are ordered already.

        Raises:
            DataError: a set with a weight has no prompts.
        """
        self._train, self._order = train, _order_of(config, train)
        is_counted = config.trainer.num_epochs is not None or not isinstance(train, StreamedPrompts)
        self.num_in_epoch = len(train) if is_counted else None
        """Prompts of an epoch; None if they are not counted."""
        self.num_sources = len(train.sources)
        """Values of `data_source` among them."""

    def example_index(self, index: int) -> int:
        """Return the position in the training set of the prompt at an index of the run."""
        return self._order.example_index(index)

    def at(self, indices: Iterable[int]) -> dict[int, Prompt]:
        """Return prompts by their indices."""
        return {index: Prompt(*self._train[self.example_index(index)]) for index in indices}


def _order_of(config: RunConfig, train: EncodedPrompts | StreamedPrompts) -> PromptStream | Mixture | StreamedPrompts:
    if isinstance(train, StreamedPrompts):
        return train
    weights = [weight for one in config.data.train if (weight := weight_of(one)) is not None]
    if not weights:
        return PromptStream(len(train.examples), config.seed, config.data.shuffle)
    parts = [example.part for example in train.examples]
    if missing := [path_of(one) for part, one in enumerate(config.data.train) if part not in set(parts)]:
        raise DataError(f"data.train: no prompt of {', '.join(missing)} is left, and it has a weight: leave it out")
    return Mixture(parts, weights, config.seed, config.data.shuffle)
