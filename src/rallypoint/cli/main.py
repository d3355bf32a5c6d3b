"""The command `rally`: parses and prints, decides nothing.

Every command imports what it needs when it runs, so that `rally --help` answers at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand

from rallypoint import __version__
from rallypoint.cli.engines import engine_app
from rallypoint.cli.use import chat, evaluate, export, import_verl, serve, view
from rallypoint.errors import (
    ConfigError,
    DataError,
    ExportError,
    ModelError,
    NoPlaceError,
    RallyError,
    RayLostError,
    ResumeError,
    RewardError,
    RunFolderError,
    WorkerDiedError,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language models by reinforcement learning, from a laptop to a cluster.",
)

Config = Annotated[str, typer.Argument(metavar="RECIPE", help="A shipped recipe, a .yaml file, or a run folder.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder or name, or a recipe: its newest run.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="For example actor.optimizer.lr=3e-4")]


class _TakesKeys(TyperCommand):
    """A command with KEY=VALUE; its error names that form if a key is written as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # typer does not export the type of ctx
        for word in args:
            if re.match(r"--?\w+(\.\w+)+(=|$)", word):
                key, _, value = word.lstrip("-").partition("=")
                raise typer.BadParameter(f"{word}: keys have no dashes here; write {key}={value or 'VALUE'}")
        return super().parse_args(ctx, args)


@contextlib.contextmanager
def _shown(what: str) -> Iterator[None]:
    """Show a status in a terminal: importing takes seconds on a busy machine."""
    if sys.stderr.isatty():
        print(f"{what} ...", end="\r", file=sys.stderr, flush=True)
    yield
    if sys.stderr.isatty():
        print("\x1b[K", end="", file=sys.stderr, flush=True)


@app.command(cls=_TakesKeys)
def train(
    recipe: Config,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue this run (or the recipe's newest run) from its newest checkpoint."),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", min=0, help="With --resume: from the checkpoint of that step; 0 starts over."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print batches, placement and memory, and start nothing.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="MACHINE", help="With --dry-run: plan for another machine, such as 8xH100."),
    ] = None,
) -> None:
    """Train a model."""
    if on is not None and not dry_run:
        raise typer.BadParameter("expected --dry-run beside --on, which only plans")
    if on is not None and resume:
        raise typer.BadParameter("expected --on without --resume: a plan for another machine compares no checkpoint")
    if dry_run:
        from rallypoint.cli.show import print_plan

        print_plan(recipe, overrides or [], on=on, resume=resume, from_step=from_step)
        return
    with _shown("reading the config"):
        from rallypoint.library.launch import launch

    _, finished = launch(recipe, overrides or [], Console(), resume=resume, from_step=from_step)
    raise typer.Exit(0 if finished else 130)


@app.command(cls=_TakesKeys)
def config(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A shipped recipe, a .yaml file, or a run folder.")
    ] = None,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also print what each key means, and its range.")] = False,
    from_verl: Annotated[
        str | None,
        typer.Option("--from-verl", help="Translate a command line, a script (.sh) or a YAML file of verl's."),
    ] = None,
    from_trl: Annotated[
        str | None, typer.Option("--from-trl", help="Translate a script of TRL's (.py), a command line, or arguments.")
    ] = None,
) -> None:
    """Print every key of a config with its value and where it was set; or a config of another project as ours."""
    if sum(one is not None for one in (recipe, from_verl, from_trl)) != 1:
        raise typer.BadParameter("expected one of RECIPE, --from-verl and --from-trl")
    if recipe is not None:
        from rallypoint.cli.show import print_config

        print_config(recipe, overrides or [], explain=explain)
        return
    from rallypoint.config import translate

    found = translate.from_trl(from_trl) if from_trl is not None else translate.from_verl(from_verl or "")
    typer.echo(found.as_yaml(), nl=False)


@app.command()
def simulate(
    recipe: Run,
    max_staleness: Annotated[
        list[int] | None, typer.Option(min=0, max=64, help="Values of rollout.max_staleness; by default 0, 1, 2, 4.")
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(min=1, help="Values of rollout.window; by default 1, the order of admission.")
    ] = None,
    num_steps: Annotated[int, typer.Option(min=2, max=10_000, help="Steps to simulate.")] = 100,
) -> None:
    """Estimate from a run's timings what sampling ahead would gain."""
    from rallypoint.cli.simulate import print_simulation

    print_simulation(recipe, max_staleness or [0, 1, 2, 4], window or [1], num_steps)


@app.command()
def show(
    run: Run,
    step: Annotated[int | None, typer.Option(min=0, help="By default the newest.")] = None,
    best: Annotated[int | None, typer.Option(min=0, help="Rollouts with the highest scores.")] = None,
    worst: Annotated[int | None, typer.Option(min=0, help="Rollouts with the lowest scores.")] = None,
    failed: Annotated[int | None, typer.Option(min=0, help="Rollouts without a score, with the reason.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Those of the validation after the step, which 0 has, too.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="Do not truncate long texts.")] = False,
    traces: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write all of them as training traces of OpenEnv, one a line.")
    ] = None,
) -> None:
    """Print rollouts of a step: prompt, response, rewards."""
    from rallypoint.cli.runs import show as print_chosen, write_traces

    if traces is not None:
        write_traces(run, traces, step=step, validation=validation)
        return
    print_chosen(run, step=step, best=best, worst=worst, failed=failed, validation=validation, full=full)


@app.command()
def runs(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of runs, or a run.")] = "runs",
) -> None:
    """List runs with recipe, state, step, scores and age."""
    from rallypoint.cli.runs import list_runs

    list_runs(folder)


@app.command()
def diff(a: Run, b: Run) -> None:
    """Find the first step, rollout and token in which two runs part, and exit with 1 if there is one."""
    from rallypoint.cli.runs import print_difference

    raise typer.Exit(0 if print_difference(a, b) else 1)


@app.command()
def replay(
    run: Run,
    step: Annotated[int, typer.Option(min=1, help="A step that the run has done.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="What is to be different: a reward, a loss, any other key."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show all rollouts that differ.")] = False,
) -> None:
    """Compute a step again without sampling, and exit with 1 if it is not what it was."""
    from rallypoint.cli.replay import print_replay

    raise typer.Exit(0 if print_replay(run, step, changes or [], full=full) else 1)


@app.command()
def waste(run: Run) -> None:
    """Print the seconds and tokens of a run that bought nothing, by cause."""
    from rallypoint.cli.replay import print_waste

    print_waste(run)


@app.command()
def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run's folder or name; without: this machine.")
    ] = None,
) -> None:
    """Say what is wrong with this machine, or with a run, and what to do; exit with 1 if something is."""
    if run is not None:
        from rallypoint.cli.replay import print_troubles

        raise typer.Exit(1 if print_troubles(run) else 0)
    from rallypoint.cli.show import print_checkup
    from rallypoint.prepare.checkup import check_all, looks

    raise typer.Exit(1 if print_checkup(check_all(looks(Path.cwd()))) else 0)


@app.command()
def logs(
    run: Run,
    errors: Annotated[bool, typer.Option("--errors", help="Only what failed, with its traceback.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
) -> None:
    """Print what a run has said."""
    from rallypoint.cli.runs import print_logs

    print_logs(run, errors=errors, follow=follow)


@app.command()
def drill(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="A drill, or a part of the names of some. Without one, twenty of them."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Do all drills, which takes about an hour.")] = False,
    only_list: Annotated[bool, typer.Option("--list", help="Print names, and do nothing.")] = False,
    write: Annotated[
        str | None, typer.Option(metavar="FILE", help="Put a table of the results into a Markdown file.")
    ] = None,
) -> None:
    """Break tiny runs on purpose, and exit with 1 if one does not end with the weights of an untouched one."""
    from rallypoint.cli.replay import print_drills

    if everything and names:
        raise typer.BadParameter("expected names or --all, not both")
    raise typer.Exit(0 if print_drills(names or [], everything=everything, only_list=only_list, write=write) else 1)


@app.command()
def recipes() -> None:
    """List the recipes that ship with rallypoint."""
    from rallypoint.cli.show import print_recipes

    print_recipes()


@app.command(name="check-reward", cls=_TakesKeys)
def check_reward(
    recipe: Config,
    overrides: Overrides = None,
    max_rows: Annotated[int, typer.Option(min=2, help="Rows of the training data whose right answers are tried.")] = 64,
) -> None:
    """Try a run's reward on right, empty, huge, repeated, truncated and adversarial answers."""
    from rallypoint.cli.show import check_reward as run_check

    raise typer.Exit(run_check(recipe, overrides or [], max_rows=max_rows))


for command, name in (
    (evaluate, "eval"),
    (chat, "chat"),
    (export, "export"),
    (import_verl, "import-verl"),
    (view, "view"),
    (serve, "serve"),
):
    app.command(name=name)(command)
app.add_typer(engine_app, name="engine")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"rallypoint {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Train language models by reinforcement learning, from a laptop to a cluster."""
    del version


def run() -> None:
    """Run the command line: 0 done, 1 failed, 2 wrong input, 75 failed by the machine: try again, 130 interrupted."""
    try:
        _run()
    except SystemExit as end:
        if "rallypoint.cluster" in sys.modules:  # otherwise nothing can hold it, and importing takes time
            _leave_at_once_if_held(end)
        raise


def _leave_at_once_if_held(end: SystemExit) -> None:
    """End the process here if an orderly end would hang or crash: because of a lost Ray, or of a tracker."""
    from rallypoint.cluster import is_held_by_ray
    from rallypoint.observability.leaving import is_anyone_left_behind

    if is_held_by_ray() or is_anyone_left_behind():
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


_TRY_AGAIN = 75
"""The status of sysexits.h for a failure that may pass: Slurm, Kubernetes and systemd can be told to start again."""
WRONG_INPUT = (ConfigError, DataError, ExportError, ModelError, ResumeError, RewardError, RunFolderError)


def report(error: RallyError) -> int:
    """Print an error and return the exit status: 2 for wrong input, 75 if another try may help, 1 for all else."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(str(error))}")
    if isinstance(error, RayLostError | NoPlaceError) or (isinstance(error, WorkerDiedError) and not error.is_final):
        return _TRY_AGAIN
    return 2 if isinstance(error, WRONG_INPUT) else 1


def _run(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of the process."""
    try:
        app(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except RallyError as error:
        sys.exit(report(error))
    except BrokenPipeError:
        # The reader of a pipe (`rally config digits | head`) has closed it; nothing more may be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    run()
