"""What an episode samples with, and whether what it returns is a rollout of its prompt.

Owns: how a turn continues those before, and the rules of an episode. Must not know: groups, scores, which prompts these
are.

A rollout is the turns that the client has returned: they have the tokens that the policy sampled, and training
recomputes their logprobs in the same context. So an episode may leave out the last turns, but cannot change or skip
one.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rallypoint.config import RolloutConfig
from rallypoint.environments.environment import Episode, Prompt
from rallypoint.environments.episodes import name_of
from rallypoint.errors import EpisodeError, GenerationError, RallyError
from rallypoint.generation import Request, SamplingParams, as_turn
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.types import Trajectory, Turn
from rallypoint.user_code import format_user_traceback

_NEXT_TURN = 2**33
"""Distance of the seeds of two turns of one rollout."""
_TURNS = "expected Trajectory(turns=(first, second, ...)) with the turns that client.sample returned, from the first on"


class EpisodeClient:
    """Samples for one episode, see `Client`: each turn continues the tokens of those before."""

    def __init__(
        self,
        mailbox: Mailbox,
        params: SamplingParams,
        prompt: int,
        sample: int,
        *,
        rank: int,
        max_tokens: int,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Begin without tokens.

        Args:
            mailbox: in front of the role that samples.
            params: how turns are drawn; the seed is that of the first one.
            prompt: index of the prompt in the run.
            sample: which of the rollouts of the prompt this is.
            rank: of the rollout role, which samples all turns.
            max_tokens: of the row, prompts and responses of all turns together.
            tokenizer: the model's, for the episode.
        """
        self.params, self.prompt_index = params, prompt
        self._mailbox, self._sample, self._rank, self._max_tokens = mailbox, sample, rank, max_tokens
        self._tokens: tuple[int, ...] = ()
        self._turns: list[Turn] = []
        self._is_sampling, self._is_full, self._tokenizer = False, False, tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """See `Client.tokenizer`."""
        return self._tokenizer

    async def rollout(self, episode: Episode, prompt: Prompt) -> Trajectory | GenerationError:
        """Return the rollout that an episode makes of a prompt, or why there is none: a failed one is counted."""
        try:
            return await self.have(episode, prompt)
        except GenerationError as error:
            return error

    async def have(self, episode: Episode, prompt: Prompt) -> Trajectory:
        """Return the rollout that an episode makes of a prompt; truncated, if its row had no room for a further turn.

        Raises:
            GenerationError: the engine failed on a turn, or the row has no room for it.
            EpisodeError: the episode raised, or broke a rule.
        """
        try:
            found: object = await episode(prompt, self)
        except RallyError:
            raise
        except Exception as error:
            shown = format_user_traceback(error, skip=lambda file: file == __file__)
            raise self._broken(f"raised {type(error).__name__}:\n{shown}", episode, prompt) from error
        if (foul := find_foul(found, self._turns)) is not None:
            raise self._broken(foul, episode, prompt)
        assert isinstance(found, Trajectory)
        if not self._is_full:
            return found
        return Trajectory(turns=(*found.turns[:-1], dataclasses.replace(found.turns[-1], truncated=True)))

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """See `Client.sample`."""
        if self._is_sampling:
            raise EpisodeError(
                f"{self}: client.sample was called while it samples another turn of the same rollout, but a turn "
                "continues the one before; await it first"
            )
        added, number = self._checked(tokens), len(self._turns)
        params, tokens = self.params, self._tokens + added
        if number:
            params = dataclasses.replace(params, seed=params.seed + number * _NEXT_TURN)
        room = self._max_tokens - len(tokens)
        self._is_full = room < 1
        if self._is_full:
            raise GenerationError(
                f"{self}: turn {number + 1} begins with {len(tokens)} tokens, and a row may have {self._max_tokens}; "
                "raise rollout.max_response_tokens, which all turns of a rollout share with what is added between them"
            )
        if room < params.max_new_tokens:
            least = min(room, params.min_new_tokens)
            params = dataclasses.replace(params, max_new_tokens=room, min_new_tokens=least)
        request = Request(tokens=tokens, params=params, prompt_index=self.prompt_index, sample_index=self._sample)
        self._is_sampling = True
        try:
            turn = as_turn(added, await self._mailbox.sample(request, self._rank))
        finally:
            self._is_sampling = False
        self._tokens = tokens + turn.response  # a turn that failed leaves nothing behind: an episode may repeat it
        self._turns.append(turn)
        return turn

    def _checked(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a turn as whole numbers; text, and a tokenizer's output as it is, are refused."""
        try:
            return tuple(map(operator.index, tokens))
        except TypeError:
            raise EpisodeError(
                f"{self}: client.sample was called with {type(tokens).__name__}, expected token ids, such as "
                "tokenizer.encode(text, add_special_tokens=False)"
            ) from None

    def _broken(self, what: str, episode: Episode, prompt: Prompt) -> EpisodeError:
        return EpisodeError(f"{self} ({prompt.example.name}): the episode {name_of(episode)} {what}")

    def __str__(self) -> str:
        return f"prompt {self.prompt_index} sample {self._sample}"


def find_foul(found: object, sampled: Sequence[Turn]) -> str | None:
    """Say why what an episode returned is no rollout; None if it is one.

    Args:
        found: what it returned.
        sampled: the turns that its client has returned.
    """
    if not isinstance(found, Trajectory):
        return f"returned {'nothing' if found is None else type(found).__name__}; {_TURNS}"
    turns: object = found.turns
    if not isinstance(turns, tuple | list):
        return f"returned a Trajectory whose turns are a {type(turns).__name__}; {_TURNS}"
    if not turns:
        return f"returned a Trajectory without turns; {_TURNS}"
    for number, turn in enumerate(turns, start=1):
        if number > len(sampled) or turn != sampled[number - 1]:
            return f"returned a Trajectory whose turn {number} is not turn {number} of its client; {_TURNS}"
    return None


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
