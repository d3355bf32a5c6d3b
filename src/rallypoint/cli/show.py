"""`rally config`, `rally recipes` and `rally train --dry-run`: what would be, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rallypoint.config import (
    UNUSED_SECTIONS,
    LoadedConfig,
    Plan,
    RunConfig,
    describe,
    leaves,
    make_plan,
    range_of,
    shipped_recipes,
    unit_of,
    values_of,
)
from rallypoint.recipes.preflight import load_checked


def print_config(recipe: str, overrides: Sequence[str], *, explain: bool) -> None:
    """Print every key, its value and its origin."""
    loaded, known = load_checked(recipe, overrides), leaves(RunConfig)
    unused = UNUSED_SECTIONS[loaded.config.recipe]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("key", "value", "set in"):
        table.add_column(heading, overflow="fold")
    if explain:
        table.add_column("meaning", overflow="fold", style="dim")
    for key, value in values_of(loaded.config):
        origin = loaded.origins[key]
        if key.split(".")[0] in unused:
            origin += f" (not read by {loaded.config.recipe})"
        style = "dim" if origin.startswith("default") else ""
        row = [key, escape(_shown(value)), origin]
        if explain:
            info = known.get(key)
            text = " ".join(filter(None, (info.description, unit_of(info), range_of(info).strip()))) if info else "off"
            row.append(escape(text))
        table.add_row(*row, style=style)
    _console().print(table)


def print_recipes() -> None:
    """Print names and descriptions."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, path in shipped_recipes().items():
        table.add_row(f"[bold]{name}[/]", escape(describe(path)))
    console = _console()
    console.print(table)
    console.print("\nrally train NAME     rally config NAME     rally train NAME --dry-run", style="dim")


def print_plan(recipe: str, overrides: Sequence[str]) -> None:
    """Print batch arithmetic, placement and memory."""
    loaded = load_checked(recipe, overrides)
    plan, console = make_plan(loaded.config), _console()
    console.print(_batches(loaded, plan))
    console.print(_placement(loaded.config, plan))
    console.print("Nothing was started. All keys: rally config " + recipe, style="dim")


def _batches(loaded: LoadedConfig, plan: Plan) -> Table:
    config = loaded.config
    table = Table(
        box=None,
        pad_edge=False,
        show_header=False,
        title=f"{loaded.name}: one of {config.trainer.num_steps} steps",
        title_justify="left",
        title_style="bold",
    )
    table.add_row("rollouts", f"{plan.num_prompts} prompts x {plan.group_size} = {plan.num_rows} rows")
    table.add_row(
        "tokens",
        f"at most {plan.num_rows} x ({config.data.max_prompt_tokens} + {config.rollout.max_response_tokens}) "
        f"= {plan.max_tokens:,}",
    )
    for role, (num_updates, rows, num_micro_batches) in plan.updates.items():
        ranks = config.num_ranks("actor" if role == "actor" else "critic")
        table.add_row(
            f"{role} update",
            f"{num_updates} optimizer steps on {rows} rows each; on each of {ranks} ranks at most {num_micro_batches} "
            f"micro-batches of {config.engine.max_tokens_per_micro_batch:,} tokens",
        )
    return table


def _placement(config: RunConfig, plan: Plan) -> Table:
    size = (
        "unknown until it is loaded" if plan.num_parameters is None else f"{plan.num_parameters / 1e6:,.2f}M parameters"
    )
    table = Table(
        box=None,
        pad_edge=False,
        title=f"\nplacement on {config.cluster.runtime}, and memory of each process; model: {size}",
        title_justify="left",
        title_style="bold",
        header_style="bold",
    )
    for heading in ("role", "pool", "ranks", "weights", "gradients", "optimizer", "activations", "cache", "total"):
        table.add_column(heading, justify="left" if heading in {"role", "pool"} else "right")
    for m in plan.memory:
        parts = (m.weights, m.gradients, m.optimizer, m.activations, m.cache, m.total)
        table.add_row(m.role, m.pool, str(m.num_ranks), *(_mebibytes(part) for part in parts))
    if not plan.memory:
        for role, placement in config.roles.items():
            table.add_row(role, placement.pool, str(config.num_ranks(role)), *["?"] * 6)
    for pool, nodes in config.cluster.pools.items():
        held = sum(m.total for m in plan.memory if m.pool == pool)
        name = f"pool {pool}: {list(nodes)}"
        table.add_row(name, "", "", *[""] * 5, _mebibytes(held) if plan.memory else "?", style="bold")
    return table


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in value.items()) + "}"
    return str(value)


def _mebibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _console() -> Console:
    return Console(highlight=False)
