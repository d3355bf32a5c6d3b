"""Where the time of a run went, as JSON: seconds by phase, slow ranks, memory, waste, and a step on one axis.

Owns: what is said of ranks that others waited for, and how many steps become one point. Must not know: how it is drawn.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rallypoint.journal import BatchTaken, RolesStarted
from rallypoint.observability.spans import spans_of, top_level
from rallypoint.page.run_reader import Snapshot
from rallypoint.run.reports import MEMORY, TOKENS_SAMPLED, TOKENS_TRAINED
from rallypoint.run.trace import trace

JSON: TypeAlias = dict[str, Any]
MOST_NOTES = 200
"""Newest things of a kind that are listed."""
_STRAGGLES = 1.5
"""A rank that samples so many times as long as the median of the others is named."""


def six_digits(value: float) -> float | None:
    """Return a value as a curve shows it; None if it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def spans(num: int, most: int) -> list[range]:
    """Return at most so many ranges of about equal length that are `range(num)` together."""
    width = max(1, math.ceil(num / max(1, most)))
    return [range(first, min(first + width, num)) for first in range(0, num, width)]


def time_spent(run: Snapshot, max_points: int = 1000) -> JSON:
    """Return seconds by phase and step, ranks that are slower than others, memory beside its plan, and the waste.

    Of more steps than points, each point is the mean of some steps, and stands at the first of them.
    """
    steps, stragglers = sorted(run.state.steps), list[JSON]()
    parts = spans(len(steps), max_points)
    seconds = {step: _phases(run.steps[step]) for step in steps}
    phases = list(dict.fromkeys(name for of_step in seconds.values() for name in of_step))
    busy = {entry.event.step: entry.event.busy_s for entry in run.entries if isinstance(entry.event, BatchTaken)}
    for step, each in busy.items():
        if (found := _straggler(each)) is not None:
            stragglers.append({"step": step, "rank": found[0], "seconds": each[found[0]], "median": found[1]})
    counts = Counter(one["rank"] for one in stragglers)
    whole = {step: run.state.steps[step].seconds for step in steps}

    def means(of: Mapping[int, float]) -> list[float | None]:
        each = ([of[steps[place]] for place in span if steps[place] in of] for span in parts)
        return [six_digits(statistics.fmean(some)) if some else None for some in each]

    return {
        "steps": [steps[span[0]] for span in parts],
        "each": len(parts[0]) if parts else 1,
        "phases": {name: means({step: s[name] for step, s in seconds.items() if name in s}) for name in phases},
        "other": means({step: max(0.0, whole[step] - sum(seconds[step].values())) for step in steps}),
        "tokens_per_s": means({step: _tokens(run.steps[step]) / whole[step] for step in steps if whole[step]}),
        "ranks": len(max(busy.values(), key=len, default=())),
        "stragglers": stragglers[-MOST_NOTES:],
        "slow_ranks": [{"rank": rank, "steps": num, "of": len(busy)} for rank, num in counts.most_common(8)],
        "processes": run.processes,
        "tokens_without_signal": round(sum(map(_tokens_without_signal, run.steps.values()))),
        "memory": _memory(run),
        "waste": dataclasses.asdict(run.account)
        | {"seconds_wasted": run.account.seconds_wasted, "tokens_wasted": run.account.tokens_wasted},
    }


def _straggler(busy_s: Sequence[float]) -> tuple[int, float] | None:
    """Return the rank that others waited for, and the median of their seconds; None if there is none."""
    rank = max(range(len(busy_s)), key=busy_s.__getitem__, default=0)
    others = [one for place, one in enumerate(busy_s) if place != rank]
    return (rank, middle) if others and busy_s[rank] > _STRAGGLES * (middle := statistics.median(others)) else None


def _phases(metrics: Mapping[str, float]) -> dict[str, float]:
    spans = top_level(spans_of(metrics))
    return {name: value for name, value in spans.items() if name not in {"start", "validate", "checkpoint"}}


def _tokens(metrics: Mapping[str, float]) -> float:
    return metrics.get(TOKENS_SAMPLED, metrics.get(TOKENS_TRAINED, 0.0))


def _tokens_without_signal(metrics: Mapping[str, float]) -> float:
    """Return about how many tokens of a batch taught nothing: the share of its groups without signal."""
    share = metrics.get("actor/without_signal", 0.0)
    return share * _tokens(metrics) if math.isfinite(share) else 0.0


def _memory(run: Snapshot) -> list[JSON]:
    """Return the peak of each role in GiB, and what the plan of the newest start said."""
    peaks: dict[str, float] = {}
    for metrics in run.steps.values():
        for name in (name for name in metrics if name.endswith(MEMORY)):
            role = name.removesuffix(MEMORY)
            peaks[role] = max(peaks.get(role, 0.0), metrics[name])
    started = (entry.event for entry in reversed(run.entries) if isinstance(entry.event, RolesStarted))
    planned = next((event.planned_gib for event in started), {})
    return [{"role": role, "peak": peak, "planned": planned.get(role)} for role, peak in peaks.items()]


def timeline(run: Snapshot, step: int) -> JSON:
    """Return the bars of a step on one axis, in seconds since it began, as `rally view --trace` draws them.

    Things of one rank that overlap stand in rows below each other.
    """
    done = run.state.steps.get(step)
    if done is None:
        return {"step": step, "lanes": [], "seconds": 0.0}
    events = trace(run.around(step), range(step, step + 1))["traceEvents"]
    named = {(one["name"], one["pid"], one["tid"]): one["args"].get("name") for one in events if one["ph"] == "M"}
    lanes: dict[tuple[str, str], dict[int, list[JSON]]] = {}
    for one in events:
        if one["ph"] != "X" or one["name"] == f"step {step}":
            continue
        pid, row, begin_s = one["pid"], one["tid"], one["ts"] / 1e6
        thread = re.sub(r" \(\d+\)$", "", named["thread_name", pid, row])
        bar = {"name": one["name"], "from": begin_s, "to": begin_s + one["dur"] / 1e6}
        lanes.setdefault((named["process_name", pid, 0], thread), {}).setdefault(row, []).append(bar)
    in_order = sorted(lanes, key=lambda lane: (lane[0] != "driver", lane[0], len(lane[1]), lane[1]))
    rows = [{"role": role, "name": name, "rows": list(lanes[role, name].values())} for role, name in in_order]
    taken = (entry.event for entry in reversed(run.entries) if isinstance(entry.event, BatchTaken))
    slow = _straggler(next((one.busy_s for one in taken if one.step == step), ()))
    return {"step": step, "seconds": done.seconds, "lanes": rows, "straggler": None if slow is None else slow[0]}
