"""The episodes that Python gives: a function or class, an agent, or the name of one."""

from __future__ import annotations

import contextlib
from typing import TypeAlias

from rallypoint.environments.agents import Agent
from rallypoint.environments.blocking import PlainEpisode, is_plain
from rallypoint.environments.environment import Episode
from rallypoint.environments.given import named, packed
from rallypoint.user_code import own_signature

AnyEpisode: TypeAlias = str | Episode | PlainEpisode | Agent
"""`file.py:function`, or the function or class itself."""


def episode_spec(episode: AnyEpisode, stack: contextlib.ExitStack) -> str:
    """Return the name that a config has for an episode; a function has one until the stack is left."""
    if isinstance(episode, str):
        return episode
    has_processes = is_plain(episode) or next(iter(own_signature(episode).parameters), "") == "base_url"
    code, why_here = packed(episode) if has_processes else (None, "")
    return stack.enter_context(named(episode, None, code, why_here))


def episode_keys(episode: AnyEpisode | None, stack: contextlib.ExitStack) -> dict[str, object]:
    """Return the key that names an episode; none for none."""
    return {} if episode is None else {"rollout.episode": episode_spec(episode, stack)}
