"""Steps of decoding on an accelerator: several without a wait of the host, captured as graphs where that works.

Owns: the memory that a step reads and writes, and the captured graphs. Must not know: what a step computes.

A step of a small model is hundreds of kernels, and to launch them takes the host longer than the device takes to run
them. A captured step is launched as a whole, and reads and writes the same memory every time. So all that differs from
step to step lies in tensors of fixed shapes, `GraphBuffers`; a batch takes the buffers of an earlier one with as many
rows and block columns, which are padded to a few numbers.

A captured step is verified before it is used: two ordinary steps are made, and replays of both must sample the same
tokens. If capturing or this check fails, the engine continues with ordinary steps, and the log says why.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from rallypoint.generation.sampler import SampledTokens, SamplingMetadata, sample_tokens

if TYPE_CHECKING:
    from rallypoint.generation.native.accelerator.backend import PagedAttention, PagedMetadata

Capture: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches, and returns a function that launches it again."""

_LOG = logging.getLogger(__name__)

_MOST_ROWS = 256
"""Most rows of a captured step: with more, the device takes longer than the host."""
_MOST_GRAPHS = 64
"""Graphs that are kept; each takes some MiB."""
_SIZES_PER_OCTAVE = 4
"""Numbers of rows from a power of two to the next: up to a fifth of them is padding."""
_LARGEST_GAP = 0.05
"""Largest difference between logprobs of a step and of its replay, in nats: half precision rounds, and another kernel
may be chosen."""


class GraphBuffers(NamedTuple):
    """What a step reads and writes for B rows, padding included; [steps, B] has a line for each step."""

    metadata: PagedMetadata
    sampling: SamplingMetadata
    sources: Tensor
    """[B] int64: the row whose token a row takes: its own, or for padding the last one's."""
    numbers: Tensor
    """[steps, B] float64 in [0, 1)."""
    tokens: Tensor
    """[steps, B] int64."""
    logprobs: Tensor
    """[steps, B] float32."""
    sampled_logprobs: Tensor
    """[steps, B] float32; not written if they are `logprobs`."""

    @classmethod
    def of(cls, batch: PagedAttention, sampling: SamplingMetadata) -> GraphBuffers:
        """Make the buffers of a batch."""
        metadata, num = batch.metadata, batch.num_queries
        slots = metadata.slot_mapping
        sources = torch.arange(len(metadata.tokens), device=slots.device).clamp_(max=num - 1)
        numbers = torch.zeros(slots.shape, dtype=torch.float64, device=slots.device)
        sampling = _padded(sampling, num, sources)
        return cls(metadata, sampling, sources, numbers, torch.zeros_like(slots), numbers.float(), numbers.float())

    @property
    def results(self) -> tuple[Tensor, ...]:
        """What is sampled: the fields of `SampledTokens`, without `sampled_logprobs` if these are the logprobs."""
        is_plain = self.sampling.filtered is None and self.sampling.greedy is None
        return self.tokens, self.logprobs, *(() if is_plain else (self.sampled_logprobs,))

    @property
    def tensors(self) -> list[Tensor | None]:
        """All tensors."""
        return [*self.metadata, *self.sampling, *self[2:]]

    @property
    def shape(self) -> Hashable:
        """The shapes of the buffers; buffers with equal shapes can replace each other."""
        return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in self.tensors)

    def copy_from(self, other: GraphBuffers) -> None:
        """Take the content of buffers of the same shape."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def state(self) -> list[Tensor]:
        """Return copies of what changes with every step: tokens, positions and the step."""
        return [tensor.clone() for tensor in self.metadata[:3]]

    def restore(self, state: list[Tensor]) -> None:
        """Go back to such a state."""
        for mine, before in zip(self.metadata[:3], state, strict=True):
            mine.copy_(before)


class GraphRunner:
    """Decodes batches of one engine, by replaying graphs where there are some."""

    def __init__(self, logits: Callable[[PagedAttention], Tensor], capture: Capture | None) -> None:
        """Take what computes logits of a batch, [B, V], and what captures a step; None: nothing is captured."""
        self._logits, self._capture = logits, capture
        self._captured: OrderedDict[Hashable, tuple[GraphBuffers, Callable[[], None]]] = OrderedDict()
        self._too_large: set[Hashable] = set()
        """Shapes that there was no memory to capture."""
        self._addresses: Hashable = None
        self._current: tuple[PagedAttention, SamplingMetadata, GraphBuffers, Callable[[], None] | None] | None = None

    @property
    def captures(self) -> bool:
        """Whether steps are captured, and batches better padded."""
        return self._capture is not None

    def release(self) -> None:
        """Let go of all memory."""
        self._captured.clear()
        self._too_large.clear()
        self._current = None

    @torch.no_grad()
    def decode(
        self, batch: PagedAttention, sampling: SamplingMetadata, numbers: Tensor, addresses: Hashable
    ) -> list[SampledTokens]:
        """Sample the next tokens of a batch, and return them in memory of the host.

        Args:
            batch: laid out for as many steps.
            sampling: of its rows, the same for all their tokens.
            numbers: [steps, B] float64 in [0, 1).
            addresses: of everything that a graph reads other than the buffers; graphs captured with others are dropped.
        """
        if addresses != self._addresses:
            self.release()
            self._addresses = addresses
        if self._current is None or self._current[0] is not batch or self._current[1] is not sampling:
            self._current = (batch, sampling, *self._begin(batch, sampling))
        _, _, buffers, replay = self._current
        start, num, num_rows = batch.num_moves, len(numbers), batch.num_queries
        lines = slice(start, start + num)
        buffers.numbers[lines] = numbers.index_select(1, buffers.sources)
        first = 0
        if replay is None and self._may_capture(batch, buffers):
            replay = self._try(batch, buffers, slice(start, start + 2))
            self._current = batch, sampling, buffers, replay
            first = 1  # has been made
        for _ in range(first, num):
            if replay is None:
                self._step(batch, buffers)
            else:
                replay()
        batch.num_moves += num
        batch.forget()
        # All at once, so that the host waits once: a float64 has every token and every float32 as it is.
        tokens, *logprobs = torch.stack([result[lines, :num_rows].double() for result in buffers.results]).cpu()
        found = [tokens.long(), *(column.float() for column in logprobs)]
        return [SampledTokens(*line, *([] if len(line) == 3 else line[1:])) for line in zip(*found, strict=True)]

    def _begin(
        self, batch: PagedAttention, sampling: SamplingMetadata
    ) -> tuple[GraphBuffers, Callable[[], None] | None]:
        """Return buffers for a batch, and the graph that was captured with them, if there is one."""
        if self._current is not None:  # the batch before may go on, with tensors of its own
            before = self._current[0]
            before.metadata = before.metadata._make(tensor.clone() for tensor in before.metadata)
        buffers = GraphBuffers.of(batch, sampling)
        shape = buffers.shape
        if shape not in self._captured:
            return buffers, None
        self._captured.move_to_end(shape)
        kept, replay = self._captured[shape]
        kept.copy_from(buffers)
        batch.metadata = kept.metadata
        return kept, replay

    def _step(self, batch: PagedAttention, buffers: GraphBuffers) -> None:
        """Sample a token of every row, which is the one that the next step computes."""
        batch.forget()  # a captured step must not contain anything that was made outside of it
        at = buffers.metadata.step
        numbers = buffers.numbers.index_select(0, at).view(-1)
        found = sample_tokens(self._logits(batch), buffers.sampling, numbers, None)
        for result, new in zip(buffers.results, found, strict=False):
            result.index_copy_(0, at, new.unsqueeze(0))
        batch.move(found[0].index_select(0, buffers.sources))

    def _may_capture(self, batch: PagedAttention, buffers: GraphBuffers) -> bool:
        """Whether a step can be captured, others will be like it, and there is another one to compare with."""
        num, sampling = len(buffers.sources), buffers.sampling
        is_for_all = all(len(at) == num for at in (sampling.greedy, sampling.filtered) if at is not None)
        is_small = batch.num_queries <= _MOST_ROWS and buffers.shape not in self._too_large
        return self.captures and is_small and is_for_all and batch.has_next

    def _try(self, batch: PagedAttention, buffers: GraphBuffers, lines: slice) -> Callable[[], None] | None:
        """Make a step, and return it captured; None if that fails. The step after it is made for comparison only."""
        capture = self._capture
        assert capture is not None, "`_may_capture` said so"
        before = buffers.state()
        self._step(batch, buffers)
        self._step(batch, buffers)
        usual = [result[lines].clone() for result in buffers.results]
        buffers.restore(before)
        try:
            replay = capture(lambda: self._step(batch, buffers))
            buffers.restore(before)
            replay()
            between = buffers.state()
            replay()
            gap = _gap(usual, [result[lines] for result in buffers.results])
            buffers.restore(between)
            if gap <= _LARGEST_GAP:
                self._captured[buffers.shape] = buffers, replay
                if len(self._captured) > _MOST_GRAPHS:
                    self._captured.popitem(last=False)
                return replay
            reason = f"its logprobs are {gap:.2g} nats off"
        except torch.OutOfMemoryError:
            self._too_large.add(buffers.shape)
            reason = ""
        except Exception as error:  # noqa: BLE001 - of torch, the driver, and what a kernel is built with
            reason = f"{type(error).__name__}: {error}"
        if reason:
            _LOG.warning("steps of decoding are launched one by one from now on: a captured one failed: %s", reason)
            self._captured.clear()
            self._capture = None
        buffers.restore(before)
        self._step(batch, buffers)
        return None


def captures_on(device: torch.device) -> Capture | None:
    """Return what captures steps on a device; None, and a line in the log, if this torch cannot."""
    if device.type == "cpu":
        return None
    begin = _graphs_of(device)
    if begin is None:
        _LOG.warning("torch %s captures nothing on %s, 2.13 does: decoding is slower", torch.__version__, device.type)
        return None
    pools: list[Any] = []
    """Memory that all graphs share: nothing in it is of use when a replay has ended, and there is one at a time."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        graph, captures = begin(pools[0] if pools else None)
        with captures:
            step()
        pools.append(graph.pool())
        return graph.replay

    return capture


@contextmanager
def _on(stream: torch.Stream, graph: Any) -> Iterator[None]:
    with stream, graph:
        yield


def _graphs_of(device: torch.device) -> Callable[[Any], tuple[Any, AbstractContextManager[object]]] | None:
    """Return what begins a graph in the memory of others: it, and a context that records what is launched.

    All are recorded on a single stream, as libraries keep memory for each that they have worked on. What other threads
    do meanwhile is not captured, and no error.
    """
    mode: Any = "thread_local"
    if hasattr(torch.accelerator, "Graph"):  # from torch 2.13 on, for devices of all vendors
        stream = torch.Stream(device)

        def of_any(pool: Any) -> tuple[Any, AbstractContextManager[object]]:
            graph = torch.accelerator.Graph(pool=pool, capture_error_mode=mode)
            return graph, _on(stream, graph)

        return of_any
    if device.type != "cuda":
        return None
    own = torch.cuda.Stream(device)

    def of_cuda(pool: Any) -> tuple[Any, AbstractContextManager[object]]:
        graph = torch.cuda.CUDAGraph()
        return graph, torch.cuda.graph(graph, pool=pool, stream=own, capture_error_mode=mode)

    return of_cuda


def num_padded(num_rows: int) -> int:
    """Return to how many rows a captured step is padded.

    >>> [num_padded(num) for num in (1, 2, 3, 5, 9, 17, 33, 100, 256)]
    [1, 2, 3, 5, 10, 20, 40, 112, 256]
    """
    quantum = max(1, (1 << num_rows.bit_length() - 1) // _SIZES_PER_OCTAVE)
    return -(-num_rows // quantum) * quantum


def _padded(sampling: SamplingMetadata, num_rows: int, sources: Tensor) -> SamplingMetadata:
    """Return the metadata of so many rows for these and padding, whose tokens do not matter."""

    def lines(column: Tensor) -> Tensor:
        return column.index_select(0, sources) if len(column) == num_rows > 1 else column.clone()

    def indices(chosen: Tensor | None) -> Tensor | None:
        if chosen is None or len(chosen) < num_rows:
            return chosen
        return torch.arange(len(sources), device=sources.device)

    is_cut = sampling.filtered is not None and len(sampling.filtered) == num_rows
    cuts = [lines(column) if is_cut else column.clone() for column in (sampling.top_k, sampling.top_p, sampling.min_p)]
    temperature = None if sampling.temperature is None else lines(sampling.temperature)
    return SamplingMetadata(temperature, indices(sampling.greedy), indices(sampling.filtered), *cuts)


def _gap(usual: list[Tensor], replayed: list[Tensor]) -> float:
    """Return the largest difference of two steps, in nats; infinite if more than a sixteenth of the tokens differ.

    A few may, when a last bit decides; their logprobs are not compared.
    """
    is_same = usual[0] == replayed[0]
    if int((~is_same).sum()) > is_same.numel() / 16:
        return float("inf")
    gaps = [
        torch.where((one == other) | (one.isnan() & other.isnan()) | ~is_same, 0.0, one - other).abs().max()
        for one, other in zip(usual[1:], replayed[1:], strict=True)
    ]
    return float(torch.stack(gaps).nan_to_num(float("inf")).max())
