"""`rally simulate`: what another staleness, window or split would gain, estimated from a run's timings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from rallypoint.cluster.capacity import num_cores
from rallypoint.config import RunConfig
from rallypoint.config.check_sampling_ahead import could_split
from rallypoint.environments.pool import MAX_PROCESSES
from rallypoint.errors import RunFolderError
from rallypoint.recipes.preflight import load_checked, newest_of
from rallypoint.run.folder import RunFolder
from rallypoint.sampling.measured import Measured, read_times, settled
from rallypoint.sampling.simulator import Outcome, Setting, measured_outcome, simulate, splits

_LEAST_STEPS = 3
_FAR = 0.1
"""Share of a step's seconds by which a simulation may miss what was measured before it is said."""
_ROW = "{:>4} {:>6}  {:>7} {:>7}  {:>8} {:>8} {:>13} {:>11} {:>10}"
_HEAD = ("S", "window", "rollout", "actor", "s/step", "speed", "rollout idle", "actor idle", "staleness")


def print_simulation(recipe: str, staleness: Sequence[int], windows: Sequence[int], num_steps: int) -> None:
    """Print a table of settings, for the times of a run, or of a recipe's newest one."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder = Path(recipe) if (Path(recipe) / "config.yaml").is_file() else newest_of(recipe, ())
    config, journal = load_checked(str(folder), ()).config, RunFolder(folder).journal
    every = read_times(journal)
    steps = settled(every)
    if len(steps) < _LEAST_STEPS:
        raise RunFolderError(
            f"{journal} has the times of {len(every)} steps; expected at least {_LEAST_STEPS}: train some first"
        )
    left_out = f"; the first {num} are left out, as the run was starting" if (num := len(every) - len(steps)) else ""
    console.print(f"times of {len(every)} steps in {folder}{left_out}")
    console.print(_ROW.format(*_HEAD))
    measured = Measured.of(steps, max_rows=config.rollout.max_batch_rows, max_calls=_calls_at_once(config))
    split, found = _own_split(config), measured_outcome(steps)
    most, window = config.rollout.max_staleness, config.rollout.window
    console.print(_row(most, window, split, found, "", "measured"))
    own = simulate(measured, _setting(config, most, window, split, num_steps))
    slowest = simulate(measured, _setting(config, 0, 1, split, num_steps))
    rows = {(most, window, split): own, (0, 1, split): slowest}
    for key, speed in _worth_trying(config, staleness, windows):
        rows[key] = simulate(measured, _setting(config, *key, num_steps, speed))
    for (most, window, split), outcome in sorted(rows.items(), key=lambda row: row[0] != (0, 1, _own_split(config))):
        aged = f"{outcome.staleness_mean:.1f} to {outcome.staleness_max}"
        console.print(_row(most, window, split, outcome, f"x {slowest.step_s / outcome.step_s:.2f}", aged))
    for note in _notes(config, own.step_s / found.step_s - 1, max(staleness, default=0)):
        console.print(note)


def _calls_at_once(config: RunConfig) -> int | None:
    """Return how many calls of the reward function this machine has at once; None for any number.

    Where the run chose the number itself it is that of its beginning: calls that waited in more processes then count as
    shorter ones in fewer, which come to the same times.
    """
    functions = {one.function for one in config.reward.all_functions} - {"digits", "judge"}  # these need no process
    return (config.reward.num_processes or min(num_cores(), MAX_PROCESSES)) if functions else None


def _own_split(config: RunConfig) -> tuple[int, int]:
    return config.num_ranks("rollout"), config.num_ranks("actor")


def _takes_turns(config: RunConfig) -> bool:
    """Whether rollout and actor share their processes."""
    return config.roles["rollout"].pool == config.roles["actor"].pool


def _setting(
    config: RunConfig, most: int, window: int, split: tuple[int, int], num_steps: int, train_speed: float = 1.0
) -> Setting:
    return Setting(
        num_prompts=config.rollout.num_prompts,
        max_staleness=most,
        window=window,
        num_ranks=split[0],
        train_speed=train_speed,
        num_steps=num_steps,
        num_warmup_steps=min(max(5, most + 1), (num_steps - 1) // 2),
    )


def _worth_trying(
    config: RunConfig, staleness: Sequence[int], windows: Sequence[int]
) -> Iterator[tuple[tuple[int, int, tuple[int, int]], float]]:
    """Yield each staleness and window, for each split of the processes that the config would allow, and its speed.

    Sampler and trainer that take turns have all processes each; ahead of it, the sampler needs some for itself.
    """
    own, (num_rollout, num_actor) = _own_split(config), _own_split(config)
    takes_turns = _takes_turns(config)
    apart = splits(num_actor if takes_turns else num_rollout + num_actor, num_actor)
    apart = {split: speed for split, speed in apart.items() if could_split(config, *split)}
    for split, speed in (({own: 1.0} if takes_turns else {}) | apart).items():
        for most in staleness:
            if takes_turns and (split == own) != (most == 0):
                continue
            for window in windows or (1,):
                if window <= most * config.rollout.num_prompts + 1:
                    yield (most, window, split), speed


def _notes(config: RunConfig, missed: float, most: int) -> Iterator[str]:
    """Yield what the table does not say."""
    if abs(missed) > _FAR:
        yield (
            f"note: the run's own step is {abs(missed):.0%} {'longer' if missed > 0 else 'shorter'} simulated than "
            "measured, so other rows can be as far off: some of its time is not in the model (docs/async.md)"
        )
    if most and _takes_turns(config):
        pool, num_actor = config.roles["rollout"].pool, config.num_ranks("actor")
        if not any(could_split(config, *split) for split in splits(num_actor, num_actor)):
            yield (
                f"note: nothing above S = 0 is possible here: rollout and actor share all processes of pool {pool!r}, "
                "and sampling ahead needs one more, a second process for rollout alone"
            )
        else:
            yield (
                f"note: above S = 0 the processes of pool {pool!r} are divided between rollout and actor: a pool for "
                "rollout alone, and the rest trains"
            )
    left = [key for key in ("dynamic_sampling", "over_sampling") if getattr(config.rollout, key)]
    if most and left:
        yield f"note: rows above S = 0 are without rollout.{' and rollout.'.join(left)}, which go with S = 0 alone"


def _row(staleness: int, window: int, split: tuple[int, int], outcome: Outcome, speed: str, last: str) -> str:
    idle = (f"{share:.0%}" for share in (outcome.rollout_idle, outcome.actor_idle))
    return _ROW.format(staleness, window, *split, f"{outcome.step_s:.2f}", speed, *idle, last)
