"""The recipes that a config can name, and what a run of each has: its roles, its sections, its checks, its page.

A recipe is declared here, or with `declare` by a package of its own; no other file branches on its name. Owns no
computation: a page is imported when a run begins, because pages need torch and a config does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from rallypoint.config.fields import Problem

if TYPE_CHECKING:
    from rallypoint.config.tree import RunConfig

RoleName = Literal["actor", "rollout", "reward", "reference", "critic"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec:
    """What the rest of the package needs to know of a recipe."""

    name: str
    page: str
    """`module:Class` of its `rallypoint.recipes.recipe.Recipe`."""
    roles: tuple[RoleName, ...]
    """Roles of every run of it."""
    optional_roles: tuple[RoleName, ...] = ()
    """Roles of a run whose config turns them on: `reward` by reward.path, `reference` by kl."""
    sections: tuple[str, ...] = ()
    """Sections of the config that it reads and others may not, besides those of its roles."""
    checks: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = ()
    """Contradictions between keys that would be wrong in this recipe."""

    def reads(self, name: str) -> bool:
        """Whether it reads a section that not all recipes read."""
        return name in (*self.sections, *self.roles, *self.optional_roles)


RECIPES: dict[str, RecipeSpec] = {}
"""The declared recipes by name."""


def declare(spec: RecipeSpec) -> RecipeSpec:
    """Add a recipe to those that a config can name.

    Raises:
        ValueError: another one has that name.
    """
    if RECIPES.setdefault(spec.name, spec) != spec:
        raise ValueError(f"there is a recipe {spec.name!r} already: {RECIPES[spec.name].page}")
    return spec


def unread_by(name: str) -> tuple[str, ...]:
    """Return the sections that other recipes read, but not this one."""
    found = {part for spec in RECIPES.values() for part in (*spec.sections, *spec.roles, *spec.optional_roles)}
    return tuple(sorted(part for part in found if not RECIPES[name].reads(part)))


def _check_groups(config: RunConfig) -> Iterator[Problem]:
    size = config.rollout.group_size
    if size == 1:
        yield Problem(
            ("rollout.group_size", "recipe"),
            f"rollout.group_size=1: recipe={config.recipe} compares the rollouts of a group, and a group of one has "
            "nothing to compare; expected at least 2, usually 8",
        )


def _check_kl(config: RunConfig) -> Iterator[Problem]:
    """Yield estimators whose gradient is not that of the KL where they are placed."""
    kl = config.kl
    if kl is not None and kl.placement == "loss" and kl.estimator_used == "k1":
        yield Problem(
            ("kl.estimator", "kl.placement"),
            "kl.estimator='k1' does not pull towards the reference when kl.placement=loss (the mean of its gradient is "
            "zero); expected k2 or k3, or kl.placement=reward",
        )
    if kl is not None and kl.placement == "reward" and kl.estimator_used != "k1":
        yield Problem(
            ("kl.estimator", "kl.placement"),
            f"kl.estimator={kl.estimator!r} does not pull towards the reference when kl.placement=reward (only k1 has "
            "the gradient of the KL there); expected k1, or kl.placement=loss",
        )


def _check_clipping(config: RunConfig) -> Iterator[Problem]:
    highest_ratio = 1 + config.actor.clip_high
    if config.actor.dual_clip is not None and config.actor.dual_clip <= highest_ratio:
        yield Problem(
            ("actor.dual_clip", "actor.clip_high"),
            f"actor.dual_clip={config.actor.dual_clip} is not above the highest ratio that the clipping leaves, "
            f"1 + actor.clip_high = {highest_ratio:g}; expected more than that, usually 3, or null",
        )


declare(
    RecipeSpec(
        name="ppo",
        page="rallypoint.recipes.ppo:PPO",
        roles=("actor", "rollout", "critic"),
        optional_roles=("reward", "reference"),
        sections=("kl", "ppo"),
        checks=(_check_kl, _check_clipping),
    )
)
declare(
    RecipeSpec(
        name="grpo",
        page="rallypoint.recipes.grpo:GRPO",
        roles=("actor", "rollout"),
        optional_roles=("reward", "reference"),
        sections=("kl", "grpo"),
        checks=(_check_groups, _check_kl, _check_clipping),
    )
)
