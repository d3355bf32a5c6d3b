"""Everything that can be known before a run begins: `--dry-run` and `rally train` look at the same, in this order.

1. The machine: devices, cores and memory beside pools and plan.
2. The weights of local folders, by the headers of their files.
3. Tokenizer, chat template, prompts and reward function, as `reading.py` reads them.
"""

from __future__ import annotations

import dataclasses

from rallypoint.config import RunConfig
from rallypoint.data import EncodedPrompts
from rallypoint.plan import make_plan
from rallypoint.recipes.machine import check_machine
from rallypoint.recipes.reading import Found, check_weights, read_material

DRY_RUN_ROWS = 20_000
"""Prompts of a data set that a dry run reads: all of those that take it seconds."""


def examine(config: RunConfig) -> Found:
    """Look at everything that a run begins with, before anything of it is there.

    Raises:
        ConfigError: this machine cannot have the run.
        DataError: a data set has bad rows, or prompts that do not fit.
        ModelError: a model folder or a tokenizer cannot be used.
        RewardError: the reward function cannot be loaded.
    """
    notes = check_machine(config, make_plan(config))
    check_weights(config)
    found = read_material(config)
    return dataclasses.replace(found, notes=(*notes, *found.notes))


def examine_dry(config: RunConfig) -> tuple[str, ...]:
    """Do as `examine`, but read no more than takes seconds.

    Returns:
        What was read, and what there is to say of it, a line each.

    Raises:
        ConfigError, DataError, ModelError, RewardError: as `examine`.
    """
    check_weights(config)
    found = read_material(config, max_rows=DRY_RUN_ROWS)
    lines = [_described("train", found.train, config), _described("validation", found.validation, config)]
    if config.data.generate is not None:
        lines = [f"prompts        {config.data.generate.num_train_prompts:,}, made when the run starts"]
    spec = config.reward.function
    if spec is not None:
        lines.append(f"reward         {spec}, which could be imported")
    return (*filter(None, lines), *found.notes)


def _described(name: str, prompts: EncodedPrompts | None, config: RunConfig) -> str:
    if prompts is None:
        return ""
    part = f"the first {len(prompts.examples):,} prompts alone were read" if prompts.is_part else ""
    whole = part or f"{len(prompts.examples):,} prompts"
    return (
        f"{name:13}  {whole}, the longest of {prompts.max_tokens:,} tokens "
        f"(data.max_prompt_tokens={config.data.max_prompt_tokens})"
    )
