"""Group-relative policy optimisation (arXiv 2402.03300): PPO's step without the critic."""

from __future__ import annotations

import dataclasses
from asyncio import gather
from typing import Self

from rallypoint.algorithms import group_relative
from rallypoint.config import RunConfig
from rallypoint.observability import span
from rallypoint.recipes.checks import check_judged, kl_of
from rallypoint.roles.actor import Actor
from rallypoint.roles.placement import Placement
from rallypoint.roles.reference import Reference
from rallypoint.roles.source import RolloutSource
from rallypoint.types import Metrics, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO:
    """Three roles and one step."""

    config: RunConfig
    source: RolloutSource
    actor: Actor
    reference: Reference

    @classmethod
    async def create(cls, placement: Placement, actor: Actor, source: RolloutSource) -> Self:
        """Start the role that GRPO needs besides actor and rollout."""
        reference = await Reference.create(placement)
        return cls(config=placement.config, source=source, actor=actor, reference=reference)

    @property
    def learners(self) -> tuple[Actor]:
        """The roles whose state a checkpoint holds."""
        return (self.actor,)

    async def train_step(self, step: int) -> Metrics:
        """One GRPO step: sample, judge, weigh, learn, publish."""
        sampled = await self.source.next_batch()  # B scored rollouts in P groups
        batch = sampled.batch

        with span("judge"):
            old, reference = await gather(self.actor.old_logprobs(batch), self.reference.logprobs(batch))
            batch = batch.judged(old_logprobs=old, reference_logprobs=reference)
            judged = check_judged(batch, self.config.checks)

        with span("weigh"):
            grpo, kl = self.config.grpo, kl_of(self.config)
            actor_batch = group_relative(
                batch, normalize_std=grpo.normalize_std, token_discount=grpo.token_discount, kl=kl
            )

        with span("learn"):
            learned = await self.actor.update(actor_batch, step)

        with span("publish"):
            await self.actor.publish(self.source.rollouts)

        return merge(sampled.metrics, judged, learned)
