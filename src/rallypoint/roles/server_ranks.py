"""Ranks of the rollout role that share a vLLM server, each of which brings the device of its process.

Owns: how they agree on when the server may be awake, and what those do that have no server of their own. Must not know:
requests. Invariant: while the server samples, the rollout role holds the memory of every process whose device it has.

Consecutive ranks of a node share a server (`rollout.mesh.tp`), which the first of them starts. All are called for each
slice of time, and meet twice in it: the server wakes once all hold their memory, and at the end the first one says
whether it still samples; if not, the others give their memory back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, cast

import torch

from rallypoint.cluster import WorkerContext, broadcast, collect, scatter
from rallypoint.errors import PlacementError
from rallypoint.parallel import Collective, DeviceMesh
from rallypoint.roles.colocated import ActorParts, LeaseHolder, MemoryLease, make_room_for_neighbour, with_lease
from rallypoint.roles.connections import StreamConnection
from rallypoint.roles.placement import WorkerSpec
from rallypoint.roles.publishing import Stream, WeightTransport
from rallypoint.weights import TransferPlan

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST_NAME = 256
"""Bytes of the name of a device."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServerRanks:
    """The ranks that share a server, as one of them sees the others."""

    mesh: DeviceMesh
    devices: tuple[str, ...]
    """What each of them sees of accelerators; empty on CPUs."""

    @staticmethod
    def place(context: WorkerContext, spec: WorkerSpec) -> int:
        """Return the place of a rank among those that share a server; 0 if it has one."""
        has_server = spec.config.rollout.engine == "vllm"
        return context.mesh.coordinates(context.rank).get("tp", 0) if has_server else 0

    @classmethod
    def meet(cls, context: WorkerContext, spec: WorkerSpec) -> ServerRanks:
        """Leave the memory of this process to the server while its roles sleep, and find the others.

        Raises:
            PlacementError: it is not known which device one of them has.
        """
        make_room_for_neighbour(context)
        # Memory and not devices is what they agree on, so they meet on the CPU.
        mesh = DeviceMesh.connect(
            spec.rendezvous,
            f"{context.role} server {context.mesh.part(context.rank)}",
            cls.place(context, spec),
            {"tp": context.mesh.axes.get("tp", 1)},
            timeout_s=spec.config.cluster.call_timeout_s,
            generation=context.start,
        )
        needs_names = context.device != "cpu" and mesh.tp.size > 1
        return cls(mesh, devices_of(mesh.tp, os.environ.get(_VISIBLE, "")) if needs_names else ())

    @contextlib.contextmanager
    def slice(self, is_sampling: Callable[[], bool]) -> Iterator[None]:
        """Begin a slice once all hold the memory of their processes; at its end tell them whether they keep it."""
        with self.mesh.abandoned_on_error():
            self._agree()
            yield
            self._agree(is_sampling())

    def follow(self) -> bool:
        """Wait for a slice of the first rank to begin and to end; return whether its server still samples."""
        with self.mesh.abandoned_on_error():
            self._agree()
            return self._agree()

    def _agree(self, is_sampling: bool = False) -> bool:
        """Wait for all; return whether one of them has said yes."""
        said = torch.tensor([int(is_sampling)])
        self.mesh.tp.all_reduce_max(said)
        return bool(said)


def devices_of(ranks: Collective, own: str) -> tuple[str, ...]:
    """Return the device of each rank, by the name that makes it visible.

    Args:
        ranks: all of them.
        own: names of those that this process sees.

    Raises:
        PlacementError: one of them sees none, or several, or two of them see the same.
    """
    named = torch.tensor(list(own.encode()[:_MOST_NAME].ljust(_MOST_NAME)), dtype=torch.uint8)
    found = ranks.all_gather(named, [_MOST_NAME] * ranks.size)
    devices = tuple(bytes(one.tolist()).decode().strip() for one in found)
    if not all(devices) or any("," in one for one in devices) or len(set(devices)) < len(devices):
        raise PlacementError(
            f"a vLLM server over {len(devices)} processes needs a device of each, but {_VISIBLE} is "
            f"{', '.join(map(repr, devices))} in them; expected another one in each, which Ray sets unless "
            f"RAY_EXPERIMENTAL_NOSET_{_VISIBLE} is set"
        )
    return devices


class RolloutRank(LeaseHolder):
    """A rank of the rollout role."""

    def __new__(cls, context: WorkerContext, spec: WorkerSpec, *_: object, **__: object) -> Self:
        """Return it, or a `ServerFollower` for one that shares the server of another, which has the same calls."""
        if ServerRanks.place(context, spec):
            return cast("Self", ServerFollower(context, spec))
        return super().__new__(cls)


class ServerFollower(LeaseHolder):
    """A rank of the rollout role whose device the server of another rank has; see `RolloutWorker` for its calls."""

    shares_actor = False

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        spec.prepare(context)
        self.lease, self._max_tokens = MemoryLease(context), spec.config.max_row_tokens
        self._context, self._actor = context, ActorParts.find(context)
        self._connection = StreamConnection(context, spec)
        self._ranks = ServerRanks.meet(context, spec)
        self._sampling = contextlib.ExitStack()
        self._is_sampling = False

    def advance(self, asked: object) -> None:
        """Hold the memory of this process until the server has sampled all that its first rank was asked for."""
        del asked
        with contextlib.ExitStack() as if_it_ends:
            if_it_ends.callback(self.forget)
            if not self._is_sampling:
                self._sampling.enter_context(self.lease.held(doing="sample"))
                self._is_sampling = True
            if self._ranks.follow():
                if_it_ends.pop_all()

    @broadcast
    def forget(self) -> None:
        """Give the memory back."""
        self._is_sampling = False
        self._sampling.close()

    @collect
    def open_guests(self, max_rows: int) -> int:
        """Take part in requests of guests, which the first rank has."""
        del max_rows
        return self._max_tokens

    @scatter
    @with_lease()
    def advance_guests(self, asked: object) -> list[object]:
        """Hold the memory while the server samples for guests."""
        del asked
        self._ranks.follow()
        return []

    @broadcast
    def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Connect to the server's workers, and to others, if this process has a rank of the actor that sends them."""
        self._connection.close()
        place = plan.place_of_process(self._context.rank)
        if place is not None:
            assert self._actor is not None, "the actor's rank of this process left its parts"
            self._connection.open(stream, plan, place, self._actor.exposed())

    @collect
    def load(self, version: int, transport: WeightTransport, published: Path | None) -> str | None:
        """Do this rank's part while the server takes weights over."""
        return transport.load(self, version, published)

    def read(self, version: int, published: Path) -> None:
        """See `Replica`; the first rank has the server read them."""

    def receive(self, version: int) -> None:
        """See `Replica`; the rank of the actor in this process sends."""
        if self._actor is not None:
            self._connection.send(version, self._actor.open_sender)
