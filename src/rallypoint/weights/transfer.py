"""Who takes part in a transfer of weights, and what travels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from rallypoint.errors import PublishError, RendezvousTimeoutError
from rallypoint.weights.manifest import RELAY, Manifest


@dataclasses.dataclass(frozen=True, slots=True)
class Participant:
    """A process that sends weights, receives them, or does both.

    >>> Participant(0, None).name, Participant(None, 3).name, Participant(1, 1).name
    ('actor rank 0', 'rollout rank 3', 'actor rank 1 and rollout rank 1')
    >>> Participant(None, 3, worker=1).name
    "worker 1 of rollout rank 3's server"
    """

    sender: int | None
    """Rank of the actor whose buckets it sends, if any; `RELAY` if it passes on what all of them send."""
    receiver: int | None
    """Rank of the rollout role whose model it fills, if any."""
    worker: int | None = None
    """Number of a worker of that rank's server, which has the model in a process of its own; None: this process is the
    rank's."""

    @property
    def name(self) -> str:
        """Name for error messages."""
        if self.worker is not None:
            return f"worker {self.worker} of rollout rank {self.receiver}'s server"
        roles = [("actor", None if self.sender == RELAY else self.sender), ("rollout", self.receiver)]
        return " and ".join(f"{role} rank {rank}" for role, rank in roles if rank is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class TransferPlan:
    """The participants and the manifest of a transfer; the same in all of them."""

    name: str
    """Name of the rendezvous; a new one after each failure."""
    members: tuple[Participant, ...]
    manifest: Manifest
    timeout_s: float
    """Limit of the wait for each other, at the rendezvous and for every bucket."""

    @property
    def receivers(self) -> tuple[int, ...]:
        """Indices of the members that have a model to fill: where ranks have servers, the workers of these."""
        has_servers = any(member.worker is not None for member in self.members)
        return tuple(
            place
            for place, member in enumerate(self.members)
            if member.receiver is not None and (member.worker is not None) == has_servers
        )

    def place_of_sender(self, rank: int) -> int | None:
        """Return the index of the member that sends for a rank of the actor; None if that rank sends nothing."""
        return next((place for place, member in enumerate(self.members) if member.sender == rank), None)

    def place_of_process(self, rank: int) -> int | None:
        """Return the index of the process that sends, and has a rank of the rollout role; None if it sends nothing."""
        senders = (place for place, member in enumerate(self.members) if member.sender is not None)
        return next((place for place in senders if self.members[place].receiver == rank), None)

    def place_of_receiver(self, rank: int) -> int:
        """Return the index of the member that has the model of a rank of the rollout role."""
        return self.places_of_receiver(rank)[0]

    def places_of_receiver(self, rank: int) -> tuple[int, ...]:
        """Return the indices of the members that have the model of a rank of the rollout role, which a server cuts."""
        return tuple(place for place in self.receivers if self.members[place].receiver == rank)


@contextlib.contextmanager
def naming_absentees(plan: TransferPlan) -> Iterator[None]:
    """Turn a rendezvous that timed out into an error that names the missing members.

    Raises:
        PublishError: some members did not come.
    """
    try:
        yield
    except RendezvousTimeoutError as error:
        who = ", ".join(plan.members[place].name for place in error.ranks)
        raise PublishError(f"waited {plan.timeout_s:g} s for {who} to take part in publishing weights") from error
