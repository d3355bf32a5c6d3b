"""What verl, TRL, OpenRLHF and NeMo-RL call our keys, read from `other_projects.yaml`, which explains its own form.

A name of theirs is not a key: it is refused, and the error names ours (`suggest.py`). Whole configs
are translated (`translate`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib.resources import files

import yaml
from pydantic import BaseModel, ConfigDict

from rallypoint.config.recipes import RECIPES

VALUE = "VALUE"
"""Stands in an assignment for the value that was given."""

Values = Mapping[str, object]
Words = Mapping[str, str]


class _Read(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Alias(_Read):
    """Names that others have for something, and how it is written here."""

    names: str
    to: tuple[str, ...] = ()
    note: str = ""
    values: Words = {}


class Verl(_Read):
    """What verl has where nothing is given, and its words for losses, estimators and sections."""

    defaults: Values
    defaults_critic: Values
    defaults_lora: Values
    defaults_length: Values
    defaults_sft: Values
    defaults_sft_length: Values
    losses: Mapping[str, Values]
    covariance: Mapping[str, Words]
    advantages: Words
    estimators: Words
    sharded: Words
    masks: Words
    kl_masks: Words
    no_corrections: tuple[str, ...]
    sft_columns: Words
    sft_on_too_long: Words
    sft_unneeded: Words
    reward_words: frozenset[str]
    ambiguous: tuple[str, ...]
    metrics: Words


class Trl(_Read):
    """What TRL's classes have where nothing is given, and what its commands and arguments say of the class.

    Also which arguments may be given by their places, and what those of its trainers are in `rally.train`.
    """

    classes: Words
    commands: Words
    signs: Words
    aggregations: Words
    defaults_of_all: Values
    defaults: Mapping[str, Values]
    defaults_lora: Values
    defaults_peft: Values
    defaults_vllm: Values
    defaults_length: Values
    positional: Mapping[str, tuple[str, ...]]
    renamed: Words
    arguments: Words


class OtherProjects(_Read):
    """The whole file."""

    anywhere: tuple[Alias, ...]
    examples: tuple[Alias, ...]
    preferences: tuple[Alias, ...]
    teachers: tuple[Alias, ...]
    policies: tuple[Alias, ...]
    whole_configs: tuple[Alias, ...]
    values: Mapping[str, Words]
    verl: Verl
    trl: Trl


@functools.cache
def other_projects() -> OtherProjects:
    """Read the file, once."""
    text = files("rallypoint.config").joinpath("other_projects.yaml").read_text(encoding="utf-8")
    return OtherProjects.model_validate(yaml.safe_load(text))


def by_name(aliases: Iterable[Alias]) -> dict[str, Alias]:
    """Return aliases by each of their names; later ones replace earlier ones."""
    return {name: alias for alias in aliases for name in alias.names.split()}


@functools.cache
def aliases_for(recipe: str | None) -> Mapping[str, Alias]:
    """Return the aliases by each of their names, as a recipe has them; None for those that hold anywhere."""
    theirs, spec = other_projects(), RECIPES.get(recipe or "")
    if spec is None:
        return by_name(theirs.anywhere)
    return by_name(
        (
            *theirs.anywhere,
            *(theirs.examples if spec.examples != "prompts" else ()),
            *(theirs.preferences if spec.reads("preference") else ()),
            *(theirs.teachers if spec.reads("teacher") else ()),
            *(theirs.policies if spec.reads("loss") else ()),
        )
    )
