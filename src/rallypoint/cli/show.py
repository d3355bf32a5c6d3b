"""What a run would do, and where: `rally config`, `recipes`, `doctor`, `check-reward` and `train --dry-run`."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rallypoint.config import LoadedConfig, RunConfig, leaves, read, shipped_recipes, shown, values_of
from rallypoint.config.check_algorithm import note_ratios
from rallypoint.config.fields import section_of, sections_in
from rallypoint.config.load import AUTOMATICALLY, expected
from rallypoint.config.source import describe
from rallypoint.config.transport import describe_transport, transport_kind
from rallypoint.config.unread import unread_sections, why_unread
from rallypoint.display.text import clean
from rallypoint.display.theme import LEVELS, PALETTE
from rallypoint.environments.reward import SHIPPED
from rallypoint.observability.health import Level
from rallypoint.observability.numbers import counted
from rallypoint.prepare.checkup import Finding, Standing
from rallypoint.prepare.inventory import Machine, imagine, look_around
from rallypoint.prepare.machine import (
    check_machine,
    choices,
    describe_choices,
    devices_of,
    plan_on,
    time_on,
)
from rallypoint.prepare.model_folders import is_hub_name
from rallypoint.prepare.plan import RunPlan
from rallypoint.prepare.preflight import file_problems, find_wanted, load_checked, load_named
from rallypoint.prepare.step_time import StepTime
from rallypoint.run.folder import RunFolder, anchored

if TYPE_CHECKING:
    from rallypoint.prepare.check_reward import Kind, Report

_MAX_VALUE_CELLS, _INDENT = 20, "    "


_STANDINGS: dict[Standing, Level] = {"ok": "ok", "note": "watch", "fault": "bad"}


def print_checkup(found: Sequence[Finding]) -> bool:
    """Print what a machine is like for runs, a line each; return whether something keeps them from working."""
    console = _console()
    for one in found:
        mark, style = LEVELS[_STANDINGS[one.level]]
        console.print(Text.assemble((mark, style), f" {one.level:<6}{one.what:<14} {clean(one.said)}"))
        if one.advice:
            console.print(f"{'':<8} -> {one.advice}")
    return any(one.level == "fault" for one in found)


def print_config(recipe: str, overrides: Sequence[str], *, explain: bool) -> None:
    """Print every key with value and origin, one per line, uncut; keys that are still to be set as well."""
    loaded, console = load_checked(recipe, overrides, draft=True), _console()
    rows = [(key, value if isinstance(value, str) else shown(value)) for key, value in values_of(loaded.config)]
    rows = [(key, "required" if key in loaded.missing else value) for key, value in rows]
    rows = [(key, "null" if loaded.origins[key] == AUTOMATICALLY else value) for key, value in rows]
    key_cells = max(len(key) for key, _ in rows)
    value_cells = min(_MAX_VALUE_CELLS, max(len(value) for _, value in rows))
    unread = unread_sections(loaded.config)
    for key, value in rows:
        origin, setting = loaded.origins[key], why_unread(unread, key)
        origin = "not set yet" if key in loaded.missing else origin
        line = f"{key:{key_cells}}  {value:{value_cells}}  {origin}" + (f" (not read: {setting})" if setting else "")
        style = "dim" if origin in ("default", AUTOMATICALLY) or setting else ""
        if not explain:
            console.print(line, style=PALETTE["watch"] if key in loaded.missing else style)
            continue
        console.print(line, style="bold")
        # Wrapped at words, with room for the indent: a pager would break a long line anywhere.
        width = max(console.width - len(_INDENT), 20)
        for part in textwrap.wrap(_meaning(key), width, break_long_words=False, break_on_hyphens=False):
            console.print(_INDENT + part, style="dim")


def _meaning(key: str) -> str:
    if info := leaves(RunConfig).get(key):
        return f"{info.description} Expected {expected(info)}."
    info = sections_in(RunConfig)[key]
    inside = section_of(info)
    assert inside is not None, "what is no leaf is a section"
    return f"{info.description} Off; {key}={{}} switches it on, with the keys {', '.join(inside.model_fields)}."


def print_recipes() -> None:
    """Print names and descriptions."""
    console, recipes = _console(), shipped_recipes()
    cells = max(map(len, recipes)) + 2
    for name, path in recipes.items():
        said = textwrap.fill(
            describe(path), console.width, initial_indent=f"{name:{cells}}", subsequent_indent=" " * cells
        )
        line = Text(said)
        line.stylize("bold", 0, len(name))
        console.print(line)
    console.print("\nrally train NAME     rally config NAME     rally train NAME --dry-run", style="dim")


def print_plan(
    recipe: str, overrides: Sequence[str], *, on: str | None = None, resume: bool = False, from_step: int | None = None
) -> None:
    """Print batch arithmetic, placement and memory, and what was read of data, tokenizer and reward.

    Args:
        recipe: a shipped recipe, a YAML file, or a run folder.
        overrides: dotted keys and values.
        on: another machine that the plan is for, such as `8xH100`; then no data is read, and of a model config.json.
        resume: whether the plan is for a run that goes on; its checkpoint is compared with the config, and stays as it
            is.
        from_step: with `resume`, the step of that checkpoint; None for the newest.

    Raises:
        RallyError: a run would fail; what was known before is printed.
    """
    elsewhere, console = imagine(on) if on is not None else None, _console()
    folder, devices = None, list[str]()
    if resume:
        loaded, folder = find_wanted(recipe, overrides, say=console.print)
    elif elsewhere is not None:
        devices = devices_of(elsewhere, read(recipe, overrides).values)
        choose = functools.partial(choices, machine=elsewhere)
        loaded = load_named(recipe, [*devices, *overrides], choose=choose, elsewhere=True)
    else:
        loaded = load_named(recipe, overrides)
    config = loaded.config
    machine = elsewhere or look_around(config)
    plan = plan_on(config, machine)
    time = time_on(config, plan, machine, _console(stderr=True).print)
    parts = [_batches(loaded, plan), _placement(loaded, plan, machine), *([_time(config, time)] if time else [])]
    for title, lines in parts:
        console.print(title, style="bold")
        for line in lines:
            console.print(f"  {line}".rstrip())
    console.print("data and machine" if elsewhere is None else f"on {on}", style="bold")
    for line in _not_known(config, plan, devices) if elsewhere is not None else ():
        console.print(f"  {line}", style="yellow")
    for line in check_machine(config, plan, machine):
        console.print(f"  {line}")
    for line in _read(config) if elsewhere is None else ():
        console.print(f"  {line}")
    if folder is not None:
        console.print(f"resume of {folder.path.name}", style="bold")
        for line in _compared(config, folder, from_step):
            console.print(f"  {line}")
    console.print(f"\nNothing was started. All keys: rally config {recipe}", style="dim")


def _compared(config: RunConfig, folder: RunFolder, from_step: int | None) -> Sequence[str]:
    """Compare a config with the checkpoint that a resume would go on from."""
    from rallypoint.prepare.material import read_inputs  # only now torch, as in `_read`
    from rallypoint.run.resume import Beginning

    config = anchored(config)
    if config.trainer.num_epochs is not None:
        config = read_inputs(config).settled(config)
    beginning = Beginning.compared(folder, config, from_step)
    return [f"goes on after step {beginning.first} of {config.trainer.num_steps}", *beginning.notes]


def _not_known(config: RunConfig, plan: RunPlan, devices: Sequence[str]) -> Iterator[str]:
    """Yield what was taken for granted of another machine, and what only it can tell."""
    yield from (f"{one}: planned with it, so start the run with it" for one in devices)
    if plan.num_parameters is None:
        yield _how_to_know(config)
    for problem in file_problems(config):
        if problem.is_local and problem.keys != ("model.path",):  # of which config.json is enough for a plan
            yield f"not here, and perhaps there: {problem.text}"


def _how_to_know(config: RunConfig) -> str:
    """Say why the memory of a plan is not known, and what to do to know it."""
    path = config.model.path
    if path is not None and is_hub_name(path):
        return (
            f"the sizes of {path} are not known here, so this plan has no memory, and does not say whether it fits: "
            f"where there is a network, hf download {path} config.json --local-dir FOLDER, and give model.path=FOLDER"
        )
    if path is not None and not Path(path).expanduser().exists():
        return (
            f"there is no {path} here, so this plan has no memory, and does not say whether it fits: copy its "
            "config.json into a folder here, and give model.path=FOLDER"
        )
    return (
        f"config.json of {path} describes no decoder of a family that is planned, so this plan has no memory, and does "
        "not say whether it fits"
    )


def _read(config: RunConfig) -> Sequence[str]:
    """Read the user's own data, model and reward, if there are any."""
    generate, functions = config.data.generate, [one.function for one in config.reward.all_functions]
    named = (config.model.path, config.own_models, config.data.train, config.own_functions, config.rollout.episode)
    is_own = any(named)
    if generate is not None and not is_own and SHIPPED.keys() >= set(functions):
        return [
            f"prompts        {generate.num_train_prompts:,}, made when the run starts",
            f"reward         {', '.join(functions)}, which ships with rallypoint",
        ]
    from rallypoint.prepare.material import examine_dry  # only now torch, and the seconds that it takes

    return examine_dry(config)


def _batches(loaded: LoadedConfig, plan: RunPlan) -> tuple[str, list[str]]:
    config = loaded.config
    what, longest = (
        f"prompts x {plan.group_size}",
        f"({config.data.max_prompt_tokens} + {config.rollout.max_response_tokens})",
    )
    if config.trains_on_files:
        what, longest = f"examples x {plan.group_size}", f"{config.data.max_row_tokens:,}"
    lines = [
        f"{'rows' if config.trains_on_files else 'rollouts':13}  {plan.num_prompts} {what} = {plan.num_rows} rows",
        f"tokens         at most {plan.num_rows} x {longest} = {plan.max_tokens:,}",
    ]
    if most := config.rollout.max_staleness:
        lines.append(f"sampled ahead  at most {config.max_groups} prompts under way; rollouts at most {most} steps old")
    for role, (num_updates, num_rows, num_micro_batches) in plan.updates.items():
        ranks = config.num_parts(role)
        lines += [
            f"{f'{role} update':13}  {counted(num_updates, 'optimizer step')} of at most {counted(num_rows, 'row')}; "
            f"on each of {counted(ranks, 'rank')}",
            f"{'':13}  at most {counted(num_micro_batches, 'micro-batch', 'es')} of "
            f"{config.engine.max_tokens_per_micro_batch:,} tokens",
        ]
    if not why_unread(unread_sections(config), "loss"):
        lines += [f"{'' if place else 'policy loss':13}  {line}" for place, line in enumerate(note_ratios(config))]
    epochs = config.trainer.num_epochs  # whose steps are known when the data are read, see `examine_dry`
    steps = f"one of {counted(config.trainer.num_steps, 'step')}" if epochs is None else "one step"
    return f"{loaded.name}: {steps}", lines


def _placement(loaded: LoadedConfig, plan: RunPlan, machine: Machine) -> tuple[str, list[str]]:
    """A column for each role, a row for each part of its memory, and what each pool's processes hold."""
    config, known = loaded.config, bool(plan.memory)
    size = (
        "unknown until it is loaded" if plan.num_parameters is None else f"{plan.num_parameters / 1e6:,.2f}M parameters"
    )
    columns = [("", ["pool", "ranks", "weights", "gradients", "optimizer", "activations", "cache", "total"])]
    if known:
        for m in plan.memory:
            parts = (m.weights, m.gradients, m.optimizer, m.activations, m.cache, m.total)
            columns.append((m.role, [m.pool, str(m.num_ranks), *map(_mebibytes, parts)]))
    else:
        for role, placement in config.roles.items():
            columns.append((role, [placement.pool, str(config.num_ranks(role)), *"??????"]))
    cells = max(11, *(len(column[0]) for _, column in columns[1:]))
    lines = [
        f"{first:11}" + "".join(f"  {one:>{cells}}" for one in others)
        for first, *others in zip(*([name, *column] for name, column in columns), strict=True)
    ]
    lines.append("")
    for pool, nodes in config.cluster.pools.items():
        held = _mebibytes(plan.process_memory(pool)) if known else "?"
        away = f", and {_mebibytes(of_cpu)} of CPU memory" if (of_cpu := plan.cpu_memory(pool)) else ""
        lines.append(f"pool {pool} {shown(nodes)}: {held} in each process{away}")
    lines += describe_choices(loaded, machine)
    if "rollout" in config.roles and config.rollout.engine == "vllm" and (tp := config.rollout.mesh.tp) > 1:
        devices = f"the devices of {tp} processes" if config.devices_of_rollout == 1 else f"{tp} devices of a process"
        lines.append(f"vLLM servers: {config.num_parts('rollout')}, each over {devices}")
    if "rollout" in config.roles:
        lines += [f"published weights: {describe_transport(config, transport_kind(config))}", ""]
    return f"\nplacement on {config.cluster.runtime}, and memory of each process; model: {size}", lines


def _time(config: RunConfig, time: StepTime) -> tuple[str, list[str]]:
    """A line for each phase of a step, and what the run takes."""
    lines = [f"{one.name:14}  {_between(one.least_s, one.most_s)} s, most of it {one.limit}" for one in time.phases]
    total = f"{'a step':14}  {_between(*time.seconds)} s"
    if config.trainer.num_epochs is None:
        hours = [config.trainer.num_steps * seconds / 3600 for seconds in time.seconds]
        took = f"{_between(*hours)} h" if hours[1] >= 1 else f"{_between(*(60 * one for one in hours))} min"
        total += f"; {counted(config.trainer.num_steps, 'step')}: {took}"
        if time.num_devices:
            total += f", {_between(*(time.num_devices * one for one in hours))} device-hours"
    lines += [total + (", pools beside each other" if time.is_ahead else ""), ""]
    if not time.num_devices:
        processes = counted(sum(map(sum, config.cluster.pools.values())), "process", "es")
        each = counted(config.cluster.num_cpus_per_process, "core")
        lines.insert(-1, f"{'':14}  by what {processes} of {each} were measured to compute here")
    return (
        "time, estimated without rewards and tools: responses half to all as long as they may be",
        lines,
    )


def _between(least: float, most: float) -> str:
    few, many = (f"{one:,.0f}" if one >= 10 else f"{one:.1f}" if one >= 1 else f"{one:.2f}" for one in (least, most))
    return few if few == many else f"{few} to {many}"


def _mebibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _console(*, stderr: bool = False) -> Console:
    """Return a console for lines: a terminal may wrap them, a file or a pipe gets them as they are."""
    return Console(highlight=False, markup=False, soft_wrap=True, stderr=stderr)


def check_reward(recipe: str, overrides: Sequence[str], *, max_rows: int) -> int:
    """Print a table of answers, scores and times; return 1 if there is something to look at, else 0."""
    from rallypoint.prepare.check_reward import (
        SHOWN_ROWS,  # heavy, and of no use to the other commands
        check_reward as check,
    )

    console, config = _console(), load_named(recipe, overrides).config
    with console.status("") as status:

        def say(text: str) -> None:
            if console.is_terminal:
                status.update(Text(text))
            else:
                print(text, file=sys.stderr)

        report = check(config, max_rows=max_rows, say=say)
    console.print("look at this before a run:" if report.worries else Text("nothing to worry about", "bold"))
    for worry in report.worries:
        console.print(f"- {worry}")
    functions = ", ".join(one.function for one in config.reward.all_functions)
    console.print(Text.assemble((functions, "bold"), f": right answers are the ground truth {report.form}"))
    console.print(_answers(report), soft_wrap=False)
    if report.low:
        console.print(f"right answers below the maximum, {len(report.low)}:")
    for example, got in report.low[:SHOWN_ROWS]:
        truth = repr(example.ground_truth)
        shown = truth if len(truth) <= 80 else f"{truth[:80]} ..."
        console.print(f"  {example.name}: {got}; ground truth {shown}")
    if len(report.low) > SHOWN_ROWS:
        console.print(f"  and {len(report.low) - SHOWN_ROWS} more")
    return int(bool(report.worries))


def _answers(report: Report) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("answer", "calls", "mean", "min", "max", "no score", "mean ms", "max ms"):
        table.add_column(name, justify="left" if name == "answer" else "right", no_wrap=True)
    for kind in report.kinds:
        table.add_row(*_cells(kind))
    return table


def _cells(kind: Kind) -> list[str]:
    scores = kind.scores
    found = [f"{number:.4g}" for number in (kind.mean, min(scores), max(scores))] if scores else ["-"] * 3
    milliseconds = [1000 * seconds for seconds in kind.seconds]
    times = [f"{sum(milliseconds) / len(milliseconds):.1f}", f"{max(milliseconds):.1f}"]
    return [kind.name, str(len(kind.outcomes)), *found, str(len(kind.failures)), *times]
