"""The rollouts of a step as a table that is filtered and sorted here, a prompt's group, and a prompt over the steps.

Owns: what a row of the table has. Must not know: HTTP, how it is drawn, tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rallypoint.errors import RunFolderError
from rallypoint.page.run_reader import Snapshot
from rallypoint.page.timing import JSON
from rallypoint.run.rollouts import Kind, rollout_files, scores_in
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
FILTERS: Mapping[str, Callable[[JSON], bool]] = {
    "trained": lambda row: row["is_trained"],
    "no signal": lambda row: row["untrained"] in (NO_SIGNAL, REPLACED) or (row["is_trained"] and not row["has_signal"]),
    "failed": lambda row: row["failure"] is not None,
    "truncated": lambda row: row["finish_reason"] == "length",
    "empty": lambda row: row["length"] <= 1 or not row["response"].strip(),
    "replaced": lambda row: bool(row["replaced"]),
}
"""Name of a filter -> whether it keeps a row."""
SORTS: Mapping[str, Callable[[JSON], Any]] = {
    "batch": lambda row: row["place"],
    "score": lambda row: row["score"],
    "advantage": lambda row: row["advantage"],
    "length": lambda row: row["length"],
    "gap": lambda row: row["gap"],
}


@functools.lru_cache(maxsize=8)
def _rows(file: Path, changed: float) -> list[JSON]:
    """Return the rollouts of a file without their tokens.

    Raises:
        RunFolderError: it cannot be read.
    """
    del changed
    table, is_step = read(file, (*LIGHT, "loss_mask", *TOKENS)), file.name.startswith("step")
    there = [name for name in LIGHT if name in table.column_names]  # fewer in a file of an older version
    light: list[JSON] = table.select(there).to_pylist(maps_as_pydicts="strict")
    masks, advantages, old, sampled = (_column(table, name) for name in ("loss_mask", *TOKENS))
    for place, (row, mask, advantage, a, b) in enumerate(zip(light, masks, advantages, old, sampled, strict=True)):
        here = None if mask is None else mask.astype(bool)
        gaps = None if a is None or b is None else np.abs(a - b)[here]
        more: JSON = {
            "place": place,
            "score": _finite(row["score"]),
            "length": 0 if here is None else int(here.sum()),
            "advantage": None if advantage is None else _mean_advantage(advantage[here]),
            "gap": None if gaps is None or not len(gaps) else _finite(float(gaps.max())),
        }
        row.update({name: None for name in LIGHT if name not in there} | more)
        row["is_trained"] = is_step and row["failure"] is None and row["untrained"] is None
        if "untrained" not in there:
            row["is_trained"] &= bool(row["advantage"])
    with_signal = {row["prompt_index"] for row in light if row["advantage"]}
    for row in light:
        row["has_signal"] = row["prompt_index"] in with_signal
        row["tags"] = [name for name, keeps in FILTERS.items() if keeps(row)]
    return light


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean_advantage(values: np.ndarray) -> float | None:
    """Return the mean of a rollout's advantages: 0 only if all are 0, so that there is no signal.

    >>> _mean_advantage(np.array([1.0, 2.0])), _mean_advantage(np.array([1.0, -1.0])), _mean_advantage(np.zeros(2))
    (1.5, 1.0, 0.0)
    """
    if not values.any():
        return 0.0
    return _finite(float(values.mean() or values[np.abs(values).argmax()]))


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


def _column(table: Any, name: str) -> list[np.ndarray | None]:
    """Return a list column as an array for each row; None for null."""
    found = table.column(name).combine_chunks()
    if found.null_count == len(found):
        return [None] * len(found)
    offsets, values = found.offsets.to_numpy(), found.values.to_numpy(zero_copy_only=False)
    is_there = found.is_valid().to_numpy(zero_copy_only=False)
    return [values[offsets[row] : offsets[row + 1]] if is_there[row] else None for row in range(len(found))]


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


def rows_of(run: Snapshot, step: int, kind: Kind) -> list[JSON]:
    """Return the rollouts of a step, without their tokens, in the order of the batch.

    Raises:
        RunFolderError: there are none, or their file is damaged.
    """
    file = file_of(run, step, kind)
    return _rows(file, file.stat().st_mtime)


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
        sort: a name in `SORTS`; with `-` before it the largest first. Rows without a value come last.
        offset: first row.
        limit: number of rows.

    Raises:
        RunFolderError: there are none, or their file is damaged.
    """
    every = rows_of(run, step, kind)
    rows = [row for row in every if only not in FILTERS or only in row["tags"]]
    if wanted := search.casefold():
        texts = ("name", "prompt", "response", "failure", "answer")
        rows = [row for row in rows if any(wanted in (row[name] or "").casefold() for name in texts)]
    of, sign = SORTS.get(sort.lstrip("-"), SORTS["batch"]), -1 if sort.startswith("-") else 1
    rows = sorted(rows, key=lambda row: (of(row) is None, sign * (of(row) or 0)))
    scores = sorted(row["score"] for row in rows if row["score"] is not None)
    return {
        "step": step,
        "kind": kind,
        "total": len(every),
        "filters": {name: sum(name in row["tags"] for row in every) for name in FILTERS},
        "found": len(rows),
        "group_size": max(Counter(row["prompt_index"] for row in every).values(), default=1),
        "scores": [len(scores), *(_quantile(scores, share) for share in (0.1, 0.5, 0.9))],
        "rows": [cut(row) for row in rows[offset : offset + limit]],
    }


def cut(row: JSON, most: int = CUT) -> JSON:
    """Return a row of the table with its texts cut."""
    short = {name: text[:most] + " …" for name, text in row.items() if isinstance(text, str) and len(text) > most}
    return {**row, **short}


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile of sorted values by linear interpolation; None of none.

    >>> _quantile([0.0, 1.0, 2.0], 0.25)
    0.5
    """
    return float(np.quantile(values, share)) if values else None


def spread(run: Snapshot, max_steps: int = 400) -> JSON:
    """Return the 10th and 90th percentile of the scores of at most so many steps, evenly spaced."""
    files = rollout_files(run.folder.path)
    stride = max(1, math.ceil(len(files) / max_steps))
    found = [(step, _index(file, file.stat().st_mtime)) for step, file in list(files.items())[::stride]]
    there = [(step, one.scores) for step, one in found if one.scores is not None]
    return {"steps": [step for step, _ in there], "low": [s[0] for _, s in there], "high": [s[1] for _, s in there]}


@dataclasses.dataclass(frozen=True, slots=True)
class _Index:
    """What is kept of many files."""

    names: frozenset[str] = frozenset()
    scores: tuple[float, float] | None = None
    """Their 10th and 90th percentile; None without a score."""


@functools.lru_cache(maxsize=4096)
def _index(file: Path, changed: float) -> _Index:
    try:
        rows = scores_in(file, changed)
    except RunFolderError:  # the panel of its rollouts says so
        return _Index()
    scores = [score for *_, score in rows if score is not None]
    ends = (float(np.quantile(scores, 0.1)), float(np.quantile(scores, 0.9))) if scores else None
    return _Index(frozenset(name for name, *_ in rows), ends)


def group(run: Snapshot, step: int, prompt: int, kind: Kind = "step") -> JSON:
    """Return a prompt and its whole group.

    Raises:
        RunFolderError: there is none of that prompt.
    """
    rows = [row for row in rows_of(run, step, kind) if row["prompt_index"] == prompt]
    if not rows:
        raise RunFolderError(f"{kind} {step} has no prompt {prompt}")
    first = rows[0]
    return {
        "prompt": first["prompt"][:MOST_TEXT],
        "name": first["name"],
        "ground_truth": first["ground_truth"],
        "rows": [{**cut(row, _MOST_BESIDE), "prompt": ""} for row in rows],
    }


def followed(run: Snapshot, name: str, max_steps: int = 100) -> JSON:
    """Return what became of a prompt over the steps, the newest last."""
    import pyarrow.compute as pc

    found = list[JSON]()
    for step, file in reversed(rollout_files(run.folder.path).items()):
        if name not in _index(file, file.stat().st_mtime).names:
            continue
        table = read(file, ("name", "prompt_index", "score", "response"))
        rows = table.filter(pc.field("name") == name).to_pylist()
        first = {"prompt": rows[0]["prompt_index"], "response": rows[0]["response"][:CUT]}
        found.append({"step": step, **first, "scores": [row["score"] for row in rows]})
        if len(found) == max_steps:
            break
    return {"name": name, "steps": found[::-1]}
