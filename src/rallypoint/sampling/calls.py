"""The calls of one rollout: which earlier one each continues, its random numbers, and which of them count.

Owns: the tree of calls. Must not know: requests, episodes, what a call costs. Invariants: a call continues the one
whose tokens, all of its prompt and its response, are its own longest exact beginning; where calls run at the same time,
neither random numbers nor the order of turns depends on which of them comes first, or ends first.

The whole tokens of four calls, whose responses are 7, 4, 3 and 2: the second continues the first, the third goes on
from the first once more, and the last begins anew.

>>> calls, turn = Calls(prompt=(5, 6)), {"logprobs": (), "sampled_logprobs": (), "version": 0, "truncated": False}
>>> for tokens, response in (((5, 6), 7), ((5, 6, 7, 8), 4), ((5, 6, 7, 9), 3), ((1,), 2)):
...     call = calls.begin(tokens)
...     _ = calls.end(call, Turn(prompt=(), response=(response,), **turn))
>>> [(turn.prompt, turn.parent) for turn in calls.turns]
[((5, 6), None), ((8,), None), ((9,), 0), ((1,), -1)]
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rallypoint.types import ROOT, Turn

_FIRST_OF_BRANCHES = 2**29
"""Least number of a call that is numbered by its tokens; there are as many more."""


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """A call from its beginning."""

    tokens: tuple[int, ...]
    """All of them; empty once it has ended, as its turn and those before it have them."""
    num_tokens: int
    """How many there are."""
    parent: int
    """Number of the turn that it continues, or `ROOT`."""
    start: int
    """How many of its tokens that turn and those before it have."""
    number: int
    """Says its random numbers."""
    hasher: hashlib.blake2b
    """Has read all of its tokens, and knows their digest."""
    asked: int
    """Calls that began before it."""
    ended: int
    """Calls that had ended before it began."""


class Calls:
    """The calls of one rollout, in the order of their ends."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        """Begin without any.

        Args:
            prompt: tokens of the rollout's prompt.
        """
        self.turns: list[Turn] = []
        """All that have ended."""
        self._prompt, self._ended = prompt, list[Call]()
        self._hashers: dict[int, hashlib.blake2b] = {ROOT: hashlib.blake2b(digest_size=16)}
        """For each turn, what has read all tokens up to its end, so that the next call's digest takes its own alone."""
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._times: defaultdict[bytes, int] = defaultdict(int)
        self._num_asked = 0

    def begin(self, tokens: tuple[int, ...], *, parent: int | None = None, number: int | None = None) -> Call:
        """Return a call.

        Args:
            tokens: all of them.
            parent: the turn that it continues; None to find it.
            number: says its random numbers; None: that is up to its tokens, and how often they were asked before.
        """
        found, start = self._longest_beginning(tokens) if parent is None else (parent, self._end_of(parent))
        hasher = _updated(self._hashers[found], tokens[start:])
        key = hasher.digest()
        times, asked = self._times[key], self._num_asked
        self._times[key], self._num_asked = times + 1, asked + 1
        if number is None:
            number = 0 if tokens == self._prompt and not times else _number_of(key, times)
        return Call(tokens, len(tokens), found, start, number, hasher, asked, len(self.turns))

    def end(self, call: Call, turn: Turn) -> Turn:
        """Note what came of a call, and return it; one that failed is not noted.

        Args:
            call: that has ended.
            turn: has its response.
        """
        number = len(self.turns)
        parent = None if call.parent == number - 1 else call.parent
        prompt = call.tokens[call.start :]
        experts = turn.prompt_experts[call.start * turn.num_expert_bytes :]
        turn = dataclasses.replace(turn, prompt=prompt, prompt_experts=experts, parent=parent)
        self.turns.append(turn)
        call.tokens = ()
        self._ended.append(call)
        self._hashers[number] = _updated(call.hasher, turn.response)
        self._children[call.parent].append(number)
        return turn

    def kept(self) -> tuple[Turn, ...]:
        """Return the turns that count, each after the one that it continues.

        Of several calls with the same tokens some are those of a client that gave up and asked again. Those that
        nothing continues are left out if another one is continued, and else all but the one that was asked last.

        Calls that ran at the same time are in the order of their depths, and then of their numbers.
        """
        if len(self.turns) == 1:
            return tuple(self.turns)  # as most rollouts are, hundreds a step
        order = self._order_of_kept()
        place = {ROOT: ROOT} | {number: place for place, number in enumerate(order)}
        parents = [place[self._ended[number].parent] for number in order]
        return tuple(
            dataclasses.replace(self.turns[number], parent=None if parent == at - 1 else parent)
            for at, (number, parent) in enumerate(zip(order, parents, strict=True))
        )

    def overlapping(self) -> list[list[int]]:
        """Return groups of turns that count, by their places, whose order is not that of their calls.

        They were sampled at the same time, some of a group at least.

        >>> calls, turn = Calls(()), {"logprobs": (), "sampled_logprobs": (), "version": 0, "truncated": False}
        >>> for call in [calls.begin((5,)), calls.begin((6,))]:
        ...     _ = calls.end(call, Turn(prompt=(), response=(7,), **turn))
        >>> calls.overlapping()
        [[0, 1]]
        """
        order, groups = self._order_of_kept(), list[list[int]]()
        for number in sorted(order):
            group = [number]
            while groups and groups[-1][-1] >= self._ended[number].ended:
                group = groups.pop() + group
            groups.append(group)
        return [sorted(map(order.index, group)) for group in groups if len(group) > 1]

    def _order_of_kept(self) -> list[int]:
        """Return the numbers of the turns that count, in their order."""
        depths, order = [0] * len(self.turns), list[int]()
        for number, call in enumerate(self._ended):
            depths[number] = 0 if call.parent == ROOT else depths[call.parent] + 1
        for together in self._together():
            order += sorted(together, key=lambda number: (depths[number], self._ended[number].number))
        dropped = self._asked_again(depths)
        return [number for number in order if number not in dropped]

    def _together(self) -> list[list[int]]:
        """Return the calls in the order of their ends, cut wherever none was running."""
        found, soonest = [list[int]()], len(self.turns)
        for number in reversed(range(len(self.turns))):
            found[-1].append(number)
            soonest = min(soonest, self._ended[number].ended)
            if soonest >= number:
                found.append([])
        return [each[::-1] for each in reversed(found[:-1])]

    def _asked_again(self, depths: Sequence[int]) -> set[int]:
        same: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        for number, call in enumerate(self._ended):
            # A call may continue another without a token between.
            same[depths[number], call.hasher.digest()].append(number)
        dropped = set[int]()
        for calls in same.values():
            leaves = sorted(
                (number for number in calls if not self._children[number]), key=lambda n: self._ended[n].asked
            )
            dropped.update(leaves if len(leaves) < len(calls) else leaves[:-1])
        return dropped

    def _end_of(self, number: int) -> int:
        """Return how many tokens a turn and those before it have."""
        return 0 if number == ROOT else self._ended[number].num_tokens + len(self.turns[number].response)

    def _longest_beginning(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Return the turn that begins so, and up to where; of several equal ones that which was asked last."""
        left, best = [(ROOT, 0)], (0, -1, ROOT)
        while left:
            parent, start = left.pop()
            for number in self._children[parent]:
                turn, end = self.turns[number], self._end_of(number)
                if tokens[start:end] == turn.prompt + turn.response:
                    left.append((number, end))
                    best = max(best, (end, self._ended[number].asked, number))
        return best[2], best[0]


def _updated(hasher: hashlib.blake2b, tokens: Sequence[int]) -> hashlib.blake2b:
    """Return a hasher that has read some more tokens."""
    longer = hasher.copy()
    longer.update(np.array(tokens, np.int64).tobytes())
    return longer


def _number_of(key: bytes, times: int) -> int:
    mixed = hashlib.blake2b(key + times.to_bytes(8, "little"), digest_size=8).digest()
    return _FIRST_OF_BRANCHES + int.from_bytes(mixed, "little") % _FIRST_OF_BRANCHES
