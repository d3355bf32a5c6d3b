"""An episode: what happens between a prompt and its rollout. It samples as often as it needs.

Owns: what an environment is given and returns. Must not know: engines, versions, reward functions. Most runs have a
single turn. An environment of several turns samples, looks at the response, and goes on with tokens of its own:

    async def ask_twice(client: Client, example: Example) -> float:
        await client.sample(client.prompt)
        second = await client.sample(LOOK_AGAIN)
        return float(example.ground_truth in client.tokenizer.decode(second.response))

The client remembers the tokens so far, so each turn of a trajectory continues the one before, and training uses exactly
the tokens that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from rallypoint.data.dataset import Example
from rallypoint.data.prompt_sets import Prompt
from rallypoint.environments.client import Client
from rallypoint.environments.steps import Steps
from rallypoint.types.trajectory import Trajectory

Result: TypeAlias = float | Sequence[float] | Mapping[str, float | Sequence[float]] | Trajectory | None
"""What an episode returns: its reward, that of each turn, both with other numbers by name, turns of its client, or
None to have the reward function score it; `sampling/episode_end.py` has the rules."""
Episode: TypeAlias = (
    Callable[[Prompt, Client], Awaitable[Result]] | Callable[[Client, Example], Awaitable[Result]] | type[Steps]
)
"""Makes one rollout of a prompt: the turns of its client; a class is played by `environments/steps.py`. It may wait for
anything. If it raises, takes too long, or returns something else, its rollout is left out and counted. A first argument
named `client` means (client, example); any other name means (prompt, client)."""


async def single_turn(prompt: Prompt, client: Client) -> Trajectory:
    """Answer a prompt once."""
    return Trajectory(turns=(await client.sample(prompt.tokens),))
