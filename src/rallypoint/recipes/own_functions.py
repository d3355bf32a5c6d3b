"""Losses, advantages and episodes that are functions of the user's: from the config to what computes, and its checks.

Owns: when a function is held to the rules of `rallypoint.testing`: before anything is started. Its text travels with
the loss, so that all ranks compute the same, also where they have no such file, or another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from rallypoint.algorithms import OwnAdvantage, OwnObjective
from rallypoint.config import RunConfig
from rallypoint.config.recipes import find_episode_clashes
from rallypoint.environments.environment import Episode, single_turn
from rallypoint.environments.episodes import find_misfit, load_episode, name_of
from rallypoint.errors import ConfigError, UserCodeError
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
    """Return the episode that a config names; None where a rollout has a single turn.

    Raises:
        ConfigError: it cannot be loaded, or is no episode.
    """
    spec = config.rollout.episode
    try:
        return None if spec is None else load_episode(spec)
    except UserCodeError as error:
        raise ConfigError((f"rollout.episode={spec!r}: {error}",)) from None


def episode_of(config: RunConfig, given: Episode | None) -> Episode:
    """Return how rollouts are sampled: as a recipe gives it, else as the config names it, else in a single turn.

    Raises:
        ConfigError: there are two, the recipe's is no episode, or it does not go with the config.
    """
    named = own_episode(config)
    if given is None:
        return named or single_turn
    problems: list[str] = []
    if named is not None:
        problems.append(
            f"rollout.episode={config.rollout.episode}: the recipe {config.recipe} has an episode of its own"
        )
    if (misfit := find_misfit(given)) is not None:
        problems.append(f"the recipe {config.recipe}: {misfit}")
    problems += find_episode_clashes(config, name_of(given)).values()
    if problems:
        raise ConfigError(tuple(problems))
    return given


def check_own_functions(config: RunConfig) -> None:
    """Hold the functions that a config names to every rule that needs no formula; a fraction of a second each.

    Raises:
        ConfigError: one breaks a rule, or raises; names the function and the remedy, with its own traceback.
    """
    own_episode(config)
    reward = config.reward
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
