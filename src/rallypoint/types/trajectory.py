"""A rollout as it was sampled, turn by turn, and how rollouts become a batch.

A worked example: the prompt 5 6 was answered with 7, the environment added 8 9, and the answer to that was 4.

>>> turn = Turn(prompt=(5, 6), response=(7,), logprobs=(-1.0,), sampled_logprobs=(-1.0,), version=3, truncated=False)
>>> last = Turn(prompt=(8, 9), response=(4,), logprobs=(-2.0,), sampled_logprobs=(-2.0,), version=3, truncated=True)
>>> batch = assemble([Trajectory(turns=(turn, last))], prompt_index=11, sample_index=[0], is_narrowed=False)
>>> batch.tokens.tolist(), batch.loss_mask.int().tolist(), batch.truncated.tolist()
([5, 6, 7, 8, 9, 4], [0, 0, 1, 0, 0, 1], [True])
>>> batch.rollout_logprobs.tolist()
[0.0, 0.0, -1.0, 0.0, 0.0, -2.0]

A rollout is a tree: a turn continues the one before it, another earlier one, or none. Each path from a root to a leaf
is a sequence, and a response is trained in the first one that has it. Here the agent goes on from its first turn twice:

>>> again = dataclasses.replace(last, prompt=(8, 1), parent=0)
>>> branched = Trajectory(turns=(turn, last, again))
>>> branched.sequences
((0, 1), (0, 2))
>>> batch = assemble([branched], prompt_index=11, sample_index=[0], is_narrowed=False)
>>> batch.tokens.tolist(), batch.loss_mask.int().tolist(), batch.by_sequence().offsets.tolist()
([5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 1, 4], [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1], [0, 6, 12])
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np
import torch

from rallypoint.types.batch import RolloutBatch

Limit: TypeAlias = Literal["turn", "row", "engine"]
"""Limit of the turn (`max_tokens`, or `rollout.max_response_tokens`), of the row, which all turns share, or of the
engine, which is shorter than both."""
ROOT = -1
"""Parent of a turn that continues none: it begins a sequence of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: tokens that the environment gave, and the response to everything so far."""

    prompt: tuple[int, ...]
    """Token ids that are new since the response of the turn that it continues."""
    response: tuple[int, ...]
    """Token ids that the policy sampled."""
    logprobs: tuple[float, ...]
    """Log-probabilities of the response by the model as trained."""
    sampled_logprobs: tuple[float, ...]
    """Log-probabilities of the response by the distribution that was drawn from."""
    experts: bytes = b""
    """Experts of the pass that sampled each token, see `PolicySequences.experts`; empty if they were not recorded."""
    prompt_experts: bytes = b""
    """Experts of the pass that predicted each token of the prompt."""
    version: int
    """Version of the oldest weights that sampled a token of the response."""
    spans: tuple[tuple[int, int], ...] = ()
    """Version and length of every span of the response, where there are several versions."""
    truncated: bool
    """Whether the response ended at a limit and not by itself."""
    limit: Limit | None = None
    """The limit at which it was truncated, where an episode sampled it; None: it ended by itself."""
    parent: int | None = None
    """Number of the earlier turn of the rollout that it continues, from 0; None: the one before it; `ROOT`: none."""
    said: tuple[tuple[str, str], ...] = ()
    """Role and text of each message in `prompt`; empty if it was given as tokens."""
    state: str | None = None
    """The state of the environment in which it began; None: what was said before it, or else `prompt`."""

    @property
    def num_expert_bytes(self) -> int:
        """Bytes of `experts` of each token."""
        return len(self.experts) // max(1, len(self.response))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One rollout: at least one turn, each after the one that it continues."""

    turns: tuple[Turn, ...]
    rewards: tuple[float, ...] | None = None
    """The reward of each turn; None: the reward function scores the rollout."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    """What else the episode counted, by name."""
    own_s: float = 0.0
    """Seconds that the episode took for itself, and not for sampling."""
    num_tool_calls: int = 0
    """Calls of tools that the policy made, also those that could not be read."""
    num_tool_errors: int = 0
    """Calls among them that could not be read, or whose tool failed."""

    @property
    def sequences(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the turns of each sequence, from a root to a leaf; sequences in the order of their leaves.

        So the last one ends with the last turn.
        """
        if not any(turn.parent is not None for turn in self.turns):
            return (tuple(range(len(self.turns))),)  # as of most rollouts, hundreds a step
        parents = self.parents
        return tuple(_path(leaf, parents) for leaf in sorted({*range(len(parents))} - {*parents}))

    @property
    def parents(self) -> tuple[int, ...]:
        """The number of the turn that each one continues, or `ROOT`."""
        return tuple(number - 1 if turn.parent is None else turn.parent for number, turn in enumerate(self.turns))

    @property
    def starts(self) -> tuple[int, ...]:
        """Where the response of each turn begins among the tokens of the row, as it is trained."""
        found, end = dict[int, int](), 0
        for number in chain.from_iterable(self.sequences):
            turn = self.turns[number]
            found.setdefault(number, end + len(turn.prompt))
            end += len(turn.prompt) + len(turn.response)
        return tuple(found[number] for number in range(len(self.turns)))

    @property
    def as_trained(self) -> tuple[int, ...]:
        """The number of every turn once, where it is trained: in the first sequence that has it."""
        return tuple(dict.fromkeys(chain.from_iterable(self.sequences)))


def _path(leaf: int, parents: Sequence[int]) -> tuple[int, ...]:
    found = [leaf]
    while parents[found[-1]] != ROOT:
        found.append(parents[found[-1]])
    return tuple(reversed(found))


def assemble(
    trajectories: Sequence[Trajectory],
    *,
    prompt_index: int,
    sample_index: Sequence[int],
    is_narrowed: bool,
    by_token: bool = False,
    has_states: bool = False,
) -> RolloutBatch:
    """Return rollouts of one prompt as ragged rows; `loss_mask` is True for what the policy sampled, once a rollout.

    Args:
        trajectories: the rollouts.
        prompt_index: index of the prompt in the run.
        sample_index: which of the rollouts of the prompt each one is.
        is_narrowed: whether tokens of all of them were drawn from another distribution than the model's own.
        by_token: whether to keep the version of each token.
        has_states: whether to keep in which state of its environment the turn of each token began.
    """
    places: list[tuple[Turn, bool]] = []  # turns of sequences, and whether they are trained there
    tokens: list[int] = []
    is_trained: list[bool] = []
    offsets, starts = [0], list[int]()  # of rows, and of those sequences that begin within one
    for trajectory in trajectories:
        trained: set[int] = set()
        for path in trajectory.sequences:
            starts += [len(tokens)] if trained else []
            for number in path:
                turn, is_new = trajectory.turns[number], number not in trained
                places.append((turn, is_new))
                tokens += turn.prompt + turn.response
                is_trained += [False] * len(turn.prompt) + [is_new] * len(turn.response)
            trained.update(path)
        offsets.append(len(tokens))

    def aligned(values: Callable[[Turn], Sequence[float]], dtype: type = np.float32) -> torch.Tensor:
        found: list[float] = []
        for turn, is_new in places:
            found += (0,) * len(turn.prompt)
            found += values(turn) if is_new else (0,) * len(turn.response)
        return _tensor(found, dtype)

    is_narrowed = is_narrowed or any(turn.sampled_logprobs != turn.logprobs for turn, _ in places)  # as a turn asked
    mask = _tensor(is_trained, np.bool_)
    return RolloutBatch(
        offsets=_tensor(offsets, np.int64),
        tokens=_tensor(tokens, np.int64),
        loss_mask=mask,
        sequence_starts=torch.zeros_like(mask).index_fill_(0, torch.tensor(starts), True) if starts else None,
        experts=_experts([turn for turn, _ in places]),
        rollout_logprobs=aligned(lambda turn: turn.logprobs),
        sampled_logprobs=aligned(lambda turn: turn.sampled_logprobs) if is_narrowed else None,
        prompt_index=_tensor([prompt_index] * len(trajectories), np.int64),
        sample_index=_tensor(sample_index, np.int64),
        versions=_tensor([min(turn.version for turn in one.turns) for one in trajectories], np.int64),
        token_versions=aligned(_versions, np.int64) if by_token else None,
        turn_states=aligned(_states, np.int64) if has_states else None,
        truncated=_tensor([one.turns[-1].truncated for one in trajectories], np.bool_),
    )


def _versions(turn: Turn) -> list[int]:
    """Return the version of each token of a response."""
    spans = turn.spans or ((turn.version, len(turn.response)),)
    return [version for version, length in spans for _ in range(length)]


def _experts(turns: Sequence[Turn]) -> torch.Tensor | None:
    """Return the experts of all tokens of turns, [T, bytes], zeros where they were not recorded; None if none were."""
    size = max((turn.num_expert_bytes for turn in turns), default=0)
    if not size:
        return None
    halves = (((turn.prompt, turn.prompt_experts), (turn.response, turn.experts)) for turn in turns)
    parts = chain.from_iterable(halves)
    found = b"".join(experts.rjust(len(tokens) * size, b"\0") for tokens, experts in parts)
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).view(-1, size)


def _states(turn: Turn) -> list[int]:
    """Return a number for the state in which a turn began, for each token of its response."""
    state = turn.said or turn.prompt if turn.state is None else turn.state
    digest = hashlib.blake2b(repr(state).encode(errors="replace"), digest_size=8).digest()
    return [int.from_bytes(digest, "little") >> 1] * len(turn.response)


def _tensor(values: Sequence[float], dtype: type) -> torch.Tensor:
    """Return what `torch.tensor` returns; for a list in a third of its time."""
    return torch.from_numpy(np.array(values, dtype=dtype))  # pyright: ignore[reportUnknownMemberType]
