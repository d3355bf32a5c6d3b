"""Grids of cases, of which a few that have every value of each axis run always, and the others in `make test-slow`."""

from collections.abc import Iterable

import pytest


def thinned(grid: Iterable[tuple[object, ...]], *kept: tuple[object, ...]) -> list[object]:
    """Return the cases of a grid, marked slow but for those that are kept."""
    cases = list(grid)
    assert set(kept) <= set(cases), "what is kept is of the grid"
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.slow) for case in cases]
