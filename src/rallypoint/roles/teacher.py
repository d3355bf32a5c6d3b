"""The models that judge every token of a student's rollouts; each may be larger than the student, none is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rallypoint.cluster import WorkerContext, WorkerGroup, shard
from rallypoint.config import RunConfig
from rallypoint.data import EncodedPrompts
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard
from rallypoint.roles.actor import Actor
from rallypoint.roles.colocated import in_turn
from rallypoint.roles.dealing import per_token
from rallypoint.roles.frozen import FrozenModel, FrozenWorker
from rallypoint.roles.hints import Hints, said_of
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import PerToken, Sequences


class TeacherWorker(FrozenWorker):
    """One rank of every teacher."""

    role = "teacher"

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        self._temperature = spec.config.temperature
        super().__init__(context, spec)
        cap = spec.config.engine.max_tokens_per_micro_batch
        self._engines: list[TrainingEngine[Sequences]] = [
            self.engine,
            *(
                TrainingEngine(model, optimizer=None, max_tokens_per_micro_batch=cap, tick=context.tick)
                for model in self._models[1:]
            ),
        ]

    def load(self, context: WorkerContext, spec: WorkerSpec) -> ModelShard:
        """Load this rank's part of every teacher."""
        model = spec.config.model
        with spec.meeting(context) as mesh:
            self._models = [
                load_policy(
                    path,
                    dtype=model.dtype,
                    mesh=mesh,
                    device=torch.device(context.device),
                    trust_remote_code=model.trust_remote_code,
                    frozen=True,
                )
                for path in spec.config.teachers.paths
            ]
        return self._models[0]

    @shard
    @in_turn()
    def logprobs(self, parts: list[Sequences], teacher: int) -> list[PerToken]:
        """Return the log-probability, by one of the teachers, of every trained token of some parts of a batch."""
        engine, temperature = self._engines[teacher], self._temperature
        return [
            engine.evaluate(part, lambda rows, at: policy_outputs(engine.shard, rows, at, temperature).logprobs)
            for part in parts
        ]


class Teachers(FrozenModel[TeacherWorker]):
    """The teachers as the driver sees them."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup[TeacherWorker] | None,
        actor: Actor[Any],
        train: EncodedPrompts,
        hints: Hints | None,
    ) -> None:
        super().__init__(config, group)
        self._actor, self._train, self._hints = actor, train, hints

    @classmethod
    async def create(
        cls, placement: Placement, actor: Actor[Any], train: EncodedPrompts, tokenizer: PreTrainedTokenizerBase
    ) -> Teachers:
        """Start the workers; without a folder the actor is its own teacher, and reads hints.

        Raises:
            DataError: a prompt is too long with its hint.
        """
        config, hints = placement.config, None
        if config.teachers.hint is not None:
            most = config.data.max_prompt_tokens
            hints = Hints.of(config.teachers.hint, train, tokenizer, max_prompt_tokens=most)
        group = await placement.group("teacher", TeacherWorker) if "teacher" in config.roles else None
        return cls(config, group, actor, train, hints)

    async def logprobs(self, batch: Sequences, examples: Sequence[int]) -> Tensor:
        """Return the log-probability of every trained token by the teacher of its row, NaN without one: [T] float32.

        Args:
            batch: B rows.
            examples: of each, the number of the example that it answers.
        """
        if self._hints is None:
            return await self._said(batch, examples)
        shown = self._hints.shown(batch, examples)
        return said_of(batch, shown, await self._said(shown, examples))

    async def _said(self, batch: Sequences, examples: Sequence[int]) -> Tensor:
        if self._group is None:
            return await self._actor.logprobs(batch)
        sources = [self._train.examples[example].data_source for example in examples]
        chosen = torch.tensor([self._config.teachers.of(source) for source in sources])
        found = torch.full((batch.num_tokens,), torch.nan)
        for teacher in chosen[chosen >= 0].unique().tolist():
            rows = (chosen == teacher).nonzero().flatten()
            said = await per_token(
                self._group, TeacherWorker.logprobs, batch.bare().rows(rows), self._attention_cost, teacher
            )
            found[torch.isin(batch.row_of_token, rows)] = said
        return found
