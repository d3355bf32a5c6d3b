"""A request while the engine answers it, and the parts of it that are prefilled."""

from __future__ import annotations

import dataclasses
from collections import abc

from rallypoint.config.limits import BLOCK_TOKENS
from rallypoint.errors import NotFiniteError
from rallypoint.generation.native.block_manager import Block
from rallypoint.generation.protocol import FinishReason, Output, PromptLogprobs, Request
from rallypoint.generation.requests import Decode, StopChecker


class Sequence:
    """A request and its response so far, with the memory that it has while it runs."""

    def __init__(self, request_id: int, request: Request, max_new_tokens: int, decode: Decode | None) -> None:
        self.id, self.request, self.max_new_tokens = request_id, request, max_new_tokens
        self.tokens: list[int] = []
        """The response; all but the newest token have keys and values while the sequence runs."""
        self.logprobs: list[float] = []
        self.sampled_logprobs: list[float] = []
        self.experts: list[bytes] = []
        """Experts of the pass that sampled each token of the response; empty if they are not recorded."""
        self.prompt_experts: list[bytes] = []
        """Those of each token of the prompt itself."""
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_delivered = 0
        """Tokens that outputs have returned."""
        self.prompt_blocks: list[Block] = []
        self.own_blocks: list[Block] = []
        self.line = -1
        """Line in the block tables; -1 while it does not run."""
        self.is_settled = False
        """Whether its recurrent states, if the model has any, are in that line."""
        may_stop = request.params.stop_tokens or request.params.stop_strings
        self.stop_checker = StopChecker(request.params, decode) if may_stop else None

    @property
    def _chose_prompt(self) -> list[bytes]:
        """Experts of the pass that predicted each token of the prompt: of the token before it."""
        return [bytes(len(last)) for last in self.prompt_experts[-1:]] + self.prompt_experts[:-1]

    @property
    def is_running(self) -> bool:
        """Whether it has memory."""
        return self.line >= 0

    @property
    def blocks(self) -> list[Block]:
        """All its blocks, in order."""
        return [*self.prompt_blocks, *self.own_blocks]

    @property
    def newest_block(self) -> Block:
        """The block of the newest token that has keys and values."""
        num_stored = len(self.tokens) - 1
        return self.own_blocks[(num_stored - 1) // BLOCK_TOKENS] if num_stored > 0 else self.prompt_blocks[-1]

    @property
    def asks_of_prompt(self) -> bool:
        """Whether all of its prompt must be computed, for the logprobs of its tokens."""
        return self.request.prompt_logprobs is not None and not self.tokens

    @property
    def num_steps_in_memory(self) -> int:
        """Steps for which it has memory; those of a whole block if it ends before it needs another one."""
        num_stored = len(self.tokens) - 1
        fits = len(self.own_blocks) * BLOCK_TOKENS - num_stored
        return BLOCK_TOKENS if len(self.tokens) + fits >= self.max_new_tokens else fits

    def append(
        self, token: int, logprob: float, sampled_logprob: float, experts: bytes | None = None
    ) -> FinishReason | None:
        """Add a token, and return why the response ends with it; None if it goes on."""
        if experts is not None:
            self.experts.append(experts)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled_logprobs.append(sampled_logprob)
        if self.stop_checker is not None and self.stop_checker.ends(self.tokens):
            return "stop"
        return "length" if len(self.tokens) == self.max_new_tokens else None

    def output(self, version: int, reason: FinishReason | None = None, error: NotFiniteError | None = None) -> Output:
        """Return the tokens that no output has returned yet."""
        new = slice(self.num_delivered, None)
        self.num_delivered = len(self.tokens)
        return Output(
            request_id=self.id,
            tokens=tuple(self.tokens[new]),
            logprobs=tuple(self.logprobs[new]),
            sampled_logprobs=tuple(self.sampled_logprobs[new]),
            experts=b"".join(self.experts[new]),
            prompt_experts=b"".join(self._chose_prompt) if reason is not None else b"",
            version=version,
            finish_reason=reason,
            error=error,
            prompt_logprobs=self.prompt_logprobs if reason in ("stop", "length") else None,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence that are computed together."""

    past: abc.Sequence[Block]
    """Blocks before them, from the beginning of the sequence, whose keys and values are there already."""
    tokens: abc.Sequence[int]
    """At least one."""
    slots: abc.Sequence[tuple[Block, int]]
    """For each token its block, and its offset there."""
    asked_by: Sequence | None = None
    """Sequence whose prompt logprobs these tokens are for, all of its prompt; None if there is none."""

    @property
    def num_states(self) -> int:
        """Last states that are wanted: of all its tokens, or of the last one."""
        return 1 if self.asked_by is None else len(self.tokens)

    @property
    def num_past(self) -> int:
        """Tokens of `past`."""
        return sum(len(block.tokens) for block in self.past)
