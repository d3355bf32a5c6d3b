"""What becomes of one episode, for tests that have no event loop."""

import asyncio
from typing import Any

from rallypoint.environments.environment import Episode
from rallypoint.environments.episodes import with_prompt_first
from rallypoint.sampling.client import EpisodeClient


def rolled_out(client: EpisodeClient, episode: Episode) -> Any:
    """Return the trajectory or the failure that comes of an episode."""

    async def awaited() -> Any:
        return await client.rollout(with_prompt_first(episode))

    return asyncio.run(awaited())
