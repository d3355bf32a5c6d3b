"""Which rows of a rank pass through its model together: micro-batches under the token cap, in lanes side by side.

Owns: how many lanes a batch is worth, and which rows are in which. Must not know: models, losses, threads. Invariant:
the micro-batches under way at one time, one in each lane, hold `max_tokens` together at most.

    one lane, cap 100       [0 1 2 3: 100]  [4 5 6 7: 90]
    two lanes, cap 50       [0 1: 50]  [6 7: 45]
                            [2 3: 50]  [4 5: 45]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from rallypoint.data.balance import balance_groups, cost_together, row_costs
from rallypoint.data.packing import pack_groups
from rallypoint.errors import ModelError
from rallypoint.types import Sequences

Lane: TypeAlias = list[list[int]]
"""The rows of each of its micro-batches, one after the other."""

_WORTH = 1.2
"""How much more the costliest lane may have to do than its share: what lanes save beside operations that are cut."""


def check_tokens(batch: Sequences, num_ids: int) -> None:
    """Refuse tokens that a model has no row of its embedding for, as a policy with a larger one may sample.

    Args:
        batch: any rows.
        num_ids: that the model knows, from 0.

    Raises:
        ModelError: there is one; its place is named.
    """
    unknown = (batch.tokens < 0) | (batch.tokens >= num_ids)
    if unknown.any():
        place = int(unknown.nonzero()[0])
        row = int(batch.row_of_token[place])
        raise ModelError(
            f"sample {int(batch.sample_index[row])} of prompt {int(batch.prompt_index[row])} has the token "
            f"{int(batch.tokens[place])}, but this model's embedding has {num_ids} rows; what reads the rows of a "
            "policy needs an embedding that is as large"
        )


def plan_lanes(batch: Sequences, max_tokens: int, *, most: int, attention_cost: float = 0.0) -> list[Lane]:
    """Deal rows out to lanes by cost, and pack the rows of each under its share of the cap.

    A batch has fewer lanes, down to one, where a row needs a larger share of the cap, or where they would be uneven:
    few rows, or few groups of them with long prompts, which each lane would compute anew.

    Args:
        batch: any rows.
        max_tokens: the hard cap.
        most: how many lanes there may be.
        attention_cost: see `row_costs`.

    Returns:
        The lanes; one, if there are no rows.

    Raises:
        RowTooLongError: one row alone exceeds the cap.
    """
    lengths, groups = batch.lengths.tolist(), batch.prompt_index.tolist()
    most = min(most, max_tokens // max(1, *lengths)) if most > 1 and lengths else 1
    if most > 1:
        costs, shared = row_costs(lengths, attention_cost), batch.num_prompt_tokens.tolist()
        whole = cost_together(range(len(lengths)), costs, groups, shared)
        while most > 1:
            dealt = balance_groups(costs, groups, shared, most)
            if most * max(cost_together(rows, costs, groups, shared) for rows in dealt) <= _WORTH * whole:
                return [_packed(rows, lengths, groups, max_tokens // most) for rows in dealt]
            most //= 2
    return [pack_groups(lengths, groups, max_tokens)]


def _packed(rows: Sequence[int], lengths: Sequence[int], groups: Sequence[int], max_tokens: int) -> Lane:
    parts = pack_groups([lengths[row] for row in rows], [groups[row] for row in rows], max_tokens)
    return [[rows[index] for index in part] for part in parts]
