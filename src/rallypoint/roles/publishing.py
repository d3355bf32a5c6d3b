"""How weights get from the actor's ranks to those of the rollout role: one object for each way, for both ends.

Owns: how the driver publishes and how a rank loads, which processes take part in a stream (`weights`), and
which of two errors is the cause. Must not know: what travels.

A process that has a rank of both roles takes part once: there the rollout worker both sends the actor's weights
(`ActorParts`) and receives. A process executes its calls one after another, so two of them could not
wait for each other.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import xxhash

from rallypoint.cluster import Mesh
from rallypoint.cluster.call import Process
from rallypoint.config import RoleName, RunConfig
from rallypoint.config.transport import transport_kind
from rallypoint.errors import CheckpointError, PlacementError, WeightsMismatchError, WorkerError, first_line
from rallypoint.models import ModelShard
from rallypoint.transport_kinds import FOLDER, SHARED, TransportKind
from rallypoint.weights import (
    HEADER_BYTES,
    Held,
    Manifest,
    Participant,
    SharedWeights,
    TransferPlan,
    published_folder,
    share_trained,
)
from rallypoint.weights.manifest import Checksum

_WATCHDOG_S = 10.0
"""Seconds that other ranks wait after a call's deadline, so that the watchdog names the rank that hangs first."""
_PATIENCE_S = 10.0
"""Seconds that a rank which failed first may take to say so, once another has stopped because of it."""
_MOST_FAILED = 2
"""Versions in a row that servers may fail to take from memory before they get folders: each failure restarts them."""
_ROOM_S = 600.0
"""Seconds that a run waits for room to publish weights."""
_NUMBERS = itertools.count(1)
_LOG = logging.getLogger(__name__)


class Publisher(Protocol):
    """The actor, as a transport sees it."""

    version: int
    is_published: asyncio.Event
    """Set while the rollout role has the current weights."""

    @property
    def processes(self) -> Sequence[Process]:
        """The processes of its ranks."""
        ...

    async def written(self, taker: RoleName | None = None) -> Path:
        """Write the weights into a folder that all nodes see, and return it; that of a `taker` is removed by it."""
        ...

    async def held(self) -> Sequence[Mapping[str, Held]]:
        """Return what each rank holds of the weights."""
        ...

    async def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Connect every rank that sends something."""
        ...

    async def send(self) -> None:
        """Have every rank that is connected send its weights."""
        ...


class Receivers(Protocol):
    """The ranks of the rollout role, as a transport sees them."""

    publisher: Publisher | None
    """The actor that published last."""

    @property
    def transport(self) -> WeightTransport:
        """What carries weights to them."""
        ...

    @property
    def processes(self) -> Sequence[Process]:
        """The processes of the ranks."""
        ...

    async def connect(self, stream: Stream, plan: TransferPlan) -> None:
        """Connect every rank to those that send."""
        ...


class Subscriber(Protocol):
    """What weights are published to: it stands in front of the rollout role, so that they arrive between two slices."""

    @property
    def role(self) -> Receivers:
        """The role."""
        ...

    def announce(self, version: int, digest: str) -> None:
        """Record what is published; every rank loads it next."""
        ...

    async def load(self, version: int, published: Path | None = None) -> None:
        """Have every rank load a version, see `WeightTransport.load`."""
        ...


class Replica(Protocol):
    """One rank of the rollout role, as a transport sees it."""

    shares_actor: bool
    """Whether its tensors are the actor's own."""

    def read(self, version: int, published: Path) -> str | None:
        """Read the weights from a folder; return a digest if it was computed on the way."""
        ...

    def receive(self, version: int) -> str | None:
        """Receive the weights as they arrive; return a digest if it was computed on the way."""
        ...


@dataclasses.dataclass(slots=True)
class WeightTransport(abc.ABC):
    """A way of weights from the actor to the rollout role; `weights.Transport` is one member's open end of a stream."""

    kind: TransportKind

    @abc.abstractmethod
    async def publish(self, actor: Publisher, subscriber: Subscriber) -> None:
        """Give the rollout role the actor's weights; on the driver."""

    @abc.abstractmethod
    def load(self, rank: Replica, version: int, published: Path | None) -> str | None:
        """Have a rank take them over, in its process; return a digest if it was computed on the way.

        Raises:
            WeightsMismatchError: they are damaged, incomplete, or of another version or model.
        """


@dataclasses.dataclass(slots=True)
class SharedTensors(WeightTransport):
    """The rollout role samples from the actor's own tensors: nothing travels."""

    kind: TransportKind = SHARED

    async def publish(self, actor: Publisher, subscriber: Subscriber) -> None:
        """See `WeightTransport`."""
        await subscriber.load(actor.version)

    def load(self, rank: Replica, version: int, published: Path | None) -> str | None:
        """See `WeightTransport`."""
        del published
        if not rank.shares_actor:
            raise WeightsMismatchError(f"version {version} was published without weights to a rank with its own copy")


@dataclasses.dataclass(slots=True)
class WrittenFolder(WeightTransport):
    """The actor's first rank writes a folder, which every rank reads."""

    kind: TransportKind = FOLDER

    async def publish(self, actor: Publisher, subscriber: Subscriber) -> None:
        """See `WeightTransport`."""
        written = await actor.written()
        await subscriber.load(actor.version, written)
        published_folder.remove_others(written)

    def load(self, rank: Replica, version: int, published: Path | None) -> str | None:
        """See `WeightTransport`."""
        assert published is not None, "`publish` has written it"
        return rank.read(version, published)


@dataclasses.dataclass(slots=True)
class Stream(WeightTransport):
    """The actor's ranks send while those of the rollout role load, over a `Transport`."""

    checksum: Checksum
    timeout_s: float
    """Seconds to wait for another member."""
    num_workers: int | None = None
    """Workers of each server of the rollout role; None if ranks have the model themselves."""
    is_open: bool = False
    """Whether all ranks are connected."""
    is_refused: bool = False
    """Whether servers cannot be connected, so that a folder is written instead, until one is started again."""
    _num_failed: int = 0
    """Versions in a row that servers did not get from memory."""
    num_sharing: int = 1
    """Ranks that share each server, the first of which has it."""

    @classmethod
    def of(cls, kind: TransportKind, config: RunConfig) -> Stream:
        """Return one that is not open."""
        checksum = "xxh3" if config.cluster.device == "cpu" else "sums"
        num_workers = config.rollout.mesh.tp if config.rollout.engine == "vllm" else None
        num_sharing = config.mesh("rollout")["tp"]
        return cls(kind, checksum, config.cluster.call_timeout_s + _WATCHDOG_S, num_workers, num_sharing=num_sharing)

    async def publish(self, actor: Publisher, subscriber: Subscriber) -> None:
        """See `WeightTransport`; what servers do not get from memory, they get from a folder."""
        try:
            if not self.is_refused:
                await self._send(actor, subscriber)
                self._num_failed = 0
                return
        except WorkerError as error:
            if self.num_workers is None:
                raise
            self._num_failed += 1
            self.is_refused |= self._num_failed == _MOST_FAILED
            _LOG.warning("published weights take a folder to the servers: %s", first_line(error))
        await WrittenFolder().publish(actor, subscriber)

    async def _send(self, actor: Publisher, subscriber: Subscriber) -> None:
        if not self.is_open:
            plan = make_plan(self, await actor.held(), actor.processes, subscriber.role.processes)
            try:
                await both(actor.connect(self, plan), subscriber.role.connect(self, plan))
            except WorkerError:
                self.is_refused = self.num_workers is not None
                raise
        self.is_open = False  # after an error it is opened again
        await both(actor.send(), subscriber.load(actor.version))
        self.is_open = True

    def load(self, rank: Replica, version: int, published: Path | None) -> str | None:
        """See `WeightTransport`."""
        return rank.receive(version) if published is None else rank.read(version, published)


def share_published(config: RunConfig, shard: ModelShard) -> SharedWeights | None:
    """Move the weights of an actor's rank to memory that receivers on its node can read.

    None if they have to be copied all the same: on accelerators, to other nodes, of an actor that sleeps between its
    calls, or of float32 masters, which are rounded first.

    Args:
        config: of the run.
        shard: of the actor, before an engine has it.
    """
    kind = transport_kind(config)
    may_stay = config.cluster.device == "cpu" and (kind is None or kind.within_node)
    if not may_stay or "actor" in config.sleeping or shard.sharding.half is not None:
        return None
    return share_trained(shard.model)


def joint_digest(what: str, digests: Mapping[int, str], mesh: Mesh, *axes: str) -> str:
    """Return one digest of weights from those of the ranks' parts.

    Args:
        what: beginning of the error if they differ.
        digests: by rank, of those ranks that have one.
        mesh: of the ranks.
        *axes: along which they hold different parts; ranks with one part should hold equal weights.

    Raises:
        WeightsMismatchError: they do not.
    """
    places = map(mesh.coordinates, digests)
    parts = [tuple(place[axis] for axis in axes) for place in places]
    different = sorted(set(zip(parts, digests.values(), strict=True)))
    if len(different) > len(set(parts)):
        ranks = ", ".join(f"rank {rank}: {digest[:8]}" for rank, digest in digests.items())
        raise WeightsMismatchError(f"{what}: {ranks}")
    found = [digest for _, digest in different]
    return found[0] if len(found) == 1 else xxhash.xxh3_128_hexdigest("".join(found).encode())


def transport_between(config: RunConfig, actor: Sequence[Process], rollout: Sequence[Process]) -> WeightTransport:
    """Return what carries weights from some processes to others.

    Raises:
        PlacementError: the config names one that does not lead there.
    """
    nodes = {process.info.node_id: process.info.node for process in (*actor, *rollout)}
    kind = transport_kind(config, len(nodes))
    assert kind is not None, "it is known where the processes are"
    if kind.within_node and len(nodes) > 1:
        raise PlacementError(
            f"rollout.weights={kind.name} leads from process to process of one node, but actor and rollout are on "
            f"{len(nodes)} ({', '.join(sorted(nodes.values()))}); expected auto, broadcast or folder"
        )
    if kind.is_streamed:
        return Stream.of(kind, config)
    return SharedTensors() if kind == SHARED else WrittenFolder()


def make_plan(
    stream: Stream,
    held: Sequence[Mapping[str, Held]],
    actor: Sequence[Process],
    rollout: Sequence[Process],
) -> TransferPlan:
    """Return who takes part in a transport: all rollout ranks, and the ranks of the actor that have something to send.

    Where ranks have servers, the servers' workers receive within a node; of a broadcast the process of each rank with a
    server does, and passes it on. The other ranks of a server take part only if they send.

    Args:
        stream: that they take part in.
        held: by the ranks of the actor.
        actor: the processes of its ranks.
        rollout: the processes of the rollout role's ranks.
    """
    bucket_bytes = stream.kind.bucket_mib[stream.checksum == "sums"] * 2**20 + HEADER_BYTES
    manifest = Manifest.of(held, bucket_bytes=bucket_bytes, checksum=stream.checksum)
    roots = {bucket.sender for bucket in manifest.buckets}
    takers = {id(process): rank for rank, process in enumerate(rollout)}
    senders = {id(actor[root]): root for root in sorted(roots)}
    processes = dict.fromkeys([*senders, *takers])
    members = tuple(Participant(senders.get(process), takers.get(process)) for process in processes)
    if stream.num_workers is not None:
        with_server = range(0, len(rollout), stream.num_sharing)
        is_relayed = not stream.kind.within_node  # by the process of each rank with a server
        members = tuple(
            one for one in members if one.sender is not None or (is_relayed and one.receiver in with_server)
        )
        num_workers = 0 if is_relayed else stream.num_workers
        members += tuple(Participant(None, rank, worker) for rank in with_server for worker in range(num_workers))
    meeting = f"weights {next(_NUMBERS)} {uuid.uuid4().hex[:8]}"
    return TransferPlan(meeting, members, manifest, stream.timeout_s)


async def with_room(write: Callable[[], Awaitable[tuple[Path, str]]], *, again_s: float = 5.0) -> Path:
    """Write weights, and try again where there is no room for them; return their folder.

    Args:
        write: returns the folder, and why it could not be written.
        again_s: seconds from one try to the next.

    Raises:
        CheckpointError: there was no room for ten minutes.
    """
    until = time.monotonic() + _ROOM_S
    while True:
        written, why = await write()
        if not why:
            return written
        if time.monotonic() > until:
            raise CheckpointError(f"no weights are published: {why}")
        await asyncio.sleep(again_s)


async def both(*calls: Awaitable[None]) -> None:
    """Wait for calls that need each other; of their errors, raise the cause and not what it led to."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if left and all(_is_consequence(task.exception()) for task in done if task.exception()):
            done |= (await asyncio.wait(left, timeout=_PATIENCE_S, return_when=asyncio.FIRST_EXCEPTION))[0]
    finally:
        for task in tasks:
            task.cancel()
    errors = [error for task in done if (error := task.exception()) is not None]
    if errors:
        raise min(errors, key=_is_consequence)


def _is_consequence(error: BaseException | None) -> bool:
    return isinstance(error, WorkerError) and error.is_consequence
