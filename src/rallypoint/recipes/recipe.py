"""What a recipe is: the roles of a run, and one training step.

A page such as `ppo.py` starts its roles in `create`, names their losses there, and commands them in `train_step`.
`loop.py` and `steps.py` do the rest. `RECIPES` (`rallypoint.config`) says which page belongs to a recipe's name.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rallypoint.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    GAE,
    KL,
    OBJECTIVES,
    ActorLoss,
    AdaptiveKL,
    Advantage,
    OwnAdvantage,
    OwnObjective,
    PolicyObjective,
)
from rallypoint.config import RECIPES, RunConfig
from rallypoint.config.fields import Section
from rallypoint.config.transport import describe_transport, transport_kind
from rallypoint.data import EncodedPrompts, EncodedRows, StreamedPrompts, StreamedRows
from rallypoint.data.prompt_sets import PromptSets
from rallypoint.environments.attempts import measure_attempts
from rallypoint.environments.environment import Episode, single_turn
from rallypoint.environments.grader import Grader
from rallypoint.journal import Journal
from rallypoint.prepare.material import Material
from rallypoint.prepare.own_functions import episode_of, own_function
from rallypoint.roles.actor import Actor
from rallypoint.roles.examples import ExampleSource
from rallypoint.roles.frozen import RewardModels, Scorers
from rallypoint.roles.kl_controller import KLController
from rallypoint.roles.learner import Learner
from rallypoint.roles.placement import Placement
from rallypoint.roles.reference import Reference
from rallypoint.roles.rollout import Rollouts
from rallypoint.run.step_rollouts import StepRollouts
from rallypoint.sampling.episode_task import BlockingWatch
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.in_flight import Watch
from rallypoint.sampling.kept import KeptGroups
from rallypoint.sampling.mailbox import Mailbox
from rallypoint.sampling.recorded import Recorded, RecordedSource
from rallypoint.sampling.replay import Schedule
from rallypoint.sampling.sampled import Batches
from rallypoint.sampling.source import RolloutSource
from rallypoint.sampling.timekeeper import Timekeeper
from rallypoint.types import Last, Metrics, merge

if TYPE_CHECKING:
    from rallypoint.recipes.agents import Agents
    from rallypoint.recipes.blocking import PlainEpisodes

_NOT_EXACT = (
    "turns of episodes are sampled in whatever batch they meet, so two runs with one seed may differ by rounding; "
    "with rollout.exact=true they do not, where model and rollout.mesh.tp allow it"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What a recipe starts its roles with."""

    placement: Placement
    material: Material
    grader: Grader
    journal: Journal
    """The journal of the run; its `say` appends a line for the user."""
    agents: Agents | PlainEpisodes | None = None
    """What runs the agent, or plain episode, that the config names; None if it names none."""
    recorded: Recorded | None = None
    """The run whose rollouts are taken instead of sampling; None samples."""
    kept: KeptGroups = dataclasses.field(default_factory=KeptGroups)
    """Groups that earlier starts have sampled."""

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return self.placement.config

    async def open_source(self, *, episode: Episode | None = None) -> Batches:
        """Start the rollout role, and the reward models if there are some; the actor has been started.

        Args:
            episode: how a rollout of a prompt is sampled; None: as the config says, in a single turn by default.

        Raises:
            ConfigError: this is not an episode, or the config names another one, or over-samples.
        """
        episode = episode_of(self.config, episode, self.agents or self.material.episode)
        train, validation = self.material.train, self.material.validation
        assert isinstance(train, EncodedPrompts | StreamedPrompts), "the recipe is declared with prompts"
        assert isinstance(validation, EncodedPrompts | None), "likewise"
        prompts = PromptSets(train, validation, self.material.tokenizer, self.material.stop_tokens)
        if self.recorded is not None:
            return RecordedSource(self.config, self.recorded, prompts, self.grader, self.journal.say)
        rollout = self.config.rollout
        is_repeated = rollout.engine != "native" or rollout.exact or rollout.max_staleness  # or by its schedule
        if episode is not single_turn and not is_repeated:
            self.journal.say(_NOT_EXACT)
        if episode is not single_turn:
            BlockingWatch(self.journal.say, sys._current_frames)
        rollouts = await Rollouts.create(self.placement)
        schedule = Schedule.of(self.config, self.journal, rollouts.num_ranks)
        if transport_kind(self.config) is None:
            self.journal.say(f"published weights: {describe_transport(self.config, rollouts.transport.kind)}")
        mailbox = Mailbox(rollouts, schedule, keeper=self.placement)
        self.placement.refillers["rollout"] = mailbox
        return RolloutSource(
            self.config,
            mailbox,
            prompts,
            Scorers(self.grader, await RewardModels.create(self.placement), advantage_of(self.config)),
            episode,
            Watch(self.journal, Timekeeper(), self.kept),
        )

    def examples(self) -> ExampleSource:
        """Return the source of a recipe that trains on files, without sampling."""
        train, validation = self.material.train, self.material.validation
        assert isinstance(train, EncodedRows | StreamedRows), "the recipe is declared with conversations or pairs"
        assert isinstance(validation, EncodedRows | None), "likewise"
        return ExampleSource(self.config, train, validation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
    """A training step and the roles that it commands; a subclass adds roles as fields."""

    config: RunConfig
    actor: Learner[Any, Any]
    """The model that the run is there for."""
    source: Batches | ExampleSource

    @classmethod
    @abc.abstractmethod
    async def create(cls, setup: Setup) -> Self:
        """Start the roles, in the order of `RunConfig.roles`."""

    @abc.abstractmethod
    async def train_step(self, step: int) -> Metrics:
        """Take one step, and return its metrics."""

    @property
    def learners(self) -> tuple[Learner[Any, Any], ...]:
        """The roles whose state a checkpoint holds."""
        return (self.actor,)

    @property
    def sampling(self) -> Batches | None:
        """What samples, if anything does: it has the initial weights before the first step."""
        return None

    @property
    def newest(self) -> StepRollouts | None:
        """Rollouts of the newest batch, with what the actor learned from them."""
        return None

    @property
    def validated(self) -> StepRollouts | None:
        """Rollouts of the newest validation."""
        return None

    async def save(self, folder: Path) -> None:
        """Write the state of the roles into a checkpoint that is being made."""
        for learner in self.learners:
            await learner.save(folder)

    async def restore(self, folder: Path) -> None:
        """Read it back."""
        for learner in self.learners:
            await learner.restore(folder)

    async def validate(self) -> Metrics | None:
        """Return what is measured on the validation set, with `score`, which should rise; None without one."""
        return None

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps in addition to the roles' own files, as JSON has it."""
        return {"num_admitted": self.source.num_admitted, "version": self.actor.version}

    def go_on(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on after a step, from the state that its checkpoint kept."""
        del step
        self.actor.version = state["version"]
        self.source.num_admitted = state["num_admitted"]

    async def close(self) -> None:  # noqa: B027 - nothing is under way in a recipe without rollouts
        """Cancel what is under way: no step follows."""

    def hurry(self) -> None:  # noqa: B027 - nothing takes long in a recipe without rewards
        """From now on wait only some seconds for what may take long, because the run is ending."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutRecipe(Recipe):
    """A recipe that learns from scored rollouts, held near a reference."""

    actor: Actor[Any]
    source: Batches
    reference: Reference
    kl: KLController

    @property
    def sampling(self) -> Batches:
        """What samples."""
        return self.source

    @property
    def newest(self) -> StepRollouts | None:
        """See `Recipe.newest`."""
        newest, actor = self.source.newest, self.actor
        return newest and dataclasses.replace(newest, learned=actor.learned, needs_advantage=actor.needs_advantage)

    @property
    def validated(self) -> StepRollouts | None:
        """See `Recipe.validated`."""
        return self.source.validated

    async def save(self, folder: Path) -> None:
        """See `Recipe.save`; with the reference, if it has changed, and the coefficient of the KL."""
        await super().save(folder)
        await self.reference.save(folder)
        self.kl.save(folder)

    async def restore(self, folder: Path) -> None:
        """See `Recipe.restore`."""
        await super().restore(folder)
        await self.reference.restore(folder)
        self.kl.restore(folder)

    async def validate(self) -> Metrics | None:
        """Return the mean reward of the validation prompts' rollouts, and more by source; see `attempts.py`."""
        sampled, num_samples = await self.source.validate(), self.config.validation.num_samples
        if sampled is None:
            return None
        score, attempts = Last(sampled.metrics.scalars()["reward/mean"]), sampled.rollouts.attempts()
        is_plain = num_samples == 1 and len({one.source for one in attempts}) <= 1
        return merge({"score": score}, {} if is_plain else measure_attempts(attempts, num_samples))

    @property
    def state(self) -> dict[str, Any]:
        """See `Recipe.state`; with the prompts that are done, which a window may take out of order."""
        return {**super().state, "done": dataclasses.asdict(self.source.done)}

    def go_on(self, step: int, state: Mapping[str, Any]) -> None:
        """See `Recipe.go_on`."""
        super().go_on(step, state)
        done = PromptsDone.read(state["done"]) if "done" in state else self.source.done
        self.source.go_on(step, state["version"], done)

    async def close(self) -> None:
        """See `Recipe.close`."""
        await self.source.close()

    def hurry(self) -> None:
        """See `RolloutSource.hurry`."""
        self.source.hurry()


def page_of(config: RunConfig) -> type[Recipe]:
    """Return the page of the recipe that a config names."""
    page = RECIPES[config.recipe].page
    if isinstance(page, str):
        module, _, name = page.partition(":")
        page = getattr(importlib.import_module(module), name)
    assert issubclass(page, Recipe), f"{page} is declared as the page of {config.recipe}"
    return page


def kl_of(config: RunConfig) -> KL | None:
    """Return the KL to the reference, as the algorithms take it."""
    if config.kl is None:
        return None
    return KL(
        coef=config.kl.coef,
        estimator=config.kl.estimator_used,
        placement=config.kl.placement,
        importance_corrected=config.kl.importance_corrected,
    )


def kl_controller_of(config: RunConfig) -> KLController:
    """Return the controller of the KL's coefficient."""
    adaptive = config.kl.adaptive if config.kl is not None else None
    return KLController(kl_of(config), adaptive and AdaptiveKL(target=adaptive.target, horizon=float(adaptive.horizon)))


def advantage_of(config: RunConfig) -> Advantage:
    """Return the estimator that a config names."""
    section = config.advantage
    if section.name == "own":
        return OwnAdvantage(function=own_function(config, "advantage"), whiten=section.whiten)
    parameters = _parameters(section)
    if section.name == "gdpo":
        parameters["weights"] = config.reward.weights
    return ADVANTAGES[section.name](**parameters)


def gae_of(config: RunConfig) -> GAE:
    """Return the estimator of a recipe with a critic."""
    advantage = advantage_of(config)
    assert isinstance(advantage, GAE), "the recipe's checks have seen to it"
    return advantage


def actor_loss_of(config: RunConfig) -> ActorLoss:
    """Return what the actor minimises, as the config sets it."""
    corrections = tuple(CORRECTIONS[section.name](**_parameters(section)) for section in config.correction)
    return ActorLoss(
        objective=_objective_of(config),
        corrections=corrections,
        aggregation=config.aggregation,
        length=float(config.rollout.max_response_tokens),
        entropy_coef=config.actor.entropy_coef,
        kl=kl_of(config),
        is_single_update=config.updates_once,
    )


def _objective_of(config: RunConfig) -> PolicyObjective:
    if config.loss.name == "own":
        return OwnObjective(function=own_function(config, "loss"))
    return OBJECTIVES[config.loss.name](**_parameters(config.loss))


def _parameters(section: Section) -> dict[str, Any]:
    """Return the keys of a section but for its name: they are the parameters of what it names."""
    return {key: getattr(section, key) for key in type(section).model_fields if key != "name"}
