"""Group-relative policy optimisation (arXiv 2402.03300): PPO's step without the critic."""

from __future__ import annotations

import dataclasses
from asyncio import gather
from typing import Self

from rallypoint.algorithms import Advantage, weigh
from rallypoint.observability import span
from rallypoint.recipes.recipe import RolloutRecipe, Setup, actor_loss_of, advantage_of, kl_controller_of
from rallypoint.roles.actor import Actor, mask_of
from rallypoint.roles.judging import check_judged
from rallypoint.roles.reference import Reference
from rallypoint.types import Metrics, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(RolloutRecipe):
    """Actor, rollout and reference, and one step."""

    advantage: Advantage

    @classmethod
    async def create(cls, setup: Setup) -> Self:
        """Start the roles; the actor minimises the loss that the config names."""
        return cls(
            config=setup.config,
            actor=await Actor.create(setup.placement, actor_loss_of(setup.config)),
            source=await setup.open_source(),
            reference=await Reference.create(setup.placement),
            kl=kl_controller_of(setup.config),
            advantage=advantage_of(setup.config),
        )

    async def train_step(self, step: int) -> Metrics:
        """One GRPO step: sample, judge, weigh, learn, publish."""
        sampled = await self.source.next_batch()  # B scored rollouts in P groups
        batch = sampled.batch

        with span("judge"):
            old, reference = await gather(
                self.actor.old_logprobs(batch, self.advantage), self.reference.logprobs(batch)
            )
            batch = batch.judged(old_logprobs=old, reference_logprobs=reference)
            judged = check_judged(batch, self.config.checks)

        with span("weigh"):
            kl, mask = self.kl.now, mask_of(self.config)
            actor_batch = weigh(batch, self.advantage, kl=kl, aggregation=self.config.aggregation, mask=mask)

        with span("learn"):
            learned = await self.actor.update(actor_batch, step)

        with span("publish"):
            await self.actor.publish(self.source)
            refreshed = await self.reference.refresh(self.actor, step)

        return self.kl.adapt(merge(sampled.metrics, judged, learned, refreshed), len(batch))
