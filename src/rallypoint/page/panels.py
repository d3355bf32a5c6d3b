"""What each panel of the page shows, as JSON: a function of one run, named as the page asks for it.

Owns: which facts a panel has. Must not know: HTTP, how it is drawn, or how a fact is computed: that is of the readers
that the terminal uses as well.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rallypoint import checkpoint
from rallypoint.config import RECIPES, RunConfig, values_of
from rallypoint.config.fields import nested
from rallypoint.errors import RunFolderError
from rallypoint.journal import (
    TIME,
    Entry,
    RoleLost,
    RolesRestarted,
    RolloutFailed,
    Said,
)
from rallypoint.observability.health import SHARES, Rule, rules
from rallypoint.page.run_reader import Snapshot
from rallypoint.page.timing import JSON, MOST_NOTES, six_digits, spans
from rallypoint.prepare.plan import make_plan
from rallypoint.run.comparison import compare_runs
from rallypoint.run.overview import state_of
from rallypoint.run.reports import REWARD, TOKENS_SAMPLED, TOKENS_TRAINED
from rallypoint.run.rollouts import rollout_files

_WITHOUT_RULE = {
    "rollout/staleness_mean": ("staleness", "training steps by which the weights that sampled were older"),
    "rollout/response_length": (
        "length of responses",
        "tokens; a fall to few, or a rise without a rise of the reward, is a reward that pays for the wrong thing",
    ),
}
"""Numbers without thresholds that belong to a run's health: what they are about, and what they mean."""


def summary(run: Snapshot) -> JSON:
    """Return what the page opens with: state, steps, and which metrics there are."""
    state, config = run.state, run.config
    is_running = run.is_running
    how = state_of(run.folder, state.ended, state.heard_s)
    watched, validated = (REWARD, "reward"), "score"
    if config is not None:
        watched, validated = config.watched[0], RECIPES[config.recipe].validated
    return {
        "name": run.name,
        "version": run.version,
        "state": "damaged" if run.damage else "not begun" if state.began is None and not is_running else how,
        "why": run.damage or (state.ended.why.partition("\n")[0] if state.ended else ""),
        "recipe": "" if config is None else config.recipe,
        "num_steps": 0 if config is None else config.trainer.num_steps,
        "step": state.step,
        "steps": sorted(state.steps),
        "metrics": list(dict.fromkeys(name for metrics in run.steps.values() for name in metrics)),
        "headline": list(watched),
        "validation": f"validation/{validated}",
        "rollouts_changed": run.rollouts_changed,
        "rollouts": {kind: list(rollout_files(run.folder.path, kind)) for kind in ("step", "validation")},
        "seconds": max((metrics.get(TIME, 0.0) for metrics in run.steps.values()), default=0.0),
        "best": _best(run, f"validation/{validated}", -1.0 if validated == "loss" else 1.0) or _best(run, REWARD),
    }


def _best(run: Snapshot, name: str, sign: float = 1.0) -> JSON | None:
    scores = {step: one[name] for step, one in run.steps.items() if math.isfinite(one.get(name, math.nan))}
    if not scores:
        return None
    step = max(scores, key=lambda step: sign * scores[step])
    return {"step": step, "score": scores[step], "name": name}


def values(run: Snapshot, step: int) -> JSON:
    """Return all that was measured in a step, exactly, and the newest validation until then."""
    validations = [done for done in run.state.validations if done <= step]
    newest = run.steps.get(max(validations), {}) if validations else {}
    return {
        "step": step,
        "metrics": dict(run.steps.get(step, {})),
        "validation": {name: value for name, value in newest.items() if name.startswith("validation/")},
    }


def series(run: Snapshot, names: Sequence[str], max_points: int = 2000) -> JSON:
    """Return the curve of each metric: its steps, and its values in six digits.

    Args:
        run: the run.
        names: of the metrics; none for all.
        max_points: most points of a curve; of more, each span of steps gives its lowest and its highest value, each at
            its own step. Validations are never thinned.
    """
    wanted = names or list(dict.fromkeys(name for metrics in run.steps.values() for name in metrics))
    curves = dict[str, list[list[float | None]]]()
    for name in wanted:
        points = [(step, metrics[name]) for step, metrics in run.steps.items() if name in metrics]
        few = points if name.startswith("validation/") else thinned(points, max_points)
        curves[name] = [[step for step, _ in few], [six_digits(value) for _, value in few]]
    return {"curves": curves}


def thinned(points: Sequence[tuple[int, float]], most: int) -> Sequence[tuple[int, float]]:
    """Return the lowest and the highest point of each span of steps; all points if they are few.

    >>> thinned([(1, 5.0), (2, 7.0), (3, 6.0), (4, math.nan), (5, 1.0), (6, 2.0)], 4)
    [(1, 5.0), (2, 7.0), (5, 1.0), (6, 2.0)]
    """
    if len(points) <= most:
        return points
    found = list[tuple[int, float]]()
    for span in spans(len(points), most // 2):
        there = [point for point in points[span.start : span.stop] if math.isfinite(point[1])] or points[span.start :][
            :1
        ]
        found += sorted({min(there, key=lambda point: point[1]), max(there, key=lambda point: point[1])})
    return found


def health_in_words(run: Snapshot) -> JSON:
    """Return each rule with its threshold, advice and reason, and the steps at which it was watched or bad."""
    found: dict[str, JSON] = {}
    measured = {name for metrics in run.steps.values() for name in metrics}
    for name, (signal, reason) in _WITHOUT_RULE.items():
        if name in measured:
            found[name] = {"name": name, "words": signal, "signal": signal, "reason": reason, "advice": ""}
    for rule in rules():
        if rule.name in measured:
            thresholds, worse = rule.above or rule.below or (), "above" if rule.above else "below"
            told = {name: getattr(rule, name) for name in ("name", "words", "advice", "reason")}
            more = {
                "signal": rule.signal or rule.name,
                "is_share": rule.name in SHARES,
                "excused": _excused(run, rule),
                "excuse": _excuse(rule, "actor/teacher_judged" in measured),
            }
            found[rule.words] = {
                **told,
                "thresholds": list(thresholds),
                "worse": worse,
                **more,
            }
    levels: dict[str, list[tuple[int, str]]] = {words: [] for words in found}
    for step, findings in run.findings.items():
        for one in findings:
            if one.name:
                # What is not a number is not beyond a threshold: it has words and advice of its own.
                found.setdefault(one.words, {"name": one.name, "words": one.words, "advice": one.advice})
                levels.setdefault(one.words, []).append((step, one.level))
    return {"rules": [rule | {"key": key, "levels": _in_a_row(levels[key])} for key, rule in found.items()]}


def _excused(run: Snapshot, rule: Rule) -> list[tuple[int, int, str]]:
    """Return the steps in a row at which a value is beyond its threshold, and nothing is said of it."""
    told = {step for step, found in run.findings.items() if any(one.words == rule.words for one in found)}
    values = ((step, run.steps[step].get(rule.name, math.nan)) for step in run.findings if step not in told)
    return _in_a_row([(step, "excused") for step, value in values if rule.level(value) != "ok"])


def _excuse(rule: Rule, is_taught: bool) -> str:
    """Say what excuses a value; empty if nothing does."""
    good = [f"reward/mean is {rule.unless_reward:g} or more"] if math.isfinite(rule.unless_reward) else []
    return " or ".join(good + ["a teacher judges every token"] * (is_taught and rule.unless_taught))


def _in_a_row(levels: Sequence[tuple[int, str]]) -> list[tuple[int, int, str]]:
    """Return first step, last step and level of steps in a row with the same level.

    >>> _in_a_row([(1, "bad"), (2, "bad"), (3, "watch"), (5, "watch")])
    [(1, 2, 'bad'), (3, 3, 'watch'), (5, 5, 'watch')]
    """
    rows = itertools.groupby(enumerate(levels), key=lambda one: (one[1][0] - one[0], one[1][1]))
    found = ([step for _, (step, _) in row] for _, row in rows)
    named = dict(levels)
    return [(steps[0], steps[-1], named[steps[0]]) for steps in found]


def known_troubles(run: Snapshot) -> JSON:
    """Return what `rally doctor RUN` finds: troubles that lasted, each with its evidence."""
    return {"troubles": [dataclasses.asdict(one) for one in run.troubles]}


_LEFT_OUT = re.compile(r"^(?:left out: )?\d+ rollouts? (failed|ha(?:s|ve) no score) \(([^)]*)\)")
"""How a message begins that says which rollouts are left out, with the kinds."""


def what_broke(run: Snapshot) -> JSON:
    """Return starts and how they ended, lost processes, what failed by kind with the first message, and messages."""
    state, notes, lost = run.state, list[JSON](), list[JSON]()
    for entry in run.entries:
        match entry.event:
            case RoleLost() | RolesRestarted():
                lost.append({"time": entry.time_s, "kind": type(entry.event).__name__, **_plain_fields(entry)})
            case Said(text=text, level="note"):
                notes.append({"time": entry.time_s, "text": text})
            case _:
                pass
    starts = [
        {
            "time": one.began_s,
            "first": one.began.first,
            "how": one.ended.how if one.ended else "killed",
            "why": one.ended.why if one.ended else "",
            "until": one.until_s,
        }
        for one in state.attempts
    ]
    if starts and state.ended is None:
        starts[-1]["how"] = state_of(run.folder, None, state.heard_s)
    folder = run.folder.checkpoints
    kept = {checkpoint.checkpoint_name(step) for step in checkpoint.steps(folder)}
    aside = [one.name for one in folder.iterdir() if one.name not in kept] if folder.is_dir() else []
    return {
        "damage": run.damage,
        "starts": starts,
        "lost": lost,
        "failed": _failures(run, [one["text"] for one in notes]),
        "notes": notes[-MOST_NOTES:],
        "aside": sorted(aside),
    }


def _failures(run: Snapshot, notes: Sequence[str]) -> list[JSON]:
    """Return what is left out, by kind: how many, the step in which it was first, and the first message about it."""
    nums = Counter(("rollout", one.event.why) for one in run.entries if isinstance(one.event, RolloutFailed))
    first, said = dict[tuple[str, str], int](), dict[tuple[str, str], str]()
    for step, metrics in run.steps.items():
        for name in [name for name, num in metrics.items() if name.startswith("reward/failed_") and num]:
            kind = ("score", name.removeprefix("reward/failed_"))
            nums[kind] += int(metrics[name])
            first.setdefault(kind, step)
        if metrics.get("rollout/failed"):
            first |= {kind: step for kind in nums if kind[0] == "rollout" and kind not in first}
    for text in notes:
        if found := _LEFT_OUT.match(text):
            for kind in found[2].split(", "):
                said.setdefault(("rollout" if found[1] == "failed" else "score", kind.partition(" ")[2]), text)
    told = sorted(nums | dict.fromkeys(said.keys() - nums.keys(), 0))
    return [{"what": k[0], "kind": k[1], "num": nums[k], "step": first.get(k), "said": said.get(k, "")} for k in told]


def _plain_fields(entry: Entry) -> JSON:
    fields = dataclasses.asdict(entry.event)  # type: ignore[arg-type]
    return {name: value for name, value in fields.items() if name != "processes"}


def batch_arithmetic(run: Snapshot) -> JSON:
    """Return how prompts become rows, mini-batches and micro-batches over ranks."""
    config = run.config
    if config is None:
        return {"error": "the config of the run cannot be read by this version of rallypoint"}
    plan = make_plan(config)
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


def provenance(run: Snapshot) -> JSON:
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
    """Return the values that keys have if they are not set, with the names that a config has chosen."""
    names = {key: value for key, value in config.items() if key in {"recipe", "loss.name", "advantage.name"}}
    return dict(values_of(RunConfig.model_validate(nested(names))))


def compare(one: Snapshot, other: Snapshot) -> JSON:
    """Return what two runs differ in, and the first event that does.

    Raises:
        RunFolderError: one has not begun.
    """
    if late := [run.name for run in (one, other) if run.state.began is None]:
        raise RunFolderError(f"{', '.join(late)} has not begun: there is nothing to compare yet")
    found = compare_runs(one.folder.path, other.folder.path, (one.state, other.state))
    return dataclasses.asdict(found) | {"names": [one.name, other.name]}
