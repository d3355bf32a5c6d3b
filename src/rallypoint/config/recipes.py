"""The recipes that a config can name, and what a run of each has: its roles, its sections, its checks, its page.

A recipe is declared here, or with `declare` by a package of its own; no other file branches on its name. Owns no
computation: a page is imported when a run begins, because pages need torch and a config does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from rallypoint.config.check_algorithm import (
    check_clipping,
    check_correction,
    check_kl,
    check_quantization,
    check_taught_correction,
)
from rallypoint.config.fields import Problem

if TYPE_CHECKING:
    from rallypoint.config.tree import RunConfig

RoleName = Literal["actor", "rollout", "reward", "reference", "teacher", "critic"]
Examples = Literal["prompts", "conversations", "pairs"]


WATCHED = (
    ("reward/mean", "reward"),
    ("actor/loss", "loss"),
    ("actor/approx_kl", "update kl"),
    ("actor/entropy", "entropy"),
)
"""What a person wants to see of a step with rewards."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecipeSpec:
    """What the rest of the package needs to know of a recipe."""

    name: str
    page: str | type
    """Its `rallypoint.recipes.recipe.Recipe`: `module:Class`, or the class itself."""
    roles: tuple[RoleName, ...]
    """Roles of every run of it."""
    optional_roles: tuple[RoleName, ...] = ()
    """Roles of a run whose config turns them on: `reward` by reward.path and reward.models, `reference` by kl."""
    examples: Examples = "prompts"
    """What a row of its data is: a prompt to be answered, a conversation, or a prompt with a chosen and a rejected
    answer. All but prompts come from files, and a step trains on them as they are."""
    trains: Literal["policy", "scores"] = "policy"
    """What the model that is trained returns: tokens, or a score for each row."""
    advantages: tuple[str, ...] = ()
    """Names of the advantages that it can compute; the first is its default."""
    sections: tuple[str, ...] = ()
    """Sections of the config that it reads and others may not; those of its roles are not listed."""
    watched: tuple[tuple[str, str], ...] = WATCHED
    """Metrics of a step that a person wants to see, with short names; the first above all, as a curve."""
    validated: Literal["score", "loss"] = "score"
    """What a person wants to see of a validation."""
    checks: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = ()
    """Contradictions between keys that would be wrong in this recipe."""
    unread: Callable[[RunConfig], dict[str, str]] | None = None
    """Keys of its sections that a run with other settings does not read: each with the setting that makes it so."""

    def reads(self, name: str) -> bool:
        """Whether it reads a section that not all recipes read."""
        return name in (*self.sections, *self.roles, *self.optional_roles)

    @property
    def rows_per_example(self) -> int:
        """Rows that a row of its data becomes, where nothing is sampled."""
        return 2 if self.examples == "pairs" else 1


COMPARES_GROUP = (
    "grpo",
    "gdpo",
    "dr_grpo",
    "turn_grpo",
    "gigpo",
    "lite_ppo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "max_rl",
    "opo",
    "pass_at_k",
)
"""Advantages that are 0 for a rollout that is alone."""
_LEARNING = ("kl", "advantage", "loss", "correction", "aggregation")

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


def _check_advantage(config: RunConfig) -> Iterator[Problem]:
    """Yield an advantage that the recipe cannot compute, or that groups of this size have nothing for."""
    name, size, here = config.advantage.name, config.rollout.group_size, RECIPES[config.recipe]
    if name not in here.advantages:
        others = [spec.name for spec in RECIPES.values() if name in spec.advantages]
        yield Problem.of(
            f"^advantage.name={name!r} is not computed by ^recipe={config.recipe}: set recipe={' or '.join(others)}, "
            f"or take {' or '.join(here.advantages)}"
        )
    elif size == 1 and name in COMPARES_GROUP:
        yield Problem.of(
            f"^rollout.group_size=1: ^advantage.name={name!r} compares the rollouts of a group, and a group of one has "
            "nothing to compare; expected at least 2, usually 8, or advantage.name=reinforce_plus_plus"
        )
    elif name == "gdpo" and len(config.reward.weights) < 2:
        yield Problem.of(
            f"^advantage.name=gdpo normalises several rewards apart, and the run has {len(config.reward.weights)}; "
            "expected at least 2 in ^reward.functions and reward.models; with one take advantage.name=grpo"
        )
    elif config.advantage.name == "pass_at_k" and config.advantage.k > size:
        yield Problem.of(
            f"^advantage.k={config.advantage.k} is more than the rollouts of a group, ^rollout.group_size={size}; "
            f"expected at most {size}"
        )
    else:
        yield from _check_penalties(config)


_NO_PENALTIES = {
    "gdpo": (
        "kl.placement=reward has no effect with advantage.name=gdpo, which normalises each reward by itself",
        "reward.overlong has no effect with advantage.name=gdpo, which normalises each reward by itself; expected "
        "null, and a function of the length among reward.functions",
    ),
    "pass_at_k": (
        "kl.placement=reward has no effect with advantage.name=pass_at_k, which counts right rollouts (scores above 0)",
        "reward.overlong has no effect with advantage.name=pass_at_k, which counts right rollouts (scores above 0), or "
        "makes a wrong one of a right one; expected null",
    ),
    "max_rl": (
        "kl.placement=reward is divided by the mean score of the prompt with advantage.name=max_rl, and left out where "
        "no rollout is right",
        "reward.overlong makes scores negative, for which advantage.name=max_rl has no meaning; expected null",
    ),
}
"""Advantages of scores alone: what becomes of a KL in the reward, and of a penalty for length."""


def _check_penalties(config: RunConfig) -> Iterator[Problem]:
    """Yield penalties in the reward that an advantage cannot take into account."""
    name = config.advantage.name
    if name not in _NO_PENALTIES:
        return
    of_kl, of_length = _NO_PENALTIES[name]
    if config.kl is not None and config.kl.placement == "reward" and RECIPES[config.recipe].reads("kl"):
        yield Problem(("kl.placement", "advantage.name"), f"{of_kl}; expected kl.placement=loss")
    if config.reward.overlong is not None:
        yield Problem(("reward.overlong", "advantage.name"), of_length)


def find_episode_clashes(config: RunConfig, episode: str) -> Iterator[Problem]:
    """Yield the keys that do not go with an episode of the user's, and why.

    Args:
        config: of the run.
        episode: its name, for messages.
    """
    if (num_sampled := config.rollout.over_sampling) is not None:
        yield Problem.of(
            f"^rollout.over_sampling={num_sampled} does not go with the episode {episode}: which rollouts end first "
            "would depend on how long an episode waits, so the same seed would give other weights; expected "
            "rollout.over_sampling=null, or ^rollout.episode=null"
        )
    if config.teachers.hint is not None:
        yield Problem.of(
            f"^teacher.hint does not go with the episode {episode}: the hint replaces what stands before the first "
            "response, and an episode may have put its own tokens there; expected teacher.hint=null, or "
            "^rollout.episode=null"
        )


def _check_prompts(config: RunConfig) -> Iterator[Problem]:
    """Yield what cannot be combined with dynamic sampling or over-sampling."""
    rollout = config.rollout
    if rollout.over_sampling is not None and rollout.over_sampling <= rollout.num_prompts:
        yield Problem.of(
            f"^rollout.over_sampling={rollout.over_sampling} leaves nothing over beside "
            f"^rollout.num_prompts={rollout.num_prompts}: it counts all prompts that are sampled for a step; expected "
            f"more, such as {rollout.num_prompts + -(-rollout.num_prompts // 4)}, or null"
        )
    if rollout.over_sampling is not None and rollout.max_staleness:
        yield Problem.of(
            f"^rollout.over_sampling={rollout.over_sampling} does not go with "
            f"^rollout.max_staleness={rollout.max_staleness}: a run that samples ahead lets its steps pass long "
            "responses by rollout.window; expected rollout.over_sampling=null, or rollout.max_staleness=0"
        )
    if rollout.episode is not None:
        yield from find_episode_clashes(config, rollout.own_episode or "of tools")
    if not rollout.dynamic_sampling:  # 0 replaces nothing
        return
    clash = f"^rollout.dynamic_sampling={rollout.dynamic_sampling} does not go with this"
    if rollout.group_size == 1:
        yield Problem.of(
            f"{clash} ^rollout.group_size: the scores of a group of one are all equal; expected 8 or so, or "
            "rollout.dynamic_sampling=null"
        )
    if config.reward.all_models:
        yield Problem.of(
            f"{clash} ^reward.path: a reward model is asked when groups are chosen; expected null, or "
            "rollout.dynamic_sampling=null"
        )


def _check_teacher(config: RunConfig) -> Iterator[Problem]:
    """Yield a teacher that is missing, and an advantage or a loss that has no rewards to compare."""
    if config.loss.name in {"clip_cov", "kl_cov"}:
        yield Problem.of(
            f"^loss.name={config.loss.name} chooses tokens by the rewards of a step, and recipe={config.recipe} learns "
            "from a teacher; expected loss.name=clip"
        )
    if not config.teachers.paths and config.teachers.hint is None:
        yield Problem.of(
            "^teacher.path: required, but not set; expected the Hugging Face folder of a language model with the "
            "policy's tokenizer, a URL that serves one, teacher.by_source with one for each data_source, or "
            "teacher.hint alone",
            is_missing=True,
        )
    hint = config.teachers.hint or ""
    if config.teachers.hint is not None and "{ground_truth}" not in hint and "{feedback}" not in hint:
        yield Problem.of(
            f"^teacher.hint={hint!r} says the same of every prompt; expected {{ground_truth}} or {{feedback}} in it"
        )
    if "{feedback}" in hint and not config.reward.all_functions:
        yield Problem(
            ("teacher.hint", "reward.function"),
            "teacher.hint has {feedback}, which a reward function gives: expected reward.function=file.py:function "
            'that returns {"score": 0.5, "feedback": "..."}',
        )
    if config.teachers.top_k is not None and config.teachers.loss == "policy_gradient":
        yield Problem.of(
            f"^teacher.top_k={config.teachers.top_k} has no effect with ^teacher.loss=policy_gradient, whose advantage "
            "is that of the sampled token; expected null, or teacher.loss=reverse, forward or mixed"
        )
    if config.teachers.urls and config.temperature != 1.0:
        yield Problem(
            ("rollout.temperature", "teacher.path"),
            f"rollout.temperature={config.temperature:g}: {config.teachers.urls[0]} says what its model says at "
            "temperature 1; expected rollout.temperature=1, or the teacher's folder",
        )
    signal = config.rollout.dynamic_sampling
    if signal == 0 or (signal is not None and not config.teachers.reward_coef):
        why = "a teacher judges groups of equal scores, too; expected null, or more with teacher.reward_coef above 0"
        yield Problem(("rollout.dynamic_sampling", "recipe"), f"rollout.dynamic_sampling={signal}: {why}")
    if config.teachers.reward_coef:
        yield from _check_advantage(config)


def _unread_without_rewards(config: RunConfig) -> dict[str, str]:
    """Return the keys that weigh rewards, in a run whose only signal is a teacher."""
    teachers = config.teachers
    if teachers.reward_coef:
        return {}
    alone, divergence = f"teacher.reward_coef={teachers.reward_coef:g}", f"teacher.loss={teachers.loss}"
    unread = {"advantage": alone, "aggregation": alone, "actor.entropy_coef": alone, "reward.overlong": alone}
    return unread if teachers.loss == "policy_gradient" else {**unread, "loss": divergence}


declare(
    RecipeSpec(
        name="ppo",
        page="rallypoint.recipes.ppo:PPO",
        roles=("actor", "rollout", "critic"),
        optional_roles=("reward", "reference"),
        advantages=("gae",),
        sections=_LEARNING,
        checks=(_check_advantage, _check_prompts, check_kl, check_clipping, check_correction, check_quantization),
    )
)
declare(
    RecipeSpec(
        name="grpo",
        page="rallypoint.recipes.grpo:GRPO",
        roles=("actor", "rollout"),
        optional_roles=("reward", "reference"),
        advantages=(*COMPARES_GROUP, "reinforce_plus_plus", "own"),
        sections=_LEARNING,
        checks=(_check_advantage, _check_prompts, check_kl, check_clipping, check_correction, check_quantization),
    )
)
declare(
    RecipeSpec(
        name="sft",
        page="rallypoint.recipes.sft:SFT",
        roles=("actor",),
        examples="conversations",
        watched=(("actor/loss", "loss"), ("actor/grad_norm", "grad"), ("data/epoch", "epoch")),
        validated="loss",
    )
)
_OF_PAIRS = (("actor/accuracy", "accuracy"), ("actor/margin", "margin"), ("actor/loss", "loss"))
declare(
    RecipeSpec(
        name="reward_model",
        page="rallypoint.recipes.reward_model:RewardModelling",
        roles=("actor",),
        examples="pairs",
        trains="scores",
        watched=_OF_PAIRS,
    )
)
declare(
    RecipeSpec(
        name="dpo",
        page="rallypoint.recipes.dpo:DPO",
        roles=("actor",),
        examples="pairs",
        sections=("preference",),
        watched=_OF_PAIRS,
    )
)
declare(
    RecipeSpec(
        name="opd",
        page="rallypoint.recipes.opd:OPD",
        roles=("actor", "rollout"),
        optional_roles=("reward", "teacher"),
        advantages=(*COMPARES_GROUP, "reinforce_plus_plus", "own"),
        sections=("advantage", "loss", "correction", "aggregation"),
        watched=(("actor/teacher_kl", "teacher kl"), *WATCHED[:2]),
        checks=(_check_teacher, _check_prompts, check_clipping, check_taught_correction, check_quantization),
        unread=_unread_without_rewards,
    )
)
