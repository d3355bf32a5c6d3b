"""The policy being trained."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from torch import Tensor

from rallypoint.algorithms import entropy_bonus, kl_loss, policy_loss
from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, collect, shard
from rallypoint.config import RunConfig
from rallypoint.config.plan import attention_cost
from rallypoint.engine import policy_outputs
from rallypoint.errors import OffPolicyError, WeightsMismatchError
from rallypoint.models import gather
from rallypoint.roles.dealing import per_token
from rallypoint.roles.learner import LearnerWorker, MiniBatches
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.rollout import ACTOR_ENGINE, Rollouts
from rallypoint.roles.turns import Turns, in_turn
from rallypoint.types import ActorBatch, Mean, Metrics, PerToken, Sequences, Sum, merge
from rallypoint.weights import Snapshot, fingerprint, take


class ActorWorker(LearnerWorker[ActorBatch]):
    """One rank of the policy."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        spec.prepare(context)
        self.turns = Turns(context)
        model = spec.load_policy(context, spec.meet(context))
        super().__init__(context, spec, model, spec.model_path, spec.config.actor.optimizer)
        context.shared[ACTOR_ENGINE] = self.engine
        if "actor" in spec.config.sleeping:
            self.turns.sleep_between(self.engine)

    @shard
    @in_turn()
    def logprobs(self, parts: list[Sequences]) -> list[PerToken]:
        """Return the log-probability of every trained token of some parts of a batch."""
        model, temperature = self.engine.shard, self.config.rollout.temperature
        return [
            self.engine.evaluate(part, lambda rows, at: policy_outputs(model, rows, at, temperature).logprobs)
            for part in parts
        ]

    @collect
    @in_turn()
    def fingerprint(self) -> str:
        """Return a digest of this rank's part of what is trained."""
        return fingerprint(self.engine.shard.trained())

    @broadcast
    @in_turn()
    def snapshot(self, version: int) -> Snapshot | None:
        """Copy what is trained, whole, for roles in other processes: the first rank has it, the others give parts."""
        shard, rounded = self.engine.shard, self.engine.shard.rounded()
        trained = {name: rounded[name] for name in shard.trained()}
        snapshot = take(version, dict(gather(trained, {name: shard.parts[name] for name in trained}, shard.mesh)))
        return snapshot if shard.mesh.rank == 0 else None

    def loss(self, part: ActorBatch, at: Tensor, *, on_policy: bool) -> tuple[Tensor, Metrics]:
        """See `LearnerWorker.loss`: clipped policy loss, entropy bonus, and KL where it belongs to the loss."""
        actor, kl = self.config.actor, self.config.kl
        outputs = policy_outputs(self.engine.shard, part, at, self.config.rollout.temperature)
        device = outputs.logprobs.device
        everything = torch.ones(len(at), dtype=torch.bool, device=device)
        policy = policy_loss(
            outputs.logprobs,
            part.old_logprobs[at].to(device),
            part.advantages[at].to(device),
            everything,
            clip_low=actor.clip_low,
            clip_high=actor.clip_high,
            dual_clip=actor.dual_clip,
        )
        entropy = entropy_bonus(outputs.entropy, everything)
        total = policy.sum - actor.entropy_coef * entropy.sum
        metrics = merge(policy.metrics(), entropy.metrics())
        if on_policy:
            self._check_on_policy(part, at, outputs.logprobs)
        else:
            metrics = Metrics({name: metric for name, metric in metrics.items() if name != "ratio_error"})
        if kl is not None and part.reference_logprobs is not None:
            penalty = kl_loss(
                outputs.logprobs, part.reference_logprobs[at].to(device), everything, estimator=kl.estimator
            )
            total = total + kl.coef * penalty.sum
            metrics = merge(metrics, penalty.metrics())
        return total, merge(metrics, Metrics({"loss": Mean(float(total.detach()), len(at))}))

    def _check_on_policy(self, part: ActorBatch, at: Tensor, logprobs: Tensor) -> None:
        """Refuse to train when the same weights give other logprobs than a moment ago."""
        error = (logprobs.detach().cpu() - part.old_logprobs[at]).expm1().abs()
        worst = int(error.argmax())
        if not float(error[worst]) <= self.config.checks.ratio_tolerance:
            row = int(part.row_of_token[at[worst]])
            raise OffPolicyError(
                f"the ratio must be 1 in the first update of a step, but differs by {float(error[worst]):.2g} "
                f"(checks.ratio_tolerance={self.config.checks.ratio_tolerance:g}) for prompt "
                f"{int(part.prompt_index[row])} sample {int(part.sample_index[row])}, "
                f"token {int(at[worst] - part.offsets[row])} of its row"
            )


class Actor:
    """The policy as the driver sees it."""

    def __init__(self, config: RunConfig, group: WorkerGroup[ActorWorker]) -> None:
        self._config, self._group = config, group
        self._attention_cost = attention_cost(config)
        self.version = 0
        """Optimizer steps completed."""
        self.is_published = asyncio.Event()
        """Set while the rollout role has the weights of this moment."""

    @classmethod
    async def create(cls, placement: Placement) -> Actor:
        """Start the workers; they load the initial policy."""
        return cls(placement.config, await placement.group("actor", ActorWorker))

    async def logprobs(self, batch: Sequences) -> Tensor:
        """Return the log-probability of every trained token: [T] float32."""
        return await per_token(self._group, ActorWorker.logprobs, batch, self._attention_cost)

    async def update(self, batch: ActorBatch, step: int) -> Metrics:
        """Train on a step's rollouts, mini-batch by mini-batch."""
        self.is_published.clear()
        config = self._config
        batches = MiniBatches.cut(batch, config.actor, seed=config.seed, step=step, attention_cost=self._attention_cost)
        metrics = await self._group.call(ActorWorker.train, batches, step)
        self.version += len(batches.parts)
        num_tokens = Metrics({"num_tokens": Sum(sum(batches.denominators))})
        return merge(metrics, num_tokens).prefixed("actor")

    async def publish(self, rollouts: Rollouts) -> None:
        """Give the rollout role the weights as they are now.

        Raises:
            WeightsMismatchError: ranks hold different weights where they should be copies.
        """
        digests = await self._group.call(ActorWorker.fingerprint)
        axes = self._group.mesh.axes
        places = [self._group.mesh.coordinates(rank) for rank in range(len(digests))]
        different = {(place["dp_shard"], place["tp"], digest) for place, digest in zip(places, digests, strict=True)}
        if len(different) > axes["dp_shard"] * axes["tp"]:
            ranks = ", ".join(f"rank {rank}: {digest[:8]}" for rank, digest in enumerate(digests))
            raise WeightsMismatchError(f"the actor's ranks hold different weights at version {self.version}: {ranks}")
        snapshot = None
        if not rollouts.shares_actor:
            # By reference: from the worker that took it to those that load it.
            snapshot = self._group.call(ActorWorker.snapshot, self.version).reference
        await rollouts.load(self.version, snapshot)
        self.is_published.set()

    async def save(self, folder: Path) -> None:
        """Write the policy into a checkpoint: a Hugging Face folder, and training/actor.safetensors."""
        await self._group.call(ActorWorker.save, folder, folder / "training" / "actor.safetensors")

    async def restore(self, folder: Path) -> None:
        """Read the policy back from a checkpoint."""
        await self._group.call(ActorWorker.restore, folder, folder / "training" / "actor.safetensors")
