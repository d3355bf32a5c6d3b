"""`rally engine install|list|remove`: the engines that run in Python environments of their own."""

from __future__ import annotations

import shlex
import sys
import time
from typing import Annotated

import typer
from rich.console import Console

from rallypoint.install import BUILDS, Environment, engines_folder, installed_engines

engine_app = typer.Typer(no_args_is_help=True, help="Engines that run in Python environments of their own.")
Engine = Annotated[str, typer.Argument(metavar="NAME", help="vllm, verifiers or openenv.")]


def _console() -> Console:
    return Console(highlight=False, markup=False, soft_wrap=True)


@engine_app.command(name="install")
def engine_install(
    name: Engine,
    build: Annotated[str | None, typer.Option(help="Type of device; by default this machine's.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter to make it from; by default this one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run none.")] = False,
) -> None:
    """Make the environment of an engine below RALLYPOINT_ENGINES; an interrupted installation continues."""
    say, environment = _console().print, Environment.of(name)
    device, interpreter = build or _device(), python or sys.executable
    if dry_run:
        for command in environment.commands(environment.build(device), interpreter):
            say(shlex.join(command))
        return
    say(f"installing {name} for {device} into {environment.folder}")
    began = time.monotonic()
    installed = environment.make(device, interpreter, say=say)
    say(f"{name} {installed.version} is ready after {time.monotonic() - began:.0f} s: {BUILDS[name][device].use}")


@engine_app.command(name="list")
def engine_list() -> None:
    """Print the engines that are installed, with their versions, and those that can be."""
    found = {installed.name: installed for installed in installed_engines()}
    for name in BUILDS:
        line = f"{name}  not installed in {engines_folder()}: rally engine install {name}"
        if (installed := found.get(name)) is not None:
            torch = installed.packages.get("torch", "?")
            line = f"{name}  {installed.version} for {installed.device}, torch {torch}, in {installed.folder}"
        _console().print(line)


@engine_app.command(name="remove")
def engine_remove(name: Engine) -> None:
    """Remove the environment of an engine."""
    environment = Environment.of(name)
    was_there = environment.remove()
    line = f"removed {environment.folder}" if was_there else f"{name} is not installed in {environment.folder.parent}"
    _console().print(line)


def _device() -> str:
    """Return the type of this machine's devices, in torch's words."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type
