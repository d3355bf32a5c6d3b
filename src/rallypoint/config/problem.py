"""What a check of the config finds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the keys that it follows from (the first is the one to change)."""

    keys: tuple[str, ...]
    text: str
