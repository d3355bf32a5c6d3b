"""One rank of training: a model, its optimizer, and passes over packed micro-batches.

Owns: passes over micro-batches, gradients summed over micro-batches and ranks, the optimizer step, and the refusal to
step on numbers that are not finite. Must not know: which loss it minimises, who calls it, or Ray. Invariants: losses
are sums over a denominator that the caller counted over all ranks, so that no cut of the batch changes the result; and
the same cut gives the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from rallypoint.algorithms import Denominator
from rallypoint.config import OptimizerConfig
from rallypoint.config.sections.learning import Activations, Offload
from rallypoint.data.packing import pack_groups, pad_rows
from rallypoint.engine.determinism import deterministic_kernels
from rallypoint.engine.forward import TokenStream, trained_positions
from rallypoint.engine.offload import Checkpoints, Sleeper
from rallypoint.engine.optimizer import learning_rate, make_optimizer
from rallypoint.errors import ModelError, NotFiniteError, PeerFailedError, RallyError, RowTooLongError
from rallypoint.models import ModelShard
from rallypoint.types import Last, Mean, Metrics, PerToken, Sequences, merge, token_index

BatchT = TypeVar("BatchT", bound=Sequences)
RowsT = TypeVar("RowsT", bound=Sequences)

Loss: TypeAlias = Callable[[BatchT, Tensor], tuple[Tensor, Metrics]]
"""(rows of a micro-batch, positions of their trained tokens) -> sum of the loss or of each of its streams, metrics."""


class TrainingEngine(Generic[BatchT]):
    """A model that is evaluated and trained on rows of any length."""

    def __init__(
        self,
        shard: ModelShard,
        *,
        optimizer: OptimizerConfig | None,
        max_tokens_per_micro_batch: int,
        padded: bool = False,
        activations: Activations = "keep",
        offload: Offload = "nothing",
        eps: float = 1e-8,
        deterministic: bool = True,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a model over.

        Args:
            shard: this rank's part of the model, on its device; trained in place, together with the ranks of its mesh.
            optimizer: None for a model that is evaluated only.
            max_tokens_per_micro_batch: the hard cap.
            padded: whether rows are padded to the longest, not packed end to end: for the parity table (docs/parity.md)
            activations: what a layer keeps for the backward pass.
            offload: what of the optimizer lies in CPU memory between its steps.
            eps: AdamW's; a larger one keeps the division well conditioned.
            deterministic: off the CPU, run passes with kernels that give equal bits; see `engine.determinism`.
            tick: called after every micro-batch, as a sign of progress.
        """
        self.shard, self.model, self._mesh, self._sharding = shard, shard.model, shard.mesh, shard.sharding
        if optimizer is None and not shard.has_adapters:  # requires_grad tells adapters from frozen weights
            self.model.requires_grad_(False)
        self._checkpoints = Checkpoints(self.model, "keep" if optimizer is None else activations)
        make = functools.partial(make_optimizer, self.weights, eps=eps, are_masters=self._sharding.half is not None)
        self.optimizer = make(optimizer, offload=offload, agree=self._mesh.tp.all_reduce_max) if optimizer else None
        self._optimizer_config = optimizer
        self._sleeping_weights, self._sleeping_state = Sleeper(), Sleeper()
        self._is_strict = deterministic and self.model.device.type != "cpu"
        self._max_tokens, self._padded, self._tick = max_tokens_per_micro_batch, padded, tick

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """This rank's part of each weight, as ordinary tensors."""
        return self._sharding.weights

    def sleep(self) -> None:
        """Move weights and optimizer state to CPU memory until `wake`."""
        self._sleeping_weights.sleep(self.weights.values())
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self.model.zero_grad()  # sharded weights have gradients of their own
            self._sleeping_state.sleep(self.optimizer.tensors)

    def wake(self, *, to_train: bool = True) -> None:
        """Bring the weights back, and with `to_train` the optimizer's state."""
        self._sleeping_weights.wake()
        if to_train:
            self._sleeping_state.wake()

    @torch.no_grad()
    def evaluate(
        self, batch: Sequences, outputs: Callable[[Sequences, Tensor], Tensor], columns: int | None = None
    ) -> PerToken:
        """Compute one number, or several, for every trained token, without gradients.

        Args:
            batch: any rows.
            outputs: (rows of a micro-batch, positions) -> [N] numbers, or [N, columns].
            columns: None for one number.

        Returns:
            The numbers in the batch's own order, zero for tokens that are not trained.
        """
        values = torch.zeros(batch.num_tokens if columns is None else (batch.num_tokens, columns))
        micro_batches = self._cut(batch)
        with self._mesh.abandoned_on_error(), self._kernels():
            for rows, part, positions in self._parts(batch, micro_batches):
                found = self._sharding.run(functools.partial(outputs if rows else self._nothing, part, positions))
                if rows:
                    # Trained tokens are in the same order with padding and without.
                    at = token_index(batch.offsets, torch.tensor(rows))
                    values[at[batch.loss_mask[at]]] = found.to(values)
        return PerToken(offsets=batch.offsets, values=values)

    def train(
        self, batch: BatchT, loss: Loss[BatchT], *, denominator: Denominator, step: int, num_steps: int
    ) -> Metrics:
        """Take one optimizer step on the rows of all ranks together.

        Args:
            batch: this rank's rows; may be empty: the rank takes part in the step all the same.
            loss: returns a sum over the trained tokens of a micro-batch.
            denominator: divides the sum of the loss over all ranks; of a loss of several streams, the sum of each.
            step: the training step, from 1, for the learning rate.
            num_steps: training steps of the whole run.

        Raises:
            NotFiniteError: a loss or the gradient is NaN or infinite; the weights are left untouched, on all ranks.
            PeerFailedError: another rank raised on its rows; no rank takes the step.
            MembershipLostError: another rank raised in a pass that it shares, or died.
        """
        assert self.optimizer is not None, "an engine without optimizer evaluates only"
        assert self._optimizer_config is not None, "the optimizer was made from it"
        measured: list[Metrics] = []
        failure: Exception | None = None
        with self._kernels():
            try:
                measured, failure = self.accumulate(batch, loss, denominator)
            except Exception as error:
                # Peers that share this rank's passes are waiting inside one, where nothing else reaches them.
                if self._mesh.everyone.size > self._mesh.sizes["dp_replicate"]:
                    self._mesh.abandon()
                    raise
                failure = error
            norm = self._reduce_and_clip(self._optimizer_config.max_grad_norm, failure)
            rate = learning_rate(self._optimizer_config, step, num_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        # Every rank measured the same norm and rate; a step's norm is the mean over its mini-batches.
        return merge(*measured, Metrics({"grad_norm": Mean(norm, 1.0), "lr": Last(rate)}))

    def accumulate(
        self, batch: BatchT, loss: Loss[BatchT], denominator: Denominator
    ) -> tuple[list[Metrics], Exception | None]:
        """Compute the gradients of this rank's rows; a loss that is not finite does not end the passes.

        Returns:
            Metrics, and what went wrong. Ranks that share passes have then completed all of them, or begun none.
        """
        assert self.optimizer is not None, "an engine without optimizer evaluates only"
        try:
            micro_batches = self._cut(batch)
        except (ValueError, PeerFailedError) as error:  # ranks that share passes fail together, before any pass
            return [], error
        self.optimizer.zero_grad(set_to_none=False)
        measured: list[Metrics] = []
        passed: list[tuple[list[int], Tensor]] = []
        with self._checkpoints.recorded():
            for rows, part, positions in self._parts(batch, micro_batches):
                if not rows:
                    self._sharding.backward(self._sharding.run(functools.partial(self._nothing, part, positions)))
                    continue
                total, metrics = self._sharding.run(functools.partial(loss, part, positions))
                self._sharding.backward(_divided(total, denominator))  # half precision: on to AdamW's masters
                measured.append(metrics)
                passed.append((rows, total.detach().sum()))
        # Read all at once: to read each after its pass would wait for the device while it has nothing else to do.
        totals = torch.stack([total for _, total in passed]).tolist() if passed else []
        for (rows, _), total in zip(passed, totals, strict=True):
            if not math.isfinite(total):
                said = f"the loss is {total} for {self._blame(batch, rows, loss)}"
                return measured, NotFiniteError(said, is_of_update=True)
        return measured, None

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        return deterministic_kernels() if self._is_strict else contextlib.nullcontext()

    def _nothing(self, part: Sequences, positions: Tensor) -> Tensor:
        """Return zero from a pass without rows, which runs the same collectives as a pass with rows."""
        return TokenStream(self.shard, part, positions).states().sum() + self._sharding.touch()

    @torch.no_grad()
    def _blame(self, batch: BatchT, rows: list[int], loss: Loss[BatchT]) -> str:
        """Name the rows whose own loss is not finite; all rows if only their sum is not, or if ranks share passes."""
        if self._mesh.passes.size > 1:
            return _name_rows(batch, rows)
        groups = batch.prompt_index.tolist() if batch.rows_together > 1 else range(len(batch))
        alone = [batch.rows([other for other in rows if groups[other] == groups[row]]) for row in rows]
        guilty: list[int] = []
        for row, part in zip(rows, alone, strict=True):
            with contextlib.suppress(RallyError):  # what is refused of a row alone is not what went wrong in the batch
                if part.num_loss_tokens and not math.isfinite(loss(part, trained_positions(part))[0].sum().item()):
                    guilty.append(row)
        return _name_rows(batch, guilty or rows)

    def _reduce_and_clip(self, max_norm: float, failure: Exception | None) -> float:
        """Sum gradients over the ranks, clip them to a global norm, and return the norm before clipping.

        A rank that failed takes part and says so; otherwise the others would wait for it.
        """
        # First ask who failed: the sums of gradients would wait for a rank that does not come.
        is_wild = isinstance(failure, NotFiniteError) and failure.is_of_update
        counts = torch.tensor([0.0 if failure is None else 1.0, float(is_wild)])
        self._mesh.everyone.all_reduce_sum([counts])
        num_failed, num_wild = counts.tolist()
        if num_failed:
            failure = failure or PeerFailedError("another rank stopped this update; see its error")
            if isinstance(failure, NotFiniteError | PeerFailedError):
                failure.is_of_update = num_failed == num_wild
            raise failure
        assert self.optimizer is not None, "as in `train`"
        parts = functools.partial(self.optimizer.gradient_parts, self.weights)
        norm = self._sharding.reduce_and_clip(parts, max_norm, stay=self.optimizer.gradients_stay)
        if not math.isfinite(norm):
            raise NotFiniteError(f"the gradient norm is {norm}; the optimizer step was not taken", is_of_update=True)
        return norm

    def _cut(self, batch: Sequences) -> list[list[int]]:
        """Return the rows of each micro-batch with trained tokens; ranks that share passes get equally many of them.

        Raises:
            RowTooLongError: one row alone exceeds the cap.
            ModelError: see `check_tokens`.
            ValueError: see `trained_positions`.
            PeerFailedError: one of the ranks that share passes raised one of these.
        """
        assert batch.sequence_starts is None, "`deal` has split rollouts: a pass is over single sequences"
        lengths = batch.lengths.tolist()
        try:
            positions = trained_positions(batch)
            check_tokens(batch, self.model.config.get_text_config().vocab_size)
            if self._padded:
                assert batch.rows_together == 1, "the parity table has none that are padded"
                micro_batches = pad_rows(lengths, self._max_tokens)
            else:
                groups = batch.prompt_index.tolist()
                micro_batches = pack_groups(lengths, groups, self._max_tokens, whole=batch.rows_together > 1)
        except RowTooLongError as error:
            self._sharding.agree(None)
            raise error.of_rollout(int(batch.prompt_index[error.row]), int(batch.sample_index[error.row])) from None
        except ValueError:
            self._sharding.agree(None)
            raise
        trained = set(batch.row_of_token[positions].tolist())
        micro_batches = [rows for rows in micro_batches if trained.intersection(rows)]
        return micro_batches + [[]] * (self._sharding.agree(len(micro_batches)) - len(micro_batches))

    def _parts(self, batch: RowsT, micro_batches: list[list[int]]) -> Iterator[tuple[list[int], RowsT, Tensor]]:
        """Yield each micro-batch: the numbers of its rows, the rows for the model, the positions of trained tokens."""
        for rows in micro_batches:
            part = batch.rows(rows)
            part = part.padded(int(part.lengths.max())) if self._padded and rows else part
            yield rows, part, trained_positions(part)
            self._tick()


def _divided(total: Tensor, denominator: Denominator) -> Tensor:
    """Return the loss: the sum of its streams, each divided by its own denominator."""
    if isinstance(denominator, tuple):
        return (total / torch.tensor(denominator, dtype=total.dtype, device=total.device)).sum()
    return total / denominator


def _name_rows(batch: Sequences, rows: list[int]) -> str:
    names = [f"prompt {int(batch.prompt_index[row])} sample {int(batch.sample_index[row])}" for row in rows[:5]]
    return ", ".join(names) + (f" or one of {len(rows) - 5} more" if len(rows) > 5 else "")


def check_tokens(batch: Sequences, num_ids: int) -> None:
    """Refuse token ids that a model's embedding does not have; a policy with a larger one may sample them.

    Args:
        batch: any rows.
        num_ids: rows of the embedding.

    Raises:
        ModelError: there is such a token; its place is named.
    """
    unknown = (batch.tokens < 0) | (batch.tokens >= num_ids)
    if unknown.any():
        place = int(unknown.nonzero()[0])
        row = int(batch.row_of_token[place])
        raise ModelError(
            f"sample {int(batch.sample_index[row])} of prompt {int(batch.prompt_index[row])} has the token "
            f"{int(batch.tokens[place])}, but this model's embedding has {num_ids} rows; it needs an "
            "embedding as large as the policy's"
        )
