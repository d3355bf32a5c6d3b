"""One rank of training: a model, its optimizer, and passes over packed micro-batches.

Owns: passes over micro-batches, on a CPU in lanes side by side, adding up gradients over micro-batches and
ranks, one optimizer step, and refusing to step on numbers that are not finite. Must not know: which
loss it minimises, who calls it, or Ray. Invariants: losses are sums over a denominator that the caller
counted over all ranks, so no cut of the batch changes the result; and the same cut gives the same bits,
whichever lane is faster.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from rallypoint.config import Activations, OptimizerConfig
from rallypoint.config.lanes import max_lanes
from rallypoint.data.packing import pad_rows
from rallypoint.engine.activations import Checkpoints
from rallypoint.engine.optimizer import learning_rate, make_optimizer
from rallypoint.engine.passes import Lane, check_tokens, plan_lanes
from rallypoint.engine.sleeper import Sleeper
from rallypoint.engine.sums import GradientSums
from rallypoint.engine.token_stream import Stream, trained_positions
from rallypoint.errors import NotFiniteError, PeerFailedError, RowTooLongError
from rallypoint.models import ModelShard
from rallypoint.models.families import is_known
from rallypoint.parallel import Lanes
from rallypoint.types import Last, Metrics, PerToken, Sequences, merge, token_index

BatchT = TypeVar("BatchT", bound=Sequences)
RowsT = TypeVar("RowsT", bound=Sequences)
ResultT = TypeVar("ResultT")

Passes: TypeAlias = Iterable[list[int]]
"""The rows of each micro-batch of a lane that is to be computed, as it comes."""

Loss = Callable[[BatchT, Tensor], tuple[Tensor, Metrics]]
"""(rows of a micro-batch, positions of their trained tokens) -> sum of the loss, metrics.

Several threads may call it at a time.
"""


class Engine(Generic[BatchT]):
    """A model that is evaluated and trained on rows of any length."""

    def __init__(
        self,
        shard: ModelShard,
        *,
        optimizer: OptimizerConfig | None,
        max_tokens_per_micro_batch: int,
        padded: bool = False,
        activations: Activations = "keep",
        attention_cost: float = 0.0,
        eps: float = 1e-8,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Take a model over.

        Args:
            shard: this rank's part of the model, on its device; trained in place, together with the ranks of its mesh.
            optimizer: None for a model that is evaluated only.
            max_tokens_per_micro_batch: the hard cap, for all micro-batches together that are computed at one time.
            padded: whether every row of a micro-batch becomes as long as its longest, instead of lying end to end.
                Nobody trains so: it is the other side of the parity table (docs/parity.md), against which packing is
                measured on every mesh.
            activations: what a layer leaves for the backward pass.
            attention_cost: what rows are dealt out to lanes by; see `row_costs`.
            eps: is added to AdamW's denominator; a larger one keeps the division well conditioned.
            tick: called after every micro-batch of the caller's own thread, so that whoever waits knows that it
                gets on.
        """
        self.shard, self.model = shard, shard.model
        self._mesh, self._sharding = shard.mesh, shard.sharding
        if optimizer is None:
            self.model.requires_grad_(False)
        self._checkpoints = Checkpoints(self.model, "keep" if optimizer is None else activations)
        are_masters = self._sharding.half is not None
        self.optimizer = (
            make_optimizer(self.weights, optimizer, eps=eps, are_masters=are_masters) if optimizer else None
        )
        self._optimizer_config = optimizer
        self._sleeping_weights, self._sleeping_state = Sleeper(), Sleeper()
        self._max_tokens, self._padded, self._tick = max_tokens_per_micro_batch, padded, tick
        self._attention_cost, self._lanes = attention_cost, Lanes(self.model.device)
        # Ranks that share passes make them one at a time. Copies to CPU memory are in one order, too.
        self._may_have_lanes = (
            self._mesh.everyone.size == self._mesh.sizes["dp_replicate"]
            and is_known(self.model)
            and activations != "offload"
        )

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What this rank holds of each weight, as ordinary tensors."""
        return self._sharding.weights

    def sleep(self) -> None:
        """Move weights, and what the optimizer remembers of them, to CPU memory until `wake`."""
        self._sleeping_weights.sleep(self.weights.values())
        if self.optimizer is not None:
            self.optimizer.zero_grad()
            self._sleeping_state.sleep(self.optimizer.tensors)

    def wake(self, *, to_train: bool = True) -> None:
        """Bring the weights back, as they were; what the optimizer remembers only `to_train`."""
        self._sleeping_weights.wake()
        if to_train:
            self._sleeping_state.wake()

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
        lanes = self._plan(batch, gradient_bytes=0)

        def evaluate(lane: Passes, tick: Callable[[], None]) -> None:
            for rows, part, positions in self._micro_batches(batch, lane, tick):
                found = self._sharding.run(functools.partial(outputs if rows else self._nothing, part, positions))
                if rows:
                    # In their order trained tokens are the same with padding and without.
                    at = token_index(batch.offsets, torch.tensor(rows))
                    values[at[batch.loss_mask[at]]] = found.to(values)

        with self._mesh.abandoned_on_error():
            self._run(evaluate, lanes)
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
            PeerFailedError: another rank raised on its rows; no rank takes the step, and none waits for it.
            MembershipLostError: likewise, in a pass that it shares; or it died.
        """
        assert self.optimizer is not None, "an engine without optimizer evaluates only"
        assert self._optimizer_config is not None, "the optimizer was made from it"
        measured: list[Metrics] = []
        failure: Exception | None = None
        try:
            measured, failure = self.accumulate(batch, loss, denominator)
        except Exception as error:
            # Peers that share this rank's passes wait inside one, where no other news reaches them.
            if self._mesh.everyone.size > self._mesh.sizes["dp_replicate"]:
                self._mesh.abandon()
                raise
            failure = error
        norm = self._reduce_and_clip(self._optimizer_config.max_grad_norm, failure)
        rate = learning_rate(self._optimizer_config, step, num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        # Every rank measured the same norm and rate, and `Last` keeps one of them.
        return merge(*measured, Metrics({"grad_norm": Last(norm), "lr": Last(rate)}))

    def accumulate(
        self, batch: BatchT, loss: Loss[BatchT], denominator: float
    ) -> tuple[list[Metrics], Exception | None]:
        """Make the gradients those of this rank's rows, to the end even when a loss is not finite.

        Returns:
            What was measured, and what was wrong: ranks that share passes have made all of theirs.
        """
        assert self.optimizer is not None, "an engine without optimizer evaluates only"
        masters = self.optimizer.masters
        try:
            lanes = self._plan(batch, gradient_bytes=sum(master.nbytes for master in masters))
        except (ValueError, PeerFailedError) as error:  # so do those who share passes, and none has begun one
            return [], error
        self.optimizer.zero_grad(set_to_none=len(lanes) > 1)
        with self._checkpoints.recorded():
            if len(lanes) == 1:
                pass_lane = functools.partial(self._pass_lane, batch, loss, denominator, self._sharding.backward)
                return pass_lane(lanes[0], self._tick)
            return self._accumulate_apart(batch, loss, denominator, lanes)

    def _accumulate_apart(
        self, batch: BatchT, loss: Loss[BatchT], denominator: float, lanes: list[Lane]
    ) -> tuple[list[Metrics], Exception | None]:
        """Have each lane add up gradients by itself, and add up these sums in the order of the lanes."""
        assert self.optimizer is not None, "as in `accumulate`"
        weights = [weight for weight in self.weights.values() if weight.requires_grad]

        def apart(lane: Passes, tick: Callable[[], None]) -> tuple[GradientSums, list[Metrics], NotFiniteError | None]:
            sums = GradientSums(weights)
            return sums, *self._pass_lane(batch, loss, denominator, sums.add_backward, lane, tick)

        (first, *others), measured, failures = zip(*self._run(apart, lanes), strict=True)
        for sums in others:
            first.add(sums)
        for weight, total in zip(weights, first.totals, strict=True):
            self.optimizer.master(weight).grad = total
        return list(itertools.chain(*measured)), next(filter(None, failures), None)

    def _pass_lane(
        self,
        batch: BatchT,
        loss: Loss[BatchT],
        denominator: float,
        backward: Callable[[Tensor], None],
        lane: Passes,
        tick: Callable[[], None],
    ) -> tuple[list[Metrics], NotFiniteError | None]:
        """Make the passes of a lane, forward and backward."""
        measured: list[Metrics] = []
        passed: list[tuple[list[int], Tensor]] = []
        for rows, part, positions in self._micro_batches(batch, lane, tick):
            if not rows:
                backward(self._sharding.run(functools.partial(self._nothing, part, positions)))
                continue
            total, metrics = self._sharding.run(functools.partial(loss, part, positions))
            backward(total / denominator)
            measured.append(metrics)
            passed.append((rows, total.detach()))
        # All at once: a look at each of them would wait for the device before it has anything else to do.
        totals = torch.stack([total for _, total in passed]).tolist() if passed else []
        for (rows, _), total in zip(passed, totals, strict=True):
            if not math.isfinite(total):
                return measured, NotFiniteError(f"the loss is {total} for {self._blame(batch, rows, loss)}")
        return measured, None

    def _run(self, call: Callable[[Passes, Callable[[], None]], ResultT], lanes: list[Lane]) -> list[ResultT]:
        """Call with each lane, side by side, and with what is to be called after each of its micro-batches.

        Where one of them raises, the others make no further pass.
        """
        stopped = threading.Event()

        def run_lane(lane: Lane, tick: Callable[[], None]) -> ResultT:
            with contextlib.ExitStack() as unless_all_goes_well:
                unless_all_goes_well.callback(stopped.set)
                result = call(itertools.takewhile(lambda _: not stopped.is_set(), lane), tick)
                unless_all_goes_well.pop_all()
            return result

        ticks = itertools.chain([self._tick], itertools.repeat(_nobody_waits))  # the first has the caller's own thread
        return self._lanes.run([functools.partial(run_lane, *lane) for lane in zip(lanes, ticks, strict=False)])

    def _nothing(self, part: Sequences, positions: Tensor) -> Tensor:
        """Return a zero, of a pass without rows: it needs and gives other ranks what a pass with rows does."""
        return Stream(self.shard, part, positions).states().sum() + self._sharding.touch()

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
        # First the news: sums over some of the ranks would wait for one that is not coming.
        num_failed = torch.tensor([0.0 if failure is None else 1.0])
        self._mesh.everyone.all_reduce_sum([num_failed])
        if failure is not None:
            raise failure
        if num_failed.item():
            raise PeerFailedError("another rank stopped this update; see its error")
        assert self.optimizer is not None, "as in `train`"
        masters = {name: self.optimizer.master(weight) for name, weight in self.weights.items() if weight.requires_grad}
        norm = self._sharding.reduce_and_clip(masters, max_norm)
        if not math.isfinite(norm):
            raise NotFiniteError(f"the gradient norm is {norm}; the optimizer step was not taken")
        return norm

    def _plan(self, batch: Sequences, *, gradient_bytes: int) -> list[Lane]:
        """Return the lanes, with micro-batches that have something to train; ranks that share passes get as many.

        Raises what `plan_lanes`, `check_tokens` and `trained_positions` raise, and:

        Raises:
            PeerFailedError: one of the ranks that share passes raised that.
        """
        most = max_lanes(self._lanes.num, gradient_bytes) if self._may_have_lanes else 1
        try:
            positions = trained_positions(batch)
            check_tokens(batch, self.model.config.get_text_config().vocab_size)
            if self._padded:
                lanes = [pad_rows(batch.lengths.tolist(), self._max_tokens)]
            else:
                lanes = plan_lanes(batch, self._max_tokens, most=most, attention_cost=self._attention_cost)
        except RowTooLongError as error:
            self._sharding.agree(None)
            raise error.of_rollout(int(batch.prompt_index[error.row]), int(batch.sample_index[error.row])) from None
        except ValueError:
            self._sharding.agree(None)
            raise
        trained = set(batch.row_of_token[positions].tolist())
        lanes = [[rows for rows in lane if trained.intersection(rows)] for lane in lanes]
        lanes = list(filter(None, lanes)) or [[]]
        missing = self._sharding.agree(len(lanes[0])) - len(lanes[0]) if len(lanes) == 1 else 0
        return [lanes[0] + [[]] * missing, *lanes[1:]]

    def _micro_batches(
        self, batch: RowsT, lane: Passes, tick: Callable[[], None]
    ) -> Iterator[tuple[list[int], RowsT, Tensor]]:
        """Yield the rows of each micro-batch, as numbers and as what goes through the model, with trained positions."""
        for rows in lane:
            part = batch.rows(rows)
            part = part.padded(int(part.lengths.max())) if self._padded and rows else part
            yield rows, part, trained_positions(part)
            tick()


def _nobody_waits() -> None:
    """Be called where the caller's own thread says that it gets on."""


def _name_rows(batch: Sequences, rows: list[int]) -> str:
    names = [f"prompt {int(batch.prompt_index[row])} sample {int(batch.sample_index[row])}" for row in rows[:5]]
    return ", ".join(names) + (f" or one of {len(rows) - 5} more" if len(rows) > 5 else "")
