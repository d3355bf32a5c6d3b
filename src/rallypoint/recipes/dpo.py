"""Direct preference optimisation: a policy learns from pairs of answers, without a reward model (arXiv 2305.18290)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Self

from rallypoint.algorithms import PreferenceLoss
from rallypoint.observability import span
from rallypoint.recipes.recipe import Recipe, Setup
from rallypoint.roles.actor import Actor
from rallypoint.roles.examples import ExampleSource, measured
from rallypoint.roles.reference import InitialLogprobs
from rallypoint.types import Metrics, PairBatch, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(Recipe):
    """An actor, its reference logprobs, and one training step."""

    actor: Actor[PairBatch]
    source: ExampleSource
    loss: PreferenceLoss
    reference: InitialLogprobs

    @classmethod
    async def create(cls, setup: Setup) -> Self:
        """Start the actor; it is its own reference, before the first step."""
        loss = PreferenceLoss(name=setup.config.preferences.name, beta=setup.config.preferences.beta)
        actor, source = await Actor.create(setup.placement, loss), setup.examples()
        reference = InitialLogprobs(setup.config, actor, source, setup.journal)
        return cls(config=setup.config, actor=actor, source=source, loss=loss, reference=reference)

    async def train_step(self, step: int) -> Metrics:
        """One step on the next pairs."""
        with span("judge"):
            await self.reference.compute()  # before the first step; nothing later
        batch, taken = self.source.next_batch()
        pairs = batch.widen(PairBatch, reference_logprobs=self.reference.of(self.source.taken))
        with span("learn"):
            learned = await self.actor.update(pairs, step)
        return merge(taken, learned)

    async def validate(self) -> Metrics | None:
        """Return loss, margin and accuracy, which is the score, on the validation set."""
        await self.reference.compute()
        batch = self.source.validation
        if batch is None:
            return None
        pairs = batch.widen(PairBatch, reference_logprobs=self.reference.of_validation)
        return measured(self.loss, await self.actor.logprobs(batch), pairs, score="accuracy")

    async def save(self, folder: Path) -> None:
        """See `Recipe.save`; with what the reference said."""
        await super().save(folder)
        self.reference.save(folder)

    async def restore(self, folder: Path) -> None:
        """See `Recipe.restore`; what is missing is computed by the policy as it began."""
        await self.reference.restore(folder)
        await super().restore(folder)
