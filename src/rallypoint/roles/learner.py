"""What actor and critic share: mini-batches on the driver, an engine with an optimizer in the worker."""

from __future__ import annotations

import abc
import dataclasses
import functools
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from rallypoint.algorithms import Denominator, LossFunction, LossInputs, TokenOutputs
from rallypoint.cluster import WorkerContext, WorkerGroup, broadcast, collect, shard
from rallypoint.config import OptimizerConfig, RoleName, RunConfig
from rallypoint.config.sections.learning import ActorConfig, CriticConfig
from rallypoint.engine import (
    TokenStream,
    TrainingEngine,
    choosing_tokens,
    optimizer_tensors,
    restore_optimizer,
    trained_positions,
)
from rallypoint.errors import CheckpointError, NotFiniteError, PeerFailedError
from rallypoint.model_files import (
    DTYPES,
    TensorFiles,
    Writing,
    is_finite,
    own_names,
    read_adapter,
    reads_of,
    reload,
    save_adapter,
    save_model,
    save_tensors,
)
from rallypoint.models import BiasUpdate, LoadBalancing, ModelShard, Part, SharedPrefixes, adapt_alike
from rallypoint.models.kinds.experts import ExpertLoads
from rallypoint.observability.flops import device_peak, flops_of
from rallypoint.parallel.transfer import sent
from rallypoint.prepare.plan import attention_cost
from rallypoint.roles.colocated import LeaseHolder, with_lease
from rallypoint.roles.dealing import deal
from rallypoint.roles.placement import WorkerSpec
from rallypoint.types import ActorBatch, FirstPass, Last, Maximum, Mean, Metrics, Sequences, merge

BatchT = TypeVar("BatchT", bound=Sequences)
OutputsT = TypeVar("OutputsT")
WorkerT = TypeVar("WorkerT", bound="LearnerWorker[Any, Any]")

NOT_FINITE = "not_finite"
"""Metric of a step that left an update out, as its numbers were not finite."""
_LOADS = ("expert_load_min", "expert_load_max")
"""Metrics of a mixture of experts."""


class LearnerWorker(LeaseHolder, abc.ABC, Generic[BatchT, OutputsT]):
    """One rank of a model that is trained."""

    balances_routers = True
    """Whether the actor's keys for routers are about this model."""
    num_frozen_steps = 0
    """Steps of the run before the first update: the schedule of the learning rate begins after them."""

    def __init__(
        self,
        context: WorkerContext,
        spec: WorkerSpec,
        model: ModelShard,
        path: str,
        optimizer: OptimizerConfig,
        loss: LossFunction[BatchT, OutputsT],
    ) -> None:
        self.context, self.config, self._path, self._loss = context, spec.config, path, loss
        self._passes: list[tuple[Tensor, Tensor]] = []
        """Places [N] of tokens, and their logprobs and entropies [2, N], by micro-batches of the newest first pass."""
        self._flops = flops_of(model.model, functools.partial(adapt_alike, model.model))
        self._loads = ExpertLoads(model.model)
        actor, base = spec.config.actor, model.model.base_model
        coef, rate = (
            (actor.router_aux_loss_coef, actor.router_bias_update_rate) if self.balances_routers else (0.0, 0.0)
        )
        self._balancing, self._biases = LoadBalancing(base, coef, model.mesh), BiasUpdate(base, rate, model.mesh)
        self.engine: TrainingEngine[BatchT] = TrainingEngine(
            model,
            optimizer=optimizer,
            max_tokens_per_micro_batch=spec.config.engine.max_tokens_per_micro_batch,
            activations=spec.config.engine.activations,
            offload=spec.config.engine.offload,
            deterministic=spec.config.engine.deterministic,
            tick=context.tick,
        )

    @abc.abstractmethod
    def forward(self, rows: Sequences, at: Tensor) -> OutputsT:
        """Return what the model says of the trained tokens of some rows, at the positions `at`: [N]."""

    def weights_changed(self) -> None:
        """Called when the weights have changed, before they sleep; does nothing by default."""

    def check(self, outputs: OutputsT, inputs: LossInputs[BatchT]) -> Metrics:
        """Compare a forward pass with what is known of its rows already; by default with nothing."""
        del outputs, inputs
        return Metrics()

    def _loss_of(self, rows: BatchT, at: Tensor, *, is_first_step: bool) -> tuple[Tensor, Metrics]:
        """Return the loss of the rows of a micro-batch, and what to watch."""
        inputs = LossInputs(rows, at, functools.partial(sent, device=self.engine.model.device), is_first_step)
        outputs = self.forward(rows, at)
        if isinstance(rows, ActorBatch) and rows.places is not None and isinstance(outputs, TokenOutputs):
            self._passes.append((rows.places[at], torch.stack([outputs.logprobs, outputs.entropy]).detach()))
        total, metrics = self._loss(outputs, inputs)
        return total, merge(metrics, self.check(outputs, inputs))

    @shard
    @with_lease(to_train=True)
    def train(self, batches: MiniBatches[BatchT], step: int) -> Metrics:
        """Take one optimizer step for each mini-batch whose numbers are finite; `step` is the training step, from 1.

        Returns:
            Metrics, with `not_finite` if an optimizer step was left out: the weights stayed as they were.
        """
        began = time.perf_counter()
        self._passes.clear()
        with self._loads.counted():
            measured = [self._train_on(batches, index, step) for index in range(len(batches.parts))]
        if (extremes := self._loads.extremes(self.engine.shard.mesh.everyone)) is not None:
            measured.append(Metrics(dict(zip(_LOADS, map(Last, extremes), strict=True))))
        self.weights_changed()
        seconds = time.perf_counter() - began
        flops = sum(map(self._needed_flops, batches.parts))
        # Merged over ranks it is operations done over operations possible; cp, sp and tp peers share one rank's rows.
        num_peers = self.engine.shard.mesh.tokens.size * self.engine.shard.mesh.tp.size
        peak = device_peak(self.engine.model.device, DTYPES[self.config.model.dtype]) * num_peers
        measured.append(Metrics({"mfu": Mean(flops, seconds * peak)}))
        return merge(*measured)

    @collect
    def first_pass(self) -> FirstPass:
        """Return what the newest update's first pass computed; of ranks with the same rows one has it."""
        passes = self._passes if self.context.rank in self.context.mesh.leaders else []
        places = torch.cat([torch.empty(0, dtype=torch.int64), *(at for at, _ in passes)])
        found = torch.cat([values for _, values in passes], 1).float().cpu() if passes else torch.empty(2, 0)
        return FirstPass(offsets=torch.tensor([0, len(places)]), places=places, logprobs=found[0], entropies=found[1])

    def _train_on(self, batches: MiniBatches[BatchT], index: int, step: int) -> Metrics:
        """Take the optimizer step of a mini-batch, or leave it out."""
        frozen, part = self.num_frozen_steps, batches.parts[index]
        try:
            with (
                self._balancing.over(lambda: self.engine.evaluate(part, self._route)) as imbalance,
                self._biases.after(),
            ):
                metrics = self.engine.train(
                    part,
                    functools.partial(self._loss_of, is_first_step=index == 0),
                    denominator=batches.denominators[index],
                    step=step - frozen,
                    num_steps=self.config.trainer.num_steps - frozen,
                )
            measured = {} if imbalance is None else {"router_aux_loss": Mean(float(imbalance), 1.0)}
            return merge(metrics, Metrics(measured))
        except (NotFiniteError, PeerFailedError) as error:
            if not error.is_of_update:
                raise
            if isinstance(error, NotFiniteError):
                self.context.say(f"step {step}: {error}")
            return Metrics({NOT_FINITE: Maximum(1.0)})

    def _route(self, rows: Sequences, at: Tensor) -> Tensor:
        """Run a forward pass, only to count what its routers choose."""
        return TokenStream(self.engine.shard, rows, at).states().new_zeros(len(at))

    def _needed_flops(self, part: BatchT) -> int:
        """Count the operations of forward and backward: a shared prompt once, the last token of a row not at all."""
        offsets, tokens, _ = choosing_tokens(part, trained_positions(part))
        lengths = offsets.diff()
        kept = SharedPrefixes.of(offsets, tokens, part.prompt_index).kept
        computed = torch.bincount(torch.arange(len(part)).repeat_interleave(lengths)[kept], minlength=len(part))
        return self._flops.forward_backward(lengths.tolist(), part.num_loss_tokens, computed.tolist())

    @broadcast
    @with_lease(to_train=True)
    def save(self, model_folder: Path, state_file: Path, durable: bool) -> str:
        """Write the model (with LoRA, its adapters) in Hugging Face format, and the optimizer's state.

        Args:
            model_folder: of the model.
            state_file: of the optimizer.
            durable: whether this rank flushes what it wrote to the disk.

        Returns:
            Empty, or why it could not be written, as of a full disk; all ranks agree then, and may go on.

        Raises:
            NotFiniteError: a weight, or what the optimizer knows of one, is NaN or infinite.
        """
        assert self.engine.optimizer is not None, "a learner always has one"
        state = optimizer_tensors(self.engine.weights, self.engine.optimizer)
        parts = {name: self._part(name, lambda part: part.sizes, tensor.shape) for name, tensor in state.items()}
        how = Writing(durable=durable, is_listed=True)
        with self.engine.shard.mesh.abandoned_on_error():
            _check_finite(state | {name: each for name, each in self.engine.weights.items() if each.requires_grad})
            try:
                of_weights = dataclasses.replace(how, is_summed=True)
                if self.config.model.lora is None:
                    save_model(self.engine.shard, model_folder, how=of_weights)
                else:
                    save_adapter(self.engine.shard, model_folder, base=self._path, how=of_weights)
                own = own_names(self.engine.shard.model)
                save_tensors(state_file, state, parts, self.engine.shard.mesh, sources=own, how=how)
            except CheckpointError as error:
                return str(error)
        return ""

    @broadcast
    @with_lease(to_train=True)
    def restore(self, model_folder: Path, state_file: Path) -> None:
        """Read back what `save` wrote, with any number of ranks: each reads its part.

        Raises:
            CheckpointError: the files are of another model.
        """
        assert self.engine.optimizer is not None, "a learner always has one"
        try:
            if self.config.model.lora is None:
                reload(str(model_folder), self.engine.shard)
            else:
                read_adapter(self.engine.shard, model_folder)
            with TensorFiles([state_file]) as files:
                entries = files.entries
                parts = {name: self._part(name, lambda part: part.shape, entries[name].shape) for name in entries}
                state = {name: torch.empty(parts[name].sizes, dtype=entries[name].dtype) for name in entries}
                own = own_names(self.engine.shard.model)
                files.read(
                    read for name, part in parts.items() for read in reads_of(own, name, part, state[name])
                )  # fmt: skip
            restore_optimizer(self.engine.weights, self.engine.optimizer, state)
            self.weights_changed()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{model_folder}: cannot be resumed from: {error}") from error

    def _part(self, name: str, of: Callable[[Part], tuple[int, ...]], shape: Sequence[int]) -> Part:
        """Return this rank's part of an optimizer tensor: that of its weight, or all of a scalar."""
        weight = self.engine.shard.parts.get(name.rpartition("/")[0])
        return weight if weight is not None and of(weight) == tuple(shape) else Part.whole(shape)


def _check_finite(tensors: Mapping[str, Tensor]) -> None:
    if wild := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise NotFiniteError(f"{', '.join(wild[:5])}: NaN or infinite, so that nothing is saved; see --from-step")


class Learner(Generic[BatchT, WorkerT]):
    """A model that is trained, as the driver sees it."""

    role: ClassVar[RoleName]
    model_folder: ClassVar[str]
    """Folder of its model in a checkpoint."""

    def __init__(self, config: RunConfig, group: WorkerGroup[WorkerT], loss: LossFunction[BatchT, Any]) -> None:
        self._config, self._group, self._loss = config, group, loss
        self.version = 0
        """Optimizer steps so far, including those that were left out because a gradient was not finite."""
        self.learned: BatchT | None = None
        """Batch of the newest update."""
        self._attention_cost = attention_cost(config)

    def cut(self, batch: BatchT, step: int) -> MiniBatches[BatchT]:
        """Return the mini-batches of an update."""
        return MiniBatches.cut(
            batch,
            self._config.learners[self.role],
            self._loss.denominator,
            seed=self._config.seed,
            step=step,
            attention_cost=self._attention_cost,
        )

    async def save(self, folder: Path) -> None:
        """Write the model and the state of its optimizer into a checkpoint that is being made.

        Ranks on this machine do not flush what they wrote: the saver does while training goes on. Ranks on other
        machines flush it themselves, as the saver could not.

        Raises:
            CheckpointError: the disk is full or not writable.
        """
        is_here = all(process.info.node == platform.node() for process in self._group.processes)
        paths = folder / self.model_folder, self._state_file(folder)
        if why := await self._group.call(LearnerWorker.save, *paths, not is_here):
            raise CheckpointError(why)

    async def restore(self, folder: Path) -> None:
        """Read both back from a checkpoint."""
        await self._group.call(LearnerWorker.restore, folder / self.model_folder, self._state_file(folder))

    def _state_file(self, folder: Path) -> Path:
        return folder / "training" / f"{self.role}.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class MiniBatches(Generic[BatchT]):
    """The mini-batches of an update, cut before rows are dealt out, so that they do not depend on the ranks."""

    parts: tuple[BatchT, ...]
    denominators: tuple[Denominator, ...]
    """Divisor of each mini-batch's loss, which is a sum over all ranks."""
    attention_cost: float
    """Cost by which rows are dealt out to ranks; see `row_costs`."""

    @classmethod
    def cut(
        cls,
        batch: BatchT,
        learner: ActorConfig | CriticConfig,
        denominator: Callable[[BatchT], Denominator],
        *,
        seed: int,
        step: int,
        attention_cost: float,
    ) -> MiniBatches[BatchT]:
        """Take every row once an epoch, prompt by prompt, in an order that only depends on seed and step."""
        parts: list[BatchT] = []
        rows = batch
        if isinstance(batch, ActorBatch):  # what the first epoch computes of it is kept
            rows = dataclasses.replace(batch, places=torch.arange(batch.num_tokens))
        prompts, prompt_of_row = batch.prompt_index.unique(return_inverse=True)
        for epoch in range(learner.num_epochs):
            generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 131 + epoch)
            # Rows of a prompt stay together: the prompt is computed once for all of them.
            order = torch.randperm(len(prompts), generator=generator)[prompt_of_row].argsort(stable=True)
            parts += [part for part in rows.rows(order).split(learner.num_mini_batches) if part.num_loss_tokens]
            rows = batch
        return cls(tuple(parts), tuple(map(denominator, parts)), attention_cost)

    def only(self, learns: Callable[[BatchT], Tensor]) -> MiniBatches[BatchT]:
        """Leave out rows from which nothing is learned; steps and denominators stay as they are.

        The weights are the same as with these rows, up to the rounding of sums in other micro-batches.

        Args:
            learns: (mini-batch) -> [B] whether a row has a gradient.
        """
        kept = [(part, learns(part)) for part in self.parts]
        parts = tuple(part if rows.all() else part.rows(rows.nonzero().flatten()) for part, rows in kept)
        return dataclasses.replace(self, parts=parts)

    def split(self, num_parts: int) -> list[MiniBatches[BatchT]]:
        """Give every rank its rows of each mini-batch, balanced by cost."""
        dealt = [deal(part, num_parts, self.attention_cost)[0] for part in self.parts]
        return [dataclasses.replace(self, parts=tuple(parts[rank] for parts in dealt)) for rank in range(num_parts)]
