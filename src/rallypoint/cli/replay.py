"""`rally replay`, `rally waste`, `rally doctor RUN`, `rally drill`: what a run did, again, or broken on purpose."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from rallypoint.cli.runs import run_of
from rallypoint.display.summary import in_short
from rallypoint.display.text import clean, shorten
from rallypoint.display.theme import LEVELS
from rallypoint.errors import ConfigError
from rallypoint.journal import read_journal
from rallypoint.observability.numbers import counted
from rallypoint.run.folder import RunFolder
from rallypoint.run.troubles import troubles_of
from rallypoint.run.waste import account

if TYPE_CHECKING:
    from rallypoint.recipes.drilling import DrillOutcome
    from rallypoint.recipes.replay import Computed, Replay

_LEARNED = ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm")
_MOST_ROWS, _MOST_TOKENS = 5, 3
"""Rollouts and tokens that are shown: those that differ most."""
_TEXT_CELLS = 40
Say = Callable[[str], None]


def print_replay(run: str, step: int, changes: Sequence[str], *, full: bool) -> bool:
    """Compute a step again and print whether everything is equal, or what the changes make different.

    Returns:
        Whether the step is what it was.
    """
    from rallypoint.recipes.replay import Replay  # only now torch

    say, replay = Console(highlight=False, markup=False, soft_wrap=True).print, Replay.of(run_of(run), step)
    since = f"the checkpoint of step {replay.first}" if replay.first else "the initial weights"
    say(f"step {step} again, from {since} and recorded rollouts")
    before = replay.compute()
    is_equal = _say_equal(say, replay, before)
    if changes:
        rescored = any(one.startswith("reward") for one in changes)
        _say_changed(say, before, replay.compute(changes, is_rescored=rescored), changes, full=full)
    return is_equal


def _say_equal(say: Say, replay: Replay, found: Computed) -> bool:
    first = found.comparison.first
    parts = ", ".join((*found.done.digests, "loss", "gradient norm", *(["weights"] if replay.has_weights else [])))
    if first is None:
        without = "" if replay.has_weights else "; weights are not compared: the run has no checkpoint of the step"
        say(f"equal: {parts}{without}")
        return True
    say(f"different: step {first.step}, {first.what}")
    for line in found.comparison.where or (f"{first.of_a}  |  {first.of_b}",):
        say(f"  {line}")
    return False


def _say_changed(say: Say, before: Computed, after: Computed, changes: Sequence[str], *, full: bool) -> None:
    """Say which numbers of the step, rollouts and tokens would have been others."""
    say(f"with {' '.join(changes)}:")
    for name in _LEARNED:
        old, new = before.done.metrics.get(name), after.done.metrics.get(name)
        if old is not None and new is not None:
            say(f"  {name}: {old:.6g}" + (f" -> {new:.6g}" if old != new else ", the same"))
    found = sorted(_effects(before, after), key=lambda one: -one[0])
    differ = [lines for size, lines in found if size > 0]
    say(f"  {len(differ)} of {counted(len(found), 'rollout')} differ")
    for lines in differ if full else differ[:_MOST_ROWS]:
        for line in lines:
            say(f"  {line}")
    if not full and len(differ) > _MOST_ROWS:
        say(f"  ... {len(differ) - _MOST_ROWS} more (--full)")


def _effects(before: Computed, after: Computed) -> Iterator[tuple[float, list[str]]]:
    """Yield for each rollout how much differs, and the lines that say it.

    What the actor learned of a token is its advantage; what that did, its logprob by the weights after the step.
    """
    for place, (old, new) in enumerate(zip(before.rows, after.rows, strict=True)):
        name = f"prompt {clean(old['name'])} ({old['prompt_index']}), sample {old['sample_index']}"
        size, said = 0.0, [f"{name}: {shorten(clean(old['response']), _TEXT_CELLS)!r}"]
        if old["score"] != new["score"]:
            size += _gap(old["score"], new["score"])
            said.append(f"  score {_number(old['score'])} -> {_number(new['score'])}")
        tokens = list[tuple[float, str]]()
        pairs = zip(before.logprobs[place], after.logprobs[place], strict=True) if before.logprobs else ()
        for token, (was, now) in enumerate(pairs):
            if not old["loss_mask"][token]:
                continue
            one, other = (None if row["advantages"] is None else row["advantages"][token] for row in (old, new))
            gap = abs(was - now) + (_gap(one, other) if one != other else 0.0)
            line = f"  token {token} (id {old['response_ids'][token]}): advantage {_number(one)} -> {_number(other)}"
            tokens.append((gap, f"{line}, logprob after the step {was:.4f} -> {now:.4f}"))
        tokens.sort(key=lambda pair: -pair[0])
        size += sum(gap for gap, _ in tokens)
        said += [line for gap, line in tokens[:_MOST_TOKENS] if gap > 0]
        yield size, said


def _gap(old: float | None, new: float | None) -> float:
    """Return the difference of two numbers; 1 if only one is there, or it is not finite."""
    gap = 1.0 if old is None or new is None else abs(old - new)
    return gap if math.isfinite(gap) else 1.0


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def print_waste(run: str) -> None:
    """Print a line for each cause, the most seconds first, and their shares of the run."""
    console, found = Console(highlight=False), account(read_journal(RunFolder(run_of(run)).journal))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for name in ("cause", "", "tokens", "seconds"):
        table.add_column(name, justify="left" if name == "cause" else "right", no_wrap=True)
    for waste in found.wastes:
        how_often = counted(waste.num, waste.unit) if waste.num else ""
        table.add_row(waste.cause, how_often, f"{waste.tokens:,}" if waste.tokens else "", f"{waste.seconds:,.1f}")
    table.add_row("of the run", "", f"{found.tokens:,}", f"{found.seconds:,.1f}", style="dim")
    console.print(table)
    console.print(f"for nothing: {in_short(found)}" if found.wastes else "nothing was wasted", markup=False)


def print_troubles(run: str) -> bool:
    """Print the known troubles of a run with their evidence, the worst first; return whether one is bad."""
    console, found = Console(highlight=False, markup=False, soft_wrap=True), troubles_of(run_of(run))
    for one in found:
        mark, style = LEVELS[one.level]
        console.print(f"{mark} {one.words}" + (f", {one.steps}" if one.steps else ""), style=style)
        console.print(f"  {clean(one.evidence)}\n  -> {clean(one.advice)}")
    if not found:
        console.print("no known trouble")
    return any(one.level == "bad" for one in found)


_TABLE = re.compile(r"(?<=<!-- rally drill: begin -->\n).*?(?=<!-- rally drill: end -->)", re.DOTALL)
"""Place of the results in a page."""


def print_drills(names: Sequence[str], *, everything: bool, only_list: bool, write: str | None) -> bool:
    """Do drills, and print a line for each.

    Returns:
        Whether all of them ended with the weights of an untouched run, and nothing of it took longer than promised.

    Raises:
        ConfigError: there is no drill of such a name, or no place for the table in the file.
    """
    from rallypoint.recipes.drills import SHORT, chosen

    console = Console(highlight=False, markup=False, soft_wrap=True)
    drills = chosen(names if names or everything or only_list else SHORT)
    if only_list:
        for drill in drills:
            console.print(drill.name)
        return True
    if write is not None and not (Path(write).is_file() and _TABLE.search(Path(write).read_text())):
        raise ConfigError((f"--write {write}: expected a file with the lines `<!-- rally drill: begin -->` and `end`",))
    from rallypoint.recipes.drilling import Drills  # only now torch

    folder, outcomes = Path(tempfile.mkdtemp(prefix="drills-")), list["DrillOutcome"]()
    with Drills(folder).on_one_ray(drills) as doing:
        for drill in drills:
            outcomes.append(one := doing.do(drill))
            verdict = one.problem or f"equal, {one.went_on}" + f", but {one.late}" * bool(one.late)
            line = f"{drill.name:44} noticed {_seconds(one.noticed_s):>6}  back {_seconds(one.back_s):>6}  {verdict}"
            console.print(line)
            if write is not None:
                text = Path(write).read_text()
                Path(write).write_text(_TABLE.sub(lambda found: _with_row(found[0], one), text))
    failed, num_late = [one for one in outcomes if one.problem], sum(bool(one.late) for one in outcomes)
    late = f"; {num_late} took longer than promised" * bool(num_late)
    console.print(f"{len(outcomes) - len(failed)} of {counted(len(outcomes), 'drill')} ended with equal weights{late}")
    if failed:
        console.print(f"their runs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return not failed and not num_late


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _with_row(table: str, one: DrillOutcome) -> str:
    """Put the outcome of a drill into a table, at its place or in place of an earlier outcome."""
    from rallypoint.recipes.drills import table as all_drills

    rows = {row.split("`")[1]: row for row in table.splitlines() if row.startswith("| `")}
    verdict = one.problem or one.went_on + f", {one.late}" * bool(one.late)
    rows[one.drill.name] = f"| `{one.drill.name}` | {_seconds(one.noticed_s)} | {_seconds(one.back_s)} | {verdict} |"
    kept = [rows[drill.name] for drill in all_drills() if drill.name in rows]
    return "\n".join(["| drill | noticed | back | went on |", "|---|---|---|---|", *kept, ""])
