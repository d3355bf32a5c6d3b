"""What happens between a prompt and its rollout: an episode, which samples as often as it needs.

Owns: what an environment is given and returns. Must not know: engines, versions, rewards. Most runs have a single turn.
An environment of several turns samples, looks at the response, and goes on with tokens of its own:

    async def ask_twice(prompt: Prompt, client: Client) -> Trajectory:
        first = await client.sample(prompt.tokens)
        second = await client.sample(LOOK_AGAIN)
        return Trajectory(turns=(first, second))

The client remembers the tokens so far, so the turns of a trajectory always follow each other, and what is trained are
exactly the tokens that the policy sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeAlias

from rallypoint.data.dataset import Example
from rallypoint.types.trajectory import Trajectory, Turn


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A task."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    example: Example
    """Row of the data set that it comes from."""


class Client(Protocol):
    """Samples for one episode."""

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """Sample a response to everything so far and some more tokens.

        Raises:
            GenerationError: the engine has failed on it; the rollout is left out, and counted.
        """
        ...


Episode: TypeAlias = Callable[[Prompt, Client], Awaitable[Trajectory]]
"""Takes a prompt and returns one rollout of it. It may wait for anything; others go on meanwhile. An error that it
raises ends the run, except GenerationError."""


async def single_turn(prompt: Prompt, client: Client) -> Trajectory:
    """Answer a prompt once."""
    return Trajectory(turns=(await client.sample(prompt.tokens),))
