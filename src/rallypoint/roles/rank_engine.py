"""The engine of a rank: what it is asked to do in a slice of time, and what it has done.

Owns: how long a slice is. Must not know: who asks, and what a response is for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
import xxhash

from rallypoint.cluster import WorkerContext
from rallypoint.errors import (
    DeterminismError,
    GenerationError,
    MembershipLostError,
    PeerFailedError,
    RequestError,
    first_line,
)
from rallypoint.generation import GenerationEngine, Output, Request
from rallypoint.parallel import Collective, DeviceMesh
from rallypoint.roles.placement import WorkerSpec
from rallypoint.roles.server_ranks import ServerRanks

SLICE_S = 0.25
"""Seconds that a rank samples before it answers, if no request ends."""
_SHORTEST_SLICE_S = 0.1
"""Seconds that a rank samples before it answers although a request has ended; an answer costs a millisecond or two."""

Ready: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
"""Function that returns a context in which a slice has its memory, or raises."""
_GRACE_S = 60.0
"""Seconds that ranks which share a model have to come where others wait for them, before these leave."""


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
    """Whether it waits for weights, as its server was started again or dropped them while asleep."""
    is_sampling: bool = False
    """Whether it has requests left, and the memory of its process until the next slice."""


class RankEngine:
    """An engine whose requests are known by the driver's numbers."""

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
        """Submit requests and cancel others; return an output for each request that the engine refuses."""
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
        """Take `num_steps` steps, or those of a slice of time; stop when no request is left.

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
        """Return whether the slice is over, by the clock of the first rank of the model; compare what all sampled."""
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

    @property
    def open(self) -> tuple[int, ...]:
        """Numbers of the requests that have not ended."""
        return tuple(self._numbers.values())

    def clear(self) -> None:
        """Forget all requests; the engine is asleep."""
        for request_id in self._numbers:
            self.engine.cancel(request_id)
        self._numbers.clear()
        self.engine.step()  # asleep, it only ends what was cancelled


class GuestEngine:
    """A second engine of a rank, for guests: people who ask the run's endpoint (`rollout.serve`).

    It sleeps between slices. An error costs the requests of guests alone.

    Ranks that share a model meet before they sample and afterwards, over connections of their own, and tell each other
    whether they failed. If one did, all drop their requests and go on. That is safe on CPUs, where a rank that comes to
    the meeting has left the model's collectives. On accelerators the host runs ahead of its device: after an error
    while they sample, the ranks abandon their connections. They do so, too, when a rank that failed meets nobody in
    time.
    """

    def __init__(self, training: RankEngine, context: WorkerContext) -> None:
        """Begin without one.

        Args:
            training: engine of this rank, which says the version of the weights.
            context: of the rank, which says a line on requests that failed.
        """
        self._training, self._context = training, context
        self._begins = self._ends = DeviceMesh.solo()
        """Ranks that share the model, connected for this alone: to begin to sample, and when they have sampled."""
        self._grace_s = _GRACE_S
        self._make: Callable[[], RankEngine] | None = None
        self._own: RankEngine | None = None

    def open(self, make: Callable[[], RankEngine], spec: WorkerSpec, mesh: DeviceMesh | None) -> int:
        """Make the engine; return the most tokens that prompt and response may have together.

        Args:
            make: called again after an error.
            spec: of the rank.
            mesh: of the ranks that share the model; None if it is whole, or in a server.
        """
        if mesh is not None:
            self._begins, self._ends = (self._meet(spec, mesh, when) for when in ("begin", "end"))
        self._make, self._own = make, make()
        return self._own.engine.max_request_tokens

    def _meet(self, spec: WorkerSpec, mesh: DeviceMesh, when: str) -> DeviceMesh:
        # Ranks may be called at different times; once they have sampled together, the second wait is short.
        timeout_s = spec.config.cluster.call_timeout_s
        timeout_s = timeout_s if when == "begin" else min(timeout_s, self._grace_s)
        name = f"guests {when} {self._context.mesh.part(self._context.rank)}"
        generation, sizes = self._context.start, {"tp": mesh.tp.size}
        return DeviceMesh.connect(
            spec.rendezvous, name, mesh.tp.rank, sizes, timeout_s=timeout_s, generation=generation
        )

    def advance(self, asked: SliceRequest, ready: Ready) -> list[Output]:
        """Sample for a slice from the weights of training; see `Ready`."""
        numbers = (*(self._own.open if self._own else ()), *(number for number, _ in asked.new))
        with self._training.together(), self._begins.abandoned_on_error(), self._ends.abandoned_on_error():
            with contextlib.ExitStack() as held:
                begun, error = _attempt(lambda: self._begin(asked, ready, held))
                if not _one_failed(self._begins.tp, error):
                    sampled, error = _attempt(self._sample)
                    if error is not None and self._ends.tp.size > 1 and self._context.device != "cpu":
                        raise error
                    if not _one_failed(self._ends.tp, error):
                        return [*begun, *sampled]
            self._own = self._make and self._make()
        why = "another rank failed" if error is None else f"{type(error).__name__}: {first_line(error)}"
        self._context.say(f"requests to the endpoint failed: {why}")
        lost = GenerationError(f"these requests failed and are lost: {why}")
        return [Output.failed(number, self._training.engine.version, lost) for number in dict.fromkeys(numbers)]

    def _begin(self, asked: SliceRequest, ready: Ready, held: contextlib.ExitStack) -> Sequence[Output]:
        """Get the memory and submit requests; return an output for each that is refused."""
        held.enter_context(ready())
        assert self._own is not None, "it is opened first"
        engine, version = self._own.engine, self._training.engine.version
        if engine.version != version:
            engine.load(version, None)
        # Streamed token by token, so that nothing is lost when the slice ends in the middle of a response.
        return self._own.take(asked, streamed=True)

    def _sample(self) -> Sequence[Output]:
        assert self._own is not None, "requests were taken in"
        self._own.engine.wake()
        try:
            return self._own.sample(until_one_ends=False).outputs
        finally:
            self._own.engine.sleep()


def _one_failed(peers: Collective, error: Exception | None) -> bool:
    """Meet the others; return whether one has failed. If they do not come, raise this rank's own error, if any."""
    said = torch.tensor([int(error is not None)])
    try:
        peers.all_reduce_max(said)
    except (PeerFailedError, MembershipLostError) as lost:
        raise error or lost from None
    return bool(said)


def _attempt(do: Callable[[], Sequence[Output]]) -> tuple[Sequence[Output], Exception | None]:
    """Return what comes of a part of a slice, or its error; raise one that says that a connection has ended."""
    try:
        return do(), None
    except (PeerFailedError, MembershipLostError):
        raise
    except Exception as error:  # noqa: BLE001 - it costs the requests of the slice, and is told
        traceback.print_exception(error)
        return (), error
