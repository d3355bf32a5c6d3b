"""What a check of the config finds."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the keys that it follows from (the first is the one to change)."""

    keys: tuple[str, ...]
    text: str
    is_missing: bool = False
    """Whether the first key is required and was not set: what is the user's to say, as in a shipped recipe."""
