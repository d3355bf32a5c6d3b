"""What the policy said of every answer before it was trained: the reference of preferences, computed once.

Owns: these numbers, in memory and in checkpoints. Invariant: they are computed by the weights that the run begins with,
so no second model is there; a resumed run reads them back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rallypoint.config import RECIPES, RunConfig
from rallypoint.journal import Journal
from rallypoint.roles.actor import Actor
from rallypoint.roles.examples import ExampleSource, rows_of
from rallypoint.types import Sequences

_FILE = Path("training") / "initial_logprobs.safetensors"
"""In a checkpoint."""
_EXAMPLES_PER_CALL = 512
_TELL_S = 30.0
"""Seconds between two words on how many examples are done."""


class InitialLogprobs:
    """The logprob of every answer that the run will train on, and of those of the validation set."""

    def __init__(
        self,
        config: RunConfig,
        actor: Actor[Any],
        source: ExampleSource,
        journal: Journal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actor, self._source, self._journal, self._clock = actor, source, journal, clock
        self._wanted = torch.tensor(source.examples_until(config.trainer.num_steps * config.num_examples))
        num_rows = RECIPES[config.recipe].rows_per_example
        self._train = torch.full((int(self._wanted.max()) + 1, num_rows), torch.nan, dtype=torch.float64)
        """[numbers of examples, rows], NaN where it is not known."""
        self.of_validation: Tensor | None = None
        """[B] float64 of the validation set; None without one, or while it is not known."""

    def of(self, examples: tuple[int, ...]) -> Tensor:
        """Return the logprob of each row of some examples: [B] float64."""
        found = self._train[list(examples)].flatten()
        assert not bool(found.isnan().any()), "they were computed for all that the run takes"
        return found

    async def compute(self) -> None:
        """Compute what is not known; the actor must have the weights that the run begins with if something is not."""
        missing = self._wanted[self._train[self._wanted].isnan().any(1)]
        told, done = self._clock(), 0
        for part in missing.split(_EXAMPLES_PER_CALL) if len(missing) else ():
            found = await self._sums(rows_of(self._source.train, part.tolist()))
            self._train[part] = found.reshape(len(part), -1)
            done += len(part)
            if (now := self._clock()) - told >= _TELL_S:
                told = now
                self._journal.say(f"the reference has judged {done:,} of {len(missing):,} pairs, before the first step")
        if self._source.validation is not None and self.of_validation is None:
            self.of_validation = await self._sums(self._source.validation)

    async def _sums(self, batch: Sequences) -> Tensor:
        logprobs = await self._actor.logprobs(batch)
        return torch.zeros(len(batch), dtype=torch.float64).index_add_(0, batch.row_of_token, logprobs.double())

    def save(self, folder: Path) -> None:
        """Write them into a checkpoint that is being made."""
        safetensors.torch.save_file({"train": self._train}, folder / _FILE)

    async def restore(self, folder: Path) -> None:
        """Read them back, and compute those that a longer run takes besides; the actor must not be restored yet."""
        known = safetensors.torch.load_file(folder / _FILE)["train"][: len(self._train)]
        self._train[: len(known)] = known
        await self.compute()
