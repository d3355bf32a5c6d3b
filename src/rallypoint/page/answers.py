"""The answers to what the page asks, by name, as JSON: from a server, or kept in a report.

Owns: names of panels, their arguments, and which run a question is about. Must not know: HTTP, how anything is drawn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias, cast

from rallypoint.errors import EndpointError
from rallypoint.page import panels, rollout_tables, timing, tokens
from rallypoint.page.run_reader import RunReader, Snapshot
from rallypoint.run.rollouts import Kind

Asked: TypeAlias = Mapping[str, str]
Panel: TypeAlias = Callable[[Snapshot, Asked], dict[str, Any]]

STATIC = Path(str(files("rallypoint.page"))) / "static"
"""Files of the page."""


def _kind(asked: Asked) -> Kind:
    return "validation" if asked.get("kind") == "validation" else "step"


def _number(asked: Asked, name: str, default: int | None = None) -> int:
    text = asked.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise EndpointError(400, f"{name}: expected a whole number, found {text[:40]!r}") from None


def _table(run: Snapshot, asked: Asked) -> dict[str, Any]:
    return rollout_tables.table(
        run,
        _number(asked, "step"),
        _kind(asked),
        search=asked.get("search", ""),
        only=asked.get("only", "all"),
        sort=asked.get("sort", "batch"),
        offset=max(0, _number(asked, "offset", 0)),
        limit=min(512, max(1, _number(asked, "limit", 25))),
    )


PANELS: Mapping[str, Panel] = {
    "summary": lambda run, _: panels.summary(run),
    "series": lambda run, asked: panels.series(
        run, [name for name in asked.get("names", "").split(",") if name], _number(asked, "points", 2000)
    ),
    "values": lambda run, asked: panels.values(run, _number(asked, "step")),
    "spread": lambda run, _: rollout_tables.spread(run),
    "health": lambda run, _: panels.health_in_words(run),
    "troubles": lambda run, _: panels.known_troubles(run),
    "time": lambda run, _: timing.time_spent(run),
    "timeline": lambda run, asked: timing.timeline(run, _number(asked, "step")),
    "broke": lambda run, _: panels.what_broke(run),
    "batch": lambda run, _: panels.batch_arithmetic(run),
    "provenance": lambda run, _: panels.provenance(run),
    "rollouts": _table,
    "excerpt": lambda run, asked: rollout_tables.excerpt(run, _number(asked, "step"), _number(asked, "rows")),
    "group": lambda run, asked: rollout_tables.group(
        run, _number(asked, "step"), _number(asked, "prompt"), _kind(asked)
    ),
    "rollout": lambda run, asked: tokens.rollout(run, _number(asked, "step"), _number(asked, "place"), _kind(asked)),
    "prompt": lambda run, asked: rollout_tables.followed(run, asked.get("name", "")),
}
"""What the page asks for of a run, by name."""


def answer(runs: Sequence[RunReader], name: str, asked: Asked) -> dict[str, Any]:
    """Return what a panel shows.

    Raises:
        EndpointError: there is no such panel or run, or a number is none.
        RunFolderError: a file that the panel needs is missing or damaged.
    """
    if name == "runs":
        return {"runs": [run.name for run in runs]}
    readers = {run.name: run for run in runs}
    run = readers.get(asked.get("run", runs[0].name))
    if run is None:
        raise EndpointError(404, f"no such run; there are {', '.join(readers)}")
    if name == "compare":
        if (other := readers.get(asked.get("with", ""))) is None:
            raise EndpointError(404, f"with: expected one of {', '.join(readers)}")
        return panels.compare(run.now(), other.now())
    if name not in PANELS:
        raise EndpointError(404, f"no such panel; there are {', '.join((*PANELS, 'runs', 'compare'))}")
    return PANELS[name](run.now(), asked)


def answer_or_why(runs: Sequence[RunReader], name: str, asked: Asked) -> dict[str, Any]:
    """Return what a panel shows; of one that fails, as over a damaged file, `error`: it costs that panel alone.

    Raises:
        EndpointError: see `answer`.
    """
    try:
        return answer(runs, name, asked)
    except EndpointError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a damaged file, or a library that reads it, raises
        return {"error": str(error) or type(error).__name__}


def to_json(value: object) -> str:
    """Write what a panel shows as JSON, with null for numbers that are not finite."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in cast("Sequence[object]", value)]
    return value
