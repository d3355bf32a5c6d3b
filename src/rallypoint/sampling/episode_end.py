"""The end of an episode: a rollout with its rewards, or a failure of one of six kinds.

Owns: what an episode may return, and which kind of failure an exception is. Must not know: requests, groups.

What a result means for an episode of two turns:

    0.5                                    the reward, on the last token
    [0.1, 0.5]                             a reward for each turn, on its last token
    {"reward": 0.5, "moves": 7}            and the metric `episode/moves`; a list for "reward" as above
    {"moves": 7}, None                     the reward function scores the rollout
    Trajectory(turns=(first,))             some of its turns, from the first on; likewise, unless it has `rewards`
    "0.5", nan, [0.5], (first, second)     malformed
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Self, cast

from rallypoint.config import RunConfig
from rallypoint.environments.failures import EpisodeFailed, failure_kind_of
from rallypoint.environments.outcome import Scores, as_number, is_ours, too_large, unwrapped
from rallypoint.errors import first_line
from rallypoint.sampling.calls import Calls
from rallypoint.types import Trajectory, Turn
from rallypoint.user_code import format_user_traceback

_TURNS = "expected Trajectory(turns=(first, second, ...)) with the turns that client.sample returned, from the first on"
_RESULTS = (
    "expected a reward, a list with a reward for each turn, a dict of numbers such as {'reward': 0.5, 'moves': 7}, a "
    "Trajectory, or None to have the reward function score it"
)
_HERE = os.path.join(os.path.dirname(__file__), "")


class _MisfitError(ValueError):
    """What an episode returned is no result."""


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """What an episode of a run may return."""

    may_have_none: bool = True
    """Whether something scores what has no reward of its own, or nothing is learned from rewards."""
    has_functions: bool = False
    """Whether the score is a sum of several functions, of which an episode's reward would be none."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return that of a config."""
        may_have_none = config.is_rewarded or not config.needs_rewards
        return cls(may_have_none, bool(config.reward.functions))

    def read(self, found: object, calls: Calls) -> Trajectory | EpisodeFailed:
        """Return the rollout that an episode made, or why it is none.

        Args:
            found: what it returned.
            calls: what its client has sampled.
        """
        try:
            if isinstance(found, list | tuple | Mapping):
                rewards = cast("Mapping[object, object]", found).get("reward") if isinstance(found, Mapping) else found
                _check_order(rewards, calls)
            return self._checked(_read_result(found, calls.kept()))
        except _MisfitError as misfit:
            return EpisodeFailed("malformed", f"the episode {misfit}")

    def _checked(self, rollout: Trajectory) -> Trajectory:
        if not rollout.turns:
            raise _MisfitError("ended without a response: it has to await client.sample at least once")
        if rollout.rewards is None and not self.may_have_none:
            raise _MisfitError("returned no reward, and reward.function=null scores nothing; return one")
        if rollout.rewards is not None and self.has_functions:
            raise _MisfitError(
                "returned a reward, which is none of reward.functions; return None, or set reward.functions=[]"
            )
        return rollout


def failure_of(error: BaseException, *, is_of_engine: bool) -> EpisodeFailed:
    """Return the failure that an exception of an episode is.

    Args:
        error: that ended it.
        is_of_engine: whether its client raised it, as the engine failed.
    """
    kind = failure_kind_of(error, is_of_engine=is_of_engine)
    if kind in ("overlong", "engine", "nonfinite"):
        return EpisodeFailed(kind, str(error))
    said = first_line(error)
    if kind != "malformed":
        said = f"the episode raised {type(error).__name__}: {said}"
    shown = format_user_traceback(error, skip=lambda file: file.startswith(_HERE) or is_ours(file))
    return EpisodeFailed(kind, said, shown)


def scores_of(rollout: Trajectory) -> Scores | None:
    """Return an episode's rewards as scores of its rollout's tokens; None if the reward function is to score it.

    >>> turn = Turn(prompt=(1,), response=(7, 8), logprobs=(), sampled_logprobs=(), version=0, truncated=False)
    >>> scores_of(Trajectory(turns=(turn, turn), rewards=(0.5, 1.0))).token_scores
    (0.0, 0.5, 0.0, 1.0)
    """
    if rollout.rewards is None:
        return None
    scores: list[float] = []
    for number in rollout.as_trained:
        response, reward = rollout.turns[number].response, rollout.rewards[number]
        scores += [*[0.0] * (len(response) - 1), reward] if response else []
    return Scores(tuple(scores), {})


def _check_order(rewards: object, calls: Calls) -> None:
    """Refuse different rewards by turn of calls that ran at the same time: nobody knows which of them is the first."""
    if not isinstance(rewards, list | tuple):
        return
    listed = cast("Sequence[object]", rewards)
    for together in calls.overlapping():
        of_group = [listed[place] for place in together if place < len(listed)]
        if any(one != of_group[0] for one in of_group):
            raise _MisfitError(
                "returned a list with different rewards of calls that ran at the same time, so that their turns have "
                "no order; return one reward for all of them, or have each call wait for the one before"
            )


def _read_result(found: object, sampled: tuple[Turn, ...]) -> Trajectory:
    if isinstance(found, Trajectory):
        return _checked(found, sampled)
    if not isinstance(found, Mapping):
        return Trajectory(turns=sampled, rewards=_read_rewards(found, sampled))
    entries = cast("Mapping[object, object]", found)
    if "reward" not in entries and "score" in entries:
        raise _MisfitError("returned a dict with 'score', expected 'reward'")
    return Trajectory(
        turns=sampled, rewards=_read_rewards(entries.get("reward"), sampled), metrics=_read_metrics(entries)
    )


def _checked(rollout: Trajectory, sampled: Sequence[Turn]) -> Trajectory:
    """Return a rollout as the episode put it together, if it has the client's turns."""
    turns: object = rollout.turns
    if not isinstance(turns, tuple | list):
        raise _MisfitError(f"returned a Trajectory whose turns are a {type(turns).__name__}; {_TURNS}")
    if not turns:
        raise _MisfitError(f"returned a Trajectory without turns; {_TURNS}")
    for number, turn in enumerate(rollout.turns, start=1):
        if number > len(sampled) or turn != sampled[number - 1]:
            raise _MisfitError(
                f"returned a Trajectory whose turn {number} is not turn {number} of its client; {_TURNS}"
            )
    rewards = _read_rewards(rollout.rewards, rollout.turns)
    return Trajectory(turns=tuple(rollout.turns), rewards=rewards, metrics=_read_metrics(rollout.metrics))


def _read_rewards(found: object, turns: Sequence[Turn]) -> tuple[float, ...] | None:
    """Return a reward for each turn; None if there is none."""
    found = unwrapped(found)
    if found is None:
        return None
    if (single := as_number(found)) is not None:
        rewards = (*[0.0] * (len(turns) - 1), single)
    elif isinstance(found, list | tuple):
        each = [as_number(one) for one in cast("Sequence[object]", found)]
        if None in each:
            wrong = cast("Sequence[object]", found)[each.index(None)]
            raise _MisfitError(f"returned a list of rewards with a {type(wrong).__name__}; {_RESULTS}")
        if len(each) != len(turns):
            raise _MisfitError(f"returned {len(each)} rewards for {len(turns)} turns; expected one for each")
        rewards = tuple(one for one in each if one is not None)
    else:
        raise _MisfitError(f"returned {type(found).__name__}; {_RESULTS}")
    if not all(map(math.isfinite, rewards)):
        raise _MisfitError(f"returned the reward {next(one for one in rewards if not math.isfinite(one))}; {_RESULTS}")
    if bare := [at for at, turn in enumerate(turns) if not turn.response and rewards[at]]:
        raise _MisfitError(f"gave a reward to turn {bare[0] + 1}, whose response has no token to place it on")
    if problem := too_large(rewards):
        raise _MisfitError(f"returned a reward that {problem}")
    return rewards


def _read_metrics(entries: Mapping[object, object] | Mapping[str, float]) -> dict[str, float]:
    """Return the finite numbers by their names."""
    metrics: dict[str, float] = {}
    for name, value in entries.items():
        if name == "reward":
            continue
        number = as_number(value)
        if not isinstance(name, str) or number is None:
            raise _MisfitError(f"returned a dict with {type(value).__name__} under {name!r}; {_RESULTS}")
        if math.isfinite(number):
            metrics[name] = number
    return metrics
