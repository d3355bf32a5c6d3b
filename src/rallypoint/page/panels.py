"""What each panel of the page shows, as JSON: a function of one run, named as the page asks for it.

Owns: which facts a panel has. Must not know: HTTP, how it is drawn, or how a fact is computed: that is of the readers
that the terminal uses as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rallypoint import checkpoint
from rallypoint.config import RunConfig, values_of
from rallypoint.errors import RallyError
from rallypoint.journal import (
    BatchTaken,
    Entry,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    RolloutFailed,
    RunBegan,
    RunEnded,
    Said,
    read_journal,
)
from rallypoint.observability.health import rules
from rallypoint.observability.spans import TIME_PREFIX, top_level
from rallypoint.page.run_reader import RunReader
from rallypoint.prepare.machine import look_around, plan_on
from rallypoint.run.comparison import compare_runs
from rallypoint.run.metrics_log import TIME
from rallypoint.run.reports import MEMORY, REWARD, TOKENS_SAMPLED, TOKENS_TRAINED, VALIDATION, nested
from rallypoint.run.rollouts import rollout_files
from rallypoint.run.troubles import troubles_of
from rallypoint.run.waste import account

JSON: TypeAlias = dict[str, Any]
_MOST_NOTES = 200
_STRAGGLES = 1.5
"""A rank that samples so many times as long as the median rank is named."""


_SIGNALS = {
    "actor/without_signal": "learning signal",
    "actor/approx_kl": "update KL",
    "kl/reference_mean": "KL to the reference",
    "actor/entropy": "entropy",
    "actor/clip_fraction": "clip fraction",
    "actor/ratio_error": "ratio is 1 at first",
    "rollout/truncated": "truncation",
    "rollout/logprob_gap_mean": "sampler against trainer",
    "rollout/logprob_gap_max": "sampler against trainer, worst token",
    "rollout/hidden_tokens": "hidden tokens",
    "rollout/failed": "failed rollouts",
    "reward/failed": "failed rewards",
    "reward/std": "spread of rewards",
    "reward/flat_steps": "steps without a rise",
    "critic/explained_variance": "critic",
}
"""What a number is about, where there is nothing to say against it."""
_WITHOUT_RULE = {
    "rollout/staleness_mean": ("staleness", "training steps by which the weights that sampled were older"),
    "rollout/response_length": (
        "length of responses",
        "tokens; a fall to few, or a rise without a rise of the reward, is a reward that pays for the wrong thing",
    ),
}
"""Numbers without thresholds that belong to a run's health: what they are about, and what they mean."""


def summary(run: RunReader) -> JSON:
    """Return what the page opens with: state, steps, metrics that there are, and the newest of them."""
    state, config = run.state, run.config
    names = list(dict.fromkeys(name for metrics in run.steps.values() for name in metrics))
    is_running = run.is_running
    how = "running" if is_running else "killed" if state.ended is None else state.ended.how
    return {
        "name": run.name,
        "state": "damaged" if run.damage else "not begun" if state.began is None and not is_running else how,
        "why": run.damage or (state.ended.why.partition("\n")[0] if state.ended else ""),
        "recipe": "" if config is None else config.recipe,
        "num_steps": 0 if config is None else config.trainer.num_steps,
        "step": state.step,
        "steps": list(state.steps),
        "metrics": names,
        "watched": [] if config is None else [list(pair) for pair in config.watched],
        "rollouts": {kind: list(rollout_files(run.folder.path, kind)) for kind in ("step", "validation")},
        "seconds": max((metrics.get(TIME, 0.0) for metrics in run.steps.values()), default=0.0),
        "last": run.steps.get(state.step, {}),
        "best": _best(run),
    }


def _best(run: RunReader) -> JSON | None:
    for name in (VALIDATION, REWARD):
        scores = {step: one[name] for step, one in run.steps.items() if math.isfinite(one.get(name, math.nan))}
        if scores:
            step = max(scores, key=scores.__getitem__)
            return {"step": step, "score": scores[step], "name": name}
    return None


def series(run: RunReader, names: Sequence[str], max_points: int = 2000) -> JSON:
    """Return metrics by step as columns.

    Args:
        run: the run.
        names: of the metrics; none for all.
        max_points: most steps; of more, each span of steps gives its lowest and its highest value, in their order.
    """
    steps = list(run.steps)
    wanted = names or list(dict.fromkeys(name for metrics in run.steps.values() for name in metrics))
    columns = {name: [run.steps[step].get(name) for step in steps] for name in wanted}
    if len(steps) <= max_points:
        return {"steps": steps, "columns": columns}
    width = math.ceil(len(steps) / max(1, max_points // 2))
    spans = [range(first, min(first + width, len(steps))) for first in range(0, len(steps), width)]
    ends = [steps[place] for span in spans for place in (span[0], span[-1])]
    return {"steps": ends, "columns": {name: _extremes(column, spans) for name, column in columns.items()}}


def _extremes(column: Sequence[float | None], spans: Sequence[range]) -> list[float | None]:
    """Return the lowest and the highest value of each span, the earlier of them first.

    >>> _extremes([1.0, 5.0, 0.0, None, None, None], [range(0, 3), range(3, 6)])
    [5.0, 0.0, None, None]
    """
    found = list[float | None]()
    for span in spans:
        there = [(value, place) for place in span if (value := column[place]) is not None and math.isfinite(value)]
        pair = sorted((min(there)[::-1], max(there)[::-1])) if there else [(0, None), (0, None)]
        found += [value for _, value in pair]
    return found


def health_in_words(run: RunReader) -> JSON:
    """Return each rule with its threshold, advice and reason, and the steps at which it was watched or bad."""
    found: dict[str, JSON] = {}
    for name, (signal, reason) in _WITHOUT_RULE.items():
        if any(name in metrics for metrics in run.steps.values()):
            found[name] = {
                "name": name,
                "words": signal,
                "signal": signal,
                "reason": reason,
                "advice": "",
                "levels": {},
            }
    for rule in rules():
        if any(rule.name in metrics for metrics in run.steps.values()):
            found[rule.name] = dataclasses.asdict(rule) | {"levels": {}, "signal": _SIGNALS.get(rule.name, rule.name)}
            found[rule.name]["thresholds"] = list(rule.above or rule.below or ())
            found[rule.name]["worse"] = "above" if rule.above else "below"
    for step, findings in run.findings.items():
        for one in findings:
            if one.name and one.name not in found:
                found[one.name] = {"name": one.name, "words": one.words, "advice": one.advice, "levels": {}}
            if one.name:
                found[one.name]["levels"][str(step)] = one.level
    for rule in found.values():
        for excuse in ("unless_reward", "unless_taught", "above", "below"):
            rule.pop(excuse, None)
    return {"rules": list(found.values())}


def known_troubles(run: RunReader) -> JSON:
    """Return what `rally doctor RUN` finds: troubles that lasted, each with its evidence."""
    return {"troubles": [dataclasses.asdict(one) for one in troubles_of(run.folder.path)]}


def time_spent(run: RunReader) -> JSON:
    """Return seconds by phase and step, ranks that are slower than others, memory beside its plan, and the waste."""
    steps, stragglers = list(run.state.steps), list[JSON]()
    seconds = {step: _phases(run.steps[step]) for step in steps}
    phases = list(dict.fromkeys(name for of_step in seconds.values() for name in of_step))
    busy = {entry.event.step: entry.event.busy_s for entry in run.entries if isinstance(entry.event, BatchTaken)}
    for step, each in busy.items():
        middle = statistics.median(each) if len(each) > 1 else 0.0
        if each and middle and max(each) > _STRAGGLES * middle:
            rank = max(range(len(each)), key=each.__getitem__)
            stragglers.append({"step": step, "rank": rank, "seconds": each[rank], "median": middle})
    counts = Counter(one["rank"] for one in stragglers)
    whole = {step: run.state.steps[step].seconds for step in steps}
    return {
        "steps": steps,
        "phases": {name: [seconds[step].get(name) for step in steps] for name in phases},
        "other": [max(0.0, whole[step] - sum(seconds[step].values())) for step in steps],
        "tokens_per_s": [_tokens(run.steps[step]) / whole[step] if whole[step] else None for step in steps],
        "ranks": len(max(busy.values(), key=len, default=())),
        "stragglers": stragglers[-_MOST_NOTES:],
        "slow_ranks": [{"rank": rank, "steps": num, "of": len(busy)} for rank, num in counts.most_common(8)],
        "processes": _processes(run),
        "memory": _memory(run),
        "waste": _waste(run),
    }


def _phases(metrics: Mapping[str, float]) -> dict[str, float]:
    names = {name.removeprefix(TIME_PREFIX): value for name, value in metrics.items() if name.startswith(TIME_PREFIX)}
    return {name: value for name, value in top_level(names).items() if name not in {"start", "validate", "checkpoint"}}


def _tokens(metrics: Mapping[str, float]) -> float:
    return metrics.get(TOKENS_SAMPLED, metrics.get(TOKENS_TRAINED, 0.0))


def _processes(run: RunReader) -> Mapping[str, Sequence[str]]:
    found: dict[str, Sequence[str]] = {}
    for entry in run.entries:
        if isinstance(entry.event, RolesStarted | RolesRestarted):
            found |= entry.event.processes
    return found


def _memory(run: RunReader) -> list[JSON]:
    """Return the peak of each role in GiB, and what the plan said."""
    peaks: dict[str, float] = {}
    for metrics in run.steps.values():
        for name in (name for name in metrics if name.endswith(MEMORY)):
            role = name.removesuffix(MEMORY)
            peaks[role] = max(peaks.get(role, 0.0), metrics[name])
    planned: dict[str, float] = {}
    if (config := run.config) is not None:
        try:
            plan = plan_on(config, look_around(config))
            planned = {memory.role: plan.awake_memory(memory.role) / 2**30 for memory in plan.memory}
        except (RallyError, OSError):  # its model is not on this machine
            planned = {}
    return [{"role": role, "peak": peak, "planned": planned.get(role)} for role, peak in peaks.items()]


def _waste(run: RunReader) -> JSON:
    try:
        found = account(read_journal(run.folder.journal))
    except (RallyError, OSError) as error:
        return {"error": str(error)}
    return {
        "seconds": found.seconds,
        "tokens": found.tokens,
        "wastes": [dataclasses.asdict(waste) for waste in found.wastes],
        "seconds_wasted": found.seconds_wasted,
        "tokens_wasted": found.tokens_wasted,
    }


def timeline(run: RunReader, step: int) -> JSON:
    """Return the bars of a step on one axis, in seconds since it began: the driver's phases, and each rank's groups."""
    done, taken = run.state.steps.get(step), run.taken(step)
    lanes: dict[str, list[JSON]] = {"driver": []}
    if done is None:
        return {"step": step, "lanes": [], "seconds": 0.0}
    at = 0.0
    for name, seconds in _phases(done.metrics).items():
        lanes["driver"].append({"name": name, "from": at, "to": at + seconds})
        at += seconds
    if taken is not None:
        # The start's clock counts from its beginning: the step began when its batch was asked for.
        for group in sorted(run.groups(step), key=lambda one: one.admitted_s):
            lanes.setdefault(f"rollout {group.rank}", []).append(
                {
                    "name": f"prompt {group.prompt}",
                    "from": group.admitted_s - taken.asked_s,
                    "to": group.sampled_s - taken.asked_s,
                    "scored": group.scored_s - taken.asked_s,
                }
            )
    ordered = sorted(lanes, key=lambda name: (name != "driver", len(name), name))
    return {"step": step, "seconds": done.seconds, "lanes": [{"name": name, "bars": lanes[name]} for name in ordered]}


def what_broke(run: RunReader) -> JSON:
    """Return starts and how they ended, lost processes, failed rollouts by kind with a first one, and messages."""
    starts, failed, notes, lost = list[JSON](), dict[str, JSON](), list[JSON](), list[JSON]()
    for entry in run.entries:
        match entry.event:
            case RunBegan(first=first):
                starts.append({"time": entry.time_s, "first": first, "how": "killed", "why": "", "until": entry.time_s})
            case RunEnded(how=how, why=why) if starts:
                starts[-1] |= {"how": how, "why": why}
            case RolloutFailed(why=why) as event:
                first = {"prompt": event.prompt, "sample": event.sample, "reason": event.reason}
                failed.setdefault(why, {"why": why, "num": 0, **first})["num"] += 1
            case RoleLost() | RolesRestarted():
                lost.append({"time": entry.time_s, "kind": type(entry.event).__name__, **_plain_fields(entry)})
            case Said(text=text, level="note"):
                notes.append({"time": entry.time_s, "text": text})
            case _:
                pass
        if starts:
            starts[-1]["until"] = entry.time_s
    if starts and starts[-1]["how"] == "killed" and run.is_running:
        starts[-1]["how"] = "running"
    unscored = {name: sum(one.get(name, 0.0) for one in run.steps.values()) for name in _failures(run)}
    folder = run.folder.checkpoints
    kept = {checkpoint.checkpoint_name(step) for step in checkpoint.steps(folder)}
    aside = [one.name for one in folder.iterdir() if one.name not in kept] if folder.is_dir() else []
    return {
        "damage": run.damage,
        "starts": starts,
        "lost": lost,
        "failed": list(failed.values()),
        "unscored": {name: num for name, num in unscored.items() if num},
        "notes": notes[-_MOST_NOTES:],
        "checkpoints": sorted(kept),
        "aside": sorted(aside),
    }


def _failures(run: RunReader) -> list[str]:
    return sorted({name for one in run.steps.values() for name in one if name.startswith("reward/failed")})


def _plain_fields(entry: Entry) -> JSON:
    fields = dataclasses.asdict(entry.event)  # type: ignore[arg-type]
    return {name: value for name, value in fields.items() if name != "processes"}


def batch_arithmetic(run: RunReader) -> JSON:
    """Return how prompts become rows, mini-batches and micro-batches over ranks."""
    config = run.config
    if config is None:
        return {"error": "the config of the run cannot be read by this version of rallypoint"}
    plan = plan_on(config, look_around(config))
    last = run.steps.get(run.state.step, {})
    return {
        "num_prompts": plan.num_prompts,
        "group_size": plan.group_size,
        "num_rows": plan.num_rows,
        "max_tokens": plan.max_tokens,
        "cap": config.engine.max_tokens_per_micro_batch,
        "max_row_tokens": config.max_row_tokens,
        "learners": [
            {
                "role": role,
                "updates": updates,
                "rows": rows,
                "micro_batches": micro,
                "ranks": config.num_ranks(role),
                "parts": config.num_parts(role),
                "epochs": config.learners[role].num_epochs,
                "mini_batches": config.learners[role].num_mini_batches,
            }
            for role, (updates, rows, micro) in plan.updates.items()
        ],
        "roles": [{"role": role, "ranks": config.num_ranks(role)} for role in config.roles],
        "measured": {name: last.get(name) for name in (TOKENS_SAMPLED, TOKENS_TRAINED, "actor/without_signal")},
    }


def provenance(run: RunReader) -> JSON:
    """Return config against defaults, versions, machine, files and digests of weights."""
    state, began = run.state, run.state.began
    if began is None:
        return {"error": run.damage or "the run has not begun"}
    defaults = json.loads(json.dumps(_defaults(began.config)))
    keys = [
        {"key": key, "value": value, "default": defaults.get(key), "changed": value != defaults.get(key)}
        for key, value in json.loads(json.dumps(dict(began.config))).items()
    ]
    return {
        "config": keys,
        "overrides": list(state.launched.overrides),
        "software": dict(began.software),
        "machine": began.machine,
        "folder": began.folder,
        "seed": began.config.get("seed", began.config.get("trainer.seed")),
        "files": {} if state.inputs is None else {key: dict(named) for key, named in state.inputs.files.items()},
        "checkpoints": [{"step": step, "weights": one.weights} for step, one in state.checkpoints.items()],
    }


def _defaults(config: Mapping[str, object]) -> dict[str, object]:
    """Return the values that keys have if nobody sets them, with the names that a config has chosen."""
    names = {key: value for key, value in config.items() if key in {"recipe", "loss.name", "advantage.name"}}
    return dict(values_of(RunConfig.model_validate(nested(names))))


def compare(one: RunReader, other: RunReader) -> JSON:
    """Return what two runs differ in, and the first event that does."""
    found = compare_runs(one.folder.path, other.folder.path)
    return dataclasses.asdict(found) | {"names": [one.name, other.name]}
