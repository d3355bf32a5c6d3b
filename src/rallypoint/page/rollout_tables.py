"""The rollouts of a step as a table that is filtered and sorted here, and one of them token by token.

Owns: what a row of the table has, and why a token is not trained. Must not know: HTTP, how it is drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from rallypoint.algorithms import CORRECTIONS, Correction, correct
from rallypoint.algorithms.policy_losses import PolicyTokens
from rallypoint.errors import RunFolderError
from rallypoint.page.run_reader import RunReader
from rallypoint.run.rollouts import Kind, rollout_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

JSON: TypeAlias = dict[str, Any]

CUT = 400
"""Characters of a text in the table."""
_MOST_TEXT = 200_000
"""Characters of a text, and tokens of a rollout, that are shown of one."""
_TEXTS = ("name", "data_source", "prompt", "response", "ground_truth", "answer", "failure", "finish_reason")
_NUMBERS = ("prompt_index", "sample_index", "score", "version", "num_tool_calls", "num_tool_errors")
_LIGHT = (*_TEXTS, *_NUMBERS, "reward_parts", "replaced")
FILTERS: Mapping[str, Callable[[JSON], bool]] = {
    "all": lambda _: True,
    "failed": lambda row: row["failure"] is not None,
    "truncated": lambda row: row["finish_reason"] == "length",
    "no signal": lambda row: row["advantage"] == 0 or row["replaced"],
    "trained": lambda row: row["advantage"] not in (None, 0),
    "replaced": lambda row: bool(row["replaced"]),
    "empty": lambda row: row["length"] <= 1 or not row["response"].strip(),
}
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
    table = _read(file, (*_LIGHT, "response_ids", "loss_mask", "advantages", "old_logprobs", "rollout_logprobs"))
    light: list[JSON] = table.select(list(_LIGHT)).to_pylist(maps_as_pydicts="strict")
    lists = {name: _column(table, name) for name in ("loss_mask", "advantages", "old_logprobs", "rollout_logprobs")}
    for place, (row, mask) in enumerate(zip(light, lists["loss_mask"], strict=True)):
        advantages = lists["advantages"][place]
        old, sampled = lists["old_logprobs"][place], lists["rollout_logprobs"][place]
        trained = None if mask is None or advantages is None else advantages[mask.astype(bool)]
        gaps = None if old is None or sampled is None or mask is None else np.abs(old - sampled)[mask.astype(bool)]
        row |= {
            "place": place,
            "length": 0 if mask is None else int(mask.sum()),
            "advantage": None if trained is None else _mean_advantage(trained),
            "gap": None if gaps is None or not len(gaps) else float(gaps.max()),
        }
    return light


@functools.lru_cache(maxsize=1)
def _whole(file: Path, changed: float) -> Any:
    """Return all columns of a file, of which several rollouts are looked at one after the other."""
    del changed
    return _read(file)


def _mean_advantage(values: np.ndarray) -> float:
    """Return the mean of a rollout's advantages: 0 only if all are 0, so that there is no signal.

    >>> _mean_advantage(np.array([1.0, 2.0])), _mean_advantage(np.array([1.0, -1.0])), _mean_advantage(np.zeros(2))
    (1.5, 1.0, 0.0)
    """
    if not values.any():
        return 0.0
    return float(values.mean() or values[np.abs(values).argmax()])


def _read(file: Path, columns: Sequence[str] | None = None) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file, columns=None if columns is None else list(columns))
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


def _file(run: RunReader, step: int, kind: Kind) -> Path:
    files = rollout_files(run.folder.path, kind)
    if step not in files:
        raise RunFolderError(
            f"no rollouts of {kind} {step} are kept: older steps are thinned out (tracking.rollouts_gib)"
        )
    return files[step]


def rows_of(run: RunReader, step: int, kind: Kind) -> list[JSON]:
    """Return the rollouts of a step, without their tokens, in the order of the batch.

    Raises:
        RunFolderError: there are none, or their file is damaged.
    """
    file = _file(run, step, kind)
    return _rows(file, file.stat().st_mtime)


def table(
    run: RunReader,
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
        only: a name in `FILTERS`.
        sort: a name in `SORTS`; with `-` before it the largest first. Rows without a value come last.
        offset: first row.
        limit: number of rows.

    Raises:
        RunFolderError: there are none, or their file is damaged.
    """
    every = rows_of(run, step, kind)
    rows = [row for row in every if FILTERS.get(only, FILTERS["all"])(row)]
    if wanted := search.casefold():
        texts = ("name", "prompt", "response", "failure", "answer")
        rows = [row for row in rows if any(wanted in (row[name] or "").casefold() for name in texts)]
    of, sign = SORTS.get(sort.lstrip("-"), SORTS["batch"]), -1 if sort.startswith("-") else 1
    rows = sorted(rows, key=lambda row: (of(row) is None, sign * (of(row) or 0)))
    scores = sorted(row["score"] for row in every if row["score"] is not None)
    return {
        "step": step,
        "kind": kind,
        "total": len(every),
        "found": len(rows),
        "scores": [len(scores), *(_quantile(scores, share) for share in (0.1, 0.5, 0.9))],
        "rows": [cut(row) for row in rows[offset : offset + limit]],
    }


def cut(row: JSON) -> JSON:
    """Return a row of the table with its texts cut."""
    short = {name: text[:CUT] + " …" for name, text in row.items() if isinstance(text, str) and len(text) > CUT}
    return {**row, **short}


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile of sorted values by linear interpolation; None of none.

    >>> _quantile([0.0, 1.0, 2.0], 0.25)
    0.5
    """
    return float(np.quantile(values, share)) if values else None


def spread(run: RunReader, max_steps: int = 400) -> JSON:
    """Return the 10th and 90th percentile of the scores of at most so many steps, evenly spaced."""
    files = rollout_files(run.folder.path)
    stride = max(1, math.ceil(len(files) / max_steps))
    found = [(step, _scores(file, file.stat().st_mtime)) for step, file in list(files.items())[::stride]]
    there = [(step, scores) for step, scores in found if scores is not None]
    return {"steps": [step for step, _ in there], "low": [s[0] for _, s in there], "high": [s[1] for _, s in there]}


@functools.lru_cache(maxsize=4096)
def _scores(file: Path, changed: float) -> tuple[float, float] | None:
    del changed
    try:
        scores = _read(file, ["score"]).column("score").drop_null().to_numpy()
    except RunFolderError:  # the panel of its rollouts says so
        return None
    return (float(np.quantile(scores, 0.1)), float(np.quantile(scores, 0.9))) if len(scores) else None


def group(run: RunReader, step: int, prompt: int, kind: Kind = "step") -> JSON:
    """Return a prompt and its whole group.

    Raises:
        RunFolderError: there is none of that prompt.
    """
    rows = [row for row in rows_of(run, step, kind) if row["prompt_index"] == prompt]
    if not rows:
        raise RunFolderError(f"{kind} {step} has no prompt {prompt}")
    first = rows[0]
    return {
        "prompt": first["prompt"][:_MOST_TEXT],
        "name": first["name"],
        "ground_truth": first["ground_truth"],
        "rows": [{**cut(row), "prompt": ""} for row in rows],
    }


def followed(run: RunReader, name: str, max_steps: int = 100) -> JSON:
    """Return what became of a prompt over the steps, the newest last."""
    found = list[JSON]()
    for step, file in reversed(rollout_files(run.folder.path).items()):
        try:
            names = _read(file, ["name"]).column("name").to_pylist()
        except RunFolderError:
            continue
        if name not in names:
            continue
        rows = [row for row in _rows(file, file.stat().st_mtime) if row["name"] == name]
        found.append(
            {
                "step": step,
                "prompt": rows[0]["prompt_index"],
                "scores": [row["score"] for row in rows],
                "response": rows[0]["response"][:CUT],
            }
        )
        if len(found) == max_steps:
            break
    return {"name": name, "steps": found[::-1]}


def one(run: RunReader, step: int, place: int, kind: Kind = "step") -> JSON:
    """Return a rollout token by token: texts, what was trained and why not, and numbers of each token.

    Raises:
        RunFolderError: there is none, or its file is damaged.
    """
    file = _file(run, step, kind)
    table = _whole(file, file.stat().st_mtime)
    if not 0 <= place < table.num_rows:
        raise RunFolderError(f"{kind} {step} has rollouts 0 to {table.num_rows - 1}, not {place}")
    row: JSON = table.slice(place, 1).to_pylist(maps_as_pydicts="strict")[0]
    ids = (row["response_ids"] or [])[:_MOST_TEXT]
    size = len(ids)
    old, sampled = row["old_logprobs"], row["rollout_logprobs"]
    gaps = [a - b for a, b in zip(old, sampled, strict=True)] if old is not None and sampled is not None else None
    why, reasons = _why_not_trained(run, row, kind)
    return {
        **{name: row[name] for name in _LIGHT if name not in {"prompt", "response"}},
        "place": place,
        "prompt": row["prompt"][:_MOST_TEXT],
        "response": row["response"][:_MOST_TEXT],
        "extras": row["reward_extras"],
        "metrics": row["metrics"],
        "turns": _shown_turns(row["turns"]),
        "pieces": pieces(tokenizer_of(run), ids),
        "ids": ids,
        "why": why[:size],
        "reasons": reasons,
        "advantages": _rounded(row["advantages"], size),
        "ratio": _rounded(None if gaps is None else [math.exp(min(gap, 20.0)) for gap in gaps], size),
        "surprise": _rounded(None if sampled is None else [-one for one in sampled], size),
        "difference": _rounded(None if gaps is None else [abs(gap) for gap in gaps], size),
        "versions": (row["token_versions"] or [])[:size],
        "num_tokens": len(row["response_ids"] or []),
    }


def _rounded(values: Sequence[float] | None, size: int) -> list[float] | None:
    return None if values is None else [float(f"{value:.5g}") for value in values[:size]]


def _shown_turns(turns: Sequence[JSON] | None) -> list[JSON]:
    most = _MOST_TEXT // 10
    return [
        {
            **turn,
            "response": (turn["response"] or "")[:most],
            "said": [{"role": one["role"], "text": (one["text"] or "")[:most]} for one in turn["said"] or ()],
        }
        for turn in turns or ()
    ]


def _why_not_trained(run: RunReader, row: JSON, kind: Kind) -> tuple[list[int], list[str]]:
    """Return for each token of a response the place of a reason in a list, 0 for one that is trained, and the list."""
    mask = [bool(value) for value in row["loss_mask"] or ()]
    reasons = ["trained", "context: the episode or the template put it there"]
    whole = _of_whole_row(run, row, kind)
    if whole:
        return [2 if sampled else 1 for sampled in mask], [*reasons, whole]
    why = [0 if sampled else 1 for sampled in mask]
    for name, dropped in _dropped(run, row, mask):
        reasons.append(f"masked by correction {name}: sampler and trainer disagree")
        last = len(reasons) - 1
        why = [last if gone and not before else before for gone, before in zip(dropped, why, strict=True)]
    return why, reasons


def _of_whole_row(run: RunReader, row: JSON, kind: Kind) -> str:
    """Return why no token of a rollout is trained; empty if some are."""
    if kind == "validation":
        return "validation: nothing is learned from it"
    if row["failure"] is not None:
        return f"left out: {row['failure']}"
    if row["replaced"]:
        return "its group was replaced: all scores equal, so no signal"
    if row["advantages"] is None:
        is_masked = run.config is not None and run.config.rollout.mask_truncated and row["finish_reason"] == "length"
        return "truncated, and rollout.mask_truncated is set" if is_masked else "not in the batch that was learned from"
    if not any(row["advantages"]):
        return "group without signal: all its scores are equal, so every advantage is 0"
    return ""


def _dropped(run: RunReader, row: JSON, mask: Sequence[bool]) -> Iterator[tuple[str, list[bool]]]:
    """Yield the corrections of a run with the tokens to which they give a weight of 0, of those that files can tell."""
    if run.config is None or row["old_logprobs"] is None or row["rollout_logprobs"] is None:
        return
    old = torch.tensor(row["old_logprobs"])
    tokens = PolicyTokens(
        logprobs=old,
        old_logprobs=old,
        rollout_logprobs=torch.tensor(row["rollout_logprobs"]),
        advantages=torch.tensor(row["advantages"]),
        loss_mask=torch.tensor(mask),
        rows=torch.zeros(len(mask), dtype=torch.int64),
        num_rows=1,
    )
    for section in run.config.correction:
        values = {name: value for name, value in section.model_dump().items() if name != "name"}
        correction: Correction = CORRECTIONS[section.name](**values)
        weights, _ = correct([correction], tokens)
        yield section.name, [bool(weight == 0) and trained for weight, trained in zip(weights, mask, strict=True)]


_TOKENIZERS: dict[Path, Tokenizer | None] = {}


def tokenizer_of(run: RunReader) -> Tokenizer | None:
    """Return the tokenizer of a run from its folder or its model's; None if there is no file of one on this machine."""
    path = run.folder.path
    if path not in _TOKENIZERS:
        from tokenizers import Tokenizer as Loaded

        model = run.config.model.path if run.config is not None else None
        places = [*sorted(run.folder.checkpoints.glob("step_*"), reverse=True), run.folder.model]
        places += [Path(model).expanduser()] if model else []
        files = (place / "tokenizer.json" for place in places)
        file = next((file for file in files if file.is_file()), None)
        try:
            _TOKENIZERS[path] = None if file is None else Loaded.from_file(str(file))
        except Exception:  # noqa: BLE001 - what the library raises has no type of its own; ids are shown instead
            _TOKENIZERS[path] = None
    return _TOKENIZERS[path]


def pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds; of a character of several tokens, all at the last of them."""
    if tokenizer is None:
        return [f"⟨{token}⟩" for token in ids]
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    return [cast("str | None", stream.step(tokenizer, token)) or "" for token in ids]
