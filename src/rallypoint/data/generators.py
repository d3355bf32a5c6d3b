"""Data sets that are made as they are read: the generators of reasoning-gym, by name.

Owns: what an entry of a generator is as a row. Must not know: rewards, tokenizers. An entry follows from the
generator's parameters, its seed and its index, so there is nothing to download or to keep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rallypoint.data.files import Problems, Row, Table, suggestion
from rallypoint.extras import find_unusable

_PREFIX = "reasoning_gym:"
_SIZE = 10_000
"""Rows of a generator that is asked for no other number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Generator:
    """How the entries of a generator are made."""

    seed: int = 0
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    """`size`, another `seed`, and what the generator's own config has."""


def is_generator(path: str) -> bool:
    """Whether a path names a generator.

    >>> is_generator("reasoning_gym:chain_sum"), is_generator("reasoning_gym/chain_sum.jsonl")
    (True, False)
    """
    return path.startswith(_PREFIX)


def check_generator(path: str) -> str | None:
    """Return what is wrong with the name of a generator, or what has to be installed; None if nothing is."""
    if (problem := find_unusable("reasoning_gym", "reasoning-gym")) is not None:
        return f"{path} {problem}"
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    name = path.removeprefix(_PREFIX)
    return None if name in DATASETS else f"{path}: reasoning-gym has no such data set{suggestion(name, list(DATASETS))}"


def generator_version() -> str:
    """Return the version of reasoning-gym, with which its entries may change."""
    from importlib.metadata import version

    return version("reasoning-gym")


def open_generator(path: str, generator: Generator, problems: Problems) -> Table | None:
    """Return a generator as a table; None, with the problem, when it cannot be made."""
    if (problem := check_generator(path)) is not None:
        problems.add(problem)
        return None
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    wanted = {"size": _SIZE, "seed": generator.seed} | dict(generator.parameters)
    try:
        entries = reasoning_gym.create_dataset(path.removeprefix(_PREFIX), **wanted)
    except (TypeError, ValueError, AssertionError) as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
        problems.add(f"{path} cannot be made with {shown}: {error}")
        return None

    def rows(_: Sequence[str], start: int) -> Iterator[tuple[int, Row]]:
        for index in range(start, len(entries)):
            entry = entries[index]
            # Some tasks have many right answers, and the scorer looks at the metadata alone.
            truth = "" if entry["answer"] is None else entry["answer"]
            yield index, {"prompt": entry["question"], "ground_truth": truth, "extra_info": entry["metadata"]}

    return Table(None, "row", rows, lambda: len(entries))
