"""Prompts sampled by episodes: the rollouts of each are a group, which is scored while others are still sampled.

Owns: how a prompt becomes a scored group, and that nothing is under way after an error. Must not know: which prompts
these are, and what their groups are for; order and staleness (`groups.py`).

Consumes: prompts, by their index in the run. Produces: scored groups, in order of admission. Waits for: the rollout
role, and the reward function. Unblocked by: the ends of responses and calls.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from rallypoint.config import RolloutConfig, RunConfig
from rallypoint.data.tokenizer import TokenTexts
from rallypoint.environments.environment import Client, Episode, Prompt
from rallypoint.environments.pool import Grader
from rallypoint.environments.scoring import ScoredGroup, Scoring
from rallypoint.errors import GenerationError, RallyError
from rallypoint.generation import Request, SamplingParams, as_turn
from rallypoint.roles.rollout import Rollouts
from rallypoint.types import RolloutBatch, Trajectory, Turn, assemble

_NEXT_TURN = 2**33
"""Distance of the seeds of two turns of one rollout."""
GRACE_S = 5.0
"""Seconds that the reward function is given for a step after the run was asked to end."""


class AbandonedError(RallyError):
    """A step was given up after an interruption; it is done again when the run goes on."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    rows: RolloutBatch
    failures: tuple[GenerationError, ...]
    """Why rollouts are missing."""


class _Client:
    """Samples for one episode, see `Client`: each turn continues the tokens of those before."""

    def __init__(self, rollouts: Rollouts, params: SamplingParams, prompt: int, sample: int, rank: int) -> None:
        self._rollouts, self._params = rollouts, params
        self._prompt, self._sample, self._rank = prompt, sample, rank
        self._tokens: tuple[int, ...] = ()
        self._num_turns = 0

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """See `Client.sample`."""
        params, added = self._params, tuple(tokens)
        if self._num_turns:
            params = dataclasses.replace(params, seed=params.seed + self._num_turns * _NEXT_TURN)
        tokens = self._tokens + added
        request = Request(tokens=tokens, params=params, prompt_index=self._prompt, sample_index=self._sample)
        turn = as_turn(added, await self._rollouts.sample(request, self._rank))
        self._tokens = tokens + turn.response  # a turn that failed leaves nothing behind: an episode may repeat it
        self._num_turns += 1
        return turn


class GroupsUnderWay:
    """Groups that are sampled together, each scored while others are still sampled."""

    def __init__(self, groups: Iterable[Coroutine[None, None, Group]], scoring: Scoring) -> None:
        self._scoring = scoring
        self._groups = [asyncio.create_task(group) for group in groups]
        self._scored = asyncio.create_task(asyncio.to_thread(scoring.run))

    async def sampled(self) -> list[Group]:
        """Return the groups in order of admission.

        Raises:
            GenerationError: all rollouts have failed.
        """
        sampled = asyncio.gather(*self._groups)
        sampled.add_done_callback(lambda done: done.cancelled() or done.exception())  # that of the cause is raised
        await asyncio.wait({sampled, self._scored}, return_when=asyncio.FIRST_COMPLETED)
        if self._scored.done():
            self._scored.result()  # raises: it has not been told yet that all groups are there
        groups = await sampled
        self._scoring.finish()
        failures = [failure for group in groups for failure in group.failures]
        if not any(len(group.rows) for group in groups):
            raise GenerationError(f"all {len(failures)} rollouts failed; the first one: {failures[0]}")
        return groups

    async def scored(self, interrupted: asyncio.Event) -> list[ScoredGroup]:
        """Return the groups with what the reward function says of them, after `sampled`.

        Raises:
            AbandonedError: it did not say so within some seconds after an interruption.
        """
        waiting = asyncio.create_task(interrupted.wait())
        await asyncio.wait({self._scored, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not self._scored.done():
            await asyncio.wait({self._scored}, timeout=GRACE_S)
        if not self._scored.done():
            raise AbandonedError(f"the reward function was busy for {GRACE_S:g} s more")
        return self._scored.result()

    def close(self) -> None:
        """Give up what is under way."""
        for group in self._groups:
            group.cancel()
        self._scoring.stop()
        self._scored.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else looks at it


class Sampler:
    """Has prompts sampled by episodes, and scored."""

    def __init__(
        self,
        config: RunConfig,
        rollouts: Rollouts,
        *,
        tokenizer: PreTrainedTokenizerBase,
        grader: Grader,
        say: Callable[[str], None],
        episode: Episode,
    ) -> None:
        self._config, self._rollouts, self._grader, self._episode = config, rollouts, grader, episode
        self._tokenizer, self._token_texts, self._say = tokenizer, TokenTexts(tokenizer), say

    def begin(
        self,
        prompts: Mapping[int, Prompt],
        params: SamplingParams,
        group_size: int,
        complete: Callable[[int, Group, int | None], None] = lambda *_: None,
    ) -> GroupsUnderWay:
        """Have prompts sampled, and scored.

        Args:
            prompts: by their index in the run.
            params: how rollouts are drawn.
            group_size: G, rollouts of each prompt.
            complete: called with each group that was sampled: its index, itself, and the oldest version of its tokens.
        """
        scoring = Scoring(
            self._grader,
            decode=lambda responses: self._tokenizer.batch_decode(responses, skip_special_tokens=True),
            token_texts=self._token_texts,
            num_rows=len(prompts) * group_size,
            max_failed=self._config.reward.max_failed,
            warn=self._say,
        )

        async def sample(place: int, index: int, prompt: Prompt) -> Group:
            rank = self._rollouts.rank_of(place, len(prompts))
            clients = [_Client(self._rollouts, params, index, number, rank) for number in range(group_size)]
            found = await asyncio.gather(*(self._rollout(prompt, client) for client in clients))
            kept = {number: one for number, one in enumerate(found) if isinstance(one, Trajectory)}
            rows = assemble(
                list(kept.values()), prompt_index=index, sample_index=list(kept), is_narrowed=params.narrows
            )
            group = Group(rows, tuple(one for one in found if isinstance(one, GenerationError)))
            complete(index, group, int(rows.versions.min()) if len(rows) else None)
            scoring.add(place, rows, [prompt.example] * len(rows))
            return group

        return GroupsUnderWay((sample(place, *each) for place, each in enumerate(prompts.items())), scoring)

    async def _rollout(self, prompt: Prompt, client: Client) -> Trajectory | GenerationError:
        """Have an episode, or return why there is none: a failed rollout is counted."""
        try:
            return await self._episode(prompt, client)
        except GenerationError as error:
            return error


def sampling_params(rollout: RolloutConfig, *, seed: int, stop_tokens: tuple[int, ...]) -> SamplingParams:
    """Return how a config has rollouts drawn."""
    return SamplingParams(
        max_new_tokens=rollout.max_response_tokens,
        min_new_tokens=rollout.min_response_tokens,
        temperature=rollout.temperature,
        seed=seed,
        stop_tokens=stop_tokens,
        stop_strings=rollout.stop,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        repetition_penalty=rollout.repetition_penalty,
    )
