"""The policy being trained."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from rallypoint.algorithms import (
    ActorLoss,
    Advantage,
    DistillationLoss,
    LossFunction,
    LossInputs,
    RowMask,
    TokenOutputs,
    rows_that_learn,
    rows_with_signal,
)
from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, collect, shard
from rallypoint.cluster.call import Process
from rallypoint.config import RoleName, RunConfig
from rallypoint.engine import policy_outputs
from rallypoint.roles.colocated import ActorParts, MemoryLease, with_lease
from rallypoint.roles.connections import StreamConnection
from rallypoint.roles.dealing import likeliest_of, per_token
from rallypoint.roles.judging import check_gap, check_ratio, compare
from rallypoint.roles.learner import Learner, LearnerWorker, MiniBatches
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.publishing import Stream, Subscriber, joint_digest, share_published, with_room
from rallypoint.types import (
    ActorBatch,
    DistilledBatch,
    Mean,
    Metric,
    Metrics,
    PerToken,
    ScoredBatch,
    Sequences,
    Sum,
    merge,
)
from rallypoint.weights import Exposed, Held, Sender, TransferPlan, digested

BatchT = TypeVar("BatchT", bound=Sequences)


class ActorWorker(LearnerWorker[BatchT, TokenOutputs]):
    """One rank of the policy."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, loss: LossFunction[BatchT, TokenOutputs]) -> None:
        spec.prepare(context)
        self.lease = MemoryLease(context)
        with spec.meeting(context) as mesh:
            model = spec.load_policy(context, mesh)
        self._shared = share_published(spec.config, model)
        super().__init__(context, spec, model, spec.model_path, spec.config.actor.optimizer, loss)
        self._digest: str | None = None
        """Digest of the weights, if it was computed since they last changed."""
        self.num_frozen_steps = spec.config.num_frozen_steps
        ActorParts(self.engine, self._open_sender, self._exposed).leave(context)
        self._connection = StreamConnection(context, spec)
        if "actor" in spec.config.sleeping:
            self.lease.sleep_between(self.engine)

    @shard
    @with_lease()
    def logprobs(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the log-probability of every trained token of some parts of a batch."""
        return [self.engine.evaluate(part, lambda rows, at: self.forward(rows, at).logprobs) for part in parts]

    @shard
    @with_lease()
    def likeliest(self, parts: list[Sequences], num: int) -> list[PerToken]:
        """Return the policy's top-k logprobs at every trained token, see `likeliest_tokens`."""
        return likeliest_of(self.engine, parts, self.config.temperature, num)

    @collect
    def digest(self) -> str:
        """Return a digest of this rank's part of the trained weights."""
        if self._digest is None:
            with self.lease.held(doing="digest"):
                self.weights_changed()
        assert self._digest is not None, "it was computed"
        return self._digest

    def weights_changed(self) -> None:
        """Compute the digest while the weights are awake."""
        self._digest = digested(self.engine.shard.trained())

    @collect
    @with_lease()
    def held(self) -> dict[str, Held]:
        """Return which parts of the trained weights this rank holds, and the dtype that they are published in."""
        return self._held()

    def _held(self) -> dict[str, Held]:
        shard = self.engine.shard
        dtypes = shard.written_dtypes()
        return {name: Held(dtypes[name], shard.parts[name]) for name in shard.trained()}

    @broadcast
    def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Connect to the rollout ranks, if this rank sends something and no rollout rank of its process does so."""
        self._connection.close()
        place = plan.place_of_sender(self.context.rank)
        if place is not None and plan.members[place].receiver is None:
            self._connection.open(stream, plan, place, self._exposed())

    @broadcast
    def send(self, version: int) -> None:
        """Send this rank's part of the trained weights, if it is connected."""
        self._connection.send(version, self._open_sender)

    @broadcast
    @with_lease()
    def write_published(self, version: int, below: str = "") -> tuple[Path, str]:
        """Write the trained weights for all nodes to see, see `StreamConnection.write`; the first rank writes."""
        return self._connection.write(self.engine.shard, version, below, base=self._path)

    def _exposed(self) -> Exposed | None:
        """Return the memory that rollout ranks of this node read directly."""
        return None if self._shared is None else self._shared.exposed(self._held(), self.engine.shard.trained())

    @contextlib.contextmanager
    def _open_sender(self) -> Iterator[Sender]:
        """Take the memory for this role, and offer its weights for sending."""
        with self.lease.held(doing="publish"):
            yield Sender(self.engine.shard.trained())

    def forward(self, rows: Sequences, at: Tensor) -> TokenOutputs:
        """Return logprobs and entropies at the temperature of the rollouts."""
        others = rows.top_tokens[at] if isinstance(rows, DistilledBatch) and rows.top_tokens is not None else None
        return policy_outputs(self.engine.shard, rows, at, self.config.temperature, others)

    def check(self, outputs: TokenOutputs, inputs: LossInputs[BatchT]) -> Metrics:
        """In the first mini-batch of an update, compare its logprobs with the judging pass's, or else the sampler's."""
        rows, at = inputs.rows, inputs.positions
        if not isinstance(rows, ActorBatch) or not inputs.is_first_step:
            return Metrics()
        own = outputs.logprobs.detach().cpu()
        if rows.old_logprobs is not None:
            checks, dtype = self.config.checks, self.config.model.dtype
            return check_ratio(rows, at, own, rows.old_logprobs[at], checks, dtype=dtype)
        return compare(rows, at, own, None if rows.reference_logprobs is None else rows.reference_logprobs[at])


def mask_of(config: RunConfig) -> RowMask:
    """Return which rows of a step do not train."""
    return RowMask(truncated=config.rollout.mask_truncated, zero_variance=config.rollout.dynamic_sampling == 0)


_COMPARED_EVERY = 32
"""Batches of which one gets both passes, so that they are compared; that takes half a percent of a step."""


class Actor(Learner[BatchT, ActorWorker[BatchT]]):
    """The policy as the driver sees it."""

    role, model_folder = "actor", ""

    def __init__(
        self, config: RunConfig, group: WorkerGroup[ActorWorker[BatchT]], loss: LossFunction[BatchT, TokenOutputs]
    ) -> None:
        super().__init__(config, group, loss)
        self.needs_advantage = isinstance(loss, ActorLoss) and loss.needs_advantage
        """Whether nothing is learned from a row whose advantages are all 0."""
        self._num_updates = 0
        self.is_published = asyncio.Event()
        """Set while the rollout role has the current weights."""

    @classmethod
    async def create(cls, placement: Placement, loss: LossFunction[BatchT, TokenOutputs]) -> Actor[BatchT]:
        """Start the workers, which load the initial policy and will minimise the loss."""
        return cls(placement.config, await placement.group("actor", ActorWorker, loss), loss)

    async def logprobs(self, batch: Sequences) -> Tensor:
        """Return the log-probability of every trained token: [T] float32; NaN where it is not finite."""
        found = await per_token(self._group, ActorWorker.logprobs, batch, self._attention_cost, replays=True)
        return found.masked_fill(found.isinf(), math.nan)  # the ratio to an infinite one could be clipped

    async def likeliest(self, batch: Sequences, num: int) -> Tensor:
        """Return what the policy might have said in place of every trained token: [T, 1 + 2 num] float32."""
        return await per_token(self._group, ActorWorker.likeliest, batch, self._attention_cost, num)

    async def old_logprobs(self, batch: Sequences, advantage: Advantage | None = None) -> Tensor | None:
        """Return the logprobs before an update; None if the update's own first pass computes them.

        That is so when a batch is for one optimizer step. The first two batches after a start (adapters are still zero
        in the very first) and every 32nd get both passes, so that every run compares them.

        Args:
            batch: any rows.
            advantage: what will weigh scored rows. Rows without a signal get NaN instead of a pass, if nothing is
                learned from them. None: all rows are computed.
        """
        is_compared = self._num_updates < 2 or self._num_updates % _COMPARED_EVERY == 0
        if self._config.judges_in_update and not is_compared:
            return None
        needed = self._rows_to_judge(batch, advantage)
        if needed is None or bool(needed.all()):
            return await self.logprobs(batch)
        old = torch.full((batch.num_tokens,), math.nan)
        if bool(needed.any()):
            old[needed[batch.row_of_token]] = await self.logprobs(batch.rows(needed.nonzero().flatten()))
        return old

    def _rows_to_judge(self, batch: Sequences, advantage: Advantage | None) -> Tensor | None:
        """Return which rows have a signal: [B]; None if all rows are computed."""
        if advantage is None or self._config.judges_in_update or self._config.kl or not self.needs_advantage:
            return None
        assert isinstance(batch, ScoredBatch), "an advantage weighs scored rows"
        return rows_with_signal(batch, advantage, mask_of(self._config))

    async def update(self, batch: BatchT, step: int) -> Metrics:
        """Train on the rows of a step, mini-batch by mini-batch; while a critic warms up, do nothing.

        Raises:
            ValueError: a batch for several optimizer steps has no old_logprobs.
            OffPolicyError: the first pass disagrees with old_logprobs; or, in a batch without them, with the rollouts.
                The second is found only when the optimizer has stepped; those weights are not published.
        """
        self.learned = batch
        if step <= self._config.num_frozen_steps:
            return Metrics({"actor/num_tokens": Sum(0)})
        self.is_published.clear()
        batches = self.cut(self._with_selected(batch, step), step)
        if isinstance(batch, ActorBatch) and batch.old_logprobs is None and len(batches.parts) > 1:
            raise ValueError(
                f"a batch for {len(batches.parts)} optimizer steps needs old_logprobs, which are None: judge it first"
            )
        computed = batches.only(self._learns)
        metrics = await self._group.call(ActorWorker.train, computed, step)
        if isinstance(batch, ActorBatch):
            self.learned = batch.with_first_pass(await self._group.call(ActorWorker.first_pass))
        check_gap(metrics, self._config.checks)
        self._num_updates += 1
        self.version += len(batches.parts)
        return merge(metrics, self._counted(batches, computed, metrics)).prefixed("actor")

    def _with_selected(self, batch: BatchT, step: int) -> BatchT:
        """Let the loss choose tokens of the whole step; see `PolicyObjective.choose`."""
        if not isinstance(self._loss, ActorLoss) or not isinstance(batch, ActorBatch):
            return batch
        return cast("BatchT", self._loss.with_selected(batch, self._config.seed * 1_000_003 + step))

    def _learns(self, part: BatchT) -> Tensor:
        """Return which rows of a mini-batch have a gradient."""
        if not self.needs_advantage or not isinstance(part, ActorBatch):
            return torch.ones(len(part), dtype=torch.bool)
        return rows_that_learn(part.advantages, part.loss_mask, part.offsets)

    def _counted(self, batches: MiniBatches[BatchT], computed: MiniBatches[BatchT], metrics: Metrics) -> Metrics:
        """Return counts of what was learned from, and weights by which mean losses cover rows that were left out."""
        counted: dict[str, Metric] = {"num_tokens": Sum(sum(part.num_loss_tokens for part in batches.parts))}
        weighed = [part for part in batches.parts if isinstance(part, ActorBatch)]
        if weighed and not isinstance(self._loss, DistillationLoss):  # a teacher asks for no advantages
            learns = [rows_that_learn(p.advantages, p.loss_mask, p.offsets) for p in weighed]
            num_learned, num_weighed = sum(int(rows.sum()) for rows in learns), sum(map(len, weighed))
            counted["without_signal"] = Mean(num_weighed - num_learned, num_weighed)
            idle = sum(int(p.loss_mask[~rows[p.row_of_token]].sum()) for p, rows in zip(weighed, learns, strict=True))
            counted["num_tokens_without_signal"] = Sum(idle)
        if isinstance(self._loss, ActorLoss) and batches.parts:
            for name in ("loss", "policy_loss"):
                found = metrics.get(name, Mean(0.0, 0.0))
                assert isinstance(found, Mean), "`ActorLoss` makes both"
                whole = sum(cast("tuple[float, ...]", batches.denominators))  # `ActorLoss` has one stream
                counted[name] = Mean(0.0, whole - found.weight)
            if self.needs_advantage:
                num_rows, num_computed = (sum(map(len, these.parts)) for these in (batches, computed))
                counted["skipped_fraction"] = Mean(num_rows - num_computed, num_rows)
        return Metrics(counted)

    async def save(self, folder: Path) -> None:
        """See `Learner.save`.

        Raises:
            WeightsMismatchError: ranks that should hold equal weights do not.
        """
        if not self.is_published.is_set():  # or else they were compared then
            await self._digest()
        await super().save(folder)

    async def publish(self, subscriber: Subscriber) -> None:
        """Give the rollout role the current weights.

        Raises:
            WeightsMismatchError: ranks that should hold equal weights do not, or not all weights arrived.
            PublishError: they did not arrive in time.
        """
        subscriber.announce(self.version, await self._digest())
        subscriber.role.publisher = self
        await self._group.retried(lambda: subscriber.role.transport.publish(self, subscriber))
        self.is_published.set()

    @property
    def processes(self) -> Sequence[Process]:
        """The processes of its ranks."""
        return self._group.processes

    async def written(self, taker: RoleName | None = None) -> Path:
        """Write the current weights and return their folder; that of a `taker`, another role, is removed by it."""
        return await with_room(lambda: self._group.call(ActorWorker.write_published, self.version, taker or ""))

    async def held(self) -> Sequence[Mapping[str, Held]]:
        """See `Publisher`."""
        return await self._group.call(ActorWorker.held)

    async def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """See `Publisher`."""
        await self._group.call(ActorWorker.connect, stream, plan)

    async def send(self) -> None:
        """See `Publisher`."""
        await self._group.call(ActorWorker.send, self.version)

    async def _digest(self) -> str:
        """Return a digest of the trained weights; ranks that should hold equal ones are compared."""
        digests = dict(enumerate(await self._group.call(ActorWorker.digest)))
        what = f"the actor's ranks hold different weights at version {self.version}"
        return joint_digest(what, digests, self._group.mesh, "dp_shard", "ep", "tp")
