"""The rewards that Python gives: a function, a name, or several of these."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rallypoint.environments.given import GIVEN, ByName, giving
from rallypoint.errors import ConfigError

Reward: TypeAlias = str | Callable[..., object]
"""`file.py:function`, the name of one that ships, or a function."""
Rewards: TypeAlias = Reward | Sequence[Reward] | Mapping[str, Reward]
"""One, or several, whose scores are added up."""


def specs_of(reward: Rewards, stack: contextlib.ExitStack) -> str | dict[str, str]:
    """Return the name that a config has for a reward, or those of several; functions have theirs until the stack ends.

    Raises:
        ConfigError: something is not a reward, or two have the same name.
    """

    def spec(one: object) -> str:
        if isinstance(one, str):
            return one
        if not callable(one):
            raise ConfigError((f"reward: expected a function or the name of one, found {type(one).__name__}",))
        return stack.enter_context(giving(one))

    if isinstance(reward, str) or callable(reward):
        return spec(reward)
    if not isinstance(reward, Mapping | Sequence):
        return spec(reward)
    named = reward if isinstance(reward, Mapping) else {_name_of(one): one for one in reward}
    if len(named) < len(reward):
        raise ConfigError(("reward: two functions have the same name; give a dict, such as {'right': f, 'short': g}",))
    return {name: spec(one) for name, one in named.items()}


def wanted_columns(specs: str | Mapping[str, str] | None) -> list[str]:
    """Return the columns that rows must have for rewards of these names, as far as Python gave them."""
    names = [specs] if isinstance(specs, str) else [*(specs or {}).values()]
    functions = [GIVEN[name].function for name in names if name in GIVEN]
    return [column for function in functions if isinstance(function, ByName) for column in function.columns]


def _name_of(reward: Reward) -> str:
    name = reward.rpartition(":")[2] if isinstance(reward, str) else getattr(reward, "__name__", "")
    return name.strip("<>") or type(reward).__name__
