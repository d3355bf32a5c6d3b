"""Games for the policy to play, a turn at a time: a frozen lake to cross, a word to guess.

Owns: their rules, and what they say. Must not know: how an answer is sampled. The rows of `games:frozen_lake` and
`games:wordle` ask for them; `ground_truth` has the lake or the word.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.data.dataset import Example

_MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
_MOVE = re.compile(r"\b(up|down|left|right|[udlr])\b", re.IGNORECASE)


class FrozenLake:
    """Cross a lake around its holes: from `P` to `G` without `O`. The last move that an answer names is made.

    A move costs 0.05, the other side is worth 1; whoever falls in, or is still on the ice after the last move, ends
    there.
    """

    max_moves = 10
    between = "\n"
    """What stands between two lines of the lake when it is shown."""

    def reset(self, example: Example) -> None:
        """Begin where the lake says."""
        self._fields = [list(line) for line in str(example.ground_truth).split("/")]
        places = [(y, x) for y, line in enumerate(self._fields) for x, field in enumerate(line) if field == "P"]
        (self._row, self._column) = places[0]
        self._fields[self._row][self._column] = "."
        self._num_moves = 0

    @property
    def state(self) -> str:
        """The lake as it is."""
        lines = [line.copy() for line in self._fields]
        lines[self._row][self._column] = "P"
        return self.between.join(map("".join, lines))

    def step(self, message: Mapping[str, object]) -> tuple[object, float, bool, dict[str, bool]]:
        """Make a move; an answer without one stays where it is."""
        named = _MOVE.findall(str(message["content"]))
        down, right = _MOVES[named[-1][0].lower()] if named else (0, 0)
        self._row = min(len(self._fields) - 1, max(0, self._row + down))
        self._column = min(len(self._fields[0]) - 1, max(0, self._column + right))
        self._num_moves += 1
        field = self._fields[self._row][self._column]
        if field in "GO":
            return [], float(field == "G"), True, {"crossed": field == "G"}
        is_over = self._num_moves == self.max_moves
        return {"role": "user", "content": self.state}, -0.05, is_over, {"crossed": False}


class Wordle:
    """Guess a word: each guess is answered with a sign for each letter. The last word of its length is the guess.

    `+` is a right letter in its place, `?` one that stands elsewhere, `-` one that the word does not have again. A word
    that is found at the first guess is worth 1, and at each later one a tenth less.
    """

    max_guesses = 6

    def reset(self, example: Example) -> None:
        """Begin with the word of a row."""
        self._word = str(example.ground_truth).lower()
        self.state = ""
        """All guesses so far, with their signs."""
        self._num_guesses = 0

    def step(self, message: Mapping[str, object]) -> tuple[object, float, bool, dict[str, bool]]:
        """Take a guess; an answer without one is told what is expected, and counts."""
        length = len(self._word)
        words = re.findall(rf"\b[a-z]{{{length}}}\b", str(message["content"]).lower())
        self._num_guesses += 1
        if words and words[-1] == self._word:
            return [], 1.1 - self._num_guesses / 10, True, {"found": True}
        said = f"{words[-1]} {signs(words[-1], self._word)}" if words else f"expected a word of {length} letters"
        self.state += f"{said}\n"
        return {"role": "user", "content": said}, 0.0, self._num_guesses == self.max_guesses, {"found": False}


def signs(guess: str, word: str) -> str:
    """Return a sign for each letter of a guess; a letter is marked as often as the word has it.

    >>> signs("sheet", "these")
    '?++??'
    """
    left = Counter(letter for letter, other in zip(word, guess, strict=True) if letter != other)
    found = ""
    for letter, other in zip(guess, word, strict=True):
        is_elsewhere = letter != other and left[letter] > 0
        left[letter] -= is_elsewhere
        found += "+" if letter == other else "?" if is_elsewhere else "-"
    return found
