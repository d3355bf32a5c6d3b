"""Losses and advantages that are functions in a file of the user's: from the config to what computes, and its checks.

Owns: when a function is held to the rules of `rallypoint.testing`: before anything is started. Its text travels with
the loss, so that all ranks compute the same, also where they have no such file, or another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rallypoint.algorithms import OwnAdvantage, OwnObjective
from rallypoint.config import RunConfig
from rallypoint.errors import ConfigError, UserCodeError
from rallypoint.testing import check_advantage, check_objective
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


def check_own_functions(config: RunConfig) -> None:
    """Hold the functions that a config names to every rule that needs no formula; a fraction of a second each.

    Raises:
        ConfigError: one breaks a rule, or raises; names the function and the remedy, with its own traceback.
    """
    problems: list[str] = []
    for section, own in config.own_functions.items():
        function = own_function(config, section)
        try:
            if section == "loss":
                check_objective(OwnObjective(function=function))
            else:
                check_advantage(OwnAdvantage(function=function, whiten=False))
        except Exception as error:  # noqa: BLE001 - it is the user's code: it may raise anything
            problems.append(f"{section}.function={own.function!r}: {error}")
    if problems:
        raise ConfigError(tuple(problems))
