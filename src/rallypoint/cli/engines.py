"""`rally engine install|list|remove`: the engines that run in Python environments of their own."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from rallypoint.errors import EngineError
from rallypoint.install import BUILDS, Environment, engines_folder, installed_engines

engine_app = typer.Typer(no_args_is_help=True, help="Engines that run in Python environments of their own.")
Engine = Annotated[str, typer.Argument(metavar="NAME", help="vllm, verifiers or openenv.")]
EnginesFolder = Annotated[
    str | None,
    typer.Option("--folder", help="Folder of environments; by default RALLYPOINT_ENGINES, or one in the user's cache."),
]


@engine_app.command(name="install")
def engine_install(
    name: Engine,
    build: Annotated[str | None, typer.Option(help="Type of device; by default this machine's.")] = None,
    folder: EnginesFolder = None,
    python: Annotated[str | None, typer.Option(help="Interpreter to make it from; by default this one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none.")] = False,
) -> None:
    """Make the environment of an engine; an interrupted installation continues, a complete one is kept."""
    _install(name, build=build, folder=folder, python=python, dry_run=dry_run)


@engine_app.command(name="list")
def engine_list(folder: EnginesFolder = None) -> None:
    """Print the engines that are installed, with their versions."""
    _show(folder)


@engine_app.command(name="remove")
def engine_remove(name: Engine, folder: EnginesFolder = None) -> None:
    """Remove the environment of an engine."""
    _remove(name, folder)


def _install(name: str, *, build: str | None, folder: str | None, python: str | None, dry_run: bool) -> None:
    """Make the environment of an engine, and say where it is."""
    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(escape(line), soft_wrap=True)

    parent = Path(folder).expanduser().absolute() if folder is not None else None
    environment = Environment.of(name, parent)
    device, interpreter = build or _device(), python or sys.executable
    if dry_run:
        if device not in BUILDS[name]:
            raise EngineError(f"{name} has no build for device {device!r}; expected {' or '.join(BUILDS[name])}")
        for command in environment.commands(BUILDS[name][device], interpreter):
            say(shlex.join(command))
        return
    say(f"installing {name} for {device} into {environment.folder}")
    began = time.monotonic()
    installed = environment.make(device, interpreter, say=say)
    say(f"{name} {installed.version} is ready after {time.monotonic() - began:.0f} s: {BUILDS[name][device].use}")
    if parent is not None and parent != engines_folder():
        say(f"runs find it with RALLYPOINT_ENGINES={shlex.quote(str(parent))} in their environment")


def _show(folder: str | None) -> None:
    """Print the engines that are installed, and those that can be."""
    console = Console(highlight=False)
    parent = Path(folder).expanduser().absolute() if folder is not None else engines_folder()
    found = {installed.name: installed for installed in installed_engines(parent)}
    for name in BUILDS:
        if (installed := found.get(name)) is not None:
            torch = installed.packages.get("torch", "?")
            line = f"{name}  {installed.version} for {installed.device}, torch {torch}, in {installed.folder}"
        else:
            line = f"{name}  not installed in {parent}: rally engine install {name}"
        console.print(escape(line), soft_wrap=True)


def _remove(name: str, folder: str | None) -> None:
    """Remove the environment of an engine."""
    environment = Environment.of(name, Path(folder).expanduser().absolute() if folder is not None else None)
    was_there = environment.remove()
    line = f"removed {environment.folder}" if was_there else f"{name} is not installed in {environment.folder.parent}"
    Console(highlight=False).print(escape(line), soft_wrap=True)


def _device() -> str:
    """Return the type of this machine's devices, in torch's words."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type
