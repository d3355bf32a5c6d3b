"""An episode: what happens between a prompt and its rollout. It samples as often as it needs.

Owns: what an environment is given and returns. Must not know: engines, versions, rewards. Most runs have a single turn.
An environment of several turns samples, looks at the response, and goes on with tokens of its own:

    async def ask_twice(prompt: Prompt, client: Client) -> Trajectory:
        first = await client.sample(prompt.tokens)
        second = await client.sample(LOOK_AGAIN)
        return Trajectory(turns=(first, second))

The client remembers the tokens so far, so each turn of a trajectory continues the one before, and training uses exactly
the tokens that the policy sampled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rallypoint.data.dataset import Example
from rallypoint.types.trajectory import Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A task."""

    tokens: tuple[int, ...]
    """Token ids of the prompt."""
    example: Example
    """Row of the data set that it comes from."""


class Client(Protocol):
    """Samples for one episode."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's, for what the environment reads and says."""
        ...

    async def sample(self, tokens: Sequence[int]) -> Turn:
        """Append tokens to everything so far, and sample a response.

        Raises:
            GenerationError: the engine failed on this request, or the row has no room for it. An episode that catches
                this may return the turns so far; otherwise the rollout is left out and counted.
        """
        ...


Episode: TypeAlias = Callable[[Prompt, Client], Awaitable[Trajectory]]
"""Takes a prompt and returns one rollout of it: turns of its client, from the first on. It may wait for anything; other
episodes continue meanwhile. An error that it raises ends the run, except GenerationError."""


async def single_turn(prompt: Prompt, client: Client) -> Trajectory:
    """Answer a prompt once."""
    return Trajectory(turns=(await client.sample(prompt.tokens),))
