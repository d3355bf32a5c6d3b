"""Rows and models that exist in Python only, written where a config can name them.

They are in `runs/given/`, under names that follow from their content: the same rows are stored once, a
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
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rallypoint.checkpoint import digests
from rallypoint.data import save_tokenizer
from rallypoint.disk import naming
from rallypoint.environments.given import ONLY_TRL
from rallypoint.errors import DataError, ModelError

Rows: TypeAlias = Iterable[Mapping[str, Any]]
"""Such as a list of dicts, or a `datasets.Dataset`."""


@runtime_checkable
class DataFrame(Protocol):
    """A DataFrame of pandas."""

    def itertuples(self) -> Iterable[object]:
        """Tells it from a `datasets.Dataset`, which yields rows by itself."""
        ...

    def to_dict(self, orient: str, /) -> list[Mapping[str, Any]]:
        """Return the rows, for "records"."""
        ...


@runtime_checkable
class _Saves(Protocol):
    """A model of transformers, or PEFT's around one."""

    def save_pretrained(self, save_directory: str | Path, /) -> object:
        """Write a folder."""
        ...


@runtime_checkable
class _Number(Protocol):
    """A number or an array of numpy or torch."""

    def tolist(self) -> object: ...


Data: TypeAlias = str | Path | Sequence[str | Path] | Rows | DataFrame
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
        DataError: these are no rows or there is none, a value cannot be written as JSON, or the first row lacks a
            column.
        DiskError: the disk is full or not writable.
    """
    if isinstance(data, str | Path):
        return [str(data)]
    first, rows = _peek(_rows_in(data))
    if isinstance(first, str | Path):
        return [str(path) for path in rows]
    columns = _checked(first, 0)
    if missing := [name for name in wanted if name not in columns]:
        if missing[0] in ONLY_TRL:
            raise DataError(
                f"the reward function names {missing[0]!r}, which TRL's trainer gives it and a run here does not: "
                "return a dict of numbers, {'score': 1.0, 'chars': 2}, for metrics, and let a callback look at steps"
            )
        raise DataError(
            f"the reward function names {missing[0]!r}, and the first row has {', '.join(columns)}; the response is "
            "`completion`, the prompt `prompt`, and any other name is a column"
        )
    return [str(_write_rows(cast("Iterable[Mapping[str, Any]]", rows), store))]


def model_path(model: Model, store: Path) -> str:
    """Return the folder or the name of a model; one that exists in memory only is saved first.

    Raises:
        ModelError: it is neither, nor a pair.
        DiskError: the disk is full or not writable.
    """
    if isinstance(model, str | Path):
        return str(model)
    ours, tokenizer = _pair(model)
    partial = _partial(store)
    with naming(store):
        ours.save_pretrained(partial)
        save_tokenizer(tokenizer, partial)
        listed = json.dumps(digests(partial, besides=""), sort_keys=True)
        return str(_settle(partial, store / f"model-{_digest([listed.encode()])}"))


def _pair(model: object) -> tuple[_Saves, PreTrainedTokenizerBase]:
    """Return a model and its tokenizer; a type checker sees to it, a notebook has none."""
    expected = "model: expected a folder, a name on the hub, or a pair (model, tokenizer)"
    if not isinstance(model, tuple | list):
        raise ModelError(f"{expected}; found {type(model).__name__}" + " alone" * isinstance(model, _Saves))
    pair = cast("Sequence[object]", model)
    if len(pair) == 2 and isinstance(pair[0], _Saves) and isinstance(pair[1], PreTrainedTokenizerBase):
        return pair[0], pair[1]
    raise ModelError(f"{expected}; found ({', '.join(type(one).__name__ for one in pair)})")


def _rows_in(data: object) -> Iterable[Any]:
    """Return what may be rows or paths.

    Raises:
        DataError: it is one row, the splits of a data set, or nothing that yields rows.
    """
    if isinstance(data, DataFrame):
        return data.to_dict("records")
    if isinstance(data, Mapping):
        found = cast("Mapping[str, object]", data)
        if _are_splits(found):
            raise DataError(f"data: found {', '.join(found)}; name a split: data[{next(iter(found))!r}]")
        raise DataError(
            f"data: expected rows, such as a list of dicts, found one dict of {', '.join(found) or 'nothing'}"
        )
    try:
        return iter(cast("Iterable[Any]", data))
    except TypeError:
        raise DataError(f"data: expected paths, or rows that are dicts, found {type(data).__name__}") from None


def _are_splits(found: Mapping[str, object]) -> bool:
    """Whether a dict holds sets of rows, as a `DatasetDict` does; a row holds a prompt or texts."""
    if not found or {"prompt", "messages", *_TRAINED} & found.keys():
        return False
    return all(
        isinstance(one, Iterable)
        and not isinstance(one, str | bytes | Mapping)
        and not (isinstance(one, Sequence) and one and not isinstance(one[0], Mapping))
        for one in found.values()
    )


def _checked(row: object, place: int) -> Mapping[str, Any]:
    if isinstance(row, Mapping):
        return cast("Mapping[str, Any]", row)
    where = f"data, row {place}" if place else "data"
    raise DataError(f"{where}: expected paths, or rows that are dicts, found {type(row).__name__}")


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
            line = _as_json(_in_our_columns(_checked(row, place), place), place)
            digest.update(line)
            with naming(store):
                file.write(line)
    final = _settle(partial, store / f"rows-{digest.hexdigest()[:12]}.jsonl")
    shutil.rmtree(folder, ignore_errors=True)
    return final


def _in_our_columns(row: Mapping[str, Any], place: int = 0) -> dict[str, Any]:
    """Return a row as a data file has it: columns that we do not have are handed to the reward function.

    >>> _in_our_columns({"prompt": "1 + 1", "answer": "2"})
    {'prompt': '1 + 1', 'extra_info': {'answer': '2'}, 'ground_truth': '2'}
    """
    if "prompt" not in row or _TRAINED & row.keys():
        return dict(row)
    ours = {name: value for name, value in row.items() if name in _COLUMNS and name != "extra_info"}
    others = {name: value for name, value in row.items() if name not in _COLUMNS}
    more = row.get("extra_info") or {}
    if not isinstance(more, Mapping):
        raise DataError(
            f"data, row {place}: extra_info: expected a dict, found {type(more).__name__} {str(more)[:40]!r}"
        )
    ours["extra_info"] = {**others, **more}
    if not {"reward_model", "ground_truth"} & row.keys():
        ours["ground_truth"] = next((row[name] for name in _ANSWERS if row.get(name) is not None), "")
    return ours


def _as_json(row: Mapping[str, Any], place: int) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=plain).encode() + b"\n"
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
    """Give what was written its name, unless the same is there already, as of another thread just now."""
    if not final.exists():
        try:
            os.replace(partial, final)
        except OSError:  # a folder does not take the place of another
            if not final.exists():
                raise
        else:
            return final
    shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
    return final


def plain(value: object) -> Any:
    """Return a path, or a number or an array of numpy or torch, as JSON has it; for `json.dumps(default=)`."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, _Number) and not isinstance(value, type):
        return value.tolist()
    raise TypeError(f"found {type(value).__name__}")
