"""`rally simulate`: what another staleness or window would gain, estimated from a run's timings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rallypoint.config.check_sampling_ahead import with_pool_of_its_own
from rallypoint.errors import RunFolderError
from rallypoint.prepare.preflight import load_checked, newest_of
from rallypoint.run.folder import RunFolder
from rallypoint.sampling.simulator import Measured, Simulation, Timing, measured_outcome, read_steps, settled

_LEAST_STEPS = 3
_ROW = "{:>4} {:>6}  {:>8} {:>8} {:>13} {:>11} {:>10}"


def print_simulation(recipe: str, staleness: Sequence[int], windows: Sequence[int], num_steps: int) -> None:
    """Print a table of settings, for the times of a run, or of a recipe's newest one."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    folder = Path(recipe) if (Path(recipe) / "config.yaml").is_file() else newest_of(recipe, ())
    config, journal = load_checked(str(folder), ()).config, RunFolder(folder).journal
    every = read_steps(journal)
    steps = settled(every)
    if len(steps) < _LEAST_STEPS:
        raise RunFolderError(
            f"{journal} has the times of {len(every)} steps; expected {_LEAST_STEPS} or more: train first"
        )
    left_out = f"; the first {num} are left out, as the run was starting" if (num := len(every) - len(steps)) else ""
    console.print(f"times of {len(every)} steps in {folder}{left_out}")
    console.print(_ROW.format("S", "window", "s/step", "speed", "rollout idle", "actor idle", "staleness"))
    own, found = (config.rollout.max_staleness, config.rollout.window), measured_outcome(steps)
    console.print(_row(*own, found, "", "measured"))
    most, num_prompts, placed = max(staleness, default=0), config.rollout.num_prompts, with_pool_of_its_own(config)
    asked = [(each, width) for each in staleness for width in windows if width <= each * num_prompts + 1]
    measured, rows = Measured(steps, config.rollout.max_batch_rows), dict[tuple[int, int], Timing]()
    for max_staleness, window in dict.fromkeys([(0, 1), own, *asked]):
        there = placed if max_staleness else config
        outcome = rows[max_staleness, window] = Simulation(
            measured, num_prompts=num_prompts, max_staleness=max_staleness, window=window, num_steps=num_steps,
            num_ranks=there.num_parts("rollout"), train_speed=there.num_ranks("actor") / config.num_ranks("actor"),
        ).run(min(max(5, max_staleness + 1), (num_steps - 1) // 2))  # fmt: skip
        speed, ages = f"x {rows[0, 1].step_s / outcome.step_s:.2f}", outcome.ages
        console.print(_row(max_staleness, window, outcome, speed, f"{sum(ages) / len(ages):.1f} to {max(ages)}"))
    if abs(missed := rows[own].step_s / found.step_s - 1) > 0.1:
        console.print(
            f"note: the run's own step is {abs(missed):.0%} {'longer' if missed > 0 else 'shorter'} simulated than "
            "measured, so other rows can be as far off: some of its time is not in the model (docs/async.md)"
        )
    if most and placed is not config:
        pools = {name: [*nodes] for name, nodes in placed.cluster.pools.items()}
        console.print(f"note: rows above S = 0 have the pool for rollout alone that they need: cluster.pools={pools}")


def _row(max_staleness: int, window: int, outcome: Timing, speed: str, last: str) -> str:
    idle = (f"{share:.0%}" for share in (outcome.rollout_idle, outcome.actor_idle))
    return _ROW.format(max_staleness, window, f"{outcome.step_s:.2f}", speed, *idle, last)
