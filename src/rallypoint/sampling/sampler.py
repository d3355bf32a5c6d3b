"""What the clients of episodes ask for responses: the mailbox of a run, or one engine that stands for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rallypoint.generation import Output, Request


class Sampler(Protocol):
    """Samples for the clients of episodes, as the mailbox does."""

    async def sample(
        self, request: Request, rank: int | None = None, deliver: Callable[[Output], None] | None = None
    ) -> list[Output]:
        """See `Mailbox.sample`."""
        ...
