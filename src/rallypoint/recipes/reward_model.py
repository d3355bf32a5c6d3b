"""A reward model: of two answers to a prompt, the one that people prefer gets the higher score (arXiv 2203.02155)."""

from __future__ import annotations

import dataclasses
from typing import Self

from rallypoint.algorithms import BradleyTerry
from rallypoint.observability import span
from rallypoint.recipes.recipe import Recipe, Setup
from rallypoint.roles.critic import RewardLearner
from rallypoint.roles.examples import ExampleSource, measured
from rallypoint.types import Metrics, PairBatch, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelling(Recipe):
    """A reward model, and one step."""

    actor: RewardLearner
    source: ExampleSource

    @classmethod
    async def create(cls, setup: Setup) -> Self:
        """Start the reward model."""
        actor = await RewardLearner.create(setup.placement, BradleyTerry())
        return cls(config=setup.config, actor=actor, source=setup.examples())

    async def train_step(self, step: int) -> Metrics:
        """One step on the next pairs."""
        batch, taken = self.source.next_batch()
        with span("learn"):
            learned = await self.actor.update(batch.widen(PairBatch), step)
        return merge(taken, learned)

    async def validate(self) -> Metrics | None:
        """Return loss, margin and accuracy, which is the score, on the validation set."""
        batch = self.source.validation
        if batch is None:
            return None
        return measured(BradleyTerry(), await self.actor.scores(batch), batch.widen(PairBatch), score="accuracy")
