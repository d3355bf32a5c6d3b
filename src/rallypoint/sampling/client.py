"""What an episode samples with, and its way from the prompt to its end.

Owns: how a turn continues those before, and the rules of an episode. Must not know: groups, scores, which prompts these
are; what an episode may return (`episode_end.py`), or how its time is counted (`episode_task.py`).

A rollout is the turns that the client has returned: they have the tokens that the policy sampled, and training
recomputes their logprobs in the same context. So an episode may leave out the last turns, but cannot change or skip
one. `sample` continues the turn before; `call` takes whole conversations, which make a tree (`calls.py`).

An episode that takes too long is cancelled, and left behind if that does not end it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Self, cast

from transformers import PreTrainedTokenizerBase

from rallypoint.config import RunConfig
from rallypoint.data import ChatMessage
from rallypoint.data.prompt_sets import Prompt
from rallypoint.environments.chat import Chat, Messages, said_in
from rallypoint.environments.episodes import PromptEpisode
from rallypoint.environments.failures import EpisodeFailed, RolloutFailure, RolloutFailureKind
from rallypoint.environments.tools import Tools
from rallypoint.errors import EpisodeError, GenerationError, NotFiniteError, RequestError, RowFullError
from rallypoint.generation import Output, Request, SamplingParams, as_turn
from rallypoint.generation.protocol import RequestSampler, is_whole
from rallypoint.journal import RolloutFailed
from rallypoint.sampling.calls import Call, Calls
from rallypoint.sampling.episode_end import Results, failure_of
from rallypoint.sampling.episode_task import Ending, EpisodeLimits, OwnTime, leave, where
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.types import ROOT, Limit, Trajectory, Turn

_NEXT_TURN = 2**33
"""Distance of the seeds of two turns of one rollout."""


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What all episodes of a run have in common."""

    sampler: RequestSampler
    """The mailbox of a run, or what stands for it."""
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    """Tokens of a row, prompts and responses of all turns together."""
    limits: EpisodeLimits = EpisodeLimits()
    results: Results = Results()
    strips_thinking: bool = False
    """See `RolloutConfig.thinking`."""

    @classmethod
    def of(cls, config: RunConfig, mailbox: Mailbox, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return those of a config."""
        rollout, replay = config.rollout, mailbox.schedule.replay
        limits = EpisodeLimits(
            turn_s=rollout.turn_timeout_s,
            episode_s=rollout.episode_timeout_s,
            hold=lambda: replay is None or replay.is_free,
        )
        results, strips = Results.of(config), rollout.thinking == "strip"
        return cls(mailbox, tokenizer, config.max_row_tokens, limits, results, strips)


class EpisodeClient:
    """Samples for one episode, see `Client`."""

    def __init__(
        self,
        terms: Terms,
        params: SamplingParams,
        prompt: tuple[int, Prompt],
        sample: int,
        *,
        rank: int,
        recorded: RolloutFailed | None = None,
    ) -> None:
        """Begin without tokens.

        Args:
            terms: of the run.
            params: how turns are drawn; the seed is that of the first one.
            prompt: its index in the run, and what it is.
            sample: which of the rollouts of the prompt this is.
            rank: of the rollout role, which samples all turns.
            recorded: how it failed in the run that this one repeats; None if it did not.
        """
        self.params, (self.prompt_index, self._prompt) = params, prompt
        self._terms, self._sample, self._rank, self._recorded = terms, sample, rank, recorded
        self._calls, self._tokens, self._newest = Calls(self.prompt), tuple[int, ...](), ROOT
        self._has_calls = False
        """Whether `call` was called."""
        self._is_full = False
        self._tools: Tools | None = None
        """Those of Python that `chat` was given, which count their errors themselves."""
        self.num_tool_errors: int | None = None
        """Calls of tools that failed in the process of the episode; None if it has none, or none there."""
        self.own_time: OwnTime | None = None
        """Seconds of the episode; None before it has begun, and once it is over."""
        self._asking = set[asyncio.Task[object]]()
        """Whatever parts of the episode wait for a response."""
        self._engine_errors: list[BaseException] = []

    @functools.cached_property
    def chats(self) -> Chat:
        """What is said in messages; that of an agent is its session's."""
        example, stops = self._prompt.example, self.params.stop_tokens
        prompt = self.prompt, example.prompt
        return Chat(self.tokenizer, stops, prompt, example.tools, strips_thinking=self._terms.strips_thinking)

    @property
    def prompt(self) -> tuple[int, ...]:
        """See `Client.prompt`."""
        return self._prompt.tokens

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns that were sampled so far."""
        return self._calls.turns

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See `Client.tokenizer`."""
        return self._terms.tokenizer

    def rollout(self, episode: PromptEpisode) -> asyncio.Future[Trajectory | RolloutFailure]:
        """Return the rollout that an episode is going to make of the prompt, or why there will be none.

        A rollout whose row had no room for a further turn is truncated. Awaiting the future raises RallyError if the
        role that samples has failed, and not on this rollout alone.
        """
        self.own_time = time = OwnTime(self._terms.limits)
        running = asyncio.create_task(self._end_of(episode, time))

        def close() -> float:
            self.own_time = None
            for each in self._asking:
                each.cancel()
            leave(running)
            return time.stop()

        return Ending(running, time.is_over, close, lambda own_s: self._result(running, time, own_s))

    def _result(
        self, running: asyncio.Task[Trajectory | EpisodeFailed], time: OwnTime, own_s: float
    ) -> Trajectory | RolloutFailure:
        if time.is_over.done():
            found = dataclasses.replace(time.is_over.result(), traceback=where(running.get_coro()))
        elif running.cancelled():
            found = EpisodeFailed("raised", "the episode raised CancelledError")
        else:
            found = running.result()
        if isinstance(found, Trajectory):
            chats = self.chats
            of_tools = self.num_tool_errors if self._tools is None else self._tools.num_errors
            errors = chats.num_malformed if of_tools is None else of_tools
            return dataclasses.replace(found, own_s=own_s, num_tool_calls=chats.num_calls, num_tool_errors=errors)
        return RolloutFailure(
            name=self._prompt.example.name,
            prompt=self.prompt_index,
            sample=self._sample,
            num_turns=len(self._calls.turns),
            num_tokens=sum(len(turn.response) for turn in self._calls.turns),
            **dataclasses.asdict(found),
        )

    async def _end_of(self, episode: PromptEpisode, time: OwnTime) -> Trajectory | EpisodeFailed:
        """Run an episode to its end."""
        await self._repeat(time)
        try:
            found = await episode(self._prompt, self)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything: a counted value
            return failure_of(error, is_of_engine=any(error is each for each in self._engine_errors))
        result = found if isinstance(found, EpisodeFailed) else self._terms.results.read(found, self._calls)
        if not self._is_full or isinstance(result, EpisodeFailed):
            return result
        return dataclasses.replace(
            result, turns=(*result.turns[:-1], dataclasses.replace(result.turns[-1], truncated=True, limit="row"))
        )

    async def _repeat(self, time: OwnTime) -> None:
        """Fail where the recorded one did, which may have been for want of time, and wait to be cancelled."""
        if self._recorded is not None and len(self._calls.turns) == self._recorded.num_turns:
            time.end(EpisodeFailed(cast("RolloutFailureKind", self._recorded.why), self._recorded.reason))
            await asyncio.get_running_loop().create_future()

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Turn:
        """See `Client.sample`."""
        if self._asking and self.own_time is not None:
            raise EpisodeError(
                f"{self}: client.sample was called while it samples another turn of the same rollout, but a turn "
                "continues the one before; await it first"
            )
        added, number = self._checked(tokens), len(self._calls.turns)
        params = self._params_of("sample", max_tokens, stop, temperature)
        tokens = self._tokens + added
        call = self._begin(tokens, parent=self._newest, number=None if self._has_calls else number)
        turn = await self._ask(call, params)
        self._tokens, self._newest = tokens + turn.response, number
        return turn

    async def call(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
    ) -> Turn:
        """See `Client.call`."""
        return await self.answer(tokens, (), max_tokens=max_tokens, stop=stop, temperature=temperature)

    async def answer(
        self,
        tokens: Sequence[int],
        said: tuple[tuple[str, str], ...],
        *,
        max_tokens: int | None,
        stop: Sequence[str],
        temperature: float | None,
        deliver: Callable[[Output], None] | None = None,
    ) -> Turn:
        """Do as `call` does, of whose tokens it is known which messages are new; see `Turn.said`.

        `deliver` is called with each output as it comes, and must not raise.
        """
        self._has_calls = True
        ids, params = self._as_ids("call", tokens), self._params_of("call", max_tokens, stop, temperature)
        return await self._ask(self._begin(ids), params, said, deliver)

    async def chat(
        self,
        messages: Messages = (),
        tools: Sequence[ChatMessage] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        temperature: float | None = None,
        state: str | None = None,
    ) -> dict[str, object]:
        """See `Client.chat`."""
        asked, self._has_calls = self.chats.asked(messages, tools), True
        params = self._params_of("chat", max_tokens, stop, temperature)
        turn = await self._ask(self._begin(asked.tokens), params, said_in(asked), state=state)
        message = self.chats.answered(asked, turn.response, params.stop_strings, params.min_new_tokens - 1)
        if isinstance(tools, Tools):
            self._tools = tools
        return message

    def _begin(self, tokens: tuple[int, ...], *, parent: int | None = None, number: int | None = None) -> Call:
        if self.own_time is None:
            raise EpisodeError(f"{self}: the client was asked after the end of the episode, or after its deadline")
        return self._calls.begin(tokens, parent=parent, number=number)

    async def _ask(
        self,
        call: Call,
        params: SamplingParams,
        said: tuple[tuple[str, str], ...] = (),
        deliver: Callable[[Output], None] | None = None,
        state: str | None = None,
    ) -> Turn:
        """Have a call sampled."""
        time, task = self.own_time, asyncio.current_task()
        assert time is not None, "`_begin` has looked"
        assert task is not None, "an episode is one"
        request = self._request(call, params, streamed=deliver is not None)
        self._asking.add(task)
        try:
            with time.paused():
                outputs = await self._terms.sampler.sample(request, self._rank, deliver=deliver)
        except (GenerationError, NotFiniteError) as error:
            self._engine_errors.append(error)
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not self._is_of_this_rollout(error, request, task):
                time.fail(error)
            raise
        finally:
            self._asking.discard(task)
        if not said and call.tokens == self.prompt:
            said = tuple((one.role, one.content) for one in self._prompt.example.prompt)
        turn = as_turn((), outputs, limit=self._limit(request, outputs), said=said, state=state)
        turn = self._calls.end(call, turn)  # adds its prompt; one that failed leaves nothing: it may be repeated
        await self._repeat(time)
        return turn

    def _request(self, call: Call, params: SamplingParams, *, streamed: bool) -> Request:
        """Return the request for a call."""
        if call.number:
            params = dataclasses.replace(params, seed=params.seed + call.number * _NEXT_TURN)
        most = self._terms.max_tokens
        room = most - len(call.tokens)
        self._is_full = room < 1
        if self._is_full:
            raise RowFullError(
                f"{self}: turn {call.ended + 1} begins with {len(call.tokens)} tokens, and a row may have {most}; "
                "raise rollout.max_response_tokens, which all turns of a rollout share with what is added between them"
            )
        if room < params.max_new_tokens:
            least = min(room, params.min_new_tokens)
            params = dataclasses.replace(params, max_new_tokens=room, min_new_tokens=least)
        return Request(
            tokens=call.tokens,
            params=params,
            prompt_index=self.prompt_index,
            sample_index=self._sample,
            streamed=streamed,
        )

    def _is_of_this_rollout(self, error: BaseException, request: Request, task: asyncio.Task[object]) -> bool:
        """Whether what came instead of a response concerns no other rollout."""
        if isinstance(error, asyncio.CancelledError):  # or the requests of all were given up
            return bool(task.cancelling())
        return isinstance(error, RequestError) and request.tokens != self.prompt

    def _limit(self, request: Request, outputs: Sequence[Output]) -> Limit | None:
        """Return at which limit a response was cut off; None: it ended by itself."""
        if outputs[-1].finish_reason == "stop":
            return None
        most = request.params.max_new_tokens
        if sum(len(output.tokens) for output in outputs) < most:
            return "engine"
        return "row" if len(request.tokens) + most == self._terms.max_tokens else "turn"

    def _params_of(
        self, method: str, max_tokens: int | None, stop: Sequence[str], temperature: float | None
    ) -> SamplingParams:
        """Return how a turn is drawn that may have settings of its own; its logprobs are at the run's temperature."""
        params = self.params
        if max_tokens is None and not stop and temperature is None:
            return params
        most = params.max_new_tokens if max_tokens is None else max_tokens
        least = min(params.min_new_tokens, most) if is_whole(most, 1) else params.min_new_tokens
        strings = stop if isinstance(stop, str) else (*params.stop_strings, *stop)
        limits = {"max_new_tokens": most, "min_new_tokens": least, "stop_strings": strings}
        if temperature is not None:
            limits |= {"temperature": temperature, "policy_temperature": params.temperature or 1.0}
        try:
            return dataclasses.replace(params, **limits)
        except ValueError as error:
            said = f"max_tokens={max_tokens!r}, stop={stop!r}, temperature={temperature!r}"
            raise EpisodeError(f"{self}: client.{method}({said}): {error}") from None

    def _as_ids(self, method: str, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return tokens as whole numbers; text and a tokenizer's output are refused."""
        try:
            return tuple(map(operator.index, tokens))
        except TypeError:
            raise EpisodeError(
                f"{self}: client.{method} was called with {type(tokens).__name__}, expected token ids, such as "
                "tokenizer.encode(text, add_special_tokens=False)"
            ) from None

    def _checked(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a turn as whole numbers; what was sent before is refused."""
        added = self._as_ids("sample", tokens)
        if self._newest != ROOT and self._is_all_again(added):
            raise EpisodeError(
                f"{self}: turn {len(self._calls.turns) + 1} was given the whole conversation again, but client.sample "
                "appends to it; send only what comes after the last response: what the environment says, with marks of "
                "roles if the template has some. client.call takes whole conversations"
            )
        return added

    def _is_all_again(self, added: tuple[int, ...]) -> bool:
        """Whether tokens begin with all that there is; a response may have been encoded anew, as other tokens."""
        first, response = self._calls.turns[0].prompt, self._calls.turns[0].response
        if len(added) < len(self._tokens) // 2 or added[: len(first)] != first:  # a mark of a role may begin both
            return False
        if added[: len(self._tokens)] == self._tokens:
            return True
        again = added[len(first) : len(first) + 2 * len(response) + 8]
        return bool(said := self._text(response)) and self._text(again).startswith(said)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    def __str__(self) -> str:
        return f"prompt {self.prompt_index} sample {self._sample}"
