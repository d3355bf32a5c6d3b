"""Rows and models that exist in Python only, written where a config can name them.

They lie beside the runs, in `runs/given/`, under names that follow from their content: the same rows are stored once, a
run that is resumed with the same rows names the same file, and with others it is refused as it would be with a file
that was edited. See docs/decisions/0029-what-python-gives.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rallypoint.checkpoint import digests
from rallypoint.data import save_tokenizer
from rallypoint.disk import naming
from rallypoint.errors import DataError

Rows: TypeAlias = Iterable[Mapping[str, Any]]
"""Such as a list of dicts, or a `datasets.Dataset`."""
Data: TypeAlias = str | Path | Sequence[str | Path] | Rows
"""One file, several, or rows."""
Model: TypeAlias = str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase]
"""A folder, a name on the hub, or a model of transformers with its tokenizer."""

_COLUMNS = ("prompt", "reward_model", "ground_truth", "data_source", "ability", "extra_info")
_TRAINED = {"completion", "chosen", "rejected"}
"""Columns of rows that are trained on as they are."""
_ANSWERS = ("answer", "solution", "final_answer", "expected_answer", "target", "output", "label")


def data_files(data: Data, store: Path, wanted: Sequence[str] = ()) -> list[str]:
    """Return the files of data; rows are written to one first.

    Args:
        data: paths or rows.
        store: folder for what is written.
        wanted: columns that the reward function names.

    Raises:
        DataError: there is no row, a value cannot be written as JSON, or the first row lacks a column.
        DiskError: the disk is full or not writable.
    """
    if isinstance(data, str | Path):
        return [str(data)]
    first, rows = _peek(data)
    if isinstance(first, str | Path):
        return [str(path) for path in rows]
    if not isinstance(first, Mapping):
        raise DataError(f"data: expected paths, or rows that are dicts, found {type(first).__name__}")
    if missing := [name for name in wanted if name not in first]:
        raise DataError(f"the reward function names {missing[0]!r}, and the first row has {', '.join(first)}")
    return [str(_write_rows(cast("Iterable[Mapping[str, Any]]", rows), store))]


def model_path(model: Model, store: Path) -> str:
    """Return the folder or the name of a model; one that exists in memory only is saved first.

    Raises:
        DiskError: the disk is full or not writable.
    """
    if isinstance(model, str | Path):
        return str(model)
    ours, tokenizer = model
    partial = _partial(store)
    with naming(store):
        ours.save_pretrained(partial)
        save_tokenizer(tokenizer, partial)
        listed = json.dumps(digests(partial, besides=""), sort_keys=True)
        return str(_settle(partial, store / f"model-{_digest([listed.encode()])}"))


def _peek(data: Iterable[Any]) -> tuple[object, Iterator[Any]]:
    rows = iter(data)
    first = next(rows, None)
    if first is None:
        raise DataError("data: there is no row")
    return first, itertools.chain([first], rows)


def _write_rows(rows: Iterable[Mapping[str, Any]], store: Path) -> Path:
    folder, digest = _partial(store), hashlib.sha256()
    partial = folder / "rows"
    with partial.open("wb") as file:
        for place, row in enumerate(rows):
            line = _as_json(_in_our_columns(row), place)
            digest.update(line)
            with naming(store):
                file.write(line)
    final = _settle(partial, store / f"rows-{digest.hexdigest()[:12]}.jsonl")
    shutil.rmtree(folder, ignore_errors=True)
    return final


def _in_our_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as a data file has it: columns that we do not have are handed to the reward function.

    >>> _in_our_columns({"prompt": "1 + 1", "answer": "2"})
    {'prompt': '1 + 1', 'extra_info': {'answer': '2'}, 'ground_truth': '2'}
    """
    if "prompt" not in row or _TRAINED & row.keys():
        return dict(row)
    ours = {name: value for name, value in row.items() if name in _COLUMNS and name != "extra_info"}
    others = {name: value for name, value in row.items() if name not in _COLUMNS}
    ours["extra_info"] = {**others, **(row.get("extra_info") or {})}
    if not {"reward_model", "ground_truth"} & row.keys():
        ours["ground_truth"] = next((row[name] for name in _ANSWERS if row.get(name) is not None), "")
    return ours


def _as_json(row: Mapping[str, Any], place: int) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"data, row {place}: {error}; expected texts, numbers, lists and dicts") from None


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:12]


def _partial(store: Path) -> Path:
    with naming(store):
        store.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".partial-", dir=store))


def _settle(partial: Path, final: Path) -> Path:
    """Give what was written its name, unless the same is there already."""
    if final.exists():
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    else:
        os.replace(partial, final)
    return final
