"""The frozen copy that the KL is measured to: of the initial policy, or of the actor some steps ago.

Owns: which weights the reference has, and their place in a checkpoint: `reference/version_000012/`, a folder as
`published_folder` has them, by the name of the actor's version. One that has the initial policy's is not there.

The reference of preferences is what the policy said of every answer before it was trained: computed once, by the
weights that the run begins with, so that no second model is there; a resumed run reads these numbers back.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, shard
from rallypoint.config import RECIPES, RunConfig
from rallypoint.disk import naming_tensors
from rallypoint.errors import CheckpointError
from rallypoint.journal import Journal
from rallypoint.models import ModelShard, twin
from rallypoint.roles.actor import Actor
from rallypoint.roles.colocated import ActorParts, with_lease
from rallypoint.roles.dealing import logprobs_of, per_token
from rallypoint.roles.examples import ExampleSource, rows_of
from rallypoint.roles.frozen import FrozenModel, FrozenWorker
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.types import Last, Metrics, PerToken, Sequences
from rallypoint.weights import published_folder

_FOLDER = "reference"
"""In a checkpoint."""


class ReferenceWorker(FrozenWorker):
    """One rank of the reference."""

    role = "reference"

    def __init__(self, context: WorkerContext, spec: WorkerSpec, shares_actor: bool) -> None:
        self._shares_actor, self._temperature = shares_actor, spec.config.temperature
        self._path = spec.model_path
        super().__init__(context, spec)

    def load(self, context: WorkerContext, spec: WorkerSpec) -> list[ModelShard]:
        """Load the initial policy, or take the frozen weights below the actor's adapters."""
        if self._shares_actor:
            actor = ActorParts.find(context)
            assert actor is not None, "an actor worker was started here before"
            return [ModelShard.whole(twin(actor.engine.model))]
        with spec.meeting(context) as mesh:
            return [spec.load_policy(context, mesh, frozen=True)]

    @shard
    @with_lease()
    def logprobs(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the log-probability of every trained token of some parts of a batch."""
        return logprobs_of(self.engine, parts, self._temperature)

    @broadcast
    @with_lease()
    def take(self, written: Path, version: int) -> None:
        """Replace the weights by those of a folder."""
        with self.engine.shard.mesh.abandoned_on_error():
            published_folder.read(self.engine.shard, written, version)

    @broadcast
    @with_lease()
    def save(self, folder: Path, version: int) -> str:
        """Write the weights; the first rank writes. Return what `LearnerWorker.save` does."""
        with self.engine.shard.mesh.abandoned_on_error():
            try:
                published_folder.write(self.engine.shard, folder, version, base=self._path)
            except CheckpointError as error:
                return str(error)
        return ""


class Reference(FrozenModel[ReferenceWorker]):
    """The reference as the driver sees it."""

    def __init__(self, config: RunConfig, group: WorkerGroup[ReferenceWorker] | None) -> None:
        super().__init__(config, group)
        self.version = 0
        """The actor's version whose weights it has; 0 is the initial policy."""

    @classmethod
    async def create(cls, placement: Placement) -> Reference:
        """Start the workers if the run has the role, before the actor is trained; they keep the initial policy."""
        config = placement.config
        if "reference" not in config.roles:
            return cls(config, None)
        return cls(config, await placement.group("reference", ReferenceWorker, config.reference_shares_actor))

    async def logprobs(self, batch: Sequences) -> Tensor | None:
        """Return the log-probability of every trained token, [T] float32; None in a run without a reference."""
        if self._group is None:
            return None
        return await per_token(self._group, ReferenceWorker.logprobs, batch, self._attention_cost)

    async def refresh(self, actor: Actor[Any], step: int) -> Metrics:
        """Take over the actor's weights if that is due after this step; return whose weights it has then."""
        every = self._config.reference.refresh_every_steps
        if self._group is None or every is None:
            return Metrics()
        if step % every == 0:
            written = await actor.written("reference")
            await self._group.call(ReferenceWorker.take, written, actor.version)
            self.version = actor.version
            shutil.rmtree(written)
        return Metrics({"reference/version": Last(self.version)})

    async def save(self, folder: Path) -> None:
        """Write the weights into a checkpoint, unless they are the initial policy's.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        if self._group is None or not self.version:
            return
        if why := await self._group.call(ReferenceWorker.save, folder / _FOLDER, self.version):
            raise CheckpointError(why)

    async def restore(self, folder: Path) -> None:
        """Read them back from a checkpoint."""
        for written in (folder / _FOLDER).glob("version_*"):
            if self._group is not None:
                self.version = int(written.name.removeprefix("version_"))
                await self._group.call(ReferenceWorker.take, written, self.version)


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
        with naming_tensors(folder / _FILE):
            safetensors.torch.save_file({"train": self._train}, folder / _FILE)

    async def restore(self, folder: Path) -> None:
        """Read them back, and compute those that a longer run adds; the actor must not be restored yet."""
        known = safetensors.torch.load_file(folder / _FILE)["train"][: len(self._train)]
        self._train[: len(known)] = known
        await self.compute()
