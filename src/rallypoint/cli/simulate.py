"""`rally simulate`: what another staleness, window or split would gain, estimated from a run's timings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from rallypoint.cluster.capacity import num_cores
from rallypoint.config import RunConfig
from rallypoint.config.check_sampling_ahead import could_split
from rallypoint.environments.pool import MAX_PROCESSES
from rallypoint.errors import RunFolderError
from rallypoint.prepare.preflight import load_checked, newest_of
from rallypoint.run.folder import RunFolder
from rallypoint.sampling.simulator import Measured, Outcome, Setting, measured_outcome, read_steps, settled, simulate

_LEAST_STEPS = 3
_FAR = 0.1
"""Share of a step's seconds by which a simulation may miss what was measured before it is said."""
_ROW = "{:>4} {:>6}  {:>7} {:>7}  {:>8} {:>8} {:>13} {:>11} {:>10}"
_HEAD = ("S", "window", "rollout", "actor", "s/step", "speed", "rollout idle", "actor idle", "staleness")

_Key: TypeAlias = tuple[int, int, int, int]
"""Staleness, window, and the processes of rollout and actor."""


def print_simulation(recipe: str, staleness: Sequence[int], windows: Sequence[int], num_steps: int) -> None:
    """Print a table of settings, for the times of a run, or of a recipe's newest one."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder = Path(recipe) if (Path(recipe) / "config.yaml").is_file() else newest_of(recipe, ())
    config, journal = load_checked(str(folder), ()).config, RunFolder(folder).journal
    every = read_steps(journal)
    steps = settled(every)
    if len(steps) < _LEAST_STEPS:
        raise RunFolderError(
            f"{journal} has the times of {len(every)} steps; expected at least {_LEAST_STEPS}: train some first"
        )
    left_out = f"; the first {num} are left out, as the run was starting" if (num := len(every) - len(steps)) else ""
    console.print(f"times of {len(every)} steps in {folder}{left_out}")
    console.print(_ROW.format(*_HEAD))
    measured = Measured.of(steps, max_rows=config.rollout.max_batch_rows, max_calls=_calls_at_once(config))
    split, found = (config.num_ranks("rollout"), config.num_ranks("actor")), measured_outcome(steps)
    in_turns, own = (0, 1, *split), (config.rollout.max_staleness, config.rollout.window, *split)
    console.print(_row(own, found, "", "measured"))
    tried = {in_turns: 1.0, own: 1.0} | _worth_trying(config, staleness, windows)
    rows = {key: simulate(measured, _setting(config, key, num_steps, speed)) for key, speed in tried.items()}
    for key, outcome in rows.items():
        aged = f"{outcome.staleness_mean:.1f} to {outcome.staleness_max}"
        console.print(_row(key, outcome, f"x {rows[in_turns].step_s / outcome.step_s:.2f}", aged))
    for note in _notes(config, rows[own].step_s / found.step_s - 1, max(staleness, default=0)):
        console.print(note)


def _calls_at_once(config: RunConfig) -> int | None:
    """Return how many calls of the reward function this machine has at once; None for any number.

    Where the run chose the number itself it is that of its beginning: calls that waited in more processes then count as
    shorter ones in fewer, which come to the same times.
    """
    functions = {one.function for one in config.reward.all_functions} - {"digits", "judge"}  # these need no process
    return (config.reward.num_processes or min(num_cores(), MAX_PROCESSES)) if functions else None


def _takes_turns(config: RunConfig) -> bool:
    """Whether rollout and actor share their processes."""
    return config.roles["rollout"].pool == config.roles["actor"].pool


def _setting(config: RunConfig, key: _Key, num_steps: int, train_speed: float) -> Setting:
    return Setting(
        num_prompts=config.rollout.num_prompts,
        max_staleness=key[0],
        window=key[1],
        num_ranks=key[2],
        train_speed=train_speed,
        num_steps=num_steps,
        num_warmup_steps=min(max(5, key[0] + 1), (num_steps - 1) // 2),
    )


def _divisions(config: RunConfig) -> list[tuple[int, int]]:
    """Return how the processes could be divided into ranks that sample and ranks that train, by the config's meshes."""
    num_actor = config.num_ranks("actor")
    num = num_actor + (0 if _takes_turns(config) else config.num_ranks("rollout"))
    return [(each, num - each) for each in range(1, num) if could_split(config, each, num - each)]


def _worth_trying(config: RunConfig, staleness: Sequence[int], windows: Sequence[int]) -> dict[_Key, float]:
    """Return each staleness and window, for each division of the processes, and how fast it trains.

    Sampler and trainer that take turns have all processes each; ahead of it, the sampler needs some for itself.
    """
    own, takes_turns = (config.num_ranks("rollout"), config.num_ranks("actor")), _takes_turns(config)
    return {
        (most, window, *split): 1.0 if takes_turns and split == own else split[1] / own[1]
        for split in [*([own] if takes_turns else []), *_divisions(config)]
        for most in staleness
        if not takes_turns or (split == own) == (most == 0)
        for window in windows
        if window <= most * config.rollout.num_prompts + 1
    }


def _notes(config: RunConfig, missed: float, most: int) -> Iterator[str]:
    """Yield what the table does not say."""
    if abs(missed) > _FAR:
        yield (
            f"note: the run's own step is {abs(missed):.0%} {'longer' if missed > 0 else 'shorter'} simulated than "
            "measured, so other rows can be as far off: some of its time is not in the model (docs/async.md)"
        )
    pool = config.roles["rollout"].pool
    if most and _takes_turns(config) and not _divisions(config):
        yield (
            f"note: nothing above S = 0 is possible here: rollout and actor share all processes of pool {pool!r}, "
            "and sampling ahead needs one more, a second process for rollout alone"
        )
    elif most and _takes_turns(config):
        yield (
            f"note: above S = 0 the processes of pool {pool!r} are divided between rollout and actor: a pool for "
            "rollout alone, and the rest trains"
        )
    left = [key for key in ("dynamic_sampling", "over_sampling") if getattr(config.rollout, key)]
    if most and left:
        yield f"note: rows above S = 0 are without rollout.{' and rollout.'.join(left)}, which go with S = 0 alone"


def _row(key: _Key, outcome: Outcome, speed: str, last: str) -> str:
    idle = (f"{share:.0%}" for share in (outcome.rollout_idle, outcome.actor_idle))
    return _ROW.format(*key, f"{outcome.step_s:.2f}", speed, *idle, last)
