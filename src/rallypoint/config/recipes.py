"""The recipes that a config can name, and what a run of each has: its roles, its sections, its checks, its page.

A recipe is declared here, or with `declare` by a package of its own; no other file branches on its name. Owns no
computation: a page is imported when a run begins, because pages need torch and a config does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from rallypoint.config.fields import Problem
from rallypoint.config.sections.algorithms import ClipConfig, DecoupledConfig, GSPOConfig, IcePopConfig, MaskConfig

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
    """Sections of the config that it reads and others may not, besides those of its roles."""
    watched: tuple[tuple[str, str], ...] = WATCHED
    """Metrics of a step that a person wants to see, with short names; the first above all, as a curve."""
    validated: Literal["score", "loss"] = "score"
    """What a person wants to see of a validation."""
    checks: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = ()
    """Contradictions between keys that would be wrong in this recipe."""

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
        yield Problem(
            ("advantage.name", "recipe"),
            f"advantage.name={name!r} is not computed by recipe={config.recipe}: set recipe={' or '.join(others)}, or "
            f"take {' or '.join(here.advantages)}",
        )
    elif size == 1 and name in COMPARES_GROUP:
        yield Problem(
            ("rollout.group_size", "advantage.name"),
            f"rollout.group_size=1: advantage.name={name!r} compares the rollouts of a group, and a group of one has "
            "nothing to compare; expected at least 2, usually 8, or advantage.name=reinforce_plus_plus",
        )
    elif name == "gdpo" and len(config.reward.weights) < 2:
        yield Problem(
            ("reward.functions", "advantage.name"),
            f"advantage.name=gdpo normalises several rewards apart, and the run has {len(config.reward.weights)}; "
            "expected at least 2 in reward.functions and reward.models; with one take advantage.name=grpo",
        )
    elif name == "gdpo" and config.kl is not None and config.kl.placement == "reward":
        yield Problem(
            ("kl.placement", "advantage.name"),
            "kl.placement=reward has no effect with advantage.name=gdpo, which takes the rewards apart; expected "
            "kl.placement=loss",
        )
    elif name == "gdpo" and config.reward.overlong is not None:
        yield Problem(
            ("reward.overlong", "advantage.name"),
            "reward.overlong has no effect with advantage.name=gdpo, which takes the rewards apart; expected null, and "
            "a function of the length among reward.functions",
        )
    elif config.advantage.name == "pass_at_k" and config.advantage.k > size:
        yield Problem(
            ("advantage.k", "rollout.group_size"),
            f"advantage.k={config.advantage.k} is more than the rollouts of a group, rollout.group_size={size}; "
            f"expected at most {size}",
        )


def _check_correction(config: RunConfig) -> Iterator[Problem]:
    """Yield corrections that count a gap twice, and bounds that leave nothing."""
    weighs = [item.name for item in config.correction if item.name in {"tis", "icepop"}]
    loss = config.loss
    instead = "loss.name=clip" if loss.name == "decoupled" else "loss.anchor=old"
    anchored = loss.name == "decoupled" or getattr(loss, "anchor", "old") == "rollout"
    if len(weighs) > 1:
        yield Problem(
            ("correction",),
            f"correction has {' and '.join(weighs)}, and each weighs tokens with old / rollout: that counts the gap "
            "twice; expected one of them, others may be masks",
        )
    if weighs and anchored:
        yield Problem(
            ("correction", "loss"),
            f"correction has {weighs[0]}, but loss.name={loss.name} is weighed back to the sampler already: that "
            f"counts the gap twice; expected masks only, or {instead}",
        )
    masks = [item for item in config.correction if isinstance(item, IcePopConfig | MaskConfig)]
    masks = [item.name for item in masks if isinstance(item, IcePopConfig) or item.level == "token"]
    if masks and loss.name in {"gspo", "gmpo"}:
        yield Problem(
            ("correction", "loss.name"),
            f"correction has {masks[0]} by token, but loss.name={loss.name} has one ratio a row, in which tokens that "
            "are masked still count; expected a mask of rows such as `{name: mask, level: geometric}`, a weight such "
            "as `{name: tis}`, or loss.name=clip",
        )
    staleness = config.rollout.max_staleness
    if staleness and not anchored and not config.correction:
        yield Problem(
            ("rollout.max_staleness", "loss.name", "correction"),
            f"rollout.max_staleness={staleness} trains on rollouts of older weights, which loss.name={loss.name} takes "
            "for its own: such runs collapse; expected loss.name=decoupled, loss.name=dppo, or "
            "'correction=[{name: tis, cap: 2.0}]'",
        )
    for item in config.correction:
        if isinstance(item, IcePopConfig | MaskConfig) and item.low >= item.high:
            yield Problem(
                ("correction",),
                f"correction: {item.name} has low={item.low:g} and high={item.high:g}; expected low below high",
            )


def _check_kl(config: RunConfig) -> Iterator[Problem]:
    """Yield estimators whose gradient is not that of the KL where they are placed, and what would never happen."""
    kl, every = config.kl, config.reference.refresh_every_steps
    if kl is None:
        return
    estimator = kl.estimator_used
    keys = ("kl.estimator", "kl.placement", "kl.importance_corrected")
    if kl.importance_corrected and kl.placement == "reward":
        yield Problem(
            ("kl.importance_corrected", "kl.placement"),
            "kl.importance_corrected=true corrects a gradient, and kl.placement=reward has none: the KL is part of the "
            "advantages there; expected kl.importance_corrected=false, or kl.placement=loss",
        )
    elif kl.importance_corrected and estimator not in {"k1", "k3"}:
        yield Problem(
            keys,
            f"kl.estimator={estimator!r} has the gradient of no divergence with kl.importance_corrected=true; expected "
            "k1 or k3, or kl.importance_corrected=false",
        )
    elif kl.placement == "loss" and estimator == "k1" and not kl.importance_corrected:
        yield Problem(
            keys,
            "kl.estimator='k1' does not pull towards the reference when kl.placement=loss (the mean of its gradient is "
            "zero); expected k2 or k3, or kl.placement=reward, or kl.importance_corrected=true",
        )
    elif kl.placement == "reward" and estimator != "k1":
        yield Problem(
            keys,
            f"kl.estimator={estimator!r} does not pull towards the reference when kl.placement=reward (only k1 has "
            "the gradient of the KL there); expected k1, or kl.placement=loss",
        )
    if kl.adaptive is not None and kl.adaptive.horizon < config.num_rows:
        yield Problem(
            ("kl.adaptive.horizon", "rollout.num_prompts", "rollout.group_size"),
            f"kl.adaptive.horizon={kl.adaptive.horizon} is less than the {config.num_rows} rollouts of a step "
            f"(rollout.num_prompts={config.rollout.num_prompts} x rollout.group_size={config.rollout.group_size}): the "
            f"coefficient would jump; expected at least {config.num_rows}, usually 50 times as many",
        )
    if every is not None and every > config.trainer.num_steps:
        yield Problem(
            ("reference.refresh_every_steps", "trainer.num_steps"),
            f"reference.refresh_every_steps={every} is more than trainer.num_steps={config.trainer.num_steps}, so the "
            "reference would never be refreshed; expected less, or null",
        )


def _check_prompts(config: RunConfig) -> Iterator[Problem]:
    """Yield what cannot be had beside dynamic sampling or over-sampling."""
    rollout = config.rollout
    if rollout.over_sampling is not None and rollout.over_sampling <= rollout.num_prompts:
        yield Problem(
            ("rollout.over_sampling", "rollout.num_prompts"),
            f"rollout.over_sampling={rollout.over_sampling} leaves nothing over beside "
            f"rollout.num_prompts={rollout.num_prompts}: it counts all prompts that are sampled for a step; expected "
            f"more, such as {rollout.num_prompts + -(-rollout.num_prompts // 4)}, or null",
        )
    if rollout.over_sampling is not None and rollout.max_staleness:
        yield Problem(
            ("rollout.over_sampling", "rollout.max_staleness"),
            f"rollout.over_sampling={rollout.over_sampling} does not go with "
            f"rollout.max_staleness={rollout.max_staleness}: a run that samples ahead lets its steps pass long "
            "responses by rollout.window; expected rollout.over_sampling=null, or rollout.max_staleness=0",
        )
    if not rollout.dynamic_sampling:  # 0 replaces nothing
        return
    clashes = {
        "rollout.group_size": (rollout.group_size == 1, "the scores of a group of one are all equal; expected 8 or so"),
        "rollout.max_staleness": (rollout.max_staleness > 0, "only a step that waits can replace groups; expected 0"),
        "reward.path": (
            bool(config.reward.all_models),
            "a reward model is asked when groups are chosen; expected null",
        ),
    }
    for key, (clash, why) in clashes.items():
        if clash:
            yield Problem(
                ("rollout.dynamic_sampling", key),
                f"rollout.dynamic_sampling={rollout.dynamic_sampling} does not go with this {key}: {why}, or "
                "rollout.dynamic_sampling=null",
            )


def _check_clipping(config: RunConfig) -> Iterator[Problem]:
    loss = config.loss
    if (
        isinstance(loss, ClipConfig | DecoupledConfig | GSPOConfig)
        and loss.dual_clip is not None
        and loss.dual_clip <= 1 + loss.clip_high
    ):
        yield Problem(
            ("loss.dual_clip", "loss.clip_high"),
            f"loss.dual_clip={loss.dual_clip} is not above the highest ratio that the clipping leaves, "
            f"1 + loss.clip_high = {1 + loss.clip_high:g}; expected more than that, usually 3, or null",
        )
    if loss.name == "policy_gradient" and not config.updates_once:
        yield Problem(
            ("loss.name", "actor.num_epochs", "actor.num_mini_batches"),
            "loss.name=policy_gradient is right for the first optimizer step of a batch alone, and "
            f"actor.num_epochs={config.actor.num_epochs} x actor.num_mini_batches={config.actor.num_mini_batches} "
            "are several; expected 1 of each, or loss.name=clip",
        )


def _check_teacher(config: RunConfig) -> Iterator[Problem]:
    """Yield a teacher that is missing, and an advantage that has no rewards to compare."""
    if not config.teachers.paths and config.teachers.hint is None:
        yield Problem(
            ("teacher.path",),
            "teacher.path: required, but not set; expected the Hugging Face folder of a language model with the "
            "policy's tokenizer, a URL that serves one, teacher.by_source with one for each data_source, or "
            "teacher.hint alone",
            is_missing=True,
        )
    hint = config.teachers.hint or ""
    if config.teachers.hint is not None and "{ground_truth}" not in hint and "{feedback}" not in hint:
        yield Problem(
            ("teacher.hint",),
            f"teacher.hint={hint!r} says the same of every prompt; expected {{ground_truth}} or {{feedback}} in it",
        )
    if "{feedback}" in hint and not config.reward.all_functions:
        yield Problem(
            ("teacher.hint", "reward.function"),
            "teacher.hint has {feedback}, which a reward function gives: expected reward.function=file.py:function "
            'that returns {"score": 0.5, "feedback": "..."}',
        )
    if config.teachers.top_k is not None and config.teachers.loss == "policy_gradient":
        yield Problem(
            ("teacher.top_k", "teacher.loss"),
            f"teacher.top_k={config.teachers.top_k} has no effect with teacher.loss=policy_gradient, whose advantage "
            "is that of the sampled token; expected null, or teacher.loss=reverse, forward or mixed",
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


declare(
    RecipeSpec(
        name="ppo",
        page="rallypoint.recipes.ppo:PPO",
        roles=("actor", "rollout", "critic"),
        optional_roles=("reward", "reference"),
        advantages=("gae",),
        sections=_LEARNING,
        checks=(_check_advantage, _check_prompts, _check_kl, _check_clipping, _check_correction),
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
        checks=(_check_advantage, _check_prompts, _check_kl, _check_clipping, _check_correction),
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
        checks=(_check_teacher, _check_prompts, _check_clipping, _check_correction),
    )
)
