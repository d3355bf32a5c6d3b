"""Rows of files as batches: every example once an epoch, in an order that follows from the seed.

Owns: which examples a step takes. Must not know: what is learned from them. There is no state but their number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rallypoint.algorithms import LossFunction, LossInputs, TokenOutputs
from rallypoint.config import RunConfig
from rallypoint.data import EncodedRows, PromptStream, StreamedRows
from rallypoint.types import Last, Metrics, Sequences, Sum, merge, offsets_from_lengths

BatchT = TypeVar("BatchT", bound=Sequences)


class ExampleSource:
    """The examples of a run, a step's worth at a time."""

    def __init__(self, config: RunConfig, train: EncodedRows | StreamedRows, validation: EncodedRows | None) -> None:
        self.num_admitted = 0
        """Examples that were taken so far."""
        self.taken: tuple[int, ...] = ()
        """Numbers of the examples of the newest batch, among those that are trained on."""
        self.train, self._config = train, config
        is_stream = isinstance(train, StreamedRows)
        self._stream = train if is_stream else PromptStream(len(train), config.seed, config.data.shuffle)
        # Where no epoch was asked for, a stream is not read to its end to count it.
        epochs = config.trainer.num_epochs
        self._num_in_epoch = None if is_stream and epochs is None else len(train)
        self._num_in_run = math.inf if epochs is None else math.ceil(epochs * len(train))
        self.validation = None
        """The validation set; None without one."""
        if validation is not None:
            num = min(len(validation), config.validation.max_prompts or len(validation))
            self.validation = rows_of(validation, range(num))

    def examples_until(self, num_admitted: int) -> tuple[int, ...]:
        """Return the numbers of the examples taken until so many were: each once, of a stream once an epoch."""
        if not isinstance(self.train, StreamedRows):
            num_admitted = min(num_admitted, len(self.train))  # the first epoch has them all
        return tuple(sorted(map(self._stream.example_index, range(num_admitted))))

    def next_batch(self) -> tuple[Sequences, Metrics]:
        """Return the rows of the next step, and what to watch of them; the last epoch may end within it."""
        first, most = self.num_admitted, self.num_admitted + self._config.num_examples
        self.num_admitted = int(min(most, self._num_in_run))
        self.taken = tuple(map(self._stream.example_index, range(first, self.num_admitted)))
        batch = rows_of(self.train, self.taken, first=first)
        epoch = {} if self._num_in_epoch is None else {"data/epoch": Last(self.num_admitted / self._num_in_epoch)}
        return batch, Metrics({**epoch, "data/num_tokens": Sum(batch.num_tokens)})


def measured(loss: LossFunction[BatchT, Any], outputs: Tensor, batch: BatchT, *, score: str) -> Metrics:
    """Return what a loss says of a validation set, with one of its metrics as the score.

    Args:
        loss: the one that is trained with.
        outputs: [T] logprobs by the policy, or [B] scores.
        batch: the rows.
        score: which of the loss's metrics should rise.
    """
    at = batch.loss_mask.nonzero().flatten()
    by_token = len(outputs) == batch.num_tokens
    said = TokenOutputs(outputs[at], torch.zeros(len(at))) if by_token else outputs  # nobody asks for entropies
    _, metrics = loss(said, LossInputs(batch, at, lambda tensor: tensor, is_first_step=False))
    return merge(metrics, Metrics({"score": metrics[score]}))


def rows_of(data: EncodedRows | StreamedRows, examples: Sequence[int], *, first: int = 0) -> Sequences:
    """Return the rows of some examples; those of one are neighbours, and a group.

    Args:
        data: all rows.
        examples: numbers of examples, which may repeat.
        first: index of the first of them in the run.
    """
    chosen = [data[example].rows for example in examples]
    tokens, is_trained = zip(*itertools.chain.from_iterable(chosen), strict=True)
    num = len(chosen[0])
    return Sequences(
        offsets=offsets_from_lengths(torch.tensor([len(ids) for ids in tokens])),
        tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate(is_trained)),
        prompt_index=first + torch.arange(len(chosen)).repeat_interleave(num),
        sample_index=torch.arange(num).repeat(len(chosen)),
    )
