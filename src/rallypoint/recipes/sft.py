"""Supervised fine-tuning: the policy learns the assistant's turns of conversations, token by token."""

from __future__ import annotations

import dataclasses
from typing import Self

from rallypoint.algorithms import CrossEntropy
from rallypoint.observability import span
from rallypoint.recipes.recipe import Recipe, Setup
from rallypoint.roles.actor import Actor
from rallypoint.roles.examples import ExampleSource
from rallypoint.types import Mean, Metrics, Sequences, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFT(Recipe):
    """An actor, and one step."""

    actor: Actor[Sequences]
    source: ExampleSource

    @classmethod
    async def create(cls, setup: Setup) -> Self:
        """Start the actor; it minimises the cross entropy of what is trained."""
        actor = await Actor.create(setup.placement, CrossEntropy())
        return cls(config=setup.config, actor=actor, source=setup.examples())

    async def train_step(self, step: int) -> Metrics:
        """One step on the next conversations."""
        batch, taken = self.source.next_batch()
        with span("learn"):
            learned = await self.actor.update(batch, step)
        return merge(taken, learned)

    async def validate(self) -> Metrics | None:
        """Return the loss of a token of the validation set; its negative is the score."""
        batch = self.source.validation
        if batch is None:
            return None
        total = float((await self.actor.logprobs(batch)).double().sum())
        return Metrics({"score": Mean(total, batch.num_loss_tokens), "loss": Mean(-total, batch.num_loss_tokens)})
