"""Packages that only some runs need: whether one can be used, and what to do if not.

Owns: what a user is told of such a package. Must not know: what it is for.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from importlib import metadata

from rallypoint.errors import first_line, how_to_install


def is_installed(package: str) -> bool:
    """Return whether a package is there, without importing it.

    A folder with no Python code in it is none: `wandb/`, which wandb itself makes where a script runs, is taken for a
    namespace package by Python.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def find_missing(package: str, extra: str) -> str | None:
    """Say that a package is not installed, and how to install it; None if it is there.

    >>> find_missing("json", "plot") is None
    True
    """
    return None if is_installed(package) else _missing(package, extra)


def _missing(package: str, extra: str) -> str:
    return f"needs the package {package}, which is not installed for {sys.executable}; {how_to_install(extra)}"


def find_unusable(package: str, extra: str) -> str | None:
    """Import a package, and return what is wrong if that fails; None if it can be used."""
    if (missing := find_missing(package, extra)) is not None:
        return missing
    try:
        importlib.import_module(package)
    except Exception as error:  # noqa: BLE001 - a package that does not fit to others raises anything
        return f"needs the package {package}, {_but_broken(package, error)}"
    return None


def why_not(error: ImportError, packages: tuple[str, ...], extra: str) -> str:
    """Return what is wrong after an import has failed that needs all of these packages."""
    package = next((package for package in packages if package == str(error.name).partition(".")[0]), packages[0])
    if error.name == package and isinstance(error, ModuleNotFoundError):
        return _missing(package, extra)
    return find_missing(package, extra) or f"needs the package {package}, {_but_broken(package, error)}"


def _but_broken(package: str, error: Exception) -> str:
    version = ""
    with contextlib.suppress(metadata.PackageNotFoundError):
        version = f" {metadata.version(package)}"
    said = f"{type(error).__name__}: {first_line(error)}"
    lacks = error.name if isinstance(error, ModuleNotFoundError) else None
    install = f"install {lacks}" if lacks else f"install versions of {package} and of what it imports that fit together"
    return (
        f"which is installed{version}, but cannot be imported: {said}; {install} "
        f"(all of the error: {sys.executable} -c 'import {package}')"
    )
