"""A vLLM server behind the protocol of all engines.

Owns: requests that are under way, and what becomes of them when the server dies, hangs or answers nonsense. Must not
know: how a server is started, or what its answers look like.

Two threads: the caller's, in which all state lives, and that of the connection, which talks to the server and puts what
comes into a queue. Every request carries how often it was sent: what belongs to an earlier time is thrown away.

Consumes: requests. Produces: outputs. Waits for: the server; `step` looks for a moment and returns. Unblocked by: an
answer, the server's end, or `silence_s` without a sign of work.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import shutil
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from rallypoint.errors import GenerationError, NotFiniteError, RallyError, WeightsMismatchError
from rallypoint.generation.protocol import FinishReason, Output, Request
from rallypoint.generation.requests import Decode, StopChecker, check_request
from rallypoint.generation.vllm.answers import Said, ask_for, read
from rallypoint.generation.vllm.asked import Asked
from rallypoint.generation.vllm.client import LostError, ask, events
from rallypoint.generation.vllm.connection import Connection
from rallypoint.generation.vllm.weights import Outline

_LOOK_S = 0.05
"""How long `step` looks for something new, so that whoever calls it in a loop does not spin."""
_MOST_LOSSES = 2


class VLLMEngine:
    """See `GenerationEngine`; whoever made the connection closes it."""

    def __init__(
        self,
        connection: Connection,
        outline: Outline,
        *,
        max_request_tokens: int,
        max_rows: int,
        decode: Decode | None = None,
        silence_s: float = 300.0,
    ) -> None:
        """Begin without requests; nothing waits for the server here.

        Args:
            connection: to the server.
            outline: of the model that it serves.
            max_request_tokens: see `GenerationEngine`.
            max_rows: requests that are sent at once.
            decode: turns token ids into text, for stop strings.
            silence_s: how long the server may have work and give no sign.
        """
        self.is_asleep = False
        self.max_request_tokens = max_request_tokens
        self._connection, self._control = connection, connection.control
        self._outline, self._max_rows, self._decode, self._silence_s = outline, max_rows, decode, silence_s
        self._lock = threading.Lock()  # of the next three, which `submit` and `cancel` change from any thread
        self._open: dict[int, Asked] = {}
        self._waiting: deque[int] = deque()
        self._cancelled: set[int] = set()
        self._ids = itertools.count(1)
        self._news: queue.SimpleQueue[tuple[int, int, Said | Exception]] = queue.SimpleQueue()
        self._told_restarts = 0
        self._sign = (0, 0.0)  # the last beat, and when it was seen

    def memory_bytes(self) -> int:
        """Return the most memory that the server's processes had of their own since this was last asked."""
        return self._control.memory_bytes()

    def take_restarts(self) -> int:
        """Return how often the server had to be started again since this was last asked."""
        told, self._told_restarts = self._told_restarts, self._control.num_restarts
        return self._told_restarts - told

    def beside(self, *, max_rows: int, decode: Decode) -> VLLMEngine:
        """Return another engine over the same server, with requests of its own, of which so many are sent at once.

        Of the two one must be asleep whenever the other is awake.
        """
        return VLLMEngine(
            self._connection,
            self._outline,
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
        check_request(request, self._outline.num_ids, self.max_request_tokens, self._decode is not None)
        limit = min(request.params.max_new_tokens, self.max_request_tokens - len(request.tokens))
        with self._lock:
            request_id = next(self._ids)
            self._open[request_id] = Asked(request_id, request, limit, StopChecker(request.params, self._decode))
            self._waiting.append(request_id)
        return request_id

    def cancel(self, request_id: int) -> None:
        """See `GenerationEngine.cancel`."""
        with self._lock:
            if request_id in self._open:
                self._cancelled.add(request_id)

    def step(self) -> list[Output]:
        """See `GenerationEngine.step`; what is new are answers that came."""
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
            if not self._connection.is_ready():
                return outputs
        except RallyError as error:
            return [*outputs, *(self._end(asked, "failed", error) for asked in list(self._open.values()))]
        for asked in list(self._open.values()):
            if asked.answer is not None and asked.server != self._control.num_servers:
                outputs += self._lose(asked, "it was started again")
        self._send()
        for request_id, num_sent, news in self._take():
            asked = self._open.get(request_id)
            if asked is not None and asked.answer is not None and asked.num_sent == num_sent:
                outputs += self._hear(asked, news)
        self._look_for_silence()
        return outputs

    def load(self, version: int, weights: Mapping[str, Tensor] | None) -> None:
        """See `GenerationEngine.load`; weights always have to be given, as they cross into another process.

        Raises:
            WeightsMismatchError: they are not the model's, or did not arrive whole; those of before are served then.
            GenerationError: the server died and could not be started again.
        """
        if weights is None:
            raise WeightsMismatchError(f"version {version} was published without weights to a server with its own copy")
        versions = self._connection.versions
        folder = self._outline.write(versions, version, weights)
        self.load_folder(version, folder)
        for old in versions.iterdir():
            if old != folder:
                shutil.rmtree(old)

    def load_folder(self, version: int, folder: Path) -> None:
        """Take over weights that were published as a folder, which must stay until the next ones are loaded.

        Raises:
            WeightsMismatchError, GenerationError: see `load`.
        """
        for asked in self._open.values():
            if asked.is_stream:
                self._set_back(asked)  # so that it is certain which tokens are of which version
        self._connection.load(version, folder)

    def sleep(self) -> None:
        """See `GenerationEngine.sleep`."""
        if not self.is_asleep:
            for asked in self._open.values():
                self._set_back(asked)
            self.is_asleep = True
            self._connection.sleep()

    def wake(self) -> None:
        """See `GenerationEngine.wake`."""
        if self.is_asleep:
            self.is_asleep = False
            self._connection.wake()

    def _send(self) -> None:
        """Send as many of those that wait as may be under way."""
        with self._lock:
            num_under_way = sum(asked.answer is not None for asked in self._open.values())
            num_free = self._max_rows - num_under_way
            chosen = [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]
        if chosen and not num_under_way:
            self._sign = (self._control.beat(), time.monotonic())  # what was before is no silence: nobody asked
        for request_id in chosen:
            if (asked := self._open.get(request_id)) is not None:
                asked.num_sent, asked.since = asked.num_sent + 1, self.version
                asked.server = self._control.num_servers
                asked.answer = self._connection.run(self._answer(request_id, asked, asked.num_sent))

    async def _answer(self, request_id: int, asked: Asked, num_sent: int) -> None:
        """Have a request answered, and put what comes into the queue; in the loop's thread."""
        request, num_before, stream = asked.request, asked.num_given, asked.is_stream
        done = tuple(drawn.token for drawn, _ in asked.drawn[:num_before])
        limit = asked.limit - num_before

        def read_said(data: bytes, so_far: int = 0) -> Said:
            before, left = num_before + so_far, limit - so_far
            return read(data, request, before, left, self._outline.num_ids, is_event=stream)

        try:
            body = ask_for(request, done, limit, stream=stream, model=self._control.model)
            async with ask(self._control.address, "POST", "/inference/v1/generate", body) as answer:
                if answer.status != 200:
                    raise self._refused(answer.status, await answer.whole(), request)
                if not stream:
                    self._news.put((request_id, num_sent, read_said(await answer.whole())))
                    return
                so_far = 0
                async for data in events(answer):
                    said = read_said(data, so_far)
                    so_far += len(said.drawn)
                    self._news.put((request_id, num_sent, said))
        except (LostError, RallyError) as error:
            self._news.put((request_id, num_sent, error))

    def _refused(self, status: int, body: bytes, request: Request) -> Exception:
        text = f"status {status}: {body[:500].decode(errors='replace')}"
        if status >= 500:
            return LostError(text)
        return GenerationError(f"vllm refused prompt {request.prompt_index} sample {request.sample_index} with {text}")

    def _take(self) -> list[tuple[int, int, Said | Exception]]:
        """Return what came, after a moment of waiting if nothing did."""
        found: list[tuple[int, int, Said | Exception]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._news.get(timeout=_LOOK_S))
            while True:
                found.append(self._news.get_nowait())
        return found

    def _hear(self, asked: Asked, news: Said | Exception) -> list[Output]:
        """Take what came for a request, and return the outputs that can be given."""
        self._sign = (self._control.beat(), time.monotonic())
        if isinstance(news, LostError):
            self._control.doubt(str(news))
            return self._lose(asked, str(news))
        if isinstance(news, NotFiniteError):
            # What is not finite stays in the cache, and what is masked there is multiplied by 0, which is NaN.
            self._control.give_up(str(news))
        if isinstance(news, RallyError):
            return [self._end(asked, "failed", news)]
        assert isinstance(news, Said)
        versions = news.versions
        wrong = [version for version in versions or () if not asked.since <= version <= self.version]
        if wrong:
            expected = f"expected {asked.since}" + (f" to {self.version}" if self.version > asked.since else "")
            error = GenerationError(f"vllm sampled from weights of version {wrong[0]}, {expected}")
            return [self._end(asked, "failed", error)]
        if versions is None or asked.is_stream:
            versions = (self.version,) * len(news.drawn)
        reason = news.finish_reason
        for drawn, version in zip(news.drawn, versions, strict=True):
            asked.drawn.append((drawn, version))
            if asked.is_stream and asked.stops.ends([drawn.token for drawn, _ in asked.drawn]):
                reason = "stop"
                break
        if reason is None:
            return asked.give(None) if asked.request.streamed else []
        outputs = asked.give(reason)
        self._forget(asked)
        return outputs

    def _lose(self, asked: Asked, why: str) -> list[Output]:
        """Send a request again whose server was lost, once."""
        asked.num_lost += 1
        if asked.num_lost < _MOST_LOSSES:
            self._set_back(asked)
            return []
        request = asked.request
        error = GenerationError(
            f"prompt {request.prompt_index} sample {request.sample_index} was sent {asked.num_sent} times, and each "
            f"time the vllm server was lost: {why}"
        )
        return [self._end(asked, "failed", error)]

    def _look_for_silence(self) -> None:
        """Give a server up that has work and does none."""
        beat, now = self._control.beat(), time.monotonic()
        if beat != self._sign[0]:
            self._sign = (beat, now)
        elif now - self._sign[1] > self._silence_s:
            self._sign = (beat, now)
            self._control.give_up(f"no token for {self._silence_s:g} s")

    def _set_back(self, asked: Asked) -> None:
        """Have a request that is under way sent again, from what was given of it."""
        if asked.set_back():
            with self._lock:
                self._waiting.appendleft(asked.request_id)

    def _end(self, asked: Asked, reason: FinishReason, error: RallyError | None = None) -> Output:
        """End a request that has no more tokens."""
        self._forget(asked)
        return asked.end(reason, self.version, error)

    def _forget(self, asked: Asked) -> None:
        with self._lock:
            del self._open[asked.request_id]
            self._cancelled.discard(asked.request_id)
            with contextlib.suppress(ValueError):
                self._waiting.remove(asked.request_id)
        if asked.answer is not None:
            asked.answer.cancel()
