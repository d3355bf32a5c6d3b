"""What was said in a rollout of several turns, in words, for people and for files.

Owns: what is known of a turn besides its tokens. Must not know: tokenizers, files, terminals.

The policy answers 7 to the tokens 5 6, the environment says "no" in the tokens 8 9, and the answer to that is 4:

>>> known = {"logprobs": (), "sampled_logprobs": (), "version": 3, "truncated": False}
>>> last = Turn(prompt=(8, 9), response=(4,), said=(("user", "no"),), **known)
>>> turns = (Turn(prompt=(5, 6), response=(7,), **known), last)
>>> found = RolloutInWords.of(Trajectory(turns=turns), decode=lambda ids: [str(each) for each in ids], written=str)
>>> [(turn.start, turn.length, turn.num_added, turn.said) for turn in found.turns]
[(2, 1, 2, (('', '(5, 6)'),)), (5, 1, 2, (('user', 'no'),))]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rallypoint.types.trajectory import Limit, Trajectory, Turn


@dataclasses.dataclass(frozen=True, slots=True)
class TurnInWords:
    """One turn of a rollout."""

    parent: int
    """Number of the turn that it continues, from 0; -1: it begins a sequence."""
    said: tuple[tuple[str, str], ...]
    """Role and text of what was added before the response; without a role: text with marks, of tokens."""
    num_added: int
    """Tokens of that."""
    start: int
    """Place of the response's first token among those of the row."""
    length: int
    """Tokens of the response."""
    response: str
    """Its text, without special tokens."""
    limit: Limit | None
    """The limit at which it was cut off."""


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutInWords:
    """A rollout that an episode made."""

    turns: tuple[TurnInWords, ...]
    metrics: Mapping[str, float]
    """What the episode counted, by name."""
    num_tool_calls: int
    num_tool_errors: int
    own_s: float
    """Seconds that the episode took for itself."""

    @classmethod
    def of(
        cls,
        rollout: Trajectory,
        *,
        decode: Callable[[list[list[int]]], Sequence[str]],
        written: Callable[[Sequence[int]], str],
    ) -> Self | None:
        """Return what was said in a rollout; None if that is one response to its prompt, and nothing else is known.

        Args:
            rollout: turn by turn.
            decode: gives texts without special tokens.
            written: gives a text with them.
        """
        turns = rollout.turns
        if len(turns) == 1 and not rollout.metrics and rollout.rewards is None and not rollout.num_tool_calls:
            return None
        found = turns_in_words(rollout, decode=decode, written=written)
        calls, errors = rollout.num_tool_calls, rollout.num_tool_errors
        return cls(found, rollout.metrics, calls, errors, round(rollout.own_s, 3))


def turns_in_words(
    rollout: Trajectory,
    *,
    decode: Callable[[list[list[int]]], Sequence[str]],
    written: Callable[[Sequence[int]], str],
) -> tuple[TurnInWords, ...]:
    """Return each turn in words; see `RolloutInWords.of`."""
    texts = decode([list(turn.response) for turn in rollout.turns])
    return tuple(
        TurnInWords(
            parent, turn.said or _bare(turn, written), len(turn.prompt), start, len(turn.response), text, turn.limit
        )
        for parent, turn, start, text in zip(rollout.parents, rollout.turns, rollout.starts, texts, strict=True)
    )


def _bare(turn: Turn, written: Callable[[Sequence[int]], str]) -> tuple[tuple[str, str], ...]:
    return (("", written(turn.prompt)),) if turn.prompt else ()
