"""A run whose folder is elsewhere, at a URL: its folder on this machine is mirrored there, and fetched from there.

Owns: what of a run is there, in which order it gets there, and what of it counts. Must not know: how a file travels.

    local folder --Mirror--> trainer.runs_dir/NAME --bring--> a folder on another machine, which goes on
                                                   --borrow-> a copy in the cache, which is read

The journal goes first, and the manifest of a checkpoint last: a checkpoint without one does not count.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rallypoint import checkpoint
from rallypoint.config import RunConfig
from rallypoint.data.files import is_url
from rallypoint.data.remote import Remote, patiently
from rallypoint.disk import Outage
from rallypoint.errors import CheckpointError, RunFolderError, first_line
from rallypoint.journal import CheckpointSaved, Entry, Validated
from rallypoint.run.folder import RunFolder, has_begun
from rallypoint.run.reports import VALIDATION

_EVERY_S, _LAST_S = 60.0, 600.0
"""Seconds from one sending to the next, and those that the end of a run waits."""
_AGAIN_S, _MOST_S = 5.0, 60.0
"""Seconds until what failed is tried again: the first time and at the end of a run, and at most."""
_SILENT = TimeoutError("no answer")
JOURNAL, CONFIG, CHECKPOINTS = "journal.jsonl", "config.yaml", "checkpoints"
SENT = ".sent.json"
"""In the local folder: what was sent, by its size and time; and in a copy that is read: what was fetched."""
_STAYS = ("snapshots", "published", "endpoint.key", "ray", CHECKPOINTS)
"""Files and folders that are not sent, or in their own way."""


def url_of(folder: RunFolder, config: RunConfig) -> str | None:
    """Return where the folder of a run is mirrored to; None if it is not."""
    runs_dir = config.trainer.runs_dir
    return f"{runs_dir.rstrip('/')}/{folder.path.name}" if is_url(runs_dir) else None


class Mirror:
    """Sends what changes in a run's folder, in a thread of its own; training does not wait for it."""

    def __init__(self, folder: RunFolder, url: str, config: RunConfig, say: Callable[[str], None]) -> None:
        """Compare what is there with the journal.

        Args:
            folder: of the run, on this machine.
            url: of its mirror.
            config: of the run, for which checkpoints are kept.
            say: called with lines about outages, from any thread.

        Raises:
            RunFolderError: another run is there, or this one was resumed elsewhere; or the URL does not answer.
        """
        self.folder, self._config = folder, config.checkpoint
        self._sent_bytes: int | None = None
        self._scores: dict[int, float] = {}
        for step, validated in folder.state().validations.items():
            self._note(Validated(step=step, metrics=validated.metrics))
        self._outage = Outage(say, f"training goes on, {folder.path} has all of it, and sending is tried again")
        self._wake, self._done, self._is_closing = threading.Event(), threading.Event(), False
        self._failure: Exception | None = None
        self._sent = read_list(folder.path / SENT)
        try:
            self.remote = Remote.of(url)
            patiently(self._check_alone)
            self._there = patiently(self._whole_there)
        except OSError as error:
            raise RunFolderError(f"{url} cannot be used: {first_line(error)}") from error

    def start(self, first: int) -> None:
        """Begin to send; checkpoints after step `first` are set aside, as what the run does now supersedes them."""
        for step in [step for step in self._there if step > first]:
            manifest = f"{CHECKPOINTS}/{checkpoint.checkpoint_name(step)}/{checkpoint.MANIFEST}"
            with answering(self.remote.url):
                patiently(functools.partial(self.remote.rename, manifest, f"{manifest}.aside"))
            self._there.remove(step)
        threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def close(self) -> None:
        """Wait until all is there, but not for ever.

        Raises:
            CheckpointError: not all is there.
        """
        self._is_closing = True
        self._wake.set()
        self._done.wait(_LAST_S)
        if self._failure is not None or not self._done.is_set():
            raise CheckpointError(
                f"{self.remote.url} lacks what {self.folder.path} has: {first_line(self._failure or _SILENT)}; "
                f"send it with: rally train {self.folder.path} --resume"
            )

    def take(self, entry: Entry) -> None:
        """Hear of an event of the journal.

        Raises:
            RunFolderError: another process writes to the same place, so that this one ends.
        """
        if isinstance(self._failure, RunFolderError) and not self._is_closing:
            raise self._failure
        if isinstance(entry.event, Validated):
            self._note(entry.event)
        if isinstance(entry.event, CheckpointSaved):
            self._wake.set()

    def _note(self, validated: Validated) -> None:
        score = validated.metrics.get(VALIDATION, math.nan)
        if self._config.keep_best and validated.step and not math.isnan(score):
            self._scores[validated.step] = score

    def _work(self) -> None:
        wait_s = 0.0
        while True:
            self._wake.wait(wait_s)
            self._wake.clear()
            is_last = self._is_closing
            try:
                self.send()
            except OSError as error:
                self._failure = error
                self._outage.lasts(OSError(f"{self.remote.url}: {first_line(error)}"))
                wait_s = _AGAIN_S if is_last else max(_AGAIN_S, min(2 * wait_s, _MOST_S))
                continue
            except RunFolderError as error:
                self._failure = error
                break
            self._failure, wait_s = None, _EVERY_S
            self._outage.ends(f"{self.remote.url} has all of the run again")
            if is_last:
                break
        self._done.set()

    def send(self) -> None:
        """Send what has changed, once.

        Raises:
            OSError: something did not get there.
            RunFolderError: another process writes to the same place.
        """
        patiently(self._check_alone)
        for path in self._files():
            name, now = path.relative_to(self.folder.path).as_posix(), path.stat()
            if self._sent.get(name) == (stamp := [now.st_size, now.st_mtime_ns]):
                continue
            with contextlib.suppress(FileNotFoundError):  # thinned out, or replaced, since it was seen
                if name == JOURNAL:
                    self._send_journal()
                else:
                    patiently(functools.partial(self.remote.send, path, name))
                self._sent[name] = stamp
        self._write_list()
        here = checkpoint.steps(self.folder.checkpoints)
        for step in sorted(set(here) - set(self._there) - set(self._doomed({*here, *self._there})), reverse=True):
            self._send_checkpoint(step)
        for step in self._doomed(self._there):
            name = f"{CHECKPOINTS}/{checkpoint.checkpoint_name(step)}"
            for doomed in (f"{name}/{checkpoint.MANIFEST}", name):  # a half-removed one must not look whole
                patiently(functools.partial(self.remote.remove, doomed))
            self._there.remove(step)

    def _doomed(self, steps: set[int]) -> list[int]:
        best = checkpoint.best_of(self._scores, steps)
        return checkpoint.doomed(steps, self._config.keep, best=best, every=self._config.keep_every)

    def _files(self) -> Iterator[Path]:
        """Yield the files to send, the journal first."""
        yield self.folder.journal
        for path in sorted(self.folder.path.rglob("*")):
            parts = path.relative_to(self.folder.path).parts
            hidden = any(part.startswith(".") or part in _STAYS for part in parts) or path.suffix in (
                ".part",
                ".partial",
            )
            if not hidden and path != self.folder.journal and path.is_file():
                yield path

    def _send_journal(self) -> None:
        """Send the whole lines of the journal, to which others are appended meanwhile."""
        copy = self.folder.path / f".{JOURNAL}.sending"
        whole = whole_lines(self.folder.journal)
        copy.write_bytes(whole)
        try:
            patiently(lambda: self.remote.send(copy, JOURNAL))
        finally:
            copy.unlink()
        self._sent_bytes = len(whole)

    def _check_alone(self) -> None:
        """Compare the journal there with this one, if it is not as it was left.

        Raises:
            RunFolderError: it has what this one has not.
        """
        size = self.remote.size(JOURNAL)
        if size in (None, self._sent_bytes):
            return
        there = self.remote.read(JOURNAL)
        if there is not None and not self.folder.journal.read_bytes().startswith(there):
            raise RunFolderError(
                f"{self.remote.url} has another history than {self.folder.path}: the run was gone on with elsewhere, "
                f"or another has its name; go on from there with: rally train {self.remote.url} --resume"
            )

    def _whole_there(self) -> set[int]:
        """Return the steps of the checkpoints there that are those of this folder, or that it lacks."""
        found = set(whole_steps(self.remote))
        for step in found & set(checkpoint.steps(self.folder.checkpoints)):
            name = checkpoint.checkpoint_name(step)
            there = self.remote.read(f"{CHECKPOINTS}/{name}/{checkpoint.MANIFEST}")
            if there != (self.folder.checkpoints / name / checkpoint.MANIFEST).read_bytes():
                found.remove(step)
        return found

    def _send_checkpoint(self, step: int) -> None:
        """Send a checkpoint, its manifest last; nothing if it is removed at that moment."""
        name = checkpoint.checkpoint_name(step)
        with contextlib.suppress(FileNotFoundError), _linked(self.folder.checkpoints / name) as folder:
            manifest = folder / checkpoint.MANIFEST
            patiently(lambda: self.remote.remove(f"{CHECKPOINTS}/{name}"))  # what a killed sending left
            for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest):
                where = f"{CHECKPOINTS}/{name}/{path.relative_to(folder).as_posix()}"
                patiently(functools.partial(self.remote.send, path, where))
            patiently(lambda: self.remote.send(manifest, f"{CHECKPOINTS}/{name}/{checkpoint.MANIFEST}"))
            self._there.add(step)

    def _write_list(self) -> None:
        partial = self.folder.path / f"{SENT}.partial"
        partial.write_text(json.dumps(self._sent), encoding="utf-8")
        partial.replace(self.folder.path / SENT)


def mirror_of(folder: RunFolder, config: RunConfig, say: Callable[[str], None]) -> Mirror | None:
    """Return the mirror of a run, if it has a URL.

    Raises:
        RunFolderError: see `Mirror`.
    """
    url = url_of(folder, config)
    return None if url is None else Mirror(folder, url, config, say)


@contextlib.contextmanager
def sent_at_end(folder: RunFolder, config: RunConfig) -> Iterator[None]:
    """Send what is written when a run has ended, after the block: its last event, its page.

    Raises:
        RunFolderError: it could not be sent, and the block raised nothing.
    """
    url, is_done = url_of(folder, config), False
    try:
        yield
        is_done = True
    finally:
        if url is not None and has_begun(folder) and not folder.is_in_use():  # by a process that this one gave way to
            with answering(url) if is_done else contextlib.suppress(RunFolderError, OSError):
                Mirror(folder, url, config, lambda _: None).send()


def whole_steps(remote: Remote) -> list[int]:
    """Return the steps of the checkpoints of a run's mirror that have a manifest, oldest first."""
    manifests = [name.split("/") for name in remote.below(CHECKPOINTS).files(depth=2)]
    return checkpoint.steps_of(parts[0] for parts in manifests if parts[1:] == [checkpoint.MANIFEST])


@contextlib.contextmanager
def _linked(folder: Path) -> Iterator[Path]:
    """Yield a folder of the same files, which stays as it is if the folder is removed."""
    copy = folder.parent.parent / ".sending"
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(folder, copy, copy_function=os.link)
    except (shutil.Error, OSError) as error:
        if not folder.exists():
            raise FileNotFoundError(errno.ENOENT, "it was removed", str(folder)) from error
        shutil.rmtree(copy, ignore_errors=True)
        yield folder  # a file system without links
        return
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


@contextlib.contextmanager
def answering(url: str) -> Iterator[None]:
    """Let errors of a file system be a `RunFolderError` that names the URL."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{url} cannot be read: {first_line(error)}") from error


def whole_lines(path: Path) -> bytes:
    """Return a file without a torn last line; nothing of one that is not there."""
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        return b""
    return found[: found.rfind(b"\n") + 1]


def read_list(path: Path) -> dict[str, object]:
    """Return a list of files that was kept; an empty one if there is none that can be read."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
