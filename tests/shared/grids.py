"""Grids of cases, of which a few run always, and the others in `make test-slow`."""

import itertools
from collections.abc import Iterable

import pytest


def thinned(grid: Iterable[tuple[object, ...]], *kept: tuple[object, ...]) -> list[object]:
    """Return the cases of a grid, marked slow but for those that are kept, which have every value of each axis."""
    cases = list(grid)
    assert set(kept) <= set(cases), "what is kept is of the grid"
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.slow) for case in cases]


def paired(*axes: Iterable[object]) -> list[object]:
    """Return the product of some axes, marked slow but for a few cases in which any two values of two axes meet.

    >>> [case.values for case in paired("ab", "xy", "01") if not case.marks]
    [('a', 'x', '0'), ('a', 'y', '1'), ('b', 'x', '1'), ('b', 'y', '0')]
    """
    named = [list(enumerate(axis)) for axis in axes]  # values need not be hashable
    pairs = {
        case: set(itertools.combinations(enumerate(case), 2))
        for case in itertools.product(*([place for place, _ in axis] for axis in named))
    }
    missing, kept = set[object]().union(*pairs.values()), set[object]()
    while missing:
        best = max(pairs, key=lambda case: len(pairs[case] & missing))  # the first of the best
        kept.add(best)
        missing -= pairs[best]
    values = ([value for _, value in axis] for axis in named)
    return [
        pytest.param(*case, marks=() if place in kept else pytest.mark.slow, id="-".join(map(str, case)))
        for place, case in zip(pairs, itertools.product(*values), strict=True)
    ]
