"""One rank of training: a model, its optimizer, and passes over packed micro-batches.

Owns: cutting rows into micro-batches under the token cap, adding up gradients over micro-batches and
ranks, one optimizer step, and refusing to step on numbers that are not finite. Must not know: which
loss it minimises, who calls it, or Ray. Invariant: losses are sums over a denominator that the caller
counted over all ranks, so no cut of the batch changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rallypoint.config import Activations, OptimizerConfig
from rallypoint.data.packing import pack_rows, pad_rows
from rallypoint.engine.activations import Checkpoints
from rallypoint.engine.forward import trained_positions
from rallypoint.engine.optimizer import learning_rate, make_optimizer
from rallypoint.errors import NotFiniteError, PeerFailedError
from rallypoint.parallel import DeviceMesh
from rallypoint.types import Last, Metrics, PerToken, Sequences, merge, token_index

BatchT = TypeVar("BatchT", bound=Sequences)
RowsT = TypeVar("RowsT", bound=Sequences)

Loss = Callable[[BatchT, Tensor], tuple[Tensor, Metrics]]
"""(rows of a micro-batch, positions of their trained tokens) -> sum of the loss, metrics."""


class Engine(Generic[BatchT]):
    """A model that is evaluated and trained on rows of any length."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        optimizer: OptimizerConfig | None,
        mesh: DeviceMesh,
        max_tokens_per_micro_batch: int,
        padded: bool = False,
        activations: Activations = "keep",
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a model over.

        Args:
            model: on its device; trained in place.
            optimizer: None for a model that is evaluated only.
            mesh: the ranks that train it together; `model` is this one's part of it.
            max_tokens_per_micro_batch: the hard cap.
            padded: whether every row of a micro-batch becomes as long as its longest, instead of lying end to end.
            activations: what a layer leaves for the backward pass.
            tick: called after every micro-batch, so that whoever waits knows that it gets on.
        """
        self.model = model
        self._checkpoints = Checkpoints(model, "keep" if optimizer is None else activations)
        self.optimizer = None if optimizer is None else make_optimizer(model, optimizer)
        self._optimizer_config = optimizer
        self._mesh = mesh
        self._max_tokens, self._padded, self._tick = max_tokens_per_micro_batch, padded, tick
        model.requires_grad_(optimizer is not None)

    @torch.no_grad()
    def evaluate(self, batch: Sequences, outputs: Callable[[Sequences, Tensor], Tensor]) -> PerToken:
        """Compute one number for every trained token, without gradients.

        Args:
            batch: any rows.
            outputs: (rows of a micro-batch, positions) -> [N] numbers.

        Returns:
            The numbers in the batch's own order, zero for tokens that are not trained.
        """
        values = torch.zeros(batch.num_tokens)
        for rows, part in self._micro_batches(batch):
            positions = trained_positions(part)
            if len(positions):
                # In their order trained tokens are the same with padding and without.
                at = token_index(batch.offsets, torch.tensor(rows))
                values[at[batch.loss_mask[at]]] = outputs(part, positions).to(values)
        return PerToken(offsets=batch.offsets, values=values)

    def train(self, batch: BatchT, loss: Loss[BatchT], *, denominator: float, step: int, num_steps: int) -> Metrics:
        """Take one optimizer step on the rows of all ranks together.

        Args:
            batch: this rank's rows; may be empty, the step is taken all the same.
            loss: returns a sum over the trained tokens of a micro-batch.
            denominator: what the sum over all ranks is divided by.
            step: the training step, from 1, for the learning rate.
            num_steps: of the whole run.

        Raises:
            NotFiniteError: a loss or the gradient is NaN or infinite; the weights are left untouched.
            PeerFailedError: another rank raised on its rows; no rank takes the step, and none waits for ever.
        """
        assert self.optimizer is not None, "an engine without optimizer evaluates only"
        assert self._optimizer_config is not None, "the optimizer was made from it"
        self.optimizer.zero_grad(set_to_none=False)
        measured: list[Metrics] = []
        failure: Exception | None = None
        try:
            with self._checkpoints.recorded():
                measured, failure = self._accumulate(batch, loss, denominator)
        except Exception as error:
            # Peers that share this rank's passes wait inside one, where no news reaches them: their deadline, or the
            # end of their process, does.
            if self._mesh.everyone.size > self._mesh.sizes["dp_replicate"]:
                raise
            failure = error
        norm = self._reduce_and_clip(self._optimizer_config.max_grad_norm, failure)
        rate = learning_rate(self._optimizer_config, step, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        # Every rank measured the same norm and rate, and `Last` keeps one of them.
        return merge(*measured, Metrics({"grad_norm": Last(norm), "lr": Last(rate)}))

    def _accumulate(
        self, batch: BatchT, loss: Loss[BatchT], denominator: float
    ) -> tuple[list[Metrics], NotFiniteError | None]:
        """Add up the gradients of this rank's micro-batches, to the end even when a loss is not finite."""
        measured: list[Metrics] = []
        failure: NotFiniteError | None = None
        for rows, part in self._micro_batches(batch):
            positions = trained_positions(part)
            if not len(positions):
                continue
            total, metrics = loss(part, positions)
            if failure is None and not math.isfinite(total.item()):
                failure = NotFiniteError(f"the loss is {total.item()} for {self._blame(batch, rows, loss)}")
            (total / denominator).backward()
            measured.append(metrics)
        return measured, failure

    @torch.no_grad()
    def _blame(self, batch: BatchT, rows: list[int], loss: Loss[BatchT]) -> str:
        """Name the rows whose own loss is not finite; all of them when it is only their sum, or ranks share passes."""
        if self._mesh.shard.size > 1:
            return _name_rows(batch, rows)
        alone = [batch.rows([row]) for row in rows]
        guilty = [
            row
            for row, part in zip(rows, alone, strict=True)
            if part.num_loss_tokens and not math.isfinite(loss(part, trained_positions(part))[0].item())
        ]
        return _name_rows(batch, guilty or rows)

    def _reduce_and_clip(self, max_norm: float, failure: Exception | None) -> float:
        """Sum gradients over the ranks, scale them down to a global norm, and return the norm before.

        A rank that failed takes part, and says so: the others would wait for it.
        """
        assert self.optimizer is not None, "as in `train`"
        weights = self.optimizer.masters
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        # First the news: sums over some of the ranks would wait for one that is not coming.
        num_failed = torch.tensor([0.0 if failure is None else 1.0])
        self._mesh.everyone.all_reduce_sum([num_failed])
        if failure is not None:
            raise failure
        if num_failed.item():
            raise PeerFailedError("another rank stopped this update; see its error")
        self._mesh.replicas.all_reduce_sum([weight.grad for weight in weights if weight.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(weights, max_norm).item()
        if not math.isfinite(norm):
            raise NotFiniteError(f"the gradient norm is {norm}; the optimizer step was not taken")
        return norm

    def _micro_batches(self, batch: RowsT) -> Iterator[tuple[list[int], RowsT]]:
        """Yield the rows of each micro-batch, as numbers and as what goes through the model."""
        lengths = batch.lengths.tolist()
        for rows in (pad_rows if self._padded else pack_rows)(lengths, self._max_tokens):
            part = batch.rows(rows)
            yield rows, part.padded(max(lengths[row] for row in rows)) if self._padded else part
            self._tick()


def _name_rows(batch: Sequences, rows: list[int]) -> str:
    names = [f"prompt {int(batch.prompt_index[row])} sample {int(batch.sample_index[row])}" for row in rows[:5]]
    return ", ".join(names) + (f" or one of {len(rows) - 5} more" if len(rows) > 5 else "")
