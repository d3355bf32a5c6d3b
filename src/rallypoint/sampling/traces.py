"""Rollouts as training traces of OpenEnv (version 1), which other trainers read.

Owns: what of a rollout is in a trace. Must not know: who reads it. A turn of a trace is one call: all tokens before the
response, and the response. Its loss mask covers both, so every sampled token is trained in one turn only.

The row of a rollout file whose two sequences are 5 6 7 and 5 8:

>>> row = {"prompt_ids": [5, 6], "response_ids": [7, 5, 8], "loss_mask": [True, False, True], "score": 1.0}
>>> row |= {"sequence_starts": [False, True, False], "rollout_logprobs": [-0.5, 0.0, -0.25], "version": 3}
>>> row |= {"token_rewards": [0.0, 0.0, 1.0], "prompt_index": 4, "sample_index": 1, "name": "train.jsonl:7"}
>>> trace = trace_of(row)
>>> [(turn["node_id"], turn["prompt_token_ids"], turn["completion_token_ids"]) for turn in trace["turns"]]
[('4-1-0', [5, 6], [7]), ('4-1-1', [5], [8])]
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any


def trace_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trace of a rollout, as JSON has it.

    Args:
        row: of `read_rollouts`, by the columns of docs/tracking.md.
    """
    of_rollout = {name: row[name] for name in ("name", "prompt_index", "sample_index", "score")}
    before = len(row["prompt_ids"])
    ids, rewards = [*row["prompt_ids"], *row["response_ids"]], row["token_rewards"]
    turns: list[dict[str, Any]] = []
    for start, begin, end in _turns_of(row):
        said = slice(begin - before, end - before)
        reward = None if rewards is None else math.fsum(rewards[said])
        turns.append(
            {
                "node_id": f"{row['prompt_index']}-{row['sample_index']}-{len(turns)}",
                "prompt_token_ids": ids[start:begin],
                "completion_token_ids": ids[begin:end],
                "per_token_logps": list(row["rollout_logprobs"][said]),
                "loss_mask": [0] * (begin - start) + [1] * (end - begin),
                "request": {},
                "response": {},
                "metadata": {**of_rollout, "turn": len(turns), "version": row["version"], "reward": reward},
            }
        )
    return {"schema_version": 1, "turns": turns}


def _turns_of(row: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Yield where the sequence of each turn begins, and where its response begins and ends."""
    before = [False] * len(row["prompt_ids"])
    sampled = [*before, *row["loss_mask"], False]
    starts = [*before, *(row["sequence_starts"] or [False] * len(row["loss_mask"])), True]
    start, begin = 0, None
    for at, (is_sampled, is_start) in enumerate(zip(sampled, starts, strict=True)):
        if begin is not None and (is_start or not is_sampled):
            yield start, begin, at
            begin = None
        start = at if is_start else start
        begin = at if is_sampled and begin is None else begin
