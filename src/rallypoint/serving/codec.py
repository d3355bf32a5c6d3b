"""Text to token ids and back, beside an event loop.

Owns: the tokenizer, and the one thread in which it encodes: tokenizers change their settings while they encode, and a
long text must not block the loop. A text far beyond the token limit is not encoded, because everybody else would wait
for it. Must not know: requests, engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from transformers import PreTrainedTokenizerBase

from rallypoint.data import AnswerReader, ChatMessage, chat_text, decoder
from rallypoint.errors import EndpointError, ModelError

TokenIds: TypeAlias = tuple[int, ...]
ResultT = TypeVar("ResultT")

_SLACK = 16
"""Factor by which a text may exceed the characters of that many longest tokens: some tokenizers drop spaces, or take a
word of any length for one token."""


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most characters of a token; more than that for tokenizers that count bytes."""
    return max(map(len, tokenizer.get_vocab()), default=1)


def max_characters(longest: int, max_tokens: int) -> int:
    """Return how many characters no text of so many tokens has, if the longest token has `longest`."""
    return _SLACK * max_tokens * longest


class Codec:
    """Encodes prompts and decodes answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.decode = decoder(tokenizer)
        """Returns the text of tokens, without special ones."""
        self._longest_token = longest_token(tokenizer)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatMessage] = (),
        arguments: Mapping[str, object] | None = None,
        *,
        max_tokens: int,
    ) -> TokenIds:
        """Return a conversation in the chat template, with the cue for the assistant; see `chat_text`.

        Raises:
            EndpointError: there is no template, it has no place for these messages or leaves one out, or they have far
                more characters than so many tokens.
        """
        if self._tokenizer.chat_template is None:
            raise EndpointError(400, "this model has no chat template; ask /v1/completions", param="messages")

        def encode() -> TokenIds:
            text = chat_text(self._tokenizer, messages, tools, arguments)
            self._check_length(len(text), max_tokens, "messages")
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))

        try:
            return await self._run(encode)
        except ModelError as error:
            raise EndpointError(400, str(error), param="messages") from None

    async def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> TokenIds:
        """Return a text, by default with what the tokenizer puts around it, such as a token for the beginning.

        Raises:
            EndpointError: it has far more characters than so many tokens.
        """
        self._check_length(len(text), max_tokens, "prompt")
        return await self._run(lambda: tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    async def reader(self, stop_tokens: Sequence[int], tools: Sequence[ChatMessage], num_calls: int) -> AnswerReader:
        """Return what reads an answer to a conversation that has tools and so many calls."""
        return await self._run(
            lambda: AnswerReader(self._tokenizer, stop_tokens=stop_tokens, tools=tools, num_calls=num_calls)
        )

    def token_text(self, token: int) -> str:
        """Return what one token looks like; a special one by its name."""
        return str(self._tokenizer.decode([token]))

    def _check_length(self, num_characters: int, max_tokens: int, param: str) -> None:
        if num_characters > max_characters(self._longest_token, max_tokens):
            raise EndpointError(
                400,
                f"the prompt has {num_characters} characters, which is far too long: prompt and answer may have "
                f"{max_tokens} tokens together",
                param=param,
                code="context_length_exceeded",
            )

    async def _run(self, encode: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode)
