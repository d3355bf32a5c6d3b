"""A request to a server and its response so far.

Owns: which tokens are certain, and the outputs that are made of them. Must not know: servers and queues.
"""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import Future

from rallypoint.errors import RallyError
from rallypoint.generation.protocol import FinishReason, Output, Request
from rallypoint.generation.requests import StopChecker
from rallypoint.generation.vllm.answers import Drawn


@dataclasses.dataclass(slots=True, eq=False)
class Asked:
    """One request."""

    request_id: int
    request: Request
    limit: int
    """Tokens that the response may have."""
    stops: StopChecker
    drawn: list[tuple[Drawn, int]] = dataclasses.field(default_factory=list)
    """With the version of the weights that each is from."""
    num_given: int = 0
    """Tokens that outputs were made of; the others are drawn again after an interruption."""
    num_sent: int = 0
    since: int = 0
    """Version of the weights when it was sent."""
    server: int = 0
    """Which one it was sent to, counted from 1."""
    num_lost: int = 0
    """Times that the server was lost with it."""
    answer: Future[None] | None = None
    """Under way to the server."""

    @property
    def is_stream(self) -> bool:
        """Whether tokens are needed one by one."""
        return self.request.streamed or bool(self.request.params.stop_strings)

    def set_back(self) -> bool:
        """Give the answer up that is under way, to be sent again from what was given; return whether there was one."""
        if self.answer is None:
            return False
        self.answer.cancel()
        self.answer = None
        del self.drawn[self.num_given :]
        return True

    def give(self, reason: FinishReason | None) -> list[Output]:
        """Return outputs of what was not given yet, one for each version; the last one has the reason."""
        new = self.drawn[self.num_given :]
        self.num_given = len(self.drawn)
        if not new:
            return [self.end(reason, self.since)] if reason is not None else []
        spans = [(version, [one for one, _ in span]) for version, span in itertools.groupby(new, lambda at: at[1])]
        return [
            Output(
                request_id=self.request_id,
                tokens=tuple(one.token for one in span),
                logprobs=tuple(one.logprob for one in span),
                sampled_logprobs=tuple(one.sampled_logprob for one in span),
                version=version,
                finish_reason=reason if at == len(spans) else None,
            )
            for at, (version, span) in enumerate(spans, 1)
        ]

    def end(self, reason: FinishReason, version: int, error: RallyError | None = None) -> Output:
        """Return a last output without tokens."""
        return Output(
            request_id=self.request_id,
            tokens=(),
            logprobs=(),
            sampled_logprobs=(),
            version=version,
            finish_reason=reason,
            error=error,
        )
