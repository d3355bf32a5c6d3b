"""Data sets that are made as they are read: the generators of reasoning-gym, and those of games of our own, by name.

Owns: what an entry of a generator is as a row. Must not know: rewards, tokenizers. An entry follows from the
generator's parameters, its seed and its index, so there is nothing to download or to keep.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint.data.files import Problems, Row, Table, suggestion
from rallypoint.extras import find_unusable

_PREFIX, _GAMES = "reasoning_gym:", "games:"
PREFIXES = (_PREFIX, _GAMES)
"""What names of generators begin with."""
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
    return path.startswith(PREFIXES)


def check_generator(path: str) -> str | None:
    """Return what is wrong with the name of a generator, or what has to be installed; None if nothing is."""
    if (game := path.removeprefix(_GAMES)) != path:
        return None if game in GAMES else f"{path}: there is no such game{suggestion(game, list(GAMES))}"
    if (problem := find_unusable("reasoning_gym", "reasoning-gym")) is not None:
        return f"{path} {problem}"
    from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]

    name = path.removeprefix(_PREFIX)
    return None if name in DATASETS else f"{path}: reasoning-gym has no such data set{suggestion(name, list(DATASETS))}"


def generator_version(path: str) -> str:
    """Return the version of what makes a generator's entries, with which they may change."""
    from importlib.metadata import version

    return version("rallypoint" if path.startswith(_GAMES) else "reasoning-gym")


def open_generator(path: str, generator: Generator, problems: Problems) -> Table | None:
    """Return a generator as a table; None, with the problem, when it cannot be made."""
    if (problem := check_generator(path)) is not None:
        problems.add(problem)
        return None
    if path.startswith(_GAMES):
        return _game_rows(path, {"size": _SIZE, "seed": generator.seed} | dict(generator.parameters), problems)
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


def _game_rows(path: str, wanted: Mapping[str, Any], problems: Problems) -> Table | None:
    size, seed = wanted["size"], wanted["seed"]
    if strangers := sorted(wanted.keys() - {"size", "seed"}):
        problems.add(f"{path} has no parameter {strangers[0]!r}; it has size and seed")
        return None
    text, make = GAMES[path.removeprefix(_GAMES)]

    def rows(_: Sequence[str], start: int) -> Iterator[tuple[int, Row]]:
        for index in range(start, size):
            made = make(random.Random(f"{seed} {index}"))
            shown = text.replace("{made}", made.replace("/", "\n"))
            yield index, {"prompt": shown, "ground_truth": made, "extra_info": {}}

    return Table(None, "row", rows, lambda: size)


def frozen_lake(draw: random.Random, size: int = 4) -> str:
    """Return a lake that can be crossed, from `P` to `G` around holes, `O`: its lines, with `/` between.

    >>> frozen_lake(random.Random(0), 3)
    'G.O/.O./P..'
    """
    while True:
        places = [(y, x) for y in range(size) for x in range(size)]
        player, goal, *holes = draw.sample(places, 2 + draw.randint(size // 2, size - 1))
        reached, edge = {player}, [player]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)}.intersection(places) - {*holes} - reached
            reached |= near
            edge += near
        if goal in reached:
            signs = {player: "P", goal: "G"} | dict.fromkeys(holes, "O")
            return "/".join("".join(signs.get((y, x), ".") for x in range(size)) for y in range(size))


@functools.cache
def _words() -> list[str]:
    return Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split()


GAMES: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "frozen_lake": (
        "You are P on a frozen lake. Reach G, and do not fall into a hole, O. Each of your answers is one move: up, "
        "down, left or right. You are then shown the lake as it is.\n\n{made}",
        frozen_lake,
    ),
    "wordle": (
        "Guess an English word of five letters. Each of your answers is one word. It is answered with a sign for each "
        "of its letters: + stands in its place, ? stands elsewhere in the word, - is not in it. You have six guesses.",
        lambda draw: draw.choice(_words()),
    ),
}
"""What a row of each game asks, and what makes what is to be found."""
