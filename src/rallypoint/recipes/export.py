"""A trained model, written as the folder that other tools open."""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import HfApi
from transformers import AutoConfig

from rallypoint.checkpoint import MANIFEST
from rallypoint.data import load_tokenizer, save_tokenizer
from rallypoint.disk import explain
from rallypoint.errors import CheckpointError, ExportError, first_line
from rallypoint.model_files import merge_adapters, save_model
from rallypoint.recipes.card import CARD, model_card
from rallypoint.recipes.use import Trained

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
