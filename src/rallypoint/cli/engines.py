"""The commands of `rally engine`: parsed here, done in `engine.py`, which is imported when one runs."""

from __future__ import annotations

from typing import Annotated

import typer

engine_app = typer.Typer(no_args_is_help=True, help="Engines that run in Python environments of their own.")
Engine = Annotated[str, typer.Argument(metavar="NAME", help="Such as vllm.")]
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
    from rallypoint.cli.engine import install

    install(name, build=build, folder=folder, python=python, dry_run=dry_run)


@engine_app.command(name="list")
def engine_list(folder: EnginesFolder = None) -> None:
    """Print the engines that are installed, with their versions."""
    from rallypoint.cli.engine import show

    show(folder)


@engine_app.command(name="remove")
def engine_remove(name: Engine, folder: EnginesFolder = None) -> None:
    """Remove the environment of an engine."""
    from rallypoint.cli.engine import remove

    remove(name, folder)
