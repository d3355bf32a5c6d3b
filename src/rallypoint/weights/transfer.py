"""What every transport of weights is to those who use it: a line of processes, of which this is one.

Owns: the words. Must not know: how a bucket travels. All processes of a line run the same publish at the same time;
each sends what is its own, takes over everything if it has a model to fill, or does both.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from rallypoint.errors import PublishError, RendezvousTimeoutError
from rallypoint.weights.manifest import Manifest


@dataclasses.dataclass(frozen=True, slots=True)
class Participant:
    """A process of the line.

    >>> Participant(root=0, taker=None).name, Participant(root=None, taker=3).name, Participant(root=1, taker=1).name
    ('actor rank 0', 'rollout rank 3', 'actor rank 1 and rollout rank 1')
    """

    root: int | None
    """Whose buckets it sends: those of this rank of the actor; None for none."""
    taker: int | None
    """Whose model it fills: that of this rank of the rollout role; None for none."""

    @property
    def name(self) -> str:
        """For people."""
        roles = [("actor", self.root), ("rollout", self.taker)]
        return " and ".join(f"{role} rank {rank}" for role, rank in roles if rank is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class TransferPlan:
    """Who takes part, and what travels; the same for all of them."""

    name: str
    """Of the meeting; another one after a failure."""
    members: tuple[Participant, ...]
    manifest: Manifest
    timeout_s: float
    """How long to wait for one another, at the meeting and for every bucket."""

    @property
    def takers(self) -> tuple[int, ...]:
        """Places of the members that have a model to fill."""
        return tuple(place for place, member in enumerate(self.members) if member.taker is not None)

    def sender(self, root: int) -> int | None:
        """Return the place of the member that sends the buckets of a rank of the actor; None if that has none."""
        return next((place for place, member in enumerate(self.members) if member.root == root), None)

    def taker(self, rank: int) -> int:
        """Return the place of the member that has the model of a rank of the rollout role."""
        return next(place for place, member in enumerate(self.members) if member.taker == rank)


@contextlib.contextmanager
def at_meeting(plan: TransferPlan) -> Iterator[None]:
    """Name those who did not come to the meeting of a line.

    Raises:
        PublishError: some did not come.
    """
    try:
        yield
    except RendezvousTimeoutError as error:
        who = ", ".join(plan.members[place].name for place in error.ranks)
        raise PublishError(f"waited {plan.timeout_s:g} s for {who} to take part in publishing weights") from error
