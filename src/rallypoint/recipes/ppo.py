"""Proximal policy optimisation (arXiv 1707.06347) with a critic, and a KL penalty to a reference (arXiv 2203.02155)."""

from __future__ import annotations

import dataclasses
from asyncio import gather
from typing import Self

from rallypoint.algorithms import ClippedValueLoss, weigh_valued
from rallypoint.observability import span
from rallypoint.recipes.recipe import RolloutRecipe, Setup, actor_loss_of, gae_of, kl_controller_of
from rallypoint.roles.actor import Actor, mask_of
from rallypoint.roles.critic import Critic
from rallypoint.roles.judging import check_judged
from rallypoint.roles.reference import Reference
from rallypoint.types import Metrics, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPO(RolloutRecipe):
    """The roles of PPO and its training step."""

    critic: Critic

    @classmethod
    async def create(cls, setup: Setup) -> Self:
        """Start the roles; the actor minimises the loss that the config names, the critic a clipped squared error."""
        config, placement = setup.config, setup.placement
        return cls(
            config=config,
            actor=await Actor.create(placement, actor_loss_of(config)),
            source=await setup.open_source(),
            reference=await Reference.create(placement),
            kl=kl_controller_of(config),
            critic=await Critic.create(placement, ClippedValueLoss(clip=config.critic.clip)),
        )

    @property
    def learners(self) -> tuple[Actor, Critic]:
        """The roles whose state a checkpoint holds."""
        return self.actor, self.critic

    async def train_step(self, step: int) -> Metrics:
        """One PPO step: sample, judge (logprobs, values), weigh (advantages), learn, publish."""
        sampled = await self.source.next_batch()  # B scored rollouts of P prompts
        batch = sampled.batch

        with span("judge"):
            old, reference, values = await gather(
                self.actor.old_logprobs(batch), self.reference.logprobs(batch), self.critic.values(batch)
            )
            batch = batch.judged(old_logprobs=old, reference_logprobs=reference).valued(values)
            judged = check_judged(batch, self.config.checks)

        with span("weigh"):
            gae, kl, mask = gae_of(self.config), self.kl.now, mask_of(self.config)
            actor_batch, critic_batch = weigh_valued(batch, gae, kl=kl, aggregation=self.config.aggregation, mask=mask)

        with span("learn"):
            learned = await gather(
                self.critic.update(critic_batch, step),
                self.actor.update(actor_batch, step),
            )

        with span("publish"):
            await self.actor.publish(self.source)
            refreshed = await self.reference.refresh(self.actor, step)

        return self.kl.adapt(merge(sampled.metrics, judged, *learned, refreshed), len(batch))
