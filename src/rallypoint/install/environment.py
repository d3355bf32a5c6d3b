"""A Python environment for one engine: made in steps, complete when its marker says so.

Owns: the folder of such environments and the commands that fill one. Must not know: what an engine does. Invariant: an
environment without its marker is not used; making it again goes on where it was interrupted, as pip does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rallypoint.errors import EngineError
from rallypoint.install.engines import BUILDS, Build

_MARKER = "rallypoint.json"
_LOG = "install.log"
_PROBE = """
import importlib.metadata, json, sys
import {module}
versions = {{d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]}}
print(json.dumps({{"version": {module}.__version__, "python": sys.version.split()[0], "packages": versions}}))
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Installed:
    """An environment that is complete."""

    name: str
    folder: Path
    device: str
    """Type of the device that it is built for."""
    version: str
    """Version of the engine."""
    packages: Mapping[str, str]
    """All packages in it, with their versions."""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return _python_of(self.folder)


@dataclasses.dataclass(frozen=True, slots=True)
class Environment:
    """An environment to be made, or to be removed."""

    name: str
    folder: Path

    @classmethod
    def of(cls, name: str) -> Environment:
        """Return the environment of an engine, below `engines_folder`.

        Raises:
            EngineError: there is no engine of that name that could be installed.
        """
        if name not in BUILDS:
            raise EngineError(f"{name!r} is not an engine that can be installed; expected {' or '.join(BUILDS)}")
        return cls(name, engines_folder() / name)

    def found(self) -> Installed | None:
        """Return it if it is complete."""
        try:
            said = json.loads((self.folder / _MARKER).read_text(encoding="utf-8"))
            found = Installed(self.name, self.folder, said["device"], said["version"], dict(said["packages"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if found.python.exists() else None

    def build(self, device: str) -> Build:
        """Return what is installed for a type of device.

        Raises:
            EngineError: there is no such build.
        """
        if device not in BUILDS[self.name]:
            known = " or ".join(f"--build {name}" for name in BUILDS[self.name])
            raise EngineError(f"{self.name} has no build for device {device!r}; choose {known}")
        return BUILDS[self.name][device]

    def commands(self, build: Build, python: str) -> list[list[str]]:
        """Return the commands that make it, in order."""
        pip = [str(_python_of(self.folder)), "-m", "pip", "--disable-pip-version-check"]
        steps = [[python, "-m", "venv", str(self.folder)]]
        steps += [[*pip, "install", *packages] for packages in (build.first, build.packages) if packages]
        steps += [[*pip, "uninstall", "--yes", *build.removed]] if build.removed else []
        return [*steps, [str(_python_of(self.folder)), "-c", _PROBE.format(module=build.module)]]

    def make(self, device: str, python: str, *, say: Callable[[str], None]) -> Installed:
        """Make it, unless it exists for that device.

        Args:
            device: type of the device that the engine will use.
            python: interpreter that it is made from.
            say: called with one line for each step.

        Raises:
            EngineError: there is no such build, or a step failed; it is named, with the last it said.
        """
        build = self.build(device)
        with self._locked() as lock:
            found = self.found()
            if found is not None and found.device == device:
                say(f"{self.name} {found.version} for {device} is there already: {self.folder}")
                return found
            (self.folder / _MARKER).unlink(missing_ok=True)
            said = ""
            commands = self.commands(build, python)
            for number, command in enumerate(commands, 1):
                shown = shlex.join(command) if number < len(commands) else f"import {build.module}"
                say(f"{number}/{len(commands)} {shown}")
                said = self._run(command, lock)
            content = {"device": device, **json.loads(said.splitlines()[-1])}
            partial = self.folder / f".{_MARKER}.partial"
            partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
            partial.replace(self.folder / _MARKER)
        complete = self.found()
        assert complete is not None
        return complete

    def remove(self) -> bool:
        """Remove it, and return whether it existed.

        Raises:
            EngineError: it cannot be removed.
        """
        if not self.folder.exists():
            return False
        with self._locked():
            (self.folder / _MARKER).unlink(missing_ok=True)
            shutil.rmtree(self.folder)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Let one process at a time change it, and yield the lock; a full disk is an error of one line."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder.parent / f".{self.name}.lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise EngineError(f"another process is at work in {self.folder}; wait for it") from None
                yield lock.fileno()
        except OSError as error:
            raise EngineError(f"{self.folder}: {error.strerror or error}") from error

    def _run(self, command: Sequence[str], lock: int) -> str:
        """Run a step, log its output, and return it. The step keeps the lock if this process is killed.

        Raises:
            EngineError: it failed.
        """
        log = self.folder / _LOG
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run(
            command,
            env=kept | {"PYTHONSAFEPATH": "1"},  # or Python would take a types.py in the working folder for its own
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            pass_fds=(lock,),
        )
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n{done.stdout}\n")
        if done.returncode:
            raise EngineError(
                f"{self.name} is not installed: `{shlex.join(command[:6])} ...` ended with status {done.returncode}: "
                f"{_last_words(done.stdout)} (all of it: {log}); run the same command again to go on"
            )
        return done.stdout


def engines_folder() -> Path:
    """Return where environments are: RALLYPOINT_ENGINES, or a folder in the user's cache."""
    if chosen := os.environ.get("RALLYPOINT_ENGINES"):
        return Path(chosen).expanduser().absolute()
    return cache_folder() / "engines"


def cache_folder() -> Path:
    """Return our folder in the user's cache; it may not be there yet."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().absolute() / "rallypoint"


def find_engine(name: str) -> Installed:
    """Return the environment of an engine.

    Raises:
        EngineError: it is not installed; the message has the command.
    """
    environment = Environment.of(name)
    found = environment.found()
    if found is None:
        raise EngineError(f"{name} is not installed (looked in {environment.folder}): rally engine install {name}")
    return found


def installed_engines() -> list[Installed]:
    """Return all environments that are complete."""
    found = (Environment.of(name).found() for name in BUILDS)
    return [one for one in found if one is not None]


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def _last_words(output: str) -> str:
    """Return the line that says why pip failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["it said nothing"]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines)[-1]
