"""Episodes of a trained model in one process, without Ray: one engine stands where a run has its rollout role.

Owns: which episode of a name it is, and that its clients sample from an engine here. Must not know: prompts, scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from rallypoint.config import RolloutConfig
from rallypoint.data.prompt_sets import Prompt
from rallypoint.environments.agents import is_agent
from rallypoint.environments.blocking import is_blocking
from rallypoint.environments.environment import Episode
from rallypoint.environments.episodes import PromptEpisode, load_episode, with_prompt_first
from rallypoint.environments.failures import RolloutFailure
from rallypoint.errors import ConfigError, ServingError, UserCodeError
from rallypoint.extras import why_not
from rallypoint.generation import GenerationEngine, Output, Request, SamplingParams
from rallypoint.generation.engine_thread import EngineThread
from rallypoint.recipes.blocking import PlainEpisodes
from rallypoint.sampling.client import EpisodeClient, Terms
from rallypoint.sampling.episode_end import Results
from rallypoint.sampling.episode_task import BlockingWatch, EpisodeLimits, leave_for_good
from rallypoint.types import Trajectory, Turn

ResultT = TypeVar("ResultT")

_LOOK_S = 0.05
MOST_AT_ONCE = 256
"""Episodes under way at the same time."""


class OneEngine:
    """Samples for the clients of episodes from an engine in a thread, in the event loop of the caller."""

    def __init__(self, engine: GenerationEngine) -> None:
        """Take an engine that nobody else steps."""
        self._thread = EngineThread(engine)

    async def sample(
        self, request: Request, rank: int | None = None, deliver: Callable[[Output], None] | None = None
    ) -> list[Output]:
        """See `Mailbox.sample`; there is one rank."""
        del rank
        loop, outputs = asyncio.get_running_loop(), list[Output]()
        ended: asyncio.Future[None] = loop.create_future()

        def take(output: Output) -> None:
            outputs.append(output)
            if deliver is not None:
                deliver(output)
            if output.finish_reason is not None and not ended.done():
                ended.set_result(None)

        def hand_over(output: Output) -> None:
            loop.call_soon_threadsafe(take, output)

        number = self._thread.submit(request, hand_over)
        try:
            await ended
        except asyncio.CancelledError:
            self._thread.cancel(number)
            raise
        if (error := outputs[-1].error) is not None:
            raise error
        return outputs

    def close(self) -> None:
        """End the thread."""
        self._thread.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """What episodes of a name are played with."""

    episode: Episode | str
    """It, or the name of one or of an agent."""
    engine: GenerationEngine
    tokenizer: PreTrainedTokenizerBase
    params: SamplingParams
    max_tokens: int
    """Tokens of a row."""
    rollout: RolloutConfig
    """Has the deadlines."""
    results: Results
    say: Callable[[str], None]
    """Given a line for the user, from any thread."""

    async def rollouts(self, prompts: Sequence[Prompt], num_samples: int) -> list[list[Trajectory | RolloutFailure]]:
        """Play so many episodes for each prompt; return what became of them, by prompt.

        Raises:
            ConfigError: the episode cannot be loaded, or is none.
            ServingError: it is an agent, and packages for that are missing.
        """
        async with self._opened() as (episode, terms):
            at_once = asyncio.Semaphore(MOST_AT_ONCE)

            async def one(place: int, sample: int) -> Trajectory | RolloutFailure:
                async with at_once:
                    client = EpisodeClient(terms, self.params, (place, prompts[place]), sample, rank=0)
                    return await client.rollout(episode)

            places = itertools.product(range(len(prompts)), range(num_samples))
            found = await asyncio.gather(*itertools.starmap(one, places))
        return [found[first : first + num_samples] for first in range(0, len(found), num_samples)]

    async def watched(self, prompt: Prompt, place: int) -> AsyncIterator[Sequence[Turn] | Trajectory | RolloutFailure]:
        """Play one episode: yield all turns so far whenever there are more, and at last what became of it."""
        async with self._opened() as (episode, terms):
            client, seen = EpisodeClient(terms, self.params, (place, prompt), 0, rank=0), 0
            playing = client.rollout(episode)
            try:
                while not playing.done() or seen < len(client.turns):
                    await asyncio.wait({playing}, timeout=_LOOK_S)
                    if seen < len(client.turns):
                        seen = len(client.turns)
                        yield tuple(client.turns)
                yield playing.result()
            finally:
                playing.cancel()

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[PromptEpisode, Terms]]:
        """Yield what makes a rollout, and what its clients have in common."""
        BlockingWatch(self.say, sys._current_frames)
        limits = EpisodeLimits(turn_s=self.rollout.turn_timeout_s, episode_s=self.rollout.episode_timeout_s)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(leave_for_good)
            sampler = stack.enter_context(contextlib.closing(OneEngine(self.engine)))
            strips = self.rollout.thinking == "strip"
            terms = Terms(sampler, self.tokenizer, self.max_tokens, limits, self.results, strips)
            if not isinstance(self.episode, str):
                yield with_prompt_first(self.episode), terms
                return
            spec = self.episode
            if is_blocking(spec):
                plain = PlainEpisodes(spec, self.tokenizer)
                stack.push_async_callback(plain.close)
                await plain.open()
                yield with_prompt_first(plain), terms
                return
            if not is_agent(spec):
                yield with_prompt_first(_loaded(spec)), terms
                return
            try:
                from rallypoint.recipes.agents import Agents
            except ImportError as error:
                raise ServingError(f"the agent {spec} {why_not(error, ('starlette', 'uvicorn'), 'serve')}") from None
            tokens = self.params.stop_tokens, self.max_tokens
            agents = Agents(spec, self.tokenizer, *tokens, say=self.say, strips_thinking=strips)
            stack.push_async_callback(agents.close)
            await agents.open()
            yield with_prompt_first(agents), terms


def _loaded(spec: str) -> Episode:
    try:
        return load_episode(spec)
    except UserCodeError as error:
        raise ConfigError((f"the episode {spec!r}: {error}",)) from None


def in_loop(work: Coroutine[None, None, ResultT]) -> ResultT:
    """Return what a coroutine comes to, also where an event loop runs in this thread already, as in a notebook."""
    if asyncio._get_running_loop() is None:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "episodes") as thread:
        return thread.submit(asyncio.run, work).result()
