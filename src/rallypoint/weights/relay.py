"""Weights that are broadcast, for a server: its rank's process takes part, and passes them on.

Owns: who takes part on the rank's node, and how a bucket gets from one transport into the other. Must not know: which
server it is. A bucket is passed on byte for byte, with the checksums of its sender, so that the server's workers verify
the whole way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from rallypoint.errors import PeerFailedError, PublishError
from rallypoint.weights.endpoints import Runs, Sender
from rallypoint.weights.manifest import RELAY, Manifest
from rallypoint.weights.same_node import Outlet
from rallypoint.weights.transfer import Participant, TransferPlan

ResultT = TypeVar("ResultT")


def relayed(plan: TransferPlan, rank: int, num_workers: int) -> TransferPlan:
    """Return the transfer within a node by which a rank's process passes on what it receives.

    It waits half as long for the server's workers as other ranks wait for it: these do not hang with a server.

    Args:
        plan: of the transfer across nodes.
        rank: of the rollout role.
        num_workers: workers of its server.
    """
    members = (Participant(RELAY, rank), *(Participant(None, rank, worker) for worker in range(num_workers)))
    return TransferPlan(f"{plan.name} of {rank}", members, plan.manifest.relayed(), plan.timeout_s / 2)


class Relay:
    """Passes the buckets of one version on to a server's workers.

    If a worker is lost, the buckets that follow are dropped, so that other ranks get theirs: see `problem`.
    """

    def __init__(self, manifest: Manifest, outlet: Outlet) -> None:
        """Begin; the outlet is closed as soon as something fails."""
        self._manifest, self._outlet = manifest, outlet
        self.problem: PeerFailedError | PublishError | None = None
        """Why buckets are no longer passed on."""

    def take(self, index: int, source: Sender, packed: Tensor | None = None) -> None:
        """Copy a bucket of this process's own, as it was packed for the other ranks."""
        del source
        assert packed is not None, "what is broadcast was packed"
        self.unpack(index, packed)

    def unpack(self, index: int, memory: Tensor, in_place: Runs | None = None) -> None:
        """Copy a bucket that arrived, damaged or not."""
        assert in_place is None, "weights of another node cannot be read in place"
        if (slot := self._attempt(self._outlet.free_slot)) is not None:
            num_bytes = self._manifest.buckets[index].num_bytes
            slot[:num_bytes].copy_(memory[:num_bytes])
            self._outlet.buffers.settle()
            self._attempt(self._outlet.show)

    def finish(self) -> None:
        """Return once the workers have taken every bucket, or one of them was lost."""
        self._attempt(self._outlet.settle)

    def _attempt(self, do: Callable[[], ResultT]) -> ResultT | None:
        """Do something with the outlet, unless that has failed before; return None if it fails."""
        if self.problem is None:
            try:
                return do()
            except (PeerFailedError, PublishError) as error:
                self.problem = error
                self._outlet.close()
        return None
