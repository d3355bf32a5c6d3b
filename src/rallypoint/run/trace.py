"""Steps of a run as a trace for Perfetto and Chrome (`chrome://tracing`), or as OpenTelemetry's spans.

A reader of the journal. Owns: what is drawn where. Must not know: files. In the format's words a role is a process and
a rank a thread; the driver is a process with a thread for steps, for phases and for what is between steps. Things of
one thread that overlap get further threads, since the format has no other place for them. Ranks tell times by the
clocks of their machines.

>>> began = RunBegan(first=0, config={}, software={}, machine="")
>>> done = StepDone(step=1, metrics={}, digests={}, seconds=2.0, began_s=100.0)
>>> found = trace([Entry(1, 99.0, began), Entry(2, 102.5, done)], range(1, 2))
>>> [(one["name"], one["ts"], one["dur"]) for one in found["traceEvents"] if one["ph"] == "X"]
[('step 1', 0, 2000000)]
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import xxhash

from rallypoint.errors import ExportError, RunFolderError
from rallypoint.journal import (
    BatchTaken,
    CheckpointSaved,
    Entry,
    GroupScored,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    RunBegan,
    StepDone,
    Validated,
    WeightsLoaded,
    WeightsPublished,
    fold,
)
from rallypoint.observability.spans import TIME_PREFIX, spans_of

Json: TypeAlias = dict[str, Any]
_DRIVER, _ACTOR, _ROLLOUT = "driver", "actor", "rollout"
_COUNTERS = ("reward/mean", "rollout/num_tokens", "kl/reference_mean", "actor/entropy")
_INSTANT_S = 1e-3
"""Seconds of what has no length, so that arrows have something to begin and to end at."""


@dataclasses.dataclass(slots=True)
class _Sheet:
    """Events with their processes and threads; times are in seconds since the epoch."""

    origin_s: float
    """Time that is 0 in the trace."""
    events: list[Json] = dataclasses.field(default_factory=list[Json])
    processes: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    _threads: dict[tuple[str, str], list[int]] = dataclasses.field(default_factory=dict[tuple[str, str], list[int]])
    """Process and thread -> the numbers of its rows."""
    _ends: dict[tuple[int, int], float] = dataclasses.field(default_factory=dict[tuple[int, int], float])
    """Process and row -> end of its newest event."""

    def slice(self, where: tuple[str, str], name: str, began_s: float, ended_s: float, **args: object) -> Json:
        """Add something that lasted to a thread, in a row that is free; call it in the order of beginnings."""
        pid, begin, end = self._process(where[0]), self._micros(began_s), self._micros(ended_s)
        rows = self._threads.setdefault(where, [])
        tid = next((row for row in rows if self._ends[pid, row] <= begin), None)
        if tid is None:
            tid = self._row(where, pid)
        self._ends[pid, tid] = max(end, begin)
        event = {"name": name, "ph": "X", "ts": begin, "dur": max(0, end - begin), "pid": pid, "tid": tid, "args": args}
        self.events.append(event)
        return event

    def flow(self, name: str, number: int, source: Json, target: Json) -> None:
        """Draw an arrow from one slice to another."""
        common = {"name": name, "cat": "flow", "id": number}
        self.events.append({**common, "ph": "s", **{key: source[key] for key in ("ts", "pid", "tid")}})
        self.events.append({**common, "ph": "f", "bp": "e", **{key: target[key] for key in ("ts", "pid", "tid")}})

    def count(self, name: str, at_s: float, value: float) -> None:
        """Add a point of a curve."""
        args, pid = {name: value}, self._process(_DRIVER)
        self.events.append({"name": name, "ph": "C", "ts": self._micros(at_s), "pid": pid, "tid": 0, "args": args})

    def instant(self, name: str, at_s: float, **args: object) -> None:
        """Mark a time in all of the trace."""
        pid = self._process(_DRIVER)
        common = {"name": name, "ph": "i", "s": "g", "ts": self._micros(at_s), "pid": pid, "tid": 0}
        self.events.append({**common, "args": args})

    def _process(self, name: str) -> int:
        if name not in self.processes:
            self.processes[name] = pid = len(self.processes) + 1
            self._say("process_name", pid, 0, name=name)
            self._say("process_sort_index", pid, 0, sort_index=pid)
        return self.processes[name]

    def _row(self, where: tuple[str, str], pid: int) -> int:
        rows = self._threads[where]
        tid = 1 + sum(len(others) for (process, _), others in self._threads.items() if process == where[0])
        rows.append(tid)
        self._say("thread_name", pid, tid, name=where[1] if len(rows) == 1 else f"{where[1]} ({len(rows)})")
        return tid

    def _say(self, what: str, pid: int, tid: int, **args: object) -> None:
        """Add what is known of a process or a thread."""
        self.events.append({"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args})

    def _micros(self, time_s: float) -> int:
        return round((time_s - self.origin_s) * 1e6)


def trace(entries: Iterable[Entry], steps: range) -> Json:
    """Return some steps of a run in the trace event format, as JSON has it.

    Args:
        entries: of its whole journal, oldest first.
        steps: their numbers; a step that was done again is drawn as it counts.

    Raises:
        RunFolderError: none of them is done.
    """
    entries = list(entries)
    counting = fold(entries).steps
    done = {
        entry.event.step: (entry, entry.event)
        for entry in entries
        if isinstance(entry.event, StepDone) and entry.event.step in steps
        if counting.get(entry.event.step) is entry.event
    }
    if not done:
        there = f"steps {min(counting)} to {max(counting)}" if counting else "none"
        raise RunFolderError(f"no step from {steps.start} to {steps.stop - 1} is done; expected some of {there}")
    begins = {step: event.began_s or entry.time_s - event.seconds for step, (entry, event) in done.items()}
    sheet, until_s = _Sheet(min(begins.values())), max(entry.time_s for entry, _ in done.values())
    where = _places(entries)
    for step, (entry, event) in sorted(done.items()):
        _draw_step(sheet, entry, event, begins[step])
        _draw_work(sheet, event, where)
    inside = [entry for entry in entries if sheet.origin_s <= entry.time_s <= until_s]
    _draw_between(sheet, inside)
    _draw_groups(sheet, inside, _base(entries))
    return {"traceEvents": sheet.events, "displayTimeUnit": "ms", "otherData": {"began_s": sheet.origin_s}}


def _places(entries: Sequence[Entry]) -> Mapping[str, Sequence[str]]:
    """Return number and node of the process of each rank of a role, as the newest start has them."""
    found: dict[str, Sequence[str]] = {}
    for entry in entries:
        if isinstance(entry.event, RolesStarted | RolesRestarted):
            found |= entry.event.processes
    return found


def _draw_step(sheet: _Sheet, entry: Entry, done: StepDone, began_s: float) -> None:
    sheet.slice((_DRIVER, "steps"), f"step {done.step}", began_s, began_s + done.seconds)
    spent = spans_of(done.metrics)
    at_s, placed = 0.0, dict[str, tuple[float, str, float]]()
    for path, seconds in spent.items():
        parent = path.partition("/")[0]
        begin_s = done.begins.get(path, placed[parent][0] if parent in placed else at_s)
        placed[path] = begin_s, path, seconds
        at_s = begin_s + seconds if path == parent else at_s
    for begin_s, path, seconds in sorted(placed.values()):
        thread = "phases" if "/" not in path else path.partition("/")[0]
        sheet.slice((_DRIVER, thread), path, began_s + begin_s, began_s + begin_s + seconds, step=done.step)
    for name in (*_COUNTERS, *(name for name in done.metrics if name.endswith("/memory_gib"))):
        if math.isfinite(value := done.metrics.get(name, math.nan)):
            sheet.count(name, entry.time_s, value)


def _draw_work(sheet: _Sheet, done: StepDone, where: Mapping[str, Sequence[str]]) -> None:
    for role, ranks in done.work.items():
        for rank, work in enumerate(ranks):
            places = where.get(role, ())
            thread = f"rank {rank}" + (f" ({places[rank]})" if rank < len(places) else "")
            for name, began_s, ended_s, seconds, num in sorted(work, key=lambda one: one[1]):
                if ended_s <= sheet.origin_s:  # the validation before the first step that is drawn
                    continue
                args = {"step": done.step, "seconds": seconds, "calls": num}
                sheet.slice((role, thread), name, max(began_s, sheet.origin_s), ended_s, **args)


def _draw_between(sheet: _Sheet, entries: Sequence[Entry]) -> None:
    """Draw validations, checkpoints, weights on their way, and processes that were lost."""
    published = dict[int, Json]()
    for entry in entries:
        at_s = entry.time_s
        match entry.event:
            case Validated(step=step, metrics=metrics) | CheckpointSaved(step=step, metrics=metrics):
                name = "validate" if isinstance(entry.event, Validated) else "checkpoint"
                began_s = max(sheet.origin_s, at_s - metrics.get(TIME_PREFIX + name, 0.0))
                sheet.slice((_DRIVER, "between"), name, began_s, at_s, step=step)
            case WeightsPublished(version=version, digest=digest):
                where = (_ACTOR, "weights")
                name = f"publish version {version}"
                published[version] = sheet.slice(where, name, at_s, at_s + _INSTANT_S, digest=digest)
            case WeightsLoaded(version=version) if version in published:
                loaded = sheet.slice((_ROLLOUT, "weights"), f"load version {version}", at_s, at_s + _INSTANT_S)
                sheet.flow("weights", version, published[version], loaded)
            case RoleLost(role=role, rank=rank, why=why):
                sheet.instant(f"lost {role} rank {rank}", at_s, why=why)
            case RolesRestarted(seconds=seconds):
                sheet.instant("started again", at_s, seconds=seconds)
            case _:
                pass


def _base(entries: Sequence[Entry]) -> Iterator[tuple[float, float]]:
    """Yield for each start from when on it counts, and the time that is 0 for the seconds of its groups."""
    bases, newest = defaultdict[float, list[float]](list), 0.0
    for entry in entries:
        match entry.event:
            case RunBegan():
                newest = entry.time_s
            case GroupScored(scored_s=at_s) | BatchTaken(taken_s=at_s):
                bases[newest].append(entry.time_s - at_s)
            case _:
                pass
    for began_s, found in bases.items():
        yield began_s, min(found)


def _draw_groups(sheet: _Sheet, entries: Sequence[Entry], bases: Iterable[tuple[float, float]]) -> None:
    """Draw when each group was sampled and scored, by the rank that sampled it."""
    starts, found = list(bases), list[tuple[float, float, float, GroupScored]]()
    for entry in entries:
        if isinstance(entry.event, GroupScored):
            base_s = next((base for began_s, base in reversed(starts) if began_s <= entry.time_s), starts[0][1])
            group = entry.event
            found.append((base_s + group.admitted_s, base_s + group.sampled_s, base_s + group.scored_s, group))
    for admitted_s, sampled_s, scored_s, group in sorted(found, key=lambda one: one[0]):
        tokens = sum(length for *_, spans, _ in group.turns for _, length in spans)
        kind = "group" if group.validation is None else "validation group"
        args = {"tokens": tokens, "rollouts": len(group.turns), "scored_ms": round(1e3 * (scored_s - sampled_s), 1)}
        begin_s = max(admitted_s, sheet.origin_s)
        sheet.slice((f"{_ROLLOUT} groups", f"rank {group.rank}"), f"{kind} {group.prompt}", begin_s, scored_s, **args)


def otlp(run: str, drawn: Json) -> Json:
    """Return what a trace draws as spans of OpenTelemetry, in the JSON form of its protocol (OTLP).

    Each step is a trace, and its span the parent of all others that begin while it is under way. Identities follow from
    run, step and place, so that sending steps once more replaces them.

    Args:
        run: name of the run.
        drawn: see `trace`.
    """
    events, origin_s = drawn["traceEvents"], drawn["otherData"]["began_s"]
    named = {(one["name"], one["pid"], one["tid"]): one["args"].get("name") for one in events if one["ph"] == "M"}
    slices = [one for one in events if one["ph"] == "X"]
    steps = [one for one in slices if named["thread_name", one["pid"], one["tid"]] == "steps"]
    begins = [one["ts"] for one in steps]
    spans = list[Json]()
    for number, one in enumerate(slices):
        step = steps[max(0, bisect.bisect_right(begins, one["ts"]) - 1)]
        identity = f"{run} {origin_s + step['ts'] / 1e6:.4f} {step['name']}"
        begin_ns = round(origin_s * 1e9) + one["ts"] * 1000
        where = {
            "rallypoint.role": named["process_name", one["pid"], 0],
            "rallypoint.thread": named["thread_name", one["pid"], one["tid"]],
        }
        parent = {} if one is step else {"parentSpanId": xxhash.xxh3_64_hexdigest(identity.encode())}
        spans.append(
            {
                "traceId": xxhash.xxh3_128_hexdigest(identity.encode()),
                "spanId": xxhash.xxh3_64_hexdigest((identity if one is step else f"{identity} {number}").encode()),
                **parent,
                "name": one["name"],
                "kind": 1,
                "startTimeUnixNano": str(begin_ns),
                "endTimeUnixNano": str(begin_ns + one["dur"] * 1000),
                "attributes": _attributes(where | one["args"]),
            }
        )
    resource = {"attributes": _attributes({"service.name": "rallypoint", "rallypoint.run": run})}
    return {
        "resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "rallypoint"}, "spans": spans}]}]
    }


def _attributes(values: Mapping[str, object]) -> list[Json]:
    kinds: dict[type, str] = {int: "intValue", float: "doubleValue"}
    return [
        {"key": key, "value": {kinds.get(type(value), "stringValue"): value if type(value) is float else str(value)}}
        for key, value in values.items()
    ]


def send(url: str, spans: Json, timeout_s: float = 30.0) -> None:
    """Send spans to a collector.

    Args:
        url: of its HTTP endpoint, such as http://localhost:4318.
        spans: see `otlp`.
        timeout_s: seconds that it may take to answer.

    Raises:
        ExportError: it does not take them.
    """
    address = url.rstrip("/") + ("" if url.rstrip("/").endswith("/v1/traces") else "/v1/traces")
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(address, json.dumps(spans).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read()
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{address}: the spans were not taken ({error}); expected a collector of OpenTelemetry that takes OTLP "
            "over HTTP, such as http://localhost:4318"
        ) from error
