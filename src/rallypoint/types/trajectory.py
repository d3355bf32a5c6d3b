"""A rollout as it was sampled, turn by turn, and how rollouts become a batch.

A worked example: the prompt 5 6 was answered with 7, the environment added 8 9, and the answer to that was 4.

>>> turn = Turn(prompt=(5, 6), response=(7,), logprobs=(-1.0,), sampled_logprobs=(-1.0,), version=3, truncated=False)
>>> last = Turn(prompt=(8, 9), response=(4,), logprobs=(-2.0,), sampled_logprobs=(-2.0,), version=3, truncated=True)
>>> batch = assemble([Trajectory(turns=(turn, last))], prompt_index=11, sample_index=[0], is_narrowed=False)
>>> batch.tokens.tolist(), batch.loss_mask.int().tolist(), batch.truncated.tolist()
([5, 6, 7, 8, 9, 4], [0, 0, 1, 0, 0, 1], [True])
>>> batch.rollout_logprobs.tolist()
[0.0, 0.0, -1.0, 0.0, 0.0, -2.0]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from rallypoint.types.batch import RolloutBatch
from rallypoint.types.carrier import offsets_from_lengths


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange: tokens that the environment gave, and the response to everything so far."""

    prompt: tuple[int, ...]
    """Token ids that are new since the response before."""
    response: tuple[int, ...]
    """Token ids that the policy sampled."""
    logprobs: tuple[float, ...]
    """Log-probabilities of the response by the model as trained."""
    sampled_logprobs: tuple[float, ...]
    """Log-probabilities of the response by the distribution that was drawn from."""
    version: int
    """Version of the oldest weights that sampled a token of the response."""
    spans: tuple[tuple[int, int], ...] = ()
    """Version and length of every span of the response, where there are several versions."""
    truncated: bool
    """Whether the response ended at a limit and not by itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One rollout: at least one turn."""

    turns: tuple[Turn, ...]


def assemble(
    trajectories: Sequence[Trajectory],
    *,
    prompt_index: int,
    sample_index: Sequence[int],
    is_narrowed: bool,
    by_token: bool = False,
) -> RolloutBatch:
    """Return rollouts of one prompt as ragged rows; what the policy sampled itself is True in `loss_mask`.

    Args:
        trajectories: the rollouts.
        prompt_index: index of the prompt in the run.
        sample_index: which of the rollouts of the prompt each one is.
        is_narrowed: whether tokens were drawn from another distribution than the model's own.
        by_token: whether to keep the version of each token.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    num_tokens = [sum(len(t.prompt) + len(t.response) for t in trajectory.turns) for trajectory in trajectories]
    lengths = torch.tensor([n for turn in turns for n in (len(turn.prompt), len(turn.response))], dtype=torch.int64)
    is_response = torch.arange(len(lengths)) % 2 == 1
    loss_mask = torch.repeat_interleave(is_response, lengths)

    def aligned(logprobs: Iterable[tuple[float, ...]]) -> torch.Tensor:
        values = torch.zeros(len(loss_mask))
        values[loss_mask] = torch.tensor(list(chain.from_iterable(logprobs)))
        return values

    token_versions = None
    if by_token:
        token_versions = torch.zeros(len(loss_mask), dtype=torch.int64)
        spans = [span for turn in turns for span in turn.spans or ((turn.version, len(turn.response)),)]
        token_versions[loss_mask] = torch.tensor([version for version, n in spans for _ in range(n)], dtype=torch.int64)
    tokens = chain.from_iterable(chain.from_iterable((turn.prompt, turn.response) for turn in turns))
    return RolloutBatch(
        offsets=offsets_from_lengths(torch.tensor(num_tokens, dtype=torch.int64)),
        tokens=torch.tensor(list(tokens), dtype=torch.int64),
        loss_mask=loss_mask,
        rollout_logprobs=aligned(turn.logprobs for turn in turns),
        sampled_logprobs=aligned(turn.sampled_logprobs for turn in turns) if is_narrowed else None,
        prompt_index=torch.full((len(trajectories),), prompt_index, dtype=torch.int64),
        sample_index=torch.tensor(sample_index, dtype=torch.int64),
        versions=torch.tensor([min(turn.version for turn in t.turns) for t in trajectories], dtype=torch.int64),
        token_versions=token_versions,
        truncated=torch.tensor([t.turns[-1].truncated for t in trajectories], dtype=torch.bool),
    )
