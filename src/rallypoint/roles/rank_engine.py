"""The engine of a rank: what it is asked to do in a slice of time, and what it has done.

Owns: how long a slice is. Must not know: who asks, and what a response is for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import xxhash

from rallypoint.errors import DeterminismError, RequestError
from rallypoint.generation import GenerationEngine, Output, Request
from rallypoint.parallel import DeviceMesh
from rallypoint.roles.server_ranks import ServerRanks

SLICE_S = 0.25
"""Seconds that a rank samples before it answers, if no request ends."""
_SHORTEST_SLICE_S = 0.1
"""Seconds that a rank samples before it answers although a request has ended; an answer costs a millisecond or two."""


@dataclasses.dataclass(frozen=True, slots=True)
class SliceRequest:
    """What one rank is asked to do in the next slice of time."""

    new: tuple[tuple[int, Request], ...] = ()
    """Requests to begin with, each with the driver's number for it."""
    cancelled: tuple[int, ...] = ()
    """Numbers of requests to cancel."""
    version: int = 0
    """Version of the weights to sample from."""
    num_steps: int | None = None
    """Steps of the engine to take; None: as many as a slice of time has."""


@dataclasses.dataclass(frozen=True, slots=True)
class SliceResult:
    """What a rank has done in a slice of time."""

    outputs: tuple[Output, ...] = ()
    num_steps: int = 0
    """Steps that its engine has taken."""
    busy_s: float = 0.0
    """Seconds that it has sampled."""
    lacks_weights: bool = False
    """Whether it waits for weights because its server was started again, or gave them up while it slept."""
    is_sampling: bool = False
    """Whether it has requests left, and the memory of its process until the next slice."""


class RankEngine:
    """An engine, whose requests have the driver's numbers."""

    def __init__(
        self,
        engine: GenerationEngine,
        tick: Callable[[], None],
        mesh: DeviceMesh | None = None,
        sharing: ServerRanks | None = None,
    ) -> None:
        """Take an engine.

        Args:
            engine: of this rank.
            tick: called after every step.
            mesh: of the model, whose ranks along `tp` take the same steps; None: the model is whole.
            sharing: ranks whose devices the engine's server has, too.
        """
        self.engine, self._tick, self._mesh, self._sharing = engine, tick, mesh or DeviceMesh.solo(), sharing
        self._numbers: dict[int, int] = {}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Take a slice with the ranks that share the model; leave them if it raises: they would wait for this one."""
        if self._sharing is not None:
            with self._sharing.slice(lambda: not self.engine.is_asleep):
                yield
        else:
            with self._mesh.abandoned_on_error() if self._mesh.tp.size > 1 else contextlib.nullcontext():
                yield

    def take(self, asked: SliceRequest, *, streamed: bool = False) -> list[Output]:
        """Begin with requests and give others up; return the ends of those that the engine refuses."""
        refused: list[Output] = []
        for number, request in asked.new:
            sent = dataclasses.replace(request, streamed=True) if streamed and not request.streamed else request
            try:
                self._numbers[self.engine.submit(sent)] = number
            except RequestError as error:
                refused.append(Output.failed(number, self.engine.version, error))
        if asked.cancelled:
            cancelled = set(asked.cancelled)
            for request_id, number in self._numbers.items():
                if number in cancelled:
                    self.engine.cancel(request_id)
        return refused

    def sample(self, *, until_one_ends: bool, num_steps: int | None = None) -> SliceResult:
        """Step so many times, or for a slice of time; no longer than there is a request.

        Raises:
            DeterminismError: ranks that share the model sampled different tokens.
        """
        outputs: list[Output] = []
        began, has_ended, num_taken = time.monotonic(), False, 0
        while self.engine.has_work and num_taken != num_steps:
            num_taken += 1
            new = self.engine.step()
            for output in new:
                number = self._numbers[output.request_id]
                if output.finish_reason is not None:
                    del self._numbers[output.request_id]
                    has_ended = True
                outputs.append(dataclasses.replace(output, request_id=number))
            self._tick()
            slice_s = _SHORTEST_SLICE_S if has_ended and until_one_ends else SLICE_S
            is_over = num_steps is None and time.monotonic() - began >= slice_s
            if self._is_over(is_over, new):
                break
        return SliceResult(tuple(outputs), num_taken, time.monotonic() - began)

    def _is_over(self, is_over: bool, new: Sequence[Output]) -> bool:
        """Return what the first of the ranks that share the model says, as clocks differ; compare what they sampled."""
        peers = self._mesh.tp
        if peers.size == 1:
            return is_over
        found = [(one.request_id, one.tokens, one.logprobs, one.finish_reason) for one in new]
        digest = xxhash.xxh3_64_intdigest(repr(found).encode()) >> 1  # as int64 has a sign
        said = torch.tensor([is_over and peers.rank == 0, digest, -digest])
        peers.all_reduce_max(said)
        if said[1] != -said[2]:
            raise DeterminismError(
                f"the {peers.size} ranks that share a model (rollout.mesh.tp) sampled different tokens from the same "
                "logits; processors or devices of one kind sample the same"
            )
        return bool(said[0])

    def clear(self) -> None:
        """Forget all requests; the engine is asleep."""
        for request_id in self._numbers:
            self.engine.cancel(request_id)
        self._numbers.clear()
        self.engine.step()  # asleep, it only ends what was cancelled


class GuestEngine:
    """An engine for persons, which sleeps between slices."""

    def __init__(self, make: Callable[[], RankEngine]) -> None:
        """Make it; `make` is called again after an error, when all requests are forgotten: the driver tells callers."""
        self._make, self._own = make, make()

    @property
    def max_request_tokens(self) -> int:
        """The most tokens that prompt and response may have together."""
        return self._own.engine.max_request_tokens

    def advance(self, asked: SliceRequest, version: int) -> list[Output]:
        """Sample for a slice from the weights of a version, which the model has."""
        engine = self._own.engine
        if engine.version != version:
            engine.load(version, None)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self._renew)
            # Streamed token by token, so that nothing is lost when the slice ends in the middle of a response.
            outputs = self._own.take(asked, streamed=True)
            engine.wake()
            try:
                outputs += self._own.sample(until_one_ends=False).outputs
            finally:
                engine.sleep()
            if_it_fails.pop_all()
        return outputs

    def _renew(self) -> None:
        self._own = self._make()
