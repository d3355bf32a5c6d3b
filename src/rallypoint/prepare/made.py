"""The model and the data set that a run makes for itself: once, completely or not at all, verified at every start.

Another version of a library may draw other numbers from the same config, and a run depends on every bit: the reference
is read from `model/` at each start. So each folder has a list of its files with digests, and of what it was made from.

    model/made.json     {"made_from": {"seed": 0, ...}, "files": {"model.safetensors": {"size": 1, "xxh3_128": "..."}}}
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rallypoint import checkpoint
from rallypoint.config import RunConfig
from rallypoint.data import make_digits, make_digits_tokenizer
from rallypoint.disk import naming
from rallypoint.errors import CheckpointError, DataError
from rallypoint.model_files import create_model
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import MADE_LIST, listed_in


def made_model(config: RunConfig, folder: RunFolder) -> Path:
    """Return the folder of the model that a run makes for itself, verified.

    Raises:
        CheckpointError: it was damaged since.
        DiskError: the disk is full or not writable.
    """
    made = config.model.create
    assert made is not None, "the config was checked: model.path or model.create"
    made_from = made.model_dump(mode="json") | {"seed": config.seed, "max_positions": config.max_row_tokens}

    def fill(partial: Path) -> None:
        create_model(
            partial,
            make_digits_tokenizer(),
            max_positions=config.max_row_tokens,
            seed=config.seed,
            tie_embeddings=False,
            **made.model_dump(),
        )

    return _made(folder, folder.model, made_from, fill)


def made_data(config: RunConfig, folder: RunFolder) -> tuple[Path, Path]:
    """Return train.parquet and validation.parquet of the data set that a run makes for itself, verified.

    Raises:
        CheckpointError: they were damaged since.
        DataError: the task has too few prompts.
        DiskError: the disk is full or not writable.
    """
    generate = config.data.generate
    assert generate is not None, "the config was checked: data.train or data.generate"

    def fill(partial: Path) -> None:
        try:
            make_digits(partial, **generate.model_dump())
        except ValueError as error:
            raise DataError(f"data.generate: {error}") from error

    made = _made(folder, folder.data, generate.model_dump(mode="json"), fill)
    return made / "train.parquet", made / "validation.parquet"


def _made(run: RunFolder, folder: Path, made_from: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
    """Make a folder, or verify the one that is there by its list."""
    listed = listed_in(folder)
    # Checkpoints belong to the folder; without one, nothing is lost by making it again from another config.
    if folder.exists() and (checkpoint.visible(run.checkpoints) or (listed and listed["made_from"] == made_from)):
        remedy = f"remove {folder}: it is made again as it was, at the next start"
        if listed is None:
            raise CheckpointError(f"{folder / MADE_LIST}: missing or damaged; {remedy}")
        files = {name: (entry["size"], entry["xxh3_128"]) for name, entry in listed["files"].items()}
        checkpoint.check_files(folder, files, remedy)
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    with naming(folder):
        shutil.rmtree(partial, ignore_errors=True)
        fill(partial)
        listed = {"made_from": dict(made_from), "files": checkpoint.digests(partial, besides=(MADE_LIST,))}
        (partial / MADE_LIST).write_text(json.dumps(listed, indent=1), encoding="utf-8")
        checkpoint.sync_below(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        checkpoint.sync(folder.parent)
    return folder
