"""Rows that are computed and drawn together for some steps, whoever of them ends meanwhile.

Owns: their layouts, how they are drawn, and for how many steps that pays. Must not know: who else runs.

What is made for rows that run together is worth keeping, as to make it costs more than to compute a few rows for
nothing. So rows get memory for some tokens ahead, and one that has ended stays until the next cohorts are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rallypoint.generation.drawing import Drawing
from rallypoint.generation.native.accelerator.backend import PagedRows
from rallypoint.generation.native.block_manager import BlockPool
from rallypoint.generation.native.block_tables import Integers, Seats
from rallypoint.generation.native.cpu.backend import QueryRows
from rallypoint.generation.native.model_runner import Passes
from rallypoint.generation.native.sequence import BLOCK_TOKENS, Row
from rallypoint.generation.sampler import Draws


class Cohort:
    """Some rows that have tokens."""

    def __init__(self, rows: Sequence[Row], layouts: Sequence[QueryRows | PagedRows], passes: Passes) -> None:
        """Begin with what the newest tokens of rows look at, in the order of the rows."""
        self.rows = rows
        """Those that have left among them."""
        self._layouts, self._passes = layouts, passes
        self._drawing = Drawing([(row.request, row.tokens) for row in rows], layouts[0].tokens.device)

    @classmethod
    def of(cls, passes: Passes, pool: BlockPool, seats: Seats, num_steps: int, rows: Sequence[Row]) -> Self:
        """Lay out for some steps what the newest tokens of rows look at."""
        numbers = [(row.seat, row.tokens[-1], len(row.request.tokens) + len(row.tokens) - 1) for row in rows]
        queries = seats.queries(*np.array(numbers).T)
        return cls(rows, passes.lay_out(pool, queries, num_steps), passes)

    @property
    def max_steps_at_once(self) -> int:
        """How many tokens of each row can be drawn without a look at them, where that pays and nobody waits for one."""
        is_looked_at = any(row.request.streamed for row in self.rows)
        return self._passes.max_steps_at_once if self._drawing.is_the_same_for_all_tokens and not is_looked_at else 1

    def draw(self, num_steps: int) -> list[Draws]:
        """Send the newest token of every row through the model, and draw the next, that often."""
        if num_steps > 1 or (self._passes.is_in_pages and self._drawing.is_the_same_for_all_tokens):
            return self._passes.draw_ahead(self._layouts, self._drawing.rules, self._drawing.numbers(num_steps))
        draws = self._drawing.draw(self._passes.logits(self._passes.decode(self._layouts)))
        newest = draws.tokens.split([layout.num_queries for layout in self._layouts])
        for layout, tokens in zip(self._layouts, newest, strict=True):
            if layout.has_moves:
                layout.advance(tokens)
        return [draws]


def first_draws(rows: Sequence[Row], passes: Passes) -> Draws:
    """Draw the first token of rows whose prompts have been computed."""
    states: list[Tensor] = []
    for row in rows:
        state = row.prompt_blocks[-1].last_state
        assert state is not None, "the prompts of those that join are computed first"
        states.append(state)
    drawing = Drawing([(row.request, row.tokens) for row in rows], states[0].device)
    return drawing.draw(passes.logits(torch.stack(states)))


def steps_that_are_of_use(left: Sequence[int], most: int) -> int:
    """Return how many tokens to draw at once, given how many each row still may have: [B].

    A sixteenth of what is computed may be for rows that have ended.

    >>> steps_that_are_of_use([8, 8, 8], 8), steps_that_are_of_use([2, 9], 8), steps_that_are_of_use([1] + [9] * 99, 8)
    (8, 2, 8)
    """
    steps = np.arange(1, most + 1)
    wasted = (steps[:, None] - np.array(left)).clip(0).sum(1)
    return int(steps[wasted <= steps * len(left) / 16][-1])


def steps_that_pay(room: Integers) -> int:
    """Return for how many steps to make a cohort, given how many tokens of each row its memory has room for: [B].

    To make it costs about as much as three more blocks of every row for one step. A row whose room is less than the
    steps gets another block, which is of no use until its room is filled.

    >>> steps_that_pay(np.array([31, 31, 31]))
    31
    >>> steps_that_pay(np.array([31, 2, 17]))  # the second one gets a block, and 2 steps of it are of no use
    17
    """
    steps = np.arange(1, BLOCK_TOKENS + 1)
    wasted = (room * (room < steps[:, None])).sum(1)
    return int(steps[np.argmin((3 * len(room) + wasted) / steps)])
