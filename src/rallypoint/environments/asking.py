"""What a reward function is asked about the rollouts of a group.

Owns: how rows become its arguments. Must not know: which function it is, what it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rallypoint.data.dataset import Example
from rallypoint.environments.outcome import RewardCall, TurnSaid
from rallypoint.types.batch import RolloutBatch
from rallypoint.types.trajectory import Trajectory, Turn


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """The rollouts of a group."""

    rows: RolloutBatch
    more: Sequence[str]
    """Arguments that the function wants besides the usual ones."""
    decode: Callable[[list[list[int]]], Sequence[str]]
    """Gives texts without special tokens."""
    token_texts: Callable[[Sequence[int]], Sequence[str]]
    """Gives the text of each token, also of special ones."""
    rollouts: Sequence[Trajectory] = ()
    """The rows turn by turn; empty if each is a single one."""

    def call(self, row: int, example: Example, response: Sequence[int], text: str) -> RewardCall:
        """Return what is asked about a row.

        Args:
            row: number of the row.
            example: that it answers.
            response: ids of what the policy sampled.
            text: of the response.
        """
        rows, more, token_ids = self.rows, self.more, tuple(response)
        part = slice(int(rows.offsets[row]), int(rows.offsets[row + 1]))
        sampled = rows.loss_mask[part]
        return RewardCall(
            name=f"{example.name}, sample {int(rows.sample_index[row])}",
            data_source=example.data_source,
            solution_str=text,
            ground_truth=example.ground_truth,
            extra_info=example.extra_info,
            token_ids=token_ids,
            ended=not bool(rows.truncated[row]),
            group=int(rows.prompt_index[row]),
            sample=int(rows.sample_index[row]),
            tokens=tuple(self.token_texts(token_ids)) if "tokens" in more else (),
            logprobs=tuple(rows.rollout_logprobs[part][sampled].tolist()) if "logprobs" in more else (),
            messages=tuple(each.fields for each in example.prompt) if "messages" in more else (),
            turns=tuple(self._turns(row)) if "turns" in more else (),
            metrics=dict(self.rollouts[row].metrics) if self.rollouts else {},
        )

    def _turns(self, row: int) -> Sequence[TurnSaid]:
        if self.rollouts:
            turns = self.rollouts[row].turns
        else:
            part = slice(int(self.rows.offsets[row]), int(self.rows.offsets[row + 1]))
            tokens, sampled = self.rows.tokens[part], self.rows.loss_mask[part]
            prompt, response = tuple(tokens[~sampled].tolist()), tuple(tokens[sampled].tolist())
            turns = (bare_turn(prompt, response, truncated=bool(self.rows.truncated[row])),)
        texts = self.decode([list(ids) for turn in turns for ids in (turn.prompt, turn.response)])
        return [said(turn, texts[2 * number], texts[2 * number + 1]) for number, turn in enumerate(turns)]


def bare_turn(prompt: tuple[int, ...], response: tuple[int, ...], *, truncated: bool = False) -> Turn:
    """Return a turn of which nothing else is known."""
    return Turn(prompt=prompt, response=response, logprobs=(), sampled_logprobs=(), version=0, truncated=truncated)


def said(turn: Turn, prompt: str, response: str) -> TurnSaid:
    """Return a turn as a function gets it, with the texts of its tokens."""
    return {
        "prompt": prompt,
        "prompt_ids": list(turn.prompt),
        "response": response,
        "response_ids": list(turn.response),
        "finish_reason": "length" if turn.truncated else "stop",
        "limit": turn.limit,
    }
