"""Losses, advantages, episodes and rewards that are functions of the user's: found by name, and checked before a run.

Owns: when a function is held to the rules of `rallypoint.testing`: before anything is started. Its text travels with
the loss, so that all ranks compute the same, also where they have no such file, or another one. And which rewards score
a model outside of training: those that are named, or those of its run. A run folder may be somebody else's: only the
code of runs that this user has started is run without being named again; see `run/trust.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rallypoint.algorithms import OwnAdvantage, OwnObjective
from rallypoint.config import RewardConfig, RunConfig
from rallypoint.config.recipes import find_episode_clashes
from rallypoint.config.sections.material import RewardFunctionConfig
from rallypoint.environments.agents import is_agent
from rallypoint.environments.blocking import is_blocking
from rallypoint.environments.environment import Episode, single_turn
from rallypoint.environments.episodes import find_misfit, load_episode, name_of
from rallypoint.environments.given import how_to_give_for_eval, is_given
from rallypoint.environments.shipped.tools import open_tools
from rallypoint.environments.tools import ToolUse
from rallypoint.errors import ConfigError, DataError, RewardError, UserCodeError
from rallypoint.run.folder import RunFolder
from rallypoint.run.trust import unsigned
from rallypoint.testing import CASES, check_advantage, check_objective
from rallypoint.user_code import UserFunction


def own_function(config: RunConfig, section: str) -> Callable[[Any], Any]:
    """Return the function that a section names, with its parameters, as a value that any process can call.

    Raises:
        ConfigError: the file cannot be read.
    """
    own = config.own_functions[section]
    try:
        return UserFunction.read(own.function, own.parameters)
    except UserCodeError as error:
        raise ConfigError((f"{section}.function={own.function!r}: {error}",)) from None


def own_episode(config: RunConfig) -> Episode | None:
    """Return the episode that a config names; None where a rollout has a single turn, or a process makes it.

    Raises:
        ConfigError: it cannot be loaded, or is not an episode.
    """
    spec, tool_use = config.rollout.own_episode, config.rollout.tool_use
    try:
        if tool_use is not None:
            tools = [tool for one in tool_use.tools for tool in open_tools(one.function, one.parameters)]
            return ToolUse(*tools, max_turns=tool_use.max_turns, system=tool_use.system)
        return None if spec is None or is_agent(spec) or is_blocking(spec) else load_episode(spec)
    except (UserCodeError, DataError) as error:
        said = "rollout.episode" if spec is None else f"rollout.episode={spec!r}"
        raise ConfigError((f"{said}: {error}",)) from None


def episode_of(config: RunConfig, given: Episode | None, named: Episode | None = None) -> Episode:
    """Return how rollouts are sampled: as a recipe gives it, else as the config names it, else in a single turn.

    Args:
        config: of the run.
        given: by the recipe, if it is.
        named: by the config, or what runs its agent; None to load it.

    Raises:
        ConfigError: there are two, the recipe's is not an episode, or it does not go with the config.
    """
    named = named or own_episode(config)
    if given is None:
        return named or single_turn
    problems: list[str] = []
    if config.rollout.episode is not None:
        spec = config.rollout.own_episode or "tools"
        problems.append(f"rollout.episode={spec}: the recipe {config.recipe} has an episode of its own")
    if (misfit := find_misfit(given)) is not None:
        problems.append(f"the recipe {config.recipe}: {misfit}")
    problems += [problem.text for problem in find_episode_clashes(config, name_of(given))]
    if problems:
        raise ConfigError(tuple(problems))
    return given


def check_own_functions(config: RunConfig) -> Episode | None:
    """Hold the functions that a config names to every rule that needs no formula; a fraction of a second each.

    Returns:
        The episode that it names, see `own_episode`.

    Raises:
        ConfigError: one breaks a rule, or raises; names the function and the remedy, with its own traceback.
    """
    episode, reward = own_episode(config), config.reward
    # A run keeps no components of a reward.function that is alone: its score is all there is.
    components = tuple(reward.weights) if reward.functions or reward.all_models else ()
    cases = {name: dataclasses.replace(case, component_names=components) for name, case in CASES.items()}
    problems: list[str] = []
    for section, own in config.own_functions.items():
        function = own_function(config, section)
        try:
            if section == "loss":
                check_objective(OwnObjective(function=function))
            else:
                check_advantage(OwnAdvantage(function=function, whiten=False), cases=cases)
        except Exception as error:  # noqa: BLE001 - it is the user's code: it may raise anything
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
            problems.append(f"{section}.function={own.function!r}: {said}")
    if problems:
        raise ConfigError(tuple(problems))
    return episode


SINGLE_TURN = "null"
"""Names no episode, where the run has one."""


def episode_for(path: str, config: RunConfig | None, episode: str | None) -> Episode | str | None:
    """Return the episode of an evaluation, or its name; None if a rollout is a single response.

    Args:
        path: of the model.
        config: of the run that made the model; None if it lies in none.
        episode: that is named, or `SINGLE_TURN`; None for the run's.

    Raises:
        ConfigError: none is named, and that of the run may not be run here.
    """
    if episode is not None or config is None or config.rollout.episode is None:
        return None if episode == SINGLE_TURN else episode
    spec = config.rollout.own_episode
    if spec is not None and is_given(spec):
        raise ConfigError((how_to_give_for_eval(spec, "episode"),))
    foreign = unsigned(config, RunFolder(Path(path).parent.parent).state().launched.signed)
    if own := [f"{key}={what}" for key, what in foreign.items() if key.startswith("rollout.episode")]:
        named = f"--episode {spec}" if spec is not None else "--episode file.py:function"
        raise ConfigError(
            (
                f"{own[0]}: you did not start that run on this machine, and a run folder does not decide what is run "
                f"here; if you know and trust it, name it: {named}; --episode {SINGLE_TURN} samples single responses",
            )
        )
    return spec if spec is not None else own_episode(config)


def rewards_for(
    path: str, config: RunConfig | None, reward: str | Mapping[str, str] | None, *, is_needed: bool = True
) -> RewardConfig:
    """Return the rewards of an evaluation.

    Args:
        path: of the model, for messages.
        config: of the run that made the model; None if it lies in none.
        reward: a function that is named, or several by their names, whose scores are added up; None for the run's.
        is_needed: whether nothing else gives scores; an episode may.

    Raises:
        RewardError: none is named, and the run has none that may be run here.
    """
    if not reward:
        has_functions = config is not None and "rollout" in config.roles and config.reward.all_functions
        return _of_run(path, config) if is_needed or has_functions else RewardConfig()
    several = {} if isinstance(reward, str) else reward
    named = {
        "function": reward if isinstance(reward, str) else None,
        "functions": tuple(RewardFunctionConfig(name=name, function=spec) for name, spec in several.items()),
        "parameters": {},
    }
    found = (config.reward if config else RewardConfig()).model_copy(update=named)
    for problem in found.problems():
        raise RewardError(problem)
    return found


def _of_run(path: str, config: RunConfig | None) -> RewardConfig:
    if config is None:
        raise RewardError(f"{path} does not lie in a run folder, so name the reward: --reward file.py:function")
    functions = [one.function for one in config.reward.all_functions]
    if "rollout" not in config.roles:
        raise RewardError(f"the run of {path} had no rewards; name one: --reward file.py:function")
    if not functions:
        raise RewardError(
            f"the run of {path} has a reward model, which is asked in training only, and no function; "
            "name one: --reward file.py:function"
        )
    if given := [spec for spec in functions if is_given(spec)]:
        raise RewardError(how_to_give_for_eval(given[0]))
    foreign = unsigned(config, RunFolder(Path(path).parent.parent).state().launched.signed)
    if own := [spec for key, spec in config.reward.named_functions.items() if key in foreign]:
        raise RewardError(
            "the reward of this run is a file's, and you did not start that run on this machine: a run folder does not "
            f"decide what is run here; if you know and trust it, name it: --reward {own[0]}"
        )
    if urls := [foreign[key] for one in config.reward.all_functions if (key := f"reward.{one.name}.url") in foreign]:
        raise RewardError(
            f"the reward of this run asks {urls[0]}, and you did not start that run on this machine: a run folder does "
            "not decide where responses are sent; name another reward: --reward file.py:function"
        )
    return config.reward
