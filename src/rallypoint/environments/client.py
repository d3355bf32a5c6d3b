"""What an episode samples with.

Owns: the methods of a client, and what they promise. Must not know: engines, how a rollout is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rallypoint.data import ChatMessage
from rallypoint.environments.chat import Messages
from rallypoint.environments.tools import Tools
from rallypoint.types.trajectory import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Client(Protocol):
    """Samples for one episode; in a run it is `sampling.client.EpisodeClient`."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of the prompt, with which the first turn begins."""
        ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's, for what the environment reads and says."""
        ...

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Turn:
        """Append tokens to everything so far, and sample a response.

        Args:
            tokens: what is new; the first turn begins with the prompt.
            max_tokens: most tokens of this response; None for `rollout.max_response_tokens`. The row limits it, too.
            stop: texts, each of which ends this response, besides those of `rollout.stop`.
            temperature: at which it is drawn, 0 is greedy; None for `rollout.temperature`, at which all are trained.

        Raises:
            RowFullError: the row has no room for it. An episode that catches this may return what it has so far.
            GenerationError: the engine failed on this request; likewise.
            EpisodeError: these are not token ids, or the whole conversation again, or another turn is being sampled.
        """
        ...

    async def call(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Turn:
        """Sample a response to tokens; several calls may run at the same time.

        A call continues the earlier one whose tokens with its response are the longest exact beginning of these. So
        calls make a tree, and each of its paths from a root to a leaf is a sequence.

        Args:
            tokens: the whole conversation, with all earlier responses exactly as they were sampled.
            max_tokens: as for `sample`.
            stop: likewise.
            temperature: likewise.

        Raises:
            RowFullError, GenerationError: as for `sample`.
            EpisodeError: these are not token ids.
        """
        ...

    async def chat(
        self,
        messages: Messages = (),
        tools: Tools | Sequence[ChatMessage] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        state: str | None = None,
    ) -> dict[str, object]:
        """Sample an answer to messages, and return it as one.

        What was sampled stays as it is; what stands between two answers is written by the model's chat template.
        Messages that do not continue what was said begin another row.

        Args:
            messages: at first all of them; none: those of the prompt. Later what is new, or all of them again.
            tools: functions, or their schemas as in OpenAI's API, for the template; None for those of the call before.
            max_tokens: as for `sample`.
            stop: likewise.
            temperature: as for `call`.
            state: of the environment, for `advantage.name=gigpo`, which compares turns that begin in the same one; None
                for what is new in the messages.

        Returns:
            `role` ("assistant") and `content`; `reasoning` and `tool_calls` if there are some; and `malformed`: what is
            wrong with each call that could not be read.

        Raises:
            RowFullError, GenerationError: as for `sample`.
            EpisodeError: these are not messages, or the template has no place for them.
        """
        ...
