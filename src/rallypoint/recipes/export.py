"""A trained model, written as the folder that other tools open, with a card that names what it was made from.

Files are named there without their folders: a card is read by others, and where they were is nobody's business.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import yaml
from huggingface_hub import HfApi
from transformers import AutoConfig

from rallypoint import checkpoint
from rallypoint.checkpoint import MANIFEST
from rallypoint.config import RunConfig, values_of
from rallypoint.data import load_tokenizer, save_tokenizer
from rallypoint.disk import explain
from rallypoint.errors import CheckpointError, ExportError, first_line
from rallypoint.journal import RunState
from rallypoint.model_files import merge_adapters, save_model
from rallypoint.prepare.model_folders import is_hub_name
from rallypoint.recipes.use import Trained
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import Record, has_record

_OWN = {MANIFEST, "training", "critic"}
"""Entries of a checkpoint that are not part of the model."""


def export(trained: Trained, to: Path, *, merge: bool | None) -> None:
    """Write a whole model, or an adapter in PEFT's format, with the card of its run; all of it, or nothing.

    Adapters are merged in float32, and the result is written in the type that the model was trained in (outside of a
    run: in its own).

    Args:
        trained: what to export.
        to: a folder that is empty or not there yet.
        merge: False for the adapter alone; True for a whole model, as is None.

    Raises:
        ExportError: the folder is not empty or cannot be written, or there is nothing to export in this form.
        ModelError: the model cannot be loaded.
    """
    _check(trained, to, merge)
    partial = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        if trained.base is None or merge is False:
            source = Path(trained.path)
            shutil.copytree(source, partial, ignore=lambda folder, _: _OWN if Path(folder) == source else ())
        else:
            _merge(trained, partial)
        if (card := model_card(trained)) is not None:
            (partial / CARD).write_text(card, encoding="utf-8")
        partial.rename(to)  # onto an empty folder too
    except (OSError, CheckpointError) as error:
        raise ExportError(explain(to, error) if isinstance(error, OSError) else f"{to}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def push(folder: Path, repo: str, *, public: bool, endpoint: str | None = None, token: str | None = None) -> str:
    """Upload an exported folder to the Hugging Face hub in one commit: whole, or not at all.

    Args:
        folder: what `export` wrote.
        repo: `OWNER/NAME`; made if it is not there.
        public: whether a repository that is made can be seen by everyone.
        endpoint: of the hub; None for that of its client (HF_ENDPOINT).
        token: of the user; None for that of the client (HF_TOKEN, or `hf auth login`).

    Returns:
        Where it is.

    Raises:
        ExportError: it was refused, or the hub cannot be reached. The folder stays.
    """
    hub = HfApi(endpoint=endpoint, token=token)
    try:
        where = hub.create_repo(repo, private=not public, exist_ok=True)
        hub.upload_folder(repo_id=where.repo_id, folder_path=folder, commit_message=f"Upload {folder.name}")
    except Exception as error:
        raise ExportError(
            f"--push {repo}: {first_line(error)}; expected OWNER/NAME of a repository that your token (HF_TOKEN) may "
            f"write to. {folder} is whole: push it again with `hf upload {repo} {folder}`"
        ) from error
    return str(where)


def _check(trained: Trained, to: Path, merge: bool | None) -> None:
    if to.exists() and not to.is_dir():
        raise ExportError(f"{to} is a file; expected a folder that is empty or not there yet")
    if to.is_dir() and any(to.iterdir()):
        raise ExportError(f"{to} is not empty; name a folder that is empty or not there yet")
    if trained.base is None and merge is False:
        raise ExportError(f"{trained.path} has no adapter: it was trained without model.lora; leave out --adapter")
    if trained.base is None and not (Path(trained.path) / MANIFEST).is_file():
        raise ExportError(f"{trained.path} is no checkpoint but a model as it is; there is nothing to export")


def _merge(trained: Trained, folder: Path) -> None:
    trust = trained.trusts_remote_code
    dtype = trained.config.model.dtype if trained.config else None
    if dtype is None:
        own = AutoConfig.from_pretrained(trained.model_path, trust_remote_code=trust).dtype
        dtype = str(own).removeprefix("torch.") if str(own) == "torch.bfloat16" else "float32"
    save_model(merge_adapters(trained.load(dtype)), folder)
    save_tokenizer(load_tokenizer(trained.tokenizer_path, trust_remote_code=trust), folder)


CARD = "README.md"


def model_card(trained: Trained) -> str | None:
    """Return the card of a checkpoint of a run; None of any other model, of which nothing is known.

    Raises:
        CheckpointError: its record cannot be read.
    """
    folder = Path(trained.path)
    if trained.config is None or not has_record(folder):
        return None
    step = json.loads((folder / checkpoint.MANIFEST).read_text(encoding="utf-8"))["step"]
    run = RunFolder(folder.parents[1])
    state = run.state() if run.journal.is_file() else RunState()
    record = Record.read(folder)
    lines = [*_front(trained.config), f"# {run.path.name}, step {step}", ""]
    lines += [f"Trained with [rallypoint](https://pypi.org/project/rallypoint/), recipe `{trained.config.recipe}`.", ""]
    lines += _table(dict(_facts(trained, record, state, step, checkpoint.digested(folder))))
    files = {f"{key}, {name}": f"`{digest}`" for key, named in record.inputs.items() for name, digest in named.items()}
    lines += ["", "## Made from", "", *_table(files), ""]
    lines += ["## Config", "", "<details><summary>every key</summary>", "", *_table(_keys(trained.config)), ""]
    return "\n".join([*lines, "</details>", ""])


def _front(config: RunConfig) -> list[str]:
    """Return what the hub reads."""
    about: dict[str, Any] = {"library_name": "transformers" if config.model.lora is None else "peft"}
    if config.model.path is not None and is_hub_name(config.model.path):
        about["base_model"] = config.model.path
    about |= {"pipeline_tag": "text-generation", "tags": ["rallypoint", "reinforcement-learning", config.recipe]}
    return ["---", yaml.safe_dump(about, sort_keys=False).rstrip(), "---", ""]


def _facts(trained: Trained, record: Record, state: RunState, step: int, weights: str) -> Iterator[tuple[str, str]]:
    config = trained.config
    assert config is not None, "a card is of a run"
    yield "step", f"{step} of {config.trainer.num_steps}"
    yield "seed", str(config.seed)
    yield "base model", _name(config.model.path or "made by the run, with random weights")
    rewards = config.reward.named_functions.values()
    if rewards:
        yield "reward", ", ".join(map(_name, rewards))
    measured = state.validations.get(step)
    if measured is not None:
        scores = {name.partition("validation/")[2]: value for name, value in measured.metrics.items()}
        yield "validation", ", ".join(f"{name} {value:.4g}" for name, value in scores.items() if name)
    tokens = [done.metrics.get("actor/num_tokens", 0) for at, done in state.steps.items() if at <= step]
    if tokens:
        yield "tokens trained", f"{int(sum(tokens)):,}"
    yield "weights", f"`{weights}` (xxh3 of the files' digests in manifest.json)"
    yield "packages", ", ".join(f"{name} {version}" for name, version in record.software.items())
    if state.began is not None:
        yield "machine", state.began.machine


def _keys(config: RunConfig) -> dict[str, str]:
    """Return all keys but those that say where it ran, or what rewards were given, which may be secrets."""
    kept = {key: value for key, value in values_of(config) if not key.startswith("cluster.")}
    return {
        f"`{key}`": _code(", ".join(map(str, cast("Mapping[str, object]", value))))  # their names
        if key.endswith("parameters")
        else _code(_shown(value))
        for key, value in kept.items()
    }


def _code(text: str) -> str:
    """Return a text as code, which it cannot leave."""
    return f"`{text.replace('`', chr(39))}`"


def _shown(value: object) -> str:
    match value:
        case str():
            return _name(value)
        case list() | tuple():
            return json.dumps([_shown(each) for each in value])  # pyright: ignore[reportUnknownVariableType]
        case Mapping():
            return json.dumps({str(key): _shown(each) for key, each in value.items()})  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return json.dumps(value, default=str)


def _name(text: str) -> str:
    """Return a path or an address without its folders, host and query; anything else as it is.

    >>> _name("/data/me/rewards.py:score"), _name("Qwen/Qwen3-0.6B"), _name("../me/data.parquet")
    ('rewards.py:score', 'Qwen/Qwen3-0.6B', 'data.parquet')
    >>> _name("https://me:secret@host/data.parquet?signature=1")
    'https://.../data.parquet'
    """
    if "://" in text:
        parts = urlsplit(text)
        return f"{parts.scheme}://.../{Path(parts.path).name}"
    is_file = text.startswith((".", "/", "~")) or (Path(text.partition(":")[0]).suffix and not is_hub_name(text))
    return Path(text).name if is_file else text


def _table(rows: Mapping[str, str]) -> list[str]:
    cells = [f"| {name} | {value} |" for name, value in ((_cell(a), _cell(b)) for a, b in rows.items())]
    return ["| | |", "|---|---|", *cells]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
