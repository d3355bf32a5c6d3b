"""Episodes of the user's: a function in a file, or one that Python gives to `rally.train`.

Owns: which function a name stands for, and whether it can be called as an episode. Must not know: what it does, or
torch, because configs are checked before that is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rallypoint.config.sections.sampling import SHIPPED_EPISODES
from rallypoint.environments.blocking import is_plain
from rallypoint.environments.given import GIVEN, how_to_give, is_given
from rallypoint.environments.steps import find_misfit_of_class, play
from rallypoint.errors import UserCodeError
from rallypoint.user_code import (
    UserFunction,
    is_written_async,
    is_written_plain,
    misfit,
    own_signature,
    split,
    written_signature,
)

if TYPE_CHECKING:
    from rallypoint.data.prompt_sets import Prompt
    from rallypoint.environments.client import Client
    from rallypoint.environments.environment import Episode

PromptEpisode: TypeAlias = "Callable[[Prompt, Client], Awaitable[object]]"
"""An episode as it is called: `with_prompt_first` of it."""

_EXPECTED = "expected an async function of (client, example) or (prompt, client), or a plain one of (client, example)"
_OR_CLASS = f"{_EXPECTED}, or a class with reset(example) and step(message)"


def check_episode_spec(spec: str) -> str | None:
    """Return what is wrong with the name of an episode, from the file's text alone; None when nothing can be seen."""
    if is_given(spec):
        return find_misfit(GIVEN[spec].function) if spec in GIVEN else how_to_give(spec, "episode")
    try:
        path, name = split(spec, shipped=SHIPPED_EPISODES, usual_name="episode")
        signature = written_signature(path, name)
    except UserCodeError as error:
        return str(error)
    if signature is None:
        return None
    if not is_written_async(path, name) and not is_written_plain(path, name, first="client"):
        return f"{_OR_CLASS}, found {name}, which is not async"
    return misfit(signature, 2, _EXPECTED)


def load_episode(spec: str) -> Episode:
    """Return the episode that `spec` names: one that Python gave, or "path/to/file.py:function", which is imported.

    Raises:
        UserCodeError: the file raises, has no such function, or the function is not an episode.
    """
    function: Any = GIVEN[spec].function if spec in GIVEN else UserFunction.read(spec, {}).load()
    if (problem := find_misfit(function)) is not None:
        raise UserCodeError(problem)
    if is_plain(function):
        raise UserCodeError(
            f"{_OR_CLASS}; a plain one runs in a process, so its file has to say `def {name_of(function)}`"
        )
    return cast("Episode", function)


def find_misfit(function: object) -> str | None:
    """Say why a function is not an episode.

    >>> async def episode(prompt, client): ...
    >>> def plain(prompt, client): ...
    >>> find_misfit(episode), "found plain, which is not async" in find_misfit(plain)
    (None, True)
    """
    name = name_of(function)
    if isinstance(function, type) and (hasattr(function, "reset") or hasattr(function, "step")):
        return find_misfit_of_class(function)
    if not callable(function) or isinstance(function, type):
        return f"{_OR_CLASS}, found {name}"
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function)) or _is_async_object(function)
    if not is_async and not is_plain(function):
        return f"{_OR_CLASS}, found {name}, which is not async"
    return misfit(own_signature(function), 2, _EXPECTED)


def name_of(function: object) -> str:
    """Return what messages call a function."""
    return str(getattr(function, "__name__", type(function).__name__))


def with_prompt_first(episode: Episode) -> PromptEpisode:
    """Return an episode as a function of (prompt, client), whatever it takes.

    >>> from rallypoint.data.prompt_sets import Prompt
    >>> async def episode(client, example): ...
    >>> running = with_prompt_first(episode)(Prompt((), "the example"), "the client")
    >>> running.cr_frame.f_locals, running.close()
    ({'client': 'the client', 'example': 'the example'}, None)
    """
    if isinstance(episode, type):
        return lambda prompt, client: play(episode, prompt.example, client)
    function = cast("Callable[[object, object], Awaitable[object]]", episode)
    if next(iter(own_signature(function).parameters), "") == "client":
        return lambda prompt, client: function(client, prompt.example)
    return function


def _is_async_object(function: object) -> bool:
    return inspect.iscoroutinefunction(getattr(function, "__call__", None)) or inspect.iscoroutinefunction(  # noqa: B004
        getattr(function, "func", None)  # of functools.partial
    )
