"""The rollouts of a step as a table that is filtered and sorted here, a prompt's group, and a prompt over the steps.

Owns: what a row of the table has. Must not know: HTTP, how it is drawn, tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rallypoint.errors import RunFolderError
from rallypoint.page.run_reader import Snapshot
from rallypoint.page.timing import JSON
from rallypoint.run.rollouts import Kind, rollout_files
from rallypoint.run.step_rollouts import NO_SIGNAL, REPLACED

CUT = 400
"""Characters of a text in the table."""
MOST_TEXT = 200_000
"""Characters of a text, and tokens of a rollout, that are shown of one."""
_MOST_BESIDE = 4000
"""Characters of each response of a group, side by side."""
_TEXTS = (
    "name",
    "data_source",
    "prompt",
    "response",
    "ground_truth",
    "answer",
    "failure",
    "untrained",
    "finish_reason",
)
_NUMBERS = ("prompt_index", "sample_index", "score", "version", "num_tool_calls", "num_tool_errors")
LIGHT = (*_TEXTS, *_NUMBERS, "reward_parts", "replaced")
TOKENS = ("advantages", "old_logprobs", "rollout_logprobs")
FILTERS = ("trained", "no signal", "failed", "truncated", "empty", "replaced")


@dataclasses.dataclass(frozen=True, slots=True)
class Rollouts:
    """The rollouts of a file as columns, in the order of the batch and without their tokens."""

    light: Any
    """Table of `LIGHT`; what a file of an older version lacks is null."""
    numbers: Mapping[str, np.ndarray]
    """What rows are sorted by -> of each row; not finite where it is not known."""
    tags: Mapping[str, np.ndarray]
    """Name in `FILTERS` -> whether it keeps each row."""

    @property
    def prompts(self) -> np.ndarray:
        """The prompt of each row."""
        return self.light.column("prompt_index").to_numpy()

    def texts(self, name: str) -> list[str | None]:
        """Return a column of text."""
        return self.light.column(name).to_pylist()

    def rows(self, places: Sequence[int] | np.ndarray, most: int = CUT) -> list[JSON]:
        """Return the rows of some places, with texts cut."""
        light: list[JSON] = self.light.take(places).to_pylist(maps_as_pydicts="strict")
        for place, row in zip(map(int, places), light, strict=True):
            row |= {
                name: text[:most] + " …" for name, text in row.items() if isinstance(text, str) and len(text) > most
            }
            row |= {name: _finite(float(self.numbers[name][place])) for name in ("score", "advantage", "gap")}
            row |= {"place": place, "length": int(self.numbers["length"][place])}
            row["tags"] = [name for name in FILTERS if self.tags[name][place]]
            row["is_trained"] = "trained" in row["tags"]
        return light


@functools.lru_cache(maxsize=8)
def _rollouts(file: Path, changed: float) -> Rollouts:
    """Return the rollouts of a file.

    Raises:
        RunFolderError: it cannot be read.
    """
    del changed
    table = read(file, (*LIGHT, "loss_mask", *TOKENS))
    lacking = [name for name in LIGHT if name not in table.column_names]
    for name in lacking:
        table = table.append_column(name, [[None] * len(table)])
    numbers = _numbers(table)
    light = table.select(LIGHT)
    return Rollouts(light, numbers, _tags(light, numbers, file.name.startswith("step"), "untrained" in lacking))


def _numbers(table: Any) -> dict[str, np.ndarray]:
    """Return what rows are sorted by: a mean advantage of 0 only if all are 0, so that there is no signal."""

    def flat(name: str) -> tuple[np.ndarray, np.ndarray]:
        found = table.column(name).combine_chunks()
        return found.flatten().to_numpy(zero_copy_only=False), np.repeat(np.arange(len(found)), np.diff(found.offsets))

    def of_trained(name: str) -> np.ndarray:
        values = np.full(len(mask), np.nan)
        is_there = table.column(name).is_valid().to_numpy()
        values[is_there[row_of]] = flat(name)[0]
        return values[mask]

    mask, row_of = flat("loss_mask")
    mask = mask.astype(bool)
    rows, num = row_of[mask], len(table)
    lengths, advantages = np.bincount(rows, minlength=num), of_trained("advantages")
    means = np.bincount(rows, advantages, num) / np.maximum(lengths, 1)
    for row in np.unique(rows[(means[rows] == 0) & (advantages != 0)]):
        own = advantages[rows == row]
        means[row] = own[np.abs(own).argmax()]
    means[table.column("advantages").is_null().to_numpy()] = np.nan
    gaps = np.full(num, -np.inf)
    differences = np.abs(of_trained("old_logprobs") - of_trained("rollout_logprobs"))
    np.maximum.at(gaps, rows, np.nan_to_num(differences, nan=np.inf))
    scores = table.column("score").to_numpy()
    return {"batch": np.arange(num), "score": scores, "advantage": means, "length": lengths, "gap": gaps}


def _tags(light: Any, numbers: Mapping[str, np.ndarray], is_step: bool, lacks_why: bool) -> dict[str, np.ndarray]:
    """Return which rows each filter keeps; `lacks_why`: the file does not say why nothing was learned from a row."""
    failed, prompts = light.column("failure").is_valid().to_numpy(), light.column("prompt_index").to_numpy()
    has_advantage = np.nan_to_num(numbers["advantage"]) != 0
    trained = is_step & ~failed & (has_advantage if lacks_why else light.column("untrained").is_null().to_numpy())
    lost = np.isin(light.column("untrained").to_pylist(), (NO_SIGNAL, REPLACED))
    is_blank = [not text.strip() for text in light.column("response").to_pylist()]
    return {
        "trained": trained,
        "no signal": lost | (trained & ~np.isin(prompts, prompts[has_advantage])),
        "failed": failed,
        "truncated": np.isin(light.column("finish_reason").to_pylist(), "length"),
        "empty": (numbers["length"] <= 1) | is_blank,
        "replaced": np.equal(light.column("replaced").to_pylist(), True),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read(file: Path, columns: Sequence[str] | None = None, part: int | None = None) -> Any:
    """Return the columns that a file has of some, by default all; of one group of rows, or of all.

    Raises:
        RunFolderError: it cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as opened:  # a quarter of the time of read_table
            there = opened.schema_arrow.names
            wanted = [name for name in there if columns is None or name in columns]
            if part is not None and not 0 <= part < opened.num_row_groups:
                raise RunFolderError(f"{file} has {opened.num_row_groups} groups of rows, not {part + 1}")
            parts = range(opened.num_row_groups) if part is None else (part,)
            return opened.read_row_groups(list(parts), wanted, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from error


def file_of(run: Snapshot, step: int, kind: Kind) -> Path:
    """Return the file of a step's rollouts.

    Raises:
        RunFolderError: there is none.
    """
    file = run.folder.path / "rollouts" / f"{kind}_{step:06d}.parquet"
    if not file.is_file():
        newest = max(rollout_files(run.folder.path, kind), default=0)
        thinned = "older steps are thinned out (tracking.rollouts_gib)"
        why = thinned if step < newest else f"the newest are of step {newest}" if newest else "the run has written none"
        if kind == "validation" and step not in run.state.validations:
            why = f"nothing was validated after step {step}"
        raise RunFolderError(f"no rollouts of {kind} {step} are kept: {why}")
    return file


def _of_step(run: Snapshot, step: int, kind: Kind) -> Rollouts:
    file = file_of(run, step, kind)
    return _rollouts(file, file.stat().st_mtime)


def table(
    run: Snapshot,
    step: int,
    kind: Kind = "step",
    *,
    search: str = "",
    only: str = "all",
    sort: str = "batch",
    offset: int = 0,
    limit: int = 25,
) -> JSON:
    """Return a part of a step's rollouts, with texts cut.

    Args:
        run: the run.
        step: its step.
        kind: those that were trained on, or those of the validation after it.
        search: text that the name, prompt, response or failure has, in any case.
        only: a name in `FILTERS`; another one keeps all.
        sort: a name in `Rollouts.numbers`; with `-` before it the largest first. Rows without a value come last.
        offset: first row.
        limit: number of rows.

    Raises:
        RunFolderError: there are none, or their file is damaged.
    """
    found = _of_step(run, step, kind)
    places = np.arange(len(found.prompts))
    is_wanted = found.tags.get(only, places >= 0)
    if wanted := search.casefold():
        columns = zip(*map(found.texts, ("name", "prompt", "response", "failure", "answer")), strict=True)
        is_wanted = is_wanted & [any(wanted in (text or "").casefold() for text in texts) for texts in columns]
    values = found.numbers.get(sort.lstrip("-"), places)[is_wanted]
    values = np.where(np.isfinite(values), -values if sort.startswith("-") else values, np.nan)
    places = places[is_wanted][np.argsort(values, kind="stable")]
    return _summary(found, step, kind, places) | {"rows": found.rows(places[offset : offset + limit])}


def _summary(found: Rollouts, step: int, kind: Kind, places: np.ndarray) -> JSON:
    """Return the head of a table of some rows of a step."""
    scores = found.numbers["score"][places]
    finite = scores[np.isfinite(scores)]
    ends = np.quantile(finite, (0.1, 0.5, 0.9)).tolist() if len(finite) else [None] * 3
    return {
        "step": step,
        "kind": kind,
        "total": len(found.prompts),
        "filters": {name: int(keeps.sum()) for name, keeps in found.tags.items()},
        "found": len(places),
        "group_size": max(Counter(found.prompts.tolist()).values(), default=1),
        "scores": [len(finite), *ends],
    }


def excerpt(run: Snapshot, step: int, num_rows: int) -> JSON:
    """Return a step's table with about so many rows: groups with some of each filter, the best, the worst, and others.

    Raises:
        RunFolderError: there are none, or their file is damaged.
    """
    found = _of_step(run, step, "step")
    prompts, scores = found.prompts, found.numbers["score"]
    scored = np.flatnonzero(np.isfinite(scores))
    telling = [np.flatnonzero(keeps)[:1] for keeps in found.tags.values()]
    by_score = scored[np.argsort(scores[scored], kind="stable")]
    first = np.concatenate([*telling, by_score[:1], by_score[-1:]])
    in_order = list(dict.fromkeys([*prompts[first].tolist(), *prompts.tolist()]))
    size = max(1, int((prompts == prompts[:1]).sum()))
    places = np.flatnonzero(np.isin(prompts, in_order[: max(1, num_rows // size)]))
    return _summary(found, step, "step", np.arange(len(prompts))) | {"rows": found.rows(places)}


def spread(run: Snapshot, max_steps: int = 400) -> JSON:
    """Return the 10th and 90th percentile of the scores of at most so many steps, evenly spaced."""
    files = rollout_files(run.folder.path)
    stride = max(1, math.ceil(len(files) / max_steps))
    found = [(step, _index(file, file.stat().st_mtime)) for step, file in list(files.items())[::stride]]
    there = [(step, ends) for step, (_, ends) in found if ends is not None]
    return {"steps": [step for step, _ in there], "low": [s[0] for _, s in there], "high": [s[1] for _, s in there]}


@functools.lru_cache(maxsize=4096)
def _index(file: Path, changed: float) -> tuple[frozenset[str], tuple[float, float] | None]:
    """Return what is kept of many files: names, and the 10th and 90th percentile of scores; None without a score."""
    del changed
    try:
        table = read(file, ("name", "score"))
    except RunFolderError:  # the panel of its rollouts says so
        return frozenset(), None
    scores = table.column("score").drop_null().to_numpy()
    ends = (float(np.quantile(scores, 0.1)), float(np.quantile(scores, 0.9))) if len(scores) else None
    return frozenset(table.column("name").to_pylist()), ends


def group(run: Snapshot, step: int, prompt: int, kind: Kind = "step") -> JSON:
    """Return a prompt and its whole group.

    Raises:
        RunFolderError: there is none of that prompt.
    """
    found = _of_step(run, step, kind)
    places = np.flatnonzero(found.prompts == prompt)
    if not len(places):
        raise RunFolderError(f"{kind} {step} has no prompt {prompt}")
    (first,) = found.rows(places[:1], MOST_TEXT)
    return {
        **{name: first[name] for name in ("prompt", "name", "ground_truth")},
        "rows": [row | {"prompt": ""} for row in found.rows(places, _MOST_BESIDE)],
    }


def followed(run: Snapshot, name: str, max_steps: int = 100) -> JSON:
    """Return what became of a prompt over the steps, the newest last."""
    import pyarrow.compute as pc

    found = list[JSON]()
    for step, file in reversed(rollout_files(run.folder.path).items()):
        if name not in _index(file, file.stat().st_mtime)[0]:
            continue
        table = read(file, ("name", "prompt_index", "score", "response"))
        rows = table.filter(pc.field("name") == name).to_pylist()
        first = {"prompt": rows[0]["prompt_index"], "response": rows[0]["response"][:CUT]}
        found.append({"step": step, **first, "scores": [row["score"] for row in rows]})
        if len(found) == max_steps:
            break
    return {"name": name, "steps": found[::-1]}
