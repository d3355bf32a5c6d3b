"""The rollouts of a step, or of a validation, and what became of them.

Owns: the columns of a table of them. Must not know: how rollouts are sampled, where the table is written, or who looks
at it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from rallypoint.algorithms import rows_that_learn
from rallypoint.data import Example, whole_text
from rallypoint.environments.attempts import Attempt, answer_in
from rallypoint.environments.conversation import RolloutInWords, TurnInWords
from rallypoint.environments.scored import Scored, ScoredGroup
from rallypoint.types import ActorBatch, RolloutBatch, Sequences

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

NO_SCORE = "it has no score"
REPLACED = "its group had no signal, and was replaced"
NO_SIGNAL = "group without signal: its rollouts earned the same"
TRUNCATED = "truncated, and rollout.mask_truncated is set"
AT_MEAN = "its score is the mean of its group: the advantage is 0"
"""Why nothing was learned from a rollout."""


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout in words, for people."""

    name: str
    prompt: str
    response: str
    ground_truth: str
    score: float
    truncated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepRollouts:
    """The rollouts of a step or of a validation, and what became of them."""

    rows: RolloutBatch
    """All that were sampled."""
    scored: Scored
    """Those that have a score."""
    examples: Sequence[Example]
    """Example of each of `rows`."""
    texts: Sequence[str]
    """Response of each, without special tokens."""
    learned: Sequences | None = None
    """What the actor learned from, in any order; None before it has, and of a validation."""
    needs_advantage: bool = True
    """Whether nothing is learned from a row whose advantages are all 0, as nothing but rewards is."""
    replaced: Set[int] = frozenset()
    """Indices of the prompts whose groups were replaced by others: nothing was learned from them."""
    conversations: Sequence[RolloutInWords | None] = ()
    """What was said in each of `rows`; None, or nothing at all, where that is one response to its prompt."""

    @classmethod
    def of(
        cls, rows: RolloutBatch, scored: Scored, groups: Sequence[ScoredGroup], replaced: Set[int] = frozenset()
    ) -> Self:
        """Return the rollouts of these groups, which together are these rows."""
        examples = [example for group in groups for example in group.examples]
        texts = [text for group in groups for text in group.texts]
        said = [one for group in groups for one in group.conversations or [None] * len(group.rows)]
        return cls(rows, scored, examples, texts, replaced=replaced, conversations=said)

    def records(self, limit: int) -> tuple[RolloutRecord, ...]:
        """Return the first `limit` rollouts that have a score."""
        scores = self.scored.batch.scores[:limit].tolist()
        return tuple(
            RolloutRecord(
                name=self.examples[row].name,
                prompt=self.examples[row].prompt[-1].content,
                response=self.texts[row],
                ground_truth=str(self.examples[row].ground_truth),
                score=score,
                truncated=bool(self.rows.truncated[row]),
            )
            for row, score in zip(self.scored.kept_rows, scores, strict=False)
        )

    def attempts(self) -> list[Attempt]:
        """Return those that have a score, for pass@k and the like."""
        scored, scores = self.scored, self.scored.batch.scores.tolist()
        return [
            Attempt(
                source=self.examples[row].data_source,
                prompt=int(self.rows.prompt_index[row]),
                score=scores[place],
                acc=scored.extras[place].get("acc"),
                answer=scored.answers[place] or answer_in(self.texts[row]),
            )
            for place, row in enumerate(scored.kept_rows)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the fields that grow with tokens, about."""
        experts = 0 if self.rows.experts is None else self.rows.experts.numel()
        return self.rows.num_tokens * 56 + experts + 2 * sum(map(len, self.texts))

    def table(self, step: int) -> pa.Table:
        """Return a row for each rollout, with the columns of docs/tracking.md."""
        import pyarrow as pa

        rows, batch, kept = self.rows, self.scored.batch, self.scored.kept_rows
        place = {row: place for place, row in enumerate(kept)}
        scores, names, answers = batch.scores.tolist(), batch.part_names, self.scored.answers
        parts = [()] * len(kept) if batch.reward_parts is None else _nulls(batch.reward_parts.tolist())
        why = {failure.row: f"{failure.kind}: {failure.reason}" for failure in self.scored.failures}
        numbers, text, floats = pa.map_(pa.string(), pa.float64()), pa.string(), pa.float32()
        of_rows, prompts, truncated = _Lists(rows), rows.prompt_index.tolist(), rows.truncated.tolist()

        def each(of: Callable[[int], Any], kind: pa.DataType) -> pa.Array:
            return pa.array([of(row) for row in range(len(rows))], kind)

        def of_kept(of: Callable[[int], Any], kind: pa.DataType) -> pa.Array:
            return each(lambda row: of(place[row]) if row in place else None, kind)

        columns = {
            "step": each(lambda _: step, pa.int32()),
            "prompt_index": pa.array(rows.prompt_index.numpy()),
            "sample_index": pa.array(rows.sample_index.numpy()),
            "name": each(lambda row: _writable(self.examples[row].name), text),
            "data_source": each(lambda row: _writable(self.examples[row].data_source), text),
            "prompt": each(lambda row: _writable(in_words(self.examples[row])), text),
            "response": each(lambda row: _writable(self.texts[row]), text),
            "ground_truth": each(lambda row: _writable(str(self.examples[row].ground_truth)), text),
            "answer": of_kept(lambda at: None if (found := answers[at]) is None else _writable(found), text),
            "score": of_kept(scores.__getitem__, pa.float64()),
            "reward_parts": of_kept(lambda at: list(zip(names, parts[at], strict=True)), numbers),
            "reward_extras": of_kept(lambda at: list(self.scored.extras[at].items()), numbers),
            "replaced": each(lambda row: prompts[row] in self.replaced, pa.bool_()),
            "failure": each(lambda row: _writable(why[row]) if row in why else None, text),
            "untrained": pa.array(self._untrained(), text),
            "finish_reason": each(lambda row: "length" if truncated[row] else "stop", text),
            **self._conversation_columns(),
            "version": pa.array(rows.versions.numpy()),
            "prompt_ids": of_rows(rows.tokens, pa.int32(), of_prompt=True),
            "response_ids": of_rows(rows.tokens, pa.int32()),
            "loss_mask": of_rows(rows.loss_mask, pa.bool_()),
            "sequence_starts": of_rows(rows.sequence_starts, pa.bool_()),
            "rollout_logprobs": of_rows(rows.rollout_logprobs, floats),
            "sampled_logprobs": of_rows(rows.sampled_logprobs, floats),
            "token_versions": of_rows(rows.token_versions, pa.int64()),
            "experts": each(lambda row: _experts(rows, row), pa.large_binary()),
            "turn_states": of_rows(rows.turn_states, pa.int64()),
        }
        where = pa.array([place.get(row) for row in range(len(rows))], pa.int64())
        columns["token_rewards"] = _Lists(batch)(batch.token_rewards, floats).take(where)
        learned = self.learned if isinstance(self.learned, ActorBatch) else None
        at = {pair: place for place, pair in enumerate(_pairs(learned))} if learned is not None else {}
        where = pa.array([at.get(pair) for pair in _pairs(rows)], pa.int64())
        of_learned = of_rows if learned is None else _Lists(learned)
        for name in ("old_logprobs", "entropies", "advantages"):
            values = None if learned is None else getattr(learned, name)
            columns[name] = of_learned(values, floats).take(where)
        return pa.table(columns)

    def _untrained(self) -> list[str | None]:
        """Return why nothing was learned from each row; None where something was, and in a validation."""
        rows, learned, scored = self.rows, self.learned, self.scored.batch
        if learned is None:
            return [None] * len(rows)
        places, kept = {pair: place for place, pair in enumerate(_pairs(learned))}, set(self.scored.kept_rows)
        groups, scores = set(learned.prompt_index.tolist()), defaultdict[int, set[float]](set)
        for prompt, score in zip(scored.prompt_index.tolist(), scored.scores.tolist(), strict=True):
            scores[prompt].add(score)
        learns = torch.ones(len(learned), dtype=torch.bool)
        if self.needs_advantage and isinstance(learned, ActorBatch):
            learns = rows_that_learn(learned.advantages, learned.loss_mask, learned.offsets)
        has_learned, truncated = learns.tolist(), rows.truncated.tolist()

        def why(row: int, prompt: int, pair: tuple[int, int]) -> str | None:
            if row not in kept:
                return NO_SCORE
            if prompt in self.replaced:
                return REPLACED
            if pair not in places:
                is_cut = truncated[row] and (prompt in groups or len(scores[prompt]) > 1)
                return TRUNCATED if is_cut else NO_SIGNAL
            if has_learned[places[pair]]:
                return None
            return NO_SIGNAL if len(scores[prompt]) == 1 else AT_MEAN

        return [why(row, pair[0], pair) for row, pair in enumerate(_pairs(rows))]

    def _conversation_columns(self) -> dict[str, pa.Array]:
        import pyarrow as pa

        said, whole, text = self.conversations or [None] * len(self.rows), pa.int32(), pa.string()
        message = pa.struct({"role": text, "text": text})
        turn = pa.struct(
            {"parent": whole, "said": pa.list_(message), "num_added": whole, "start": whole, "length": whole}
            | {"response": text, "limit": text}
        )
        turns = [None if one is None else [as_entries(each) for each in one.turns] for one in said]
        return {
            "turns": pa.array(turns, pa.list_(turn)),
            "metrics": pa.array([one and list(one.metrics.items()) for one in said], pa.map_(text, pa.float64())),
            "num_tool_calls": pa.array([one and one.num_tool_calls for one in said], whole),
            "num_tool_errors": pa.array([one and one.num_tool_errors for one in said], whole),
            "environment_s": pa.array([one and one.own_s for one in said], pa.float64()),
        }


def as_entries(turn: TurnInWords) -> dict[str, object]:
    """Return a turn as files have it."""
    said = [{"role": _writable(role), "text": _writable(text)} for role, text in turn.said]
    entries = {name: getattr(turn, name) for name in ("parent", "num_added", "start", "length", "limit")}
    return {**entries, "said": said, "response": _writable(turn.response)}


def in_words(example: Example) -> str:
    """Return a prompt as text: its message, or each of several after its role."""
    if len(example.prompt) == 1:
        return example.prompt[0].content
    return "\n".join(f"{message.role}: {whole_text(message.fields)}" for message in example.prompt)


def _nulls(parts: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Return the scores of each row with None, null in files, where a reward does not apply."""
    return [[None if math.isnan(score) else score for score in row] for row in parts]


def _pairs(batch: Sequences) -> list[tuple[int, int]]:
    """Return what identifies each row of a step: its prompt and its sample."""
    return list(zip(batch.prompt_index.tolist(), batch.sample_index.tolist(), strict=True))


class _Lists:
    """Columns with a list for each row of a batch: of its response, from the first token that the policy sampled."""

    def __init__(self, batch: Sequences) -> None:
        # numpy, since torch would wake threads for it that training needs.
        self._offsets = batch.offsets.numpy()
        sampled = np.concatenate(([0], batch.loss_mask.numpy().cumsum()))
        self._is_response = sampled[1:] > sampled[self._offsets[:-1]].repeat(np.diff(self._offsets))

    def __call__(self, values: Tensor | None, kind: pa.DataType, *, of_prompt: bool = False) -> pa.Array:
        """Return the column of numbers for each token.

        Args:
            values: [T]; None for null in each row.
            kind: type of a value.
            of_prompt: takes the tokens before the response instead.
        """
        import pyarrow as pa

        if values is None:
            return pa.nulls(len(self._offsets) - 1, pa.list_(kind))
        where = self._is_response != of_prompt
        ends = np.concatenate(([0], where.cumsum()))[self._offsets]
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values.numpy()[where], kind))


def _experts(rows: RolloutBatch, row: int) -> bytes | None:
    """Return what a row has in `PolicySequences.experts`, of all its tokens end to end."""
    if rows.experts is None:
        return None
    return rows.experts[int(rows.offsets[row]) : int(rows.offsets[row + 1])].numpy().tobytes()


def _writable(text: str) -> str:
    """Return a text without halves of characters, which no file holds."""
    return text.encode("utf-8", "replace").decode("utf-8")
