"""`rally simulate`: what another staleness, window or split would give, by the times of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from rallypoint.cluster.capacity import num_cores
from rallypoint.config import RunConfig
from rallypoint.environments.pool import MAX_PROCESSES
from rallypoint.errors import RunFolderError
from rallypoint.recipes.preflight import load_checked, newest_of
from rallypoint.roles.simulator import Measured, Outcome, Setting, measured_outcome, simulate, splits
from rallypoint.run.timeline import TIMELINE, Timeline

_LEAST_STEPS = 3
_ROW = "{:>4} {:>6}  {:>7} {:>7}  {:>8} {:>8} {:>13} {:>11} {:>10}"
_HEAD = ("S", "window", "rollout", "actor", "s/step", "speed", "rollout idle", "actor idle", "staleness")


def print_simulation(recipe: str, staleness: Sequence[int], windows: Sequence[int], num_steps: int) -> None:
    """Print a table of settings, for the times of a run, or of a recipe's newest one."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder = Path(recipe) if (Path(recipe) / "config.yaml").is_file() else newest_of(recipe, ())
    config, timeline = load_checked(str(folder), ()).config, Timeline(folder / TIMELINE)
    steps = timeline.read() if timeline.path.exists() else []
    if len(steps) < _LEAST_STEPS:
        raise RunFolderError(
            f"{timeline.path} has the times of {len(steps)} steps; expected at least {_LEAST_STEPS}: train some first"
        )
    found = measured_outcome(steps)
    num_ranks, rollout = (config.num_ranks("rollout"), config.num_ranks("actor")), config.rollout
    console.print(f"times of {len(steps)} steps in {folder}")
    console.print(_ROW.format(*_HEAD))
    console.print(_row(rollout.max_staleness, rollout.window, num_ranks, found, "", "measured"))
    measured = Measured.of(steps, max_rows=rollout.max_batch_rows, max_calls=_calls_at_once(config))
    slowest = 0.0
    for setting, split in _settings(config, staleness, windows, num_steps):
        outcome = simulate(measured, setting)
        slowest = slowest or outcome.step_s
        aged = f"{outcome.staleness_mean:.1f} to {outcome.staleness_max}"
        speed = f"x {slowest / outcome.step_s:.2f}"
        console.print(_row(setting.max_staleness, setting.window, split, outcome, speed, aged))


def _calls_at_once(config: RunConfig) -> int | None:
    """Return how many calls of the reward function this machine has at once; None for any number.

    Where the run chose the number itself it is that of its beginning: calls that waited in more processes then count as
    shorter ones in fewer, which come to the same times.
    """
    functions = {one.function for one in config.reward.all_functions} - {"digits", "judge"}  # these need no process
    return (config.reward.num_processes or min(num_cores(), MAX_PROCESSES)) if functions else None


def _settings(
    config: RunConfig, staleness: Sequence[int], windows: Sequence[int], num_steps: int
) -> Iterator[tuple[Setting, tuple[int, int]]]:
    """Yield what is worth trying: each staleness and window for each split of the processes."""
    num_prompts, shares = config.rollout.num_prompts, config.roles["rollout"].pool == config.roles["actor"].pool
    own = (config.num_ranks("rollout"), config.num_ranks("actor"))
    for (num_rollout, num_actor), speed in ({own: 1.0} if shares else splits(*own)).items():
        for most in staleness:
            for window in windows or (1,):
                if window <= most * num_prompts + 1:
                    setting = Setting(
                        num_prompts=num_prompts,
                        max_staleness=most,
                        window=window,
                        num_ranks=num_rollout,
                        train_speed=speed,
                        num_steps=num_steps,
                    )
                    yield setting, (num_rollout, num_actor)


def _row(staleness: int, window: int, split: tuple[int, int], outcome: Outcome, speed: str, last: str) -> str:
    idle = (f"{share:.0%}" for share in (outcome.rollout_idle, outcome.actor_idle))
    return _ROW.format(staleness, window, *split, f"{outcome.step_s:.2f}", speed, *idle, last)
