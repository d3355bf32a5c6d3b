"""Folders on other file systems, by fsspec: S3, Google's storage, HDFS, and what else it knows by a URL.

Owns: how whole files get there and back, and what is tried again for how long. Must not know: runs, models, data sets.

A file that is there under its name is whole: object stores show none before, and elsewhere it is written beside it and
renamed. What is fetched appears under its name when it has the size that it has there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import xxhash

from rallypoint.data.files import as_os_errors, is_url, suggestion
from rallypoint.errors import ModelError, how_to_install
from rallypoint.extras import is_installed

ResultT = TypeVar("ResultT")

_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"})
"""Protocols of object stores: no folders to make, and a file appears as a whole."""
_PARTIAL = ".partial"
_PACKAGES = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "gcs": ("gcsfs", "gs")}
"""Protocol -> the package that speaks it, and the extra that has it."""
_WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds from one try to the next; fsspec's clients have tried some times in each."""


def check_url(url: str) -> str | None:
    """Return what is wrong with a URL, before anything is asked over a network; None if nothing is."""
    import fsspec

    protocol = url.partition("://")[0]
    package, extra = _PACKAGES.get(protocol, ("", ""))
    if package and not is_installed(package):
        return f"{url}: needs the package {package}; {how_to_install(extra)}"
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        known = sorted(str(name) for name in fsspec.available_protocols())
        return f"{url}: {protocol} is not a file system that fsspec knows{suggestion(protocol, known)}"
    except ImportError as error:
        return f"{url}: {error}"
    return None


def patiently(act: Callable[[], ResultT], sleep: Callable[[float], None] = time.sleep) -> ResultT:
    """Do something over a network, and try again some times while that fails; what is refused or not there fails once.

    Raises:
        OSError: it did not work.
    """
    for wait_s in _WAITS_S:
        try:
            return act()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            sleep(wait_s)
    return act()


@dataclasses.dataclass(frozen=True, slots=True)
class Remote:
    """A folder on another file system; everything may raise an `OSError`, whatever the client raises."""

    url: str
    system: Any
    """File system of fsspec."""
    root: str
    """Path of the folder there."""

    @classmethod
    def of(cls, url: str) -> Self:
        """Return the folder of a URL, which need not exist."""
        import fsspec

        if problem := check_url(url):
            raise OSError(problem)
        url = url.rstrip("/")
        with as_os_errors(url):
            system, root = fsspec.core.url_to_fs(url)
        return cls(url, system, str(root).rstrip("/"))

    @property
    def name(self) -> str:
        """Last part of its path."""
        return self.root.rpartition("/")[2]

    def files(self, depth: int | None = None) -> dict[str, str]:
        """Return the files below it, sorted -> what changes when one does: size, and tag or time as far as known."""
        with as_os_errors(self.url):
            self.system.invalidate_cache()
            found: dict[str, dict[str, Any]] = self.system.find(self.root, maxdepth=depth, detail=True)
        names = {str(path).removeprefix(self.root).lstrip("/"): info for path, info in found.items()}
        return {name: _version(info) for name, info in sorted(names.items()) if name and not name.endswith(_PARTIAL)}

    def folders(self) -> list[str]:
        """Return the names of the folders in it; none of one that is not there."""
        try:
            with as_os_errors(self.url):
                self.system.invalidate_cache()
                found: list[dict[str, Any]] = self.system.ls(self.root, detail=True)
        except FileNotFoundError:
            return []
        paths = [str(one["name"]).rstrip("/") for one in found if one["type"] == "directory"]
        return sorted(path.rpartition("/")[2] for path in paths if path != self.root)

    def below(self, name: str) -> Self:
        """Return a folder in it."""
        return dataclasses.replace(self, url=f"{self.url}/{name}", root=f"{self.root}/{name}")

    def read(self, name: str) -> bytes | None:
        """Return what is in a file; None if it is not there."""
        try:
            with as_os_errors(f"{self.url}/{name}"):
                self.system.invalidate_cache()
                return bytes(self.system.cat_file(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None

    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None if it is not there."""
        try:
            with as_os_errors(f"{self.url}/{name}"):
                self.system.invalidate_cache()
                return int(self.system.size(f"{self.root}/{name}"))
        except FileNotFoundError:
            return None

    def send(self, path: Path, name: str) -> None:
        """Write a file of this machine there."""
        target = f"{self.root}/{name}"
        with as_os_errors(f"{self.url}/{name}"):
            if self._is_objects:
                self.system.put_file(str(path), target)
                return
            self.system.makedirs(target.rpartition("/")[0], exist_ok=True)
            self.system.put_file(str(path), target + _PARTIAL)
            self.system.invalidate_cache()
            if self.system.exists(target):
                self.system.rm_file(target)
            self.system.mv(target + _PARTIAL, target)

    def fetch(self, name: str, path: Path) -> None:
        """Write a file from there to this machine."""
        with as_os_errors(f"{self.url}/{name}"):
            size = self.system.size(f"{self.root}/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}{_PARTIAL}")
            self.system.get_file(f"{self.root}/{name}", str(partial))
            if size is not None and partial.stat().st_size != size:
                raise OSError(f"{self.url}/{name}: expected {size} bytes, received {partial.stat().st_size}")
            partial.replace(path)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; nothing if it is not there."""
        try:
            with as_os_errors(f"{self.url}/{name}"):
                self.system.invalidate_cache()
                self.system.rm(f"{self.root}/{name}", recursive=True)
        except FileNotFoundError:
            return

    def rename(self, name: str, to: str) -> None:
        """Give a file another name."""
        with as_os_errors(f"{self.url}/{name}"):
            self.system.mv(f"{self.root}/{name}", f"{self.root}/{to}")

    @property
    def _is_objects(self) -> bool:
        protocol = self.system.protocol
        return not _OBJECTS.isdisjoint((protocol,) if isinstance(protocol, str) else protocol)


def _version(info: dict[str, Any]) -> str:
    told = (info.get(name) for name in ("size", "ETag", "etag", "mtime", "LastModified", "updated", "modificationTime"))
    return " ".join(str(one) for one in told if one is not None)


@functools.cache
def here(path: str) -> str:
    """Return a path as it is, or of a URL the folder of this machine's cache that has its files.

    They are fetched once: the folder is there whole or not at all, and another one for files that have changed. Folders
    in it are left out, as a model has none and a checkpoint has the state to resume from there.

    Raises:
        ModelError: they cannot be fetched.
    """
    if not is_url(path):
        return path
    try:
        return str(_fetched(Remote.of(path)))
    except OSError as error:
        raise ModelError(f"{path}: cannot be fetched: {error}") from error


def _fetched(remote: Remote) -> Path:
    files = patiently(lambda: remote.files(depth=1))
    if not files:
        raise FileNotFoundError("no files are there")
    digest = xxhash.xxh3_64_hexdigest(f"{remote.url} {files}".encode())
    folder = cache_folder() / digest / remote.name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{remote.name}.", suffix=_PARTIAL, dir=folder.parent))
        try:
            for name in files:
                patiently(functools.partial(remote.fetch, name, partial / name))
            if not folder.is_dir():  # by another process
                partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def cache_folder() -> Path:
    """Return the folder of what was fetched, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "rallypoint" / "fetched"
