"""Colours of everything that is drawn: colour-blind readers can distinguish them, on dark and light backgrounds.

The hues are those of Okabe and Ito (2008), and three more for phases without a colour of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.observability.health import Level
from rallypoint.observability.spans import OTHER

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#8a8a8a"

PALETTE = {
    "accent": SKY,
    "reward": SKY,
    "validation": ORANGE,
    "watch": ORANGE,
    "wrong": VERMILION,
    "frame": GREY,
    "track": "dim",
    "quiet": "dim",
}
"""Styles by purpose."""

LEVELS: dict[Level, tuple[str, str]] = {
    "ok": ("●", GREEN),
    "watch": ("▲", ORANGE),
    "bad": ("✖", f"bold {VERMILION}"),
}
"""Mark and style of a health level: the mark says the same without colour."""

_PHASES = {"rollout": SKY, "reward": PURPLE, "judge": ORANGE, "learn": GREEN, "publish": BLUE, OTHER: GREY}
_SPARE = (VERMILION, YELLOW, PURPLE, BLUE, "#882255", "#999933", "#44aa99")


def phase_colours(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each phase; well-known ones keep theirs in every run."""
    names = list(names)
    unknown = [name for name in names if name not in _PHASES]
    taken = {_PHASES[name] for name in names if name in _PHASES}
    spare = [colour for colour in _SPARE if colour not in taken]
    return {name: _PHASES.get(name) or spare[unknown.index(name) % len(spare)] for name in names}
