"""Copies of runs whose folders are at a URL: to go on with, or to read.

Owns: what of a run is fetched for what. Must not know: how a file travels, or who reads it.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path

from rallypoint import checkpoint
from rallypoint.config import RunConfig
from rallypoint.data.files import is_url
from rallypoint.data.remote import Remote, cache_folder, patiently
from rallypoint.errors import CheckpointError, RunFolderError, UnusableCheckpointError
from rallypoint.run.folder import RunFolder
from rallypoint.run.mirror import CHECKPOINTS, CONFIG, JOURNAL, SENT, answering, read_list, whole_lines, whole_steps

_TO_GO_ON = (CONFIG, JOURNAL, "metrics.jsonl", "model", "data", "logs")
"""What a run needs to go on, but for a checkpoint."""


def names_of_runs(url: str) -> list[str]:
    """Return the names of the folders at a URL.

    Raises:
        RunFolderError: the URL does not answer.
    """
    with answering(url):
        return patiently(Remote.of(url).folders)


def refuse_taken(config: RunConfig) -> None:
    """Refuse a new run whose name is taken where it would be mirrored to, or one that cannot be.

    Raises:
        RunFolderError: there is a run, or the URL does not answer.
    """
    if is_url(config.trainer.runs_dir):
        url = f"{config.trainer.runs_dir.rstrip('/')}/{config.trainer.name}"
        if config.trainer.name in names_of_runs(config.trainer.runs_dir):
            raise RunFolderError(
                f"{url} is there already; resume it with `rally train {url} --resume`, or choose another trainer.name"
            )


def bring(url: str, runs_dir: Path, from_step: int | None = None) -> Path:
    """Return the folder on this machine to go on with of a run at a URL; it is fetched unless it is as new.

    Args:
        url: of the run.
        runs_dir: where its folder is, or will be.
        from_step: step of the checkpoint to fetch; None for the newest.

    Raises:
        RunFolderError: there is no run, it has another history than the folder here, or nobody answers.
        UnusableCheckpointError: the checkpoint is damaged there.
    """
    with answering(url):
        remote = Remote.of(url)
        journal = patiently(lambda: remote.read(JOURNAL))
        path = runs_dir / remote.name
        if journal is None:
            raise RunFolderError(f"{url}: no run is there, as it has no {JOURNAL}")
        if path.exists():
            own = whole_lines(path / JOURNAL)
            if own.startswith(journal):
                return path
            if not journal.startswith(own) or RunFolder(path).is_in_use():
                raise RunFolderError(
                    f"{path} has another history than {url}; move it away, and the run goes on as it is there"
                )
            _set_aside(path)
        partial = runs_dir / f".{remote.name}.{os.getpid()}.partial"
        try:
            found = patiently(remote.files)
            for name in found:
                if name.partition("/")[0] in _TO_GO_ON:
                    patiently(functools.partial(remote.fetch, name, partial / name))
            (partial / JOURNAL).write_bytes(journal)
            there = whole_steps(remote)
            step = max(there, default=0) if from_step is None else from_step
            if step in there:
                _fetch_checkpoint(remote, step, partial / CHECKPOINTS, there)
            checkpoint.sync_below(partial)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return path


def _copies() -> Path:
    return cache_folder() / "runs"


def is_copy(folder: Path) -> bool:
    """Whether a folder is a copy of a run at a URL, which no process of this machine trains in."""
    return folder.is_relative_to(_copies())


def borrow(url: str, *, only: tuple[str, ...] = ()) -> Path:
    """Return a copy of a run at a URL in this machine's cache, for those who read it.

    Args:
        url: of the run.
        only: files and folders at its top that are enough; none for all but checkpoints.

    Raises:
        RunFolderError: there is no run, or nobody answers.
    """
    with answering(url):
        remote = Remote.of(url)
        folder = _copies() / remote.url.replace("://", "/")
        had, found = read_list(folder / SENT), patiently(remote.files)
        if CONFIG not in found:
            raise RunFolderError(f"{url}: no run is there, as it has no {CONFIG}")
        for name, version in found.items():
            top = name.partition("/")[0]
            if (top in only or not only) and top != CHECKPOINTS and had.get(name) != version:
                patiently(functools.partial(remote.fetch, name, folder / name))
                had[name] = version
        (folder / SENT).write_text(json.dumps(had), encoding="utf-8")
        return folder


def borrow_all(url: str) -> list[Path]:
    """Return copies of what `rally runs` reads of the runs at a URL, or of the run that it is itself.

    Raises:
        RunFolderError: the URL does not answer.
    """
    with answering(url):
        remote = Remote.of(url)
        if patiently(lambda: remote.size(CONFIG)) is not None:
            return [borrow(url, only=(CONFIG, JOURNAL))]
        names = [name for name in patiently(remote.folders) if remote.below(name).size(CONFIG) is not None]
        return [borrow(f"{remote.url}/{name}", only=(CONFIG, JOURNAL)) for name in names]


def borrow_checkpoint(url: str) -> Path | None:
    """Return a copy of a checkpoint in this machine's cache, without the state to resume from.

    Args:
        url: of it, or of a run, for its newest one.

    Returns:
        Its folder, in that of its run; None if the URL is neither.

    Raises:
        RunFolderError: the URL does not answer.
        CheckpointError: the checkpoint is damaged there, or the run has none yet.
    """
    run, _, name = url.rstrip("/").partition(f"/{CHECKPOINTS}/")
    with answering(url):
        remote = Remote.of(run)
        if patiently(lambda: remote.size(CONFIG)) is None:
            return None
        there = patiently(lambda: whole_steps(remote))
        steps = checkpoint.steps_of([name]) if name else there
        if not steps or steps[-1] not in there:
            raise CheckpointError(f"{url}: no whole checkpoint is there; there are those of {there or 'none'}")
        folder = borrow(run, only=_TO_GO_ON) / CHECKPOINTS / checkpoint.checkpoint_name(steps[-1])
        manifest = remote.read(f"{CHECKPOINTS}/{folder.name}/{checkpoint.MANIFEST}")
        if not (folder / checkpoint.MANIFEST).is_file() or (folder / checkpoint.MANIFEST).read_bytes() != manifest:
            shutil.rmtree(folder, ignore_errors=True)
            _fetch_checkpoint(remote, steps[-1], folder.parent, there, to_resume=False)
        return folder


def _fetch_checkpoint(remote: Remote, step: int, to: Path, there: list[int], *, to_resume: bool = True) -> None:
    """Fetch a checkpoint, and compare it with its manifest.

    Raises:
        UnusableCheckpointError: it is damaged.
    """
    name = checkpoint.checkpoint_name(step)
    source = remote.below(f"{CHECKPOINTS}/{name}")
    for file in patiently(source.files):
        if to_resume or not checkpoint.is_to_resume(file):
            patiently(functools.partial(source.fetch, file, to / name / file))
    try:
        checkpoint.verify(to / name, to_resume=to_resume)
    except CheckpointError as error:
        older = max((other for other in there if other < step), default=0)
        raise UnusableCheckpointError(
            f"{source.url}: {error}; go on from an older one: rally train {remote.url} --resume --from-step {older}"
        ) from error


def _set_aside(path: Path) -> None:
    """Rename a folder that is older than its mirror, which another machine has gone on with."""
    names = (f"{path.name}.aside", *(f"{path.name}.aside-{number}" for number in range(2, 1000)))
    path.rename(next(free for name in names if not (free := path.with_name(name)).exists()))
