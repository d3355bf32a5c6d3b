"""A request on its way: what it has drawn, and the memory that it has while it runs."""

from __future__ import annotations

from rallypoint.errors import NotFiniteError
from rallypoint.generation.native.block_manager import Block
from rallypoint.generation.protocol import FinishReason, Output, Request
from rallypoint.generation.requests import Decode
from rallypoint.generation.stopping import StopStrings

BLOCK_TOKENS = 32
"""Tokens of a block of keys and values."""


class Row:
    """A request on its way."""

    def __init__(self, request_id: int, request: Request, max_new_tokens: int, decode: Decode | None) -> None:
        self.id, self.request, self.max_new_tokens = request_id, request, max_new_tokens
        self.tokens: list[int] = []
        """Of the response; all but the newest have keys and values while the row runs."""
        self.logprobs: list[float] = []
        self.sampled_logprobs: list[float] = []
        self.num_delivered = 0
        """Tokens that have been handed out."""
        self.prompt_blocks: list[Block] = []
        self.own_blocks: list[Block] = []
        self.seat = -1
        """Its line in `Seats`; -1 while it does not run."""
        may_stop = request.params.stop_tokens or request.params.stop_strings
        self.stops = StopStrings(request.params, decode) if may_stop else None

    @property
    def room(self) -> int:
        """Steps for which it has memory; as many as a block has tokens if it ends before it needs more."""
        num_stored = len(self.tokens) - 1
        fits = len(self.own_blocks) * BLOCK_TOKENS - num_stored
        return BLOCK_TOKENS if len(self.tokens) + fits >= self.max_new_tokens else fits

    def output(self, version: int, reason: FinishReason | None = None, error: NotFiniteError | None = None) -> Output:
        """Hand out what is new."""
        new = slice(self.num_delivered, None)
        self.num_delivered = len(self.tokens)
        return Output(
            request_id=self.id,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
            sampled_logprobs=tuple(self.sampled_logprobs[new]),
            version=version,
            finish_reason=reason,
            error=error,
        )
