"""The whole config: sections of keys, each with its meaning, unit, range and default, and what follows from them.

Imports neither torch nor ray. `None` is off, an object is on. The keys of a section stand in `sections/`. What follows
from several keys is a property here or a line of `rallypoint.prepare.plan`, never a key of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, cast

from pydantic import AfterValidator, model_validator

from rallypoint.config.fields import Section, key, named_section, named_sections, section
from rallypoint.config.recipes import RECIPES, RecipeSpec, RoleName
from rallypoint.config.sections.algorithms import (
    USUAL_AGGREGATIONS,
    AdvantageConfig,
    AggregationName,
    CorrectionConfigs,
    LossConfig,
    OwnAdvantageConfig,
    OwnLossConfig,
)
from rallypoint.config.sections.frame import CheckConfig, CheckpointConfig, TrackingConfig, TrainerConfig
from rallypoint.config.sections.learning import (
    ActorConfig,
    CriticConfig,
    EngineConfig,
    KLConfig,
    PreferenceConfig,
    ReferenceConfig,
    TeacherConfig,
    is_url,
)
from rallypoint.config.sections.material import DataConfig, ModelConfig, OverlongConfig, RewardConfig
from rallypoint.config.sections.places import ClusterConfig, MeshConfig, PlacementConfig
from rallypoint.config.sections.sampling import RolloutConfig, ValidationConfig


def _declared(name: str) -> str:
    if name not in RECIPES:
        raise ValueError(f"no recipe {name!r}")
    return name


SHORT = {"tracking": "to"}
"""Sections that a text or a list may stand for, and the key that it sets: tracking=[wandb] is tracking.to=[wandb]."""


def names_in(values: Mapping[str, object]) -> dict[str, object]:
    """Return the names of the sections that have other keys for each name: as set, or else as the recipe has them.

    Rollouts of older weights want a loss that is weighed back to them: the clipped one is `decoupled` then.
    """
    recipe = values.get("recipe")
    spec = RECIPES.get(recipe) if isinstance(recipe, str) else None
    advantage = spec.advantages[0] if spec and spec.advantages else "gae"
    rollout = values.get("rollout")
    staleness = cast("Mapping[str, object]", rollout).get("max_staleness") if isinstance(rollout, Mapping) else 0
    loss = "decoupled" if isinstance(staleness, int) and staleness > 0 else "clip"
    names: dict[str, object] = {}
    for section_name, usual in (("advantage", advantage), ("loss", loss)):
        inner = values.get(section_name, {})
        if isinstance(inner, Mapping):
            own = cast("Mapping[str, object]", inner)
            names[section_name] = own.get("name", "own" if own.get("function") is not None else usual)
    return names


def named_own(values: Mapping[str, object]) -> dict[str, object]:
    """Return values in which a function of the user's has the name `own`: it replaces what another file names.

    >>> named_own({"loss": {"function": "mine.py:my_loss"}, "seed": 1})
    {'loss': {'name': 'own', 'function': 'mine.py:my_loss'}, 'seed': 1}
    """
    found = dict(values)
    for section_name in names_in({}):
        inner = found.get(section_name)
        if isinstance(inner, Mapping) and "function" in inner and inner["function"] is not None:
            found[section_name] = {"name": "own", **cast("Mapping[str, object]", inner)}
    return found


def of_other_names(below: Mapping[str, object], over: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (section, key) of values below that the names above make mean something else.

    A name brings its own defaults: what was set for another name stays only where both have one default, as the bounds
    of `clip` and `decoupled` do, and those of `clip` and `gspo` do not.

    >>> list(of_other_names({"loss": {"name": "gspo", "clip_low": 3e-4}}, {"loss": {"name": "clip"}}))
    [('loss', 'clip_low')]
    >>> list(of_other_names({"loss": {"clip_low": 0.1}}, {"loss": {"name": "decoupled"}}))
    []
    """
    for section_name, before in names_in(below).items():
        new, own = over.get(section_name), below.get(section_name)
        after = cast("Mapping[str, object]", new).get("name") if isinstance(new, Mapping) else None
        kinds = named_sections(RunConfig.model_fields[section_name])
        if not isinstance(own, Mapping) or before == after or {str(before), str(after)} - kinds.keys():
            continue
        was, now = kinds[str(before)].model_fields, kinds[str(after)].model_fields
        for name in cast("Mapping[str, object]", own):
            if name != "name" and name in was and name in now and was[name].default != now[name].default:
                yield section_name, name


class RunConfig(Section):
    """Everything a run depends on."""

    recipe: Annotated[str, AfterValidator(_declared)] = key(
        words=RECIPES, help="The algorithm: recipes/ppo.py or recipes/grpo.py."
    )
    seed: int = key(0, at_least=0, at_most=2**31 - 1, help="Seed of weights, order of prompts and sampling.")
    model: ModelConfig = section(ModelConfig, help="The model to train.")
    data: DataConfig = section(DataConfig, help="The prompts.")
    reward: RewardConfig = section(RewardConfig, help="The score.")
    rollout: RolloutConfig = section(RolloutConfig, help="Sampling.")
    actor: ActorConfig = section(ActorConfig, help="The policy.")
    critic: CriticConfig = section(CriticConfig, help="The value function (ppo).")
    reference: ReferenceConfig = section(ReferenceConfig, help="The frozen reference.")
    kl: KLConfig | None = section(None, help="KL to the reference; null for none.")
    advantage: AdvantageConfig = named_section(help="How much better a token was than expected.")
    loss: LossConfig = named_section(help="The policy loss.")
    correction: CorrectionConfigs = key(
        (), help="Weights for a sampler that disagrees with the trainer, such as [{name: tis, cap: 2.0}]."
    )
    aggregation: AggregationName = key(
        "token",
        help="What the loss is a mean of: all tokens, rows (the default of gspo, gmpo and sapo), rows of one length, "
        "or prompts.",
    )
    teacher: TeacherConfig | None = section(None, help="The models that judge a student (opd); null for none.")
    preference: PreferenceConfig | None = section(None, help="The loss of pairs (dpo); null: its defaults.")
    engine: EngineConfig = section(EngineConfig, help="Forward and backward passes.")
    validation: ValidationConfig = section(ValidationConfig, help="Validation.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, help="Checkpoints.")
    checks: CheckConfig = section(CheckConfig, help="Checks of every step.")
    cluster: ClusterConfig = section(ClusterConfig, help="Placement.")
    trainer: TrainerConfig = section(TrainerConfig, help="Length, names, logs.")
    tracking: TrackingConfig | None = section(
        None, help="Trackers that get the metrics, too, and room for rollouts; null for no tracker and 2 GiB."
    )

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, values: object) -> object:
        """Fill in the names that the recipe has where none is set, and the aggregation that the loss has."""
        if not isinstance(values, Mapping):
            return values
        filled, names = dict(cast("Mapping[str, object]", values)), names_in(cast("Mapping[str, object]", values))
        for part, name in names.items():
            filled[part] = {"name": name, **cast("Mapping[str, object]", filled.get(part, {}))}
        if (usual := USUAL_AGGREGATIONS.get(str(names.get("loss")))) is not None:
            filled.setdefault("aggregation", usual)
        return filled

    def __getstate__(self) -> dict[Any, Any]:
        """Return what is pickled: with the roles and sections of a recipe that other processes have not declared."""
        spec = RECIPES[self.recipe]
        return {**super().__getstate__(), "spec": dataclasses.replace(spec, page="", checks=(), unread=None)}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        spec: RecipeSpec = state["spec"]
        RECIPES.setdefault(spec.name, spec)
        super().__setstate__(state)

    @property
    def roles(self) -> dict[RoleName, PlacementConfig]:
        """The roles that this run has, in the order in which they are created, and where each runs."""
        spec = RECIPES[self.recipe]
        is_on = {
            "reward": bool(self.reward.all_models),
            "reference": self.kl is not None,
            "teacher": bool(self.teachers.folders),
        }
        placements: dict[RoleName, PlacementConfig] = {
            "actor": self.actor.placement,
            "rollout": self.rollout.placement,
            "reward": self.reward.placement,
            "reference": self.reference.placement,
            "teacher": self.teachers.placement,
            "critic": self.critic.placement,
        }
        return {
            role: placement
            for role, placement in placements.items()
            if role in spec.roles or (role in spec.optional_roles and is_on.get(role))
        }

    @property
    def learners(self) -> dict[RoleName, ActorConfig | CriticConfig]:
        """The roles that this run trains, and how."""
        learners: dict[RoleName, ActorConfig | CriticConfig] = {"actor": self.actor, "critic": self.critic}
        return {role: learner for role, learner in learners.items() if role in self.roles}

    @property
    def own_models(self) -> dict[RoleName, tuple[str, ...]]:
        """Folders of the models, other than the policy's, that roles of this run start from."""
        folders: dict[RoleName, tuple[str, ...]] = {
            "critic": () if self.critic.path is None else (self.critic.path,),
            "reward": tuple(one.path for one in self.reward.all_models),
            "teacher": self.teachers.folders,
        }
        return {role: paths for role, paths in folders.items() if paths and role in self.roles}

    @property
    def named_models(self) -> dict[str, str]:
        """Key -> folder, or name on the hub, of every model that this run starts from."""
        named = self.reward.named_models if "reward" in self.roles else dict[str, str]()
        if self.critic.path is not None and "critic" in self.roles:
            named = {"critic.path": self.critic.path, **named}
        if RECIPES[self.recipe].reads("teacher"):
            named |= {key: path for key, path in self.teachers.named.items() if not is_url(path)}
        return {**({} if self.model.path is None else {"model.path": self.model.path}), **named}

    @property
    def own_functions(self) -> dict[str, OwnAdvantageConfig | OwnLossConfig]:
        """The sections that name a function of the user's instead of an algorithm."""
        sections = {"advantage": self.advantage, "loss": self.loss}
        return {name: own for name, own in sections.items() if own.name == "own"}

    @property
    def teachers(self) -> TeacherConfig:
        """The section `teacher`, with its defaults where it is off."""
        return self.teacher or TeacherConfig()

    @property
    def preferences(self) -> PreferenceConfig:
        """The section `preference`, with its defaults where it is off."""
        return self.preference or PreferenceConfig()

    @property
    def trains_on_files(self) -> bool:
        """Whether rows come from files as they are trained, and not from prompts."""
        return RECIPES[self.recipe].examples != "prompts"

    @property
    def needs_rewards(self) -> bool:
        """Whether something is learned from rewards: what a teacher says may be all."""
        return not RECIPES[self.recipe].reads("teacher") or self.teachers.reward_coef > 0

    @property
    def is_rewarded(self) -> bool:
        """Whether anything scores rollouts: a student with a teacher does without."""
        return bool(self.reward.all_functions or self.reward.all_models)

    @property
    def watched(self) -> tuple[tuple[str, str], ...]:
        """Metrics of a step that a person wants to see, see `RecipeSpec.watched`; no rewards where there are none."""
        has_none = "rollout" in self.roles and not self.is_rewarded
        return tuple(one for one in RECIPES[self.recipe].watched if not (has_none and one[0].startswith("reward/")))

    @property
    def num_examples(self) -> int:
        """P: rows of the data that a training step takes: prompts, conversations or pairs."""
        return self.data.num_examples if self.trains_on_files else self.rollout.num_prompts

    @property
    def group_size(self) -> int:
        """G: rows that each of them becomes."""
        return RECIPES[self.recipe].rows_per_example if self.trains_on_files else self.rollout.group_size

    @property
    def num_rows(self) -> int:
        """B: rows per training step."""
        return self.num_examples * self.group_size

    @property
    def max_groups(self) -> int:
        """Groups that are under way at once, from their admission to weights that were trained on them.

        So no rollout is older than rollout.max_staleness allows, whatever the latencies; see `sampling/groups.py`.
        """
        rollout = self.rollout
        return rollout.over_sampling or (rollout.max_staleness + 1) * rollout.num_prompts - (rollout.window - 1)

    @property
    def max_row_tokens(self) -> int:
        """The longest row there can be, in tokens."""
        if self.trains_on_files:
            return self.data.max_row_tokens
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens of a row that are not trained; 0 where nothing bounds them."""
        return 0 if self.trains_on_files else self.data.max_prompt_tokens

    @property
    def temperature(self) -> float:
        """What the policy's logits are divided by, in training as in sampling."""
        return 1.0 if self.trains_on_files else self.rollout.temperature

    @property
    def checkpoint_every_steps(self) -> int:
        """Steps from one checkpoint to the next, and so the most that a kill costs.

        By default a tenth of the run, but from 5 to 20 steps: a rule by time would make which folders there are, and
        so what `keep` leaves of them, depend on how busy the machine was.
        """
        return self.checkpoint.every_steps or min(20, max(5, self.trainer.num_steps // 10))

    @property
    def num_frozen_steps(self) -> int:
        """Steps before the actor's first update: those in which a critic warms up."""
        return self.critic.warmup_steps if "critic" in self.roles else 0

    @property
    def num_warmup_steps(self) -> int:
        """Steps until the actor learns at its full rate."""
        frozen = self.num_frozen_steps
        return frozen + round(self.actor.optimizer.warmup_ratio * (self.trainer.num_steps - frozen))

    @property
    def overlong(self) -> tuple[int, int]:
        """Length at which a response loses all of `reward.overlong`, and tokens before it in which the loss grows."""
        overlong = self.reward.overlong or OverlongConfig()
        max_tokens = overlong.max_tokens or self.rollout.max_response_tokens
        return max_tokens, overlong.buffer_tokens or max(1, max_tokens // 5)

    @property
    def sleeping(self) -> frozenset[RoleName]:
        """The roles that sleep between their turns, with engine.sleep: those that share a pool, but for rollout."""
        pools = [placement.pool for placement in self.roles.values()]
        return frozenset(
            role
            for role, placement in self.roles.items()
            if self.engine.sleep and role != "rollout" and pools.count(placement.pool) > 1
        )

    @property
    def devices_of_rollout(self) -> int:
        """Devices of each rollout rank: those of its vLLM server in a pool of rollouts alone, else one."""
        is_alone = [one.pool for one in self.roles.values()].count(self.rollout.placement.pool) == 1
        return self.rollout.mesh.tp if self.rollout.engine == "vllm" and is_alone else 1

    @property
    def rollout_shares_actor(self) -> bool:
        """Whether every rollout rank lives in a process that has an actor rank, and samples from its weights."""
        return "rollout" in self.roles and self.rollout.engine != "vllm" and self._lives_with_actor("rollout")

    @property
    def updates_once(self) -> bool:
        """Whether the actor takes one optimizer step for a batch."""
        return self.actor.num_epochs * self.actor.num_mini_batches == 1

    @property
    def judges_in_update(self) -> bool:
        """Whether old_logprobs are those of the update's own pass, and nothing before it asks for them."""
        return self.updates_once and not (self.kl is not None and self.kl.placement == "reward")

    @property
    def reference_shares_actor(self) -> bool:
        """Whether every reference rank lives in a process that has an actor rank, whose frozen weights it uses."""
        meshes = (self.actor.mesh, self.mesh_of("reference"))
        alone = all(mesh.dp_shard == mesh.ep == mesh.cp == mesh.sp == mesh.tp == 1 for mesh in meshes)
        wanted = bool(self.model.lora and self.kl) and not self.engine.sleep
        return wanted and alone and self._lives_with_actor("reference")

    def _lives_with_actor(self, role: RoleName) -> bool:
        mesh, pools = self.actor.mesh, (self.roles[role].pool, self.roles["actor"].pool)
        here = mesh.dp_shard == mesh.ep == 1 and mesh.tp == self.mesh(role)["tp"] and pools[0] == pools[1]
        return here and self.num_ranks(role) <= self.num_ranks("actor")

    def num_ranks(self, role: RoleName) -> int:
        """Return how many processes a role has."""
        placement = self.roles[role]
        return placement.num_ranks or sum(self.cluster.pools[placement.pool])

    def mesh_of(self, role: RoleName) -> MeshConfig:
        """Return the section `mesh` of a role, with its defaults where it is off."""
        if role == "rollout":
            return MeshConfig(tp=self.rollout.mesh.tp // self.devices_of_rollout)
        sections = {"actor": self.actor, "reward": self.reward, "reference": self.reference, "critic": self.critic}
        return sections.get(role, self.teachers).mesh or MeshConfig()

    def mesh(self, role: RoleName) -> dict[str, int]:
        """Return the size of each axis of a role's mesh."""
        inner: dict[str, int] = self.mesh_of(role).model_dump()
        return {"dp_replicate": max(1, self.num_ranks(role) // math.prod(inner.values())), **inner}

    def num_parts(self, role: RoleName) -> int:
        """Return over how many of a role's ranks rows are split; the others work on the same rows."""
        sizes = self.mesh(role)
        return sizes["dp_replicate"] * sizes["dp_shard"] * sizes["ep"]


def row_limit(config: RunConfig) -> tuple[tuple[str, ...], str]:
    """Return the keys that `max_row_tokens` follows from, and how, in words."""
    data, rollout = config.data, config.rollout
    if config.trains_on_files:
        return ("data.max_row_tokens",), f"data.max_row_tokens={data.max_row_tokens}"
    return ("data.max_prompt_tokens", "rollout.max_response_tokens"), (
        f"data.max_prompt_tokens={data.max_prompt_tokens} + rollout.max_response_tokens={rollout.max_response_tokens}"
    )
