"""Cross a frozen lake of 3 x 3 fields around its holes; every move is answered with the lake as it is then.

The rules are those of the game that ships; the lake stands on one line, and an answer is a letter.
"""

from rallypoint.environments.shipped.games import FrozenLake


class Lake(FrozenLake):
    max_tokens = 2  # of an answer: a move, and the end
    max_moves = 6
    between = "/"
