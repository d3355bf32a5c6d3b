"""What an episode says to the policy in messages, and what it answers: the dialogue behind `client.chat`.

Owns: which of the messages of a call are new. Must not know: engines, rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from rallypoint.data import AnswerReader, ChatMessage, Dialogue, Message, whole_text
from rallypoint.data.files import found
from rallypoint.data.legible import without_control
from rallypoint.environments.tools import Tools
from rallypoint.errors import EpisodeError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages: TypeAlias = Sequence[ChatMessage | Message]
_ROLES = ("system", "developer", "user", "assistant", "tool")
_EXPECTED = "expected a list of messages such as {'role': 'user', 'content': 'Look again.'}"


class Chat:
    """The dialogues of one episode, the first of which begins with its prompt."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: Sequence[int],
        prompt: tuple[tuple[int, ...], Sequence[Message]],
        tools: Sequence[ChatMessage] = (),
        *,
        strips_thinking: bool = False,
    ) -> None:
        """Begin without messages.

        Args:
            tokenizer: has the chat template.
            stop_tokens: each of them ends an answer.
            prompt: its tokens, and its messages.
            tools: function schemas that the prompt tells the model of.
            strips_thinking: see `RolloutConfig.thinking`.
        """
        self._tokenizer, self._stop_tokens, self._prompt = tokenizer, tuple(stop_tokens), prompt
        self._tools, self._strips_thinking = tuple(tools), strips_thinking
        self.num_calls, self.num_malformed = 0, 0
        """Calls of tools in all answers, also those that could not be read; and these alone."""
        self._dialogues: list[Dialogue] = []
        """Each of them ends with an answer; the newest is in front."""

    def asked(
        self, messages: Messages, tools: Sequence[ChatMessage] | None = None, *, is_whole: bool = False
    ) -> Dialogue:
        """Return the dialogue that messages make, ready to be answered; nothing of it is kept yet.

        Args:
            messages: all of a conversation, or what is new after the last answer; none at first: those of the prompt.
            tools: OpenAI's function schemas; None for those of the call before, or of the prompt.
            is_whole: whether messages are all of a conversation; False: an answer in it, or a message of the system in
                front, shows that they are.

        Raises:
            EpisodeError: these are not messages, or they do not fit the template.
        """
        given = [self._legible(_checked(index, one)) for index, one in enumerate(_listed(messages))]
        last = self._dialogues[0] if self._dialogues else None
        if isinstance(tools, Tools):
            tools = tools.legible(self._tokenizer)
        tools = (last.tools if last else self._tools) if tools is None else tuple(tools)
        is_whole = is_whole or last is None or any(one["role"] == "assistant" for one in given)
        if last is not None and not given:
            raise EpisodeError("client.chat was given nothing new after the last answer; add what is to be answered")
        try:
            if last is None or is_whole or given[0]["role"] == "system":
                return self._whole(given, tools)
            return self._continued(last, given) if last.tools == tools else self._whole([*last.messages, *given], tools)
        except ModelError as error:
            raise EpisodeError(f"client.chat: {error}") from None

    def answered(
        self, asked: Dialogue, response: Sequence[int], stop: Sequence[str] = (), num_early: int = 0
    ) -> dict[str, object]:
        """Add what was sampled, and return what it says, up to the first of some strings.

        Args:
            asked: what is answered.
            response: ids that were sampled.
            stop: strings that have ended it, and do not belong to it.
            num_early: tokens in which a whole string does not count.
        """
        reader = self.reader(asked)
        message, _ = reader.finish(response)
        content = str(message["content"])
        num_before = len(str(reader.finish(response[:num_early])[0]["content"])) if num_early > 0 and stop else 0
        places = (content.find(one, max(0, num_before - len(one) + 1)) for one in stop)
        message["content"] = content[: min((place for place in places if place >= 0), default=len(content))]
        self.keep(asked, response, message)
        return message

    def reader(self, asked: Dialogue) -> AnswerReader:
        """Return what reads the answer to a dialogue."""
        return AnswerReader(
            self._tokenizer, stop_tokens=self._stop_tokens, tools=asked.tools, num_calls=asked.num_calls
        )

    def keep(self, asked: Dialogue, response: Sequence[int], message: ChatMessage) -> None:
        """Add what was sampled, and what its reader was shown of it."""
        self._dialogues.insert(0, asked.answered(response, message))
        num_malformed = len(cast("Sequence[str]", message.get("malformed", ())))
        self.num_malformed += num_malformed
        self.num_calls += num_malformed + len(cast("Sequence[object]", message.get("tool_calls", ())))

    def _legible(self, message: ChatMessage) -> ChatMessage:
        """Return the result of a tool without control tokens: a program may print them, or a page have them.

        The policy has written the name, and half of a surrogate pair comes of a program that cuts texts.
        """
        if message["role"] != "tool":
            return message
        texts = {
            name: message[name] for name in ("content", "name", "tool_call_id") if isinstance(message.get(name), str)
        }
        whole = {name: _without_halves(str(text)) for name, text in texts.items()}
        return {**message, **{name: without_control(self._tokenizer, text) for name, text in whole.items()}}

    def _continued(self, dialogue: Dialogue, new: Sequence[ChatMessage]) -> Dialogue:
        stripped = None
        if self._strips_thinking and any(one["role"] == "user" for one in new):
            stripped = dialogue.stripped_with(new)
        return dialogue.continue_with(new) if stripped is None else stripped

    def _whole(self, messages: Sequence[ChatMessage], tools: tuple[ChatMessage, ...]) -> Dialogue:
        """Continue the longest dialogue with which the messages begin, or begin another one."""
        for dialogue in sorted(self._dialogues, key=lambda one: -one.num_messages):
            if dialogue.tools == tools and (new := dialogue.new_of(messages)):
                return self._continued(dialogue, new)
        prompt, said = self._prompt
        own = [_checked(index, one) for index, one in enumerate(said)]
        if tools == self._tools and messages in ([], own):  # its tokens may be cut, see data.on_too_long
            return Dialogue(self._tokenizer, self._stop_tokens, tuple(own), prompt, tools)
        return Dialogue.begin(self._tokenizer, messages or own, tools, stop_tokens=self._stop_tokens)


def said_in(asked: Dialogue) -> tuple[tuple[str, str], ...]:
    """Return role and text of each of its newest messages, for people."""
    return tuple((str(message["role"]), whole_text(message)) for message in asked.messages[asked.num_old :])


def _without_halves(text: str) -> str:
    r"""Return a text that can be encoded.

    >>> _without_halves("a\ud83d\ude00\ud83d") == "a\U0001f600\ufffd"
    True
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _listed(messages: object) -> Sequence[object]:
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        return cast("Sequence[object]", messages)
    raise EpisodeError(f"client.chat: {_EXPECTED}, found {found(messages)}")


def _checked(index: int, message: object) -> ChatMessage:
    """Return a message as templates take it, or what is wrong with it."""
    if isinstance(message, Message):
        return message.fields
    if not isinstance(message, Mapping):
        raise EpisodeError(f"client.chat: {_EXPECTED}, found {found(message)} as message {index}")
    fields = cast("Mapping[str, object]", message)
    role, content = fields.get("role"), fields.get("content")
    if role not in _ROLES:
        raise EpisodeError(f"client.chat: message {index} has the role {role!r}; expected one of {', '.join(_ROLES)}")
    if not isinstance(content, str) and (content is not None or role != "assistant"):
        raise EpisodeError(f"client.chat: message {index} ({role}): expected text as 'content', found {found(content)}")
    return fields
