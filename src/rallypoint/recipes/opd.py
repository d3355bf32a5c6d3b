"""On-policy distillation: the student samples, and a teacher judges every token (arXiv 2306.13649, 2601.02780)."""

from __future__ import annotations

import dataclasses
from asyncio import gather
from typing import Self

from rallypoint.algorithms import Advantage, DistillationLoss, LossStreams, weigh
from rallypoint.data import EncodedPrompts, StreamedPrompts
from rallypoint.observability import span
from rallypoint.recipes.recipe import RolloutRecipe, Setup, actor_loss_of, advantage_of
from rallypoint.roles.actor import Actor
from rallypoint.roles.judging import check_judged
from rallypoint.roles.kl_controller import KLController
from rallypoint.roles.reference import Reference
from rallypoint.roles.teacher import Teachers
from rallypoint.types import Mean, Metrics, merge


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPD(RolloutRecipe):
    """Actor, rollout and teachers, and one step."""

    teachers: Teachers
    advantage: Advantage

    @classmethod
    async def create(cls, setup: Setup) -> Self:
        """Start the roles; the actor minimises the divergence from its teacher, and what the rewards say."""
        config, rewarded = setup.config, actor_loss_of(setup.config)
        taught = DistillationLoss(
            name=config.teachers.loss, objective=rewarded.objective, corrections=rewarded.corrections
        )
        streams = {"": (config.teachers.reward_coef, rewarded), "teacher_": (1.0, taught)}
        loss = LossStreams(streams) if config.teachers.reward_coef else taught
        train, validation = setup.material.train, setup.material.validation
        assert isinstance(train, EncodedPrompts | StreamedPrompts), "the recipe is declared with prompts"
        assert isinstance(validation, EncodedPrompts | None), "likewise"
        actor = await Actor.create(setup.placement, loss)
        return cls(
            config=config,
            actor=actor,
            source=await setup.open_source(),
            reference=await Reference.create(setup.placement),
            kl=KLController(None, None),
            teachers=await Teachers.create(setup.placement, actor, train, validation, setup.material.tokenizer),
            advantage=advantage_of(config),
        )

    async def train_step(self, step: int) -> Metrics:
        """One step: sample, judge, weigh, learn, publish."""
        sampled = await self.source.next_batch()
        batch = sampled.batch

        with span("judge"):
            told = self.source.examples_of(batch), sampled.feedback
            old, teacher = await gather(self.actor.old_logprobs(batch), self.teachers.judge(batch, *told))
            batch = batch.judged(old_logprobs=old, reference_logprobs=None)
            judged = check_judged(batch, self.config.checks)

        with span("weigh"):
            weighed = weigh(batch, self.advantage, kl=None, aggregation=self.config.aggregation)
            taught = teacher.beside(weighed)

        with span("learn"):
            learned = await self.actor.update(taught, step)

        with span("publish"):
            await self.actor.publish(self.source)

        return merge(self._told(sampled.metrics), judged, learned)

    def _told(self, sampled: Metrics) -> Metrics:
        """Return what there is to say of rollouts: no rewards where nothing scores them, for all would be 0."""
        named = ((name, one) for name, one in sampled.items() if not name.startswith("reward/"))
        return sampled if self.config.is_rewarded else Metrics(dict(named))

    async def validate(self) -> Metrics | None:
        """Return the gap to the teacher on the validation prompts' rollouts, where no reward says how good they are.

        The score is its negative. With rewards see `RolloutRecipe.validate`.
        """
        if self.config.is_rewarded:
            return await super().validate()
        sampled = await self.source.validate()
        if sampled is None:
            return None
        batch = sampled.batch
        told = batch.prompt_index.tolist(), sampled.feedback
        own, teacher = await gather(self.actor.logprobs(batch), self.teachers.judge(batch, *told, of="validation"))
        gaps = (own - teacher.logprobs)[batch.loss_mask].double()
        gaps = gaps[gaps.isfinite()]
        total, num = float(gaps.sum()), len(gaps)
        return Metrics({"score": Mean(-total, num), "teacher_kl": Mean(total, num)})

    async def close(self) -> None:
        """See `Recipe.close`; served teachers are asked nothing any more."""
        self.teachers.close()
        await super().close()
