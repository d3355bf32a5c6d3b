"""Requests from outside, answered by the processes that sample, beside training.

Outsiders get slices of time between training's own calls, and an engine of their own over the same weights. It holds no
memory between slices, so that training finds its process as it left it: what it samples does not depend on them.

Consumes: requests, from any thread. Produces: outputs, as they are sampled. Waits for: the processes of the rollout
role, and for weights that are being changed where they are the actor's own. Unblocked by: `submit`, a publish.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

from transformers import PreTrainedModel

from rallypoint.cluster import Layout, Mesh, WorkerContext, WorkerGroup, collect, scatter
from rallypoint.data import decoder, load_tokenizer
from rallypoint.errors import BusyError, GenerationError, RallyError, RequestError, first_line
from rallypoint.generation import GenerationEngine, Output, Request
from rallypoint.roles.actor import Actor
from rallypoint.roles.colocated import Turns, TurnTaker, in_turn
from rallypoint.roles.engines import make_guest_engine
from rallypoint.roles.placement import Placement, WorkerSpec
from rallypoint.roles.rollout import ACTOR_ENGINE, ROLLOUT_CHECK, ROLLOUT_ENGINE, ROLLOUT_MODEL, Rollouts

_SLICE_S = 0.25
"""How long outsiders may keep a process before it looks whether training wants it."""
PATIENCE_S = 60.0
"""How long a request may get no slice, as while a colocated actor trains."""

Deliver = Callable[[Output], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Errand:
    """What one process is to do in its next slice."""

    new: tuple[tuple[int, Request], ...]
    """Requests to begin with, each under its number."""
    gone: tuple[int, ...]
    """Numbers of requests to give up."""


class GuestWorker(TurnTaker):
    """One rank that answers outsiders, in a process that has a rollout rank."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec, max_rows: int) -> None:
        self.turns = Turns(context)
        if spec.config.rollout_shares_actor and "actor" in spec.config.sleeping:
            self.turns.sleep_between(context.shared[ACTOR_ENGINE])
        self._tick, self._config, self._max_rows = context.tick, spec.config, max_rows
        self._training: GenerationEngine = context.shared[ROLLOUT_ENGINE]
        self._model: PreTrainedModel | None = context.shared.get(ROLLOUT_MODEL)
        self._check_whole: Callable[[], None] = context.shared[ROLLOUT_CHECK]
        self._decode = decoder(load_tokenizer(spec.model_path, trust_remote_code=spec.config.model.trust_remote_code))
        self._numbers: dict[int, int] = {}
        self._engine = self._new_engine()

    @collect
    def max_request_tokens(self) -> int:
        """Return how long prompt and response may be together."""
        return self._engine.max_request_tokens

    @scatter
    @in_turn()
    def answer(self, errand: Errand) -> list[Output]:
        """Sample for a slice of time, or until nothing is left, and return what is new."""
        self._check_whole()
        engine = self._engine
        if engine.version != self._training.version:
            engine.load(self._training.version, None)
        outputs: list[Output] = []
        for number, request in errand.new:
            try:
                # Token by token, so that what a slice brought is kept wherever the engine is when it ends.
                self._numbers[engine.submit(dataclasses.replace(request, streamed=True))] = number
            except RequestError as error:
                outputs.append(_failed(number, engine.version, error))
        gone = set(errand.gone)
        for request_id, number in self._numbers.items():
            if number in gone:
                engine.cancel(request_id)
        with contextlib.ExitStack() as unless_all_goes_well:
            unless_all_goes_well.callback(self._begin_anew)
            outputs += self._step(engine)
            unless_all_goes_well.pop_all()
        return outputs

    def _step(self, engine: GenerationEngine) -> list[Output]:
        """Step for a slice."""
        outputs: list[Output] = []
        engine.wake()
        try:
            until = time.monotonic() + _SLICE_S
            while engine.has_work and time.monotonic() < until:
                for output in engine.step():
                    number = self._numbers[output.request_id]
                    if output.finish_reason is not None:
                        del self._numbers[output.request_id]
                    outputs.append(dataclasses.replace(output, request_id=number))
                self._tick()
        finally:
            engine.sleep()
        return outputs

    def _begin_anew(self) -> None:
        """Forget the requests under way; the driver has their callers told."""
        self._numbers.clear()
        self._engine = self._new_engine()

    def _new_engine(self) -> GenerationEngine:
        return make_guest_engine(
            self._config, self._training, self._model, max_rows=self._max_rows, decode=self._decode
        )


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: Request
    deliver: Deliver
    rank: int
    timer: asyncio.TimerHandle


class Guests:
    """Outsiders' requests on their way to a rollout group and back; made and run in the driver's event loop."""

    def __init__(
        self,
        answer: Callable[[Sequence[Errand]], Awaitable[Sequence[Sequence[Output]]]],
        *,
        num_ranks: int,
        max_request_tokens: int,
        ready: Callable[[], Awaitable[object]],
        version: Callable[[], int],
        log: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Begin without requests.

        Args:
            answer: has every rank do its errand.
            num_ranks: that there are.
            max_request_tokens: that prompt and response may have together.
            ready: returns when weights may be sampled from.
            version: of these weights.
            log: takes what outsiders are not told, such as where in our files a slice has failed.
            patience_s: see `PATIENCE_S`.
        """
        self.max_request_tokens = max_request_tokens
        self._answer, self._ready, self._version, self._patience_s = answer, ready, version, patience_s
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._counter, self._lock = itertools.count(1), threading.Lock()
        self._closed: GenerationError | None = None
        self.has_failed = False
        """Never: a process that fails is training's to end, or to go on with."""
        # What follows belongs to the loop's thread.
        self._open: dict[int, _Open] = {}
        self._new: list[list[tuple[int, Request]]] = [[] for _ in range(num_ranks)]
        self._gone: list[list[int]] = [[] for _ in range(num_ranks)]
        self._has_work = asyncio.Event()

    @property
    def version(self) -> int:
        """Of the weights that are sampled from; see `GenerationEngine.version`."""
        return self._version()

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a request; `deliver` is called with each of its outputs, in the loop's thread, and must not raise.

        Raises:
            GenerationError: the run has ended.
        """
        with self._lock:
            if self._closed is not None:
                raise self._closed
            number = next(self._counter)
            self._loop.call_soon_threadsafe(self._take_in, number, request, deliver)
        return number

    def cancel(self, request_id: int) -> None:
        """Give a request up; one that has ended is left alone."""
        with self._lock:
            if self._closed is None:
                self._loop.call_soon_threadsafe(self._drop, request_id)

    def close(self) -> None:
        """Refuse everything from now on, and end what is under way."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = GenerationError("the run has ended, and with it this endpoint")
            self._loop.call_soon_threadsafe(self._fail_all, self._closed)

    async def run(self) -> None:
        """Answer, slice by slice, until cancelled."""
        while True:
            await self._has_work.wait()
            await self._ready()
            errands = self._errands()
            if not self._open and not any(errand.gone for errand in errands):
                self._has_work.clear()
                continue
            served = set(self._open)
            try:
                answers = await self._answer(errands)
            except RallyError as error:
                # Training meets what is wrong by itself, if it is more than one of these requests.
                self._fail_all(GenerationError(f"these requests failed and are lost: {first_line(error)}"))
                with contextlib.suppress(Exception):  # such as a full disk: others wait for their answers
                    self._log(f"requests from outside failed: {error}")
                continue
            for number in served & self._open.keys():
                self._wait_for(number)
            for output in itertools.chain.from_iterable(answers):
                self._pass_on(output)

    def _take_in(self, number: int, request: Request, deliver: Deliver) -> None:
        load = collections.Counter(waiting.rank for waiting in self._open.values())
        rank = min(range(len(self._new)), key=lambda rank: load[rank])
        timer = self._loop.call_later(self._patience_s, self._expire, number)
        self._open[number] = _Open(request, deliver, rank, timer)
        self._new[rank].append((number, request))
        self._has_work.set()

    def _errands(self) -> list[Errand]:
        errands = [
            Errand(tuple(one for one in new if one[0] in self._open), tuple(gone))
            for new, gone in zip(self._new, self._gone, strict=True)
        ]
        for waiting in (*self._new, *self._gone):
            waiting.clear()
        return errands

    def _wait_for(self, number: int) -> None:
        """Begin to count the time without a slice anew."""
        self._open[number].timer.cancel()
        self._open[number].timer = self._loop.call_later(self._patience_s, self._expire, number)

    def _expire(self, number: int) -> None:
        seconds = f"{self._patience_s:g}"
        message = f"the model is being trained and had no time for this request within {seconds} s; try again"
        self._end(number, BusyError(message))

    def _drop(self, number: int) -> None:
        """Forget a request, and have its process forget it."""
        waiting = self._open.pop(number, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._gone[waiting.rank].append(number)
            self._has_work.set()

    def _end(self, number: int, error: RallyError) -> None:
        waiting = self._open.get(number)
        self._drop(number)
        if waiting is not None:
            waiting.deliver(_failed(number, 0, error))

    def _fail_all(self, error: RallyError) -> None:
        for number in list(self._open):
            self._end(number, error)

    def _pass_on(self, output: Output) -> None:
        waiting = self._open.get(output.request_id)
        if waiting is None:  # it was given up meanwhile
            return
        if output.finish_reason is not None:
            waiting.timer.cancel()
            del self._open[output.request_id]
        waiting.deliver(output)


async def open_to_guests(
    placement: Placement, actor: Actor, rollouts: Rollouts, *, max_rows: int, log: Callable[[str], None]
) -> Guests:
    """Start workers for outsiders beside those of the rollout role; at most so many requests run on each at once."""
    config = placement.config
    processes = (await placement.pools.processes(placement.runtime, "rollout"))[: config.num_ranks("rollout")]
    layout = Layout("guests", processes, Mesh(config.mesh("rollout")), deadline_s=config.cluster.call_timeout_s)
    group = await WorkerGroup.create(layout, GuestWorker, placement.spec, max_rows)

    async def ready() -> None:
        if config.rollout_shares_actor:  # else its own copy changes within one call, between two slices
            await actor.is_published.wait()

    return Guests(
        lambda errands: group.call(GuestWorker.answer, errands),
        num_ranks=len(processes),
        max_request_tokens=min(await group.call(GuestWorker.max_request_tokens)),
        ready=ready,
        version=lambda: rollouts.version,
        log=log,
    )


def _failed(number: int, version: int, error: RallyError) -> Output:
    return Output(
        request_id=number,
        tokens=(),
        logprobs=(),
        sampled_logprobs=(),
        version=version,
        finish_reason="failed",
        error=error,
    )
