"""An episode that is a class with `reset` and `step`, as games and simulations are written elsewhere.

Owns: how such a class is played, and what its methods may return. Must not know: how an answer is sampled, rewards of
whole rollouts. One object plays one rollout. Its async methods run in the event loop, the others in one thread for each
object, so that they may block.

    class Guess:
        def reset(self, example):                          # messages, or None for those of the example
            self.number = int(example.ground_truth)
            return [{"role": "user", "content": "Guess my number."}]

        def step(self, message):                           # {"role": "assistant", "content": "3"}
            if message["content"].strip() == str(self.number):
                return [], 1.0, True
            return [{"role": "user", "content": "No."}], 0.0, False

What `step` may return: messages, to go on without a reward; (messages, reward, done), and as a fourth entry metrics;
five entries as gymnasium has them, (messages, reward, terminated, truncated, metrics); or a dict of `messages`,
`reward`, `done`, `metrics`.

An attribute `state` says in which state the game is, as text: turns that begin in the same one are compared by
`advantage.name=gigpo`. Without it what was said last stands for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from rallypoint.environments.own_thread import OwnThread
from rallypoint.errors import EpisodeError, RowFullError
from rallypoint.user_code import own_signature

if TYPE_CHECKING:
    from rallypoint.data.dataset import Example
    from rallypoint.environments.client import Client

_METHODS = {"reset": "example", "step": "message"}
_MESSAGES = "a list of messages, each a dict of 'role' and 'content'"
_STEP = (
    "expected messages, (messages, reward, done), (messages, reward, done, metrics), (messages, reward, terminated, "
    "truncated, metrics), or a dict of messages, reward, done and metrics"
)


class Steps(Protocol):
    """An episode in steps; both methods may be async. A method `close` is called at the end, if there is one."""

    def reset(self, example: Example) -> object:
        """Begin: return the first messages, None for those of the example."""
        ...

    def step(self, message: Mapping[str, object]) -> object:
        """Take an answer of the policy, and return what follows; see above."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    messages: Sequence[Mapping[str, object]]
    reward: object = None
    done: bool = False
    metrics: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])


def find_misfit_of_class(kind: type) -> str | None:
    """Say why a class is not an episode.

    >>> class Game:
    ...     def reset(self, example): ...
    >>> find_misfit_of_class(Game)
    'expected a class with reset(example) and step(message), found Game, which has no step'
    """
    expected = "expected a class with reset(example) and step(message)"
    for name, argument in _METHODS.items():
        method: Any = getattr(kind, name, None)
        if not callable(method):
            return f"{expected}, found {kind.__name__}, which has no {name}"
        signature = own_signature(method)
        try:
            signature.bind(None, None)
        except TypeError as error:
            return f"{expected}; {kind.__name__}.{name} takes {signature}, not {argument}: {error}"
    try:
        own_signature(kind).bind()
    except TypeError as error:
        return f"{expected} that can be made without arguments, one for each rollout; {kind.__name__}: {error}"
    return None


async def play(kind: type[Steps], example: Example, client: Client) -> dict[str, object]:
    """Play one rollout with an object of the class; return the reward of each turn, and the metrics.

    A rollout whose row is full ends there, with the rewards so far.

    Raises:
        EpisodeError: a method returned something else than it may.
        RowFullError: the first messages leave no room for an answer.
    """
    thread, is_over = OwnThread(kind.__name__), False
    try:
        game = await thread.call(kind)
        close = getattr(game, "close", None)
        try:
            rewards, metrics = await _play(game, thread, example, client)
            is_over = True
        finally:
            if not is_over:
                thread.begin(close)  # and not waited for: what is given up may hang
        if close is not None:
            await thread.call(close)
    finally:
        thread.end()
    given = [reward for reward in rewards if reward is not None]
    return {**metrics, "reward": [0.0 if reward is None else reward for reward in rewards] if given else None}


async def _play(
    game: Steps, thread: OwnThread, example: Example, client: Client
) -> tuple[list[object], dict[str, object]]:
    name, rewards, metrics = type(game).__name__, list[object](), dict[str, object]()
    messages = _first_messages(name, await thread.call(game.reset, example))
    while True:
        try:
            state = getattr(game, "state", None)
            message = await client.chat(
                messages, max_tokens=getattr(game, "max_tokens", None), state=None if state is None else str(state)
            )
        except RowFullError:
            if not rewards:
                raise
            return rewards, metrics
        found = _read_step(name, await thread.call(game.step, message))
        rewards.append(found.reward)
        metrics |= found.metrics
        if found.done:
            return rewards, metrics
        messages = found.messages


def _first_messages(name: str, found: object) -> Sequence[Mapping[str, object]]:
    """Read what `reset` returned: messages, alone or as gym and others do with something besides."""
    match found:
        case (messages, Mapping()) if not isinstance(messages, Mapping):
            found = cast("object", messages)
        case _:
            pass
    return () if found is None else _read_messages(f"{name}.reset", found, f"expected {_MESSAGES}, or None")


def _read_step(name: str, found: object) -> _Step:
    """Read what `step` returned."""
    who = f"{name}.step"
    metrics: object = {}
    match found:
        case list():
            parts = (cast("object", found), None, False)
        case Mapping() if "role" not in found:
            entries = cast("Mapping[object, object]", found)
            if strangers := [key for key in entries if key not in ("messages", "reward", "done", "metrics")]:
                raise EpisodeError(f"{who} returned a dict with {strangers[0]!r}; {_STEP}")
            parts = (entries.get("messages", ()), entries.get("reward"), entries.get("done", False))
            metrics = entries.get("metrics", {})
        case (messages, reward, done):
            parts = (messages, reward, done)
        case (messages, reward, done, metrics):
            parts = (messages, reward, done)
        case (messages, reward, terminated, truncated, metrics):
            parts = (messages, reward, _read_done(who, terminated) | _read_done(who, truncated))
        case _:
            parts = (found, None, False)
    messages, reward, done = parts
    is_done = _read_done(who, done)
    if not isinstance(metrics, Mapping):
        raise EpisodeError(f"{who} returned {type(metrics).__name__} for metrics, expected a dict of numbers; {_STEP}")
    if is_done:
        return _Step((), reward, True, cast("Mapping[str, object]", metrics))
    said = _read_messages(who, messages, _STEP)
    if not said:
        raise EpisodeError(f"{who} returned no message and is not done, so that nothing follows; {_STEP}")
    return _Step(said, reward, False, cast("Mapping[str, object]", metrics))


def _read_done(who: str, found: object) -> bool:
    if isinstance(found, bool) or type(found).__name__ in ("bool", "bool_"):  # numpy's, too
        return bool(found)
    raise EpisodeError(f"{who} returned {found!r} for done, expected True or False; {_STEP}")


def _read_messages(who: str, found: object, expected: str) -> Sequence[Mapping[str, object]]:
    if isinstance(found, Mapping) and "role" in found:
        found = [cast("object", found)]
    if isinstance(found, list | tuple):
        messages = cast("Sequence[object]", found)
        wrong = [one for one in messages if not isinstance(one, Mapping) or "role" not in one]
        if not wrong:
            return cast("Sequence[Mapping[str, object]]", messages)
        found = wrong[0]
    raise EpisodeError(f"{who} returned {type(found).__name__} {str(found)[:60]!r} for {_MESSAGES}; {expected}")
