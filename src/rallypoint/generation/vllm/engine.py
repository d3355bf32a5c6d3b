"""A vLLM server behind the protocol of all engines.

Owns: running requests, and what happens to them if the server dies, hangs or answers nonsense. Must not
know: how a server is started, or what its answers look like.

Two threads: the caller's, in which all state lives, and that of the connection, which talks to the server and puts what
comes into a queue. Every request counts how often it was sent: what belongs to an earlier time is dropped.

Consumes: requests. Produces: outputs. Waits for: the server, a moment in each `step`. Unblocked by: an
answer, the server's end, or `silence_s` without a sign of work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections import abc, deque
from concurrent.futures import Future
from pathlib import Path

from torch import Tensor

from rallypoint.errors import GenerationError, NotFiniteError, RallyError, RequestError, WeightsMismatchError
from rallypoint.generation.protocol import FinishReason, Output, Request
from rallypoint.generation.requests import Decode, StopChecker, check_request
from rallypoint.generation.vllm.client import Answer, LostError, SampledToken, events, read_answer, request_body, send
from rallypoint.generation.vllm.connection import VllmConnection
from rallypoint.generation.vllm.supervisor import SignsOfLife
from rallypoint.generation.vllm.weights import Outline

_LOOK_S = 0.05
"""How long `step` waits for something new, so that callers in a loop do not spin."""
_MOST_LOSSES = 2


@dataclasses.dataclass(slots=True, eq=False)
class OpenRequest:
    """A request and its response so far."""

    id: int
    request: Request
    limit: int
    """Tokens that the response may have."""
    stops: StopChecker
    sampled: list[tuple[SampledToken, int]] = dataclasses.field(default_factory=list)
    """The response; each token with the version of its weights."""
    num_delivered: int = 0
    """Tokens that outputs have returned; the others are sampled again after an interruption."""
    num_sent: int = 0
    sent_at_version: int = 0
    """Version of the weights when it was sent."""
    server: int = 0
    """Number of the server that it was sent to, counted from 1."""
    num_lost: int = 0
    """Times that the server was lost with it."""
    answer: Future[None] | None = None
    """Its answer, on the way; None if it waits to be sent."""

    @property
    def tokens(self) -> list[int]:
        """The response."""
        return [one.token for one, _ in self.sampled]

    @property
    def is_stream(self) -> bool:
        """Whether tokens are needed one by one."""
        return self.request.streamed or bool(self.request.params.stop_strings)

    def interrupt(self) -> bool:
        """Drop the answer that is on the way, to send the request again later; return whether there was one."""
        if self.answer is None:
            return False
        self.answer.cancel()
        self.answer = None
        del self.sampled[self.num_delivered :]
        return True

    def take_outputs(self, reason: FinishReason | None) -> list[Output]:
        """Return what no output has returned yet, one for each version of the weights; the last one has the reason."""
        new = self.sampled[self.num_delivered :]
        self.num_delivered = len(self.sampled)
        if not new:
            return [self.output((), self.sent_at_version, reason)] if reason is not None else []
        spans = [(version, [one for one, _ in span]) for version, span in itertools.groupby(new, lambda one: one[1])]
        reasons: list[FinishReason | None] = [*([None] * (len(spans) - 1)), reason]
        return [self.output(span, version, why) for (version, span), why in zip(spans, reasons, strict=True)]

    def output(
        self,
        tokens: abc.Sequence[SampledToken],
        version: int,
        reason: FinishReason | None = None,
        error: RallyError | None = None,
    ) -> Output:
        """Return an output with some tokens."""
        return Output(
            request_id=self.id,
            tokens=tuple(one.token for one in tokens),
            logprobs=tuple(one.logprob for one in tokens),
            sampled_logprobs=tuple(one.sampled_logprob for one in tokens),
            version=version,
            finish_reason=reason,
            error=error,
        )


class VLLMEngine:
    """See `GenerationEngine`; the connection is closed by its owner, not here."""

    def __init__(
        self,
        connection: VllmConnection,
        outline: Outline,
        *,
        max_request_tokens: int,
        max_rows: int,
        decode: Decode | None = None,
        silence_s: float = 300.0,
    ) -> None:
        """Begin without requests; nothing waits for the server here.

        Args:
            connection: the way to the server.
            outline: what the model that it serves looks like.
            max_request_tokens: see `GenerationEngine`.
            max_rows: requests that are sent at once.
            decode: turns token ids into text, for stop strings.
            silence_s: how long the server may have work and give no sign.
        """
        self.is_asleep = False
        self.max_request_tokens = max_request_tokens
        self._connection, self._supervisor = connection, connection.supervisor
        self.outline, self._max_rows, self._decode, self._silence_s = outline, max_rows, decode, silence_s
        self._lock = threading.Lock()  # of the next three, which `submit` and `cancel` change from any thread
        self._open: dict[int, OpenRequest] = {}
        self._waiting: deque[int] = deque()
        self._cancelled: set[int] = set()
        self._ids = itertools.count(1)
        self._news: queue.SimpleQueue[tuple[int, int, Answer | Exception]] = queue.SimpleQueue()
        self._told_restarts = 0
        self._signs = SignsOfLife(self._supervisor, silence_s)

    def memory_bytes(self) -> int:
        """Return the most memory that the server's processes had of their own since the last call."""
        return self._supervisor.memory_bytes()

    def take_restarts(self) -> int:
        """Return how often the server had to be started again since the last call."""
        told, self._told_restarts = self._told_restarts, self._supervisor.num_restarts
        return self._told_restarts - told

    def beside(self, *, max_rows: int, decode: Decode) -> VLLMEngine:
        """Return another engine over the same server, with requests of its own; only one of the two may be awake."""
        return VLLMEngine(
            self._connection.keeping(),
            self.outline,
            max_request_tokens=self.max_request_tokens,
            max_rows=max_rows,
            decode=decode,
            silence_s=self._silence_s,
        )

    @property
    def version(self) -> int:
        """See `GenerationEngine.version`."""
        return self._connection.version

    @property
    def has_work(self) -> bool:
        """See `GenerationEngine.has_work`."""
        return bool(self._open)

    def submit(self, request: Request) -> int:
        """See `GenerationEngine.submit`."""
        check_request(request, self.outline.num_ids, self.max_request_tokens, self._decode is not None)
        if request.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs are not available with rollout.engine=vllm; ask `rally serve`")
        limit = min(request.params.max_new_tokens, self.max_request_tokens - len(request.tokens))
        with self._lock:
            request_id = next(self._ids)
            self._open[request_id] = OpenRequest(request_id, request, limit, StopChecker(request.params, self._decode))
            self._waiting.append(request_id)
        return request_id

    def cancel(self, request_id: int) -> None:
        """See `GenerationEngine.cancel`."""
        with self._lock:
            if request_id in self._open:
                self._cancelled.add(request_id)

    def step(self) -> list[Output]:
        """See `GenerationEngine.step`; returns what the server has answered."""
        if not self._open:
            return []
        with self._lock:
            cancelled, self._cancelled = self._cancelled, set()
        outputs = [
            self._end(self._open[request_id], "cancelled") for request_id in sorted(cancelled & self._open.keys())
        ]
        if self.is_asleep:
            return outputs
        try:
            if not self._connection.is_ready() or self.lacks_weights:
                time.sleep(_LOOK_S)
                return outputs
        except RallyError as error:
            return [*outputs, *(self._end(sequence, "failed", error) for sequence in list(self._open.values()))]
        for sequence in list(self._open.values()):
            if sequence.answer is not None and sequence.server != self._supervisor.num_servers:
                outputs += self._retry(sequence, "it was started again")
        self._send()
        for request_id, num_sent, news in self._take_news():
            sequence = self._open.get(request_id)
            if sequence is not None and sequence.answer is not None and sequence.num_sent == num_sent:
                outputs += self._receive(sequence, news)
        self._signs.look()
        return outputs

    def load(self, version: int, weights: abc.Mapping[str, Tensor] | None) -> None:
        """Refuse: the server has a copy of its own, in other processes; see `load_folder` and `receive`.

        Raises:
            WeightsMismatchError: always.
        """
        del weights
        raise WeightsMismatchError(f"version {version} was published without weights to a server with its own copy")

    def load_folder(self, version: int, folder: Path) -> None:
        """Take over weights that were published as a folder, which must stay until the next ones are loaded.

        Raises:
            WeightsMismatchError: they are not the model's, or did not arrive whole; the old ones are still served.
            GenerationError: the server died and could not be started again.
        """
        self._interrupt_streams()
        self._connection.load(version, folder)

    def join(self, invite: abc.Callable[[], str], given_up: threading.Event | None = None) -> None:
        """Have the server's workers connect to ranks that send weights; see `VllmConnection.join`."""
        self._connection.join(invite, given_up)

    def receive(self, version: int, given_up: threading.Event | None = None) -> str:
        """Have them take over weights as they are sent; return a digest. See `ServerSupervisor.receive`."""
        self._interrupt_streams()
        return self._connection.receive(version, given_up)

    @property
    def lacks_weights(self) -> bool:
        """Whether nothing is sampled until weights are loaded, because the server has lost those it was sent."""
        return self._supervisor.lacks_weights

    def sleep(self) -> None:
        """See `GenerationEngine.sleep`."""
        if not self.is_asleep:
            for sequence in self._open.values():
                self._interrupt(sequence)
            self.is_asleep = True
            self._connection.sleep()

    def wake(self) -> None:
        """See `GenerationEngine.wake`."""
        if self.is_asleep:
            self.is_asleep = False
            self._connection.wake()

    def _send(self) -> None:
        """Send waiting requests, as many as may be under way at once."""
        with self._lock:
            num_under_way = sum(sequence.answer is not None for sequence in self._open.values())
            num_free = self._max_rows - num_under_way
            chosen = [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]
        if chosen and not num_under_way:
            self._signs.note()  # while nothing was sent it was not silent
        for request_id in chosen:
            if (sequence := self._open.get(request_id)) is not None:
                sequence.num_sent, sequence.sent_at_version = sequence.num_sent + 1, self.version
                sequence.server = self._supervisor.num_servers
                sequence.answer = self._connection.run(self._answer(sequence, sequence.num_sent))

    async def _answer(self, sequence: OpenRequest, num_sent: int) -> None:
        """Send a request, and put what comes into the queue; in the loop's thread."""
        request, num_before, stream = sequence.request, sequence.num_delivered, sequence.is_stream
        done = tuple(sequence.tokens[:num_before])
        limit = sequence.limit - num_before

        def read_part(data: bytes, so_far: int = 0) -> Answer:
            before, left = num_before + so_far, limit - so_far
            return read_answer(data, request, before, left, self.outline.num_ids, is_event=stream)

        try:
            body = request_body(request, done, limit, stream=stream, model=self._supervisor.model)
            async with send(self._supervisor.address, "POST", "/inference/v1/generate", body) as response:
                if response.status != 200:
                    raise await response.refusal(request)
                if not stream:
                    self._news.put((sequence.id, num_sent, read_part(await response.whole())))
                    return
                so_far = 0
                async for data in events(response):
                    part = read_part(data, so_far)
                    so_far += len(part.tokens)
                    self._news.put((sequence.id, num_sent, part))
        except (LostError, RallyError) as error:
            self._news.put((sequence.id, num_sent, error))

    def _take_news(self) -> list[tuple[int, int, Answer | Exception]]:
        """Return what came, after a moment of waiting if nothing did."""
        found: list[tuple[int, int, Answer | Exception]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._news.get(timeout=_LOOK_S))
            while True:
                found.append(self._news.get_nowait())
        return found

    def _receive(self, sequence: OpenRequest, news: Answer | Exception) -> list[Output]:
        """Take what came for a request, and return what is new."""
        self._signs.note()
        if isinstance(news, LostError):
            self._supervisor.doubt(str(news))
            return self._retry(sequence, str(news))
        if isinstance(news, NotFiniteError):
            # NaN stays in the cache, where masked values are multiplied by 0, which is NaN for other requests.
            self._supervisor.give_up(str(news))
        if isinstance(news, RallyError):
            return [self._end(sequence, "failed", news)]
        assert isinstance(news, Answer)
        first, versions = sequence.sent_at_version, news.versions
        wrong = [version for version in versions or () if not first <= version <= self.version]
        if wrong:
            expected = f"expected {first}" + (f" to {self.version}" if self.version > first else "")
            error = GenerationError(f"vllm sampled from weights of version {wrong[0]}, {expected}")
            return [self._end(sequence, "failed", error)]
        if versions is None or sequence.is_stream:
            versions = (self.version,) * len(news.tokens)
        reason = news.finish_reason
        for token, version in zip(news.tokens, versions, strict=True):
            sequence.sampled.append((token, version))
            if sequence.is_stream and sequence.stops.ends(sequence.tokens):
                reason = "stop"
                break
        if reason is None:
            return sequence.take_outputs(None) if sequence.request.streamed else []
        outputs = sequence.take_outputs(reason)
        if news.experts and not sequence.is_stream:
            try:
                outputs = self.outline.with_experts(outputs, len(sequence.request.tokens), news.experts)
            except GenerationError as error:
                return [self._end(sequence, "failed", error)]
        self._forget(sequence)
        return outputs

    def _retry(self, sequence: OpenRequest, why: str) -> list[Output]:
        """Send a request again whose server was lost, but only once."""
        sequence.num_lost += 1
        if sequence.num_lost < _MOST_LOSSES:
            self._interrupt(sequence)
            return []
        request = sequence.request
        error = GenerationError(
            f"prompt {request.prompt_index} sample {request.sample_index} was sent {sequence.num_sent} times, and each "
            f"time the vllm server was lost: {why}"
        )
        return [self._end(sequence, "failed", error)]

    def _interrupt_streams(self) -> None:
        """Have streams sent again, so that the version of every token is certain when weights change."""
        for sequence in self._open.values():
            if sequence.is_stream:
                self._interrupt(sequence)

    def _interrupt(self, sequence: OpenRequest) -> None:
        """Have a request sent again if it is under way, from what was delivered of it."""
        if sequence.interrupt():
            with self._lock:
                self._waiting.appendleft(sequence.id)

    def _end(self, sequence: OpenRequest, reason: FinishReason, error: RallyError | None = None) -> Output:
        """End a request that has no more tokens."""
        self._forget(sequence)
        return sequence.output((), self.version, reason, error)

    def _forget(self, sequence: OpenRequest) -> None:
        with self._lock:
            del self._open[sequence.id]
            self._cancelled.discard(sequence.id)
            with contextlib.suppress(ValueError):
                self._waiting.remove(sequence.id)
        if sequence.answer is not None:
            sequence.answer.cancel()
