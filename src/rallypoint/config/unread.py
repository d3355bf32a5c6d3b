"""The keys that nothing reads in a run, each with the setting that makes it so.

On the command line such a key is refused; in a file it is allowed, as another setting may make it useful.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rallypoint.config.fields import Problem, shown, values_of
from rallypoint.config.recipes import RECIPES, Examples, unread_by
from rallypoint.config.sections.learning import TeacherConfig
from rallypoint.config.sections.material import ColumnsConfig
from rallypoint.config.source import COMMAND_LINE
from rallypoint.config.tree import RunConfig

_OF_PROMPTS = (
    "data.max_prompt_tokens",
    "actor.entropy_coef",
    "validation.temperature",
    "validation.num_samples",
    "checks",
)
_OF_FILES = ("data.max_row_tokens", "data.num_examples")
"""Keys that only recipes with prompts read, and only those that train on files as they are."""

COLUMNS_OF: dict[Examples, tuple[str, ...]] = {
    "prompts": ("prompt", "tools", "ground_truth", "data_source", "ability", "extra_info"),
    "conversations": ("messages", "prompt", "completion", "tools"),
    "pairs": ("prompt", "chosen", "rejected", "tools"),
}
"""Columns that are read of each kind of data."""


def unread_sections(config: RunConfig) -> dict[str, str]:
    """Return the sections and keys that nothing reads in this run, each with the setting that makes it so."""
    spec = RECIPES[config.recipe]
    others = (*unread_by(config.recipe), *(_OF_PROMPTS if config.trains_on_files else _OF_FILES))
    columns = [name for name in ColumnsConfig.model_fields if name not in COLUMNS_OF[spec.examples]]
    unread = dict.fromkeys((*others, *(f"data.columns.{name}" for name in columns)), f"recipe={config.recipe}")
    if spec.reads("teacher"):
        unread |= _beside_a_teacher(config)
    unread |= spec.unread(config) if spec.unread is not None else {}
    if config.trainer.num_epochs is not None:
        unread["trainer.num_steps"] = f"trainer.num_epochs={config.trainer.num_epochs}"
    if config.kl is None:
        unread["reference"] = "kl=null"
    if not config.reward.all_models:
        unread |= dict.fromkeys(("reward.placement", "reward.mesh"), "reward.path=null")
    return unread


def _beside_a_teacher(config: RunConfig) -> dict[str, str]:
    """Return what a run does not read that learns from a teacher."""
    unread = {"rollout.mask_truncated": f"recipe={config.recipe}"}  # a teacher judges each token, cut off or not
    if not config.teachers.urls:
        unread["teacher.served"] = _teachers_as_set(config.teachers)
    if not config.teachers.folders:
        unread |= dict.fromkeys(("teacher.placement", "teacher.mesh"), _teachers_as_set(config.teachers))
    return unread


def _teachers_as_set(teachers: TeacherConfig) -> str:
    if teachers.by_source:
        return f"teacher.by_source={shown(teachers.by_source)}"
    return f"teacher.path={shown(teachers.path)}"


def why_unread(unread: Mapping[str, str], name: str) -> str | None:
    """Return the setting because of which nothing reads a key, by what `unread_sections` found; None if it is read."""
    return next((setting for part, setting in unread.items() if f"{name}.".startswith(f"{part}.")), None)


def without_effect(config: RunConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Yield keys that were set on the command line and that nothing reads; in a file they are allowed."""
    unread, values = unread_sections(config), dict(values_of(config))
    for name, origin in origins.items():
        setting = why_unread(unread, name) if origin == COMMAND_LINE else None
        if setting is not None and (own := _key_of(values, name)) is not None:
            readers = _readers_of(config, name) if setting.startswith("recipe=") else []
            instead = f", or set recipe={' or '.join(readers)}" if readers else ""
            value = shown(values[own]) if own in values else "{}"
            yield Problem(
                (own, setting.split("=")[0]),
                f"{own}={value} has no effect: with {setting} nothing reads it; leave it out{instead}",
            )


def _key_of(values: Mapping[str, object], name: str) -> str | None:
    """Return the key or the section that was set by a name, which may be one of a user's own inside a key.

    >>> values = {"kl.coef": 1e-3, "teacher.by_source": {"math": "folder"}}
    >>> [_key_of(values, name) for name in ("kl.coef", "kl", "teacher.by_source.math", "x")]
    ['kl.coef', 'kl', 'teacher.by_source', None]
    """
    around = (key for key in values if f"{name}.".startswith(f"{key}."))
    return next(around, name if any(key.startswith(f"{name}.") for key in values) else None)


def _readers_of(config: RunConfig, name: str) -> list[str]:
    """Return the recipes that would read a key, given all others of a config."""
    others = (config.model_copy(update={"recipe": spec.name}) for spec in RECIPES.values())
    return [other.recipe for other in others if why_unread(unread_sections(other), name) is None]
