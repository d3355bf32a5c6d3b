"""How weights get from the actor's ranks to those of the rollout role, as the driver and the workers see it.

Owns: which processes take part in a transport (`weights`), and which of two errors is the cause. Must not know: what
travels.

A process that has a rank of both roles takes part once: its rollout worker sends what the actor worker has left
(`ActorParts`) while it takes over what comes. A process executes its calls one after another, so two of them could not
wait for each other.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Mapping, Sequence

from rallypoint.cluster import WorkerContext
from rallypoint.cluster.call import Process
from rallypoint.config import RunConfig
from rallypoint.errors import PlacementError, WorkerError
from rallypoint.models import ModelShard
from rallypoint.plan.run_plan import Way, weights_way
from rallypoint.roles.placement import WorkerSpec
from rallypoint.weights import (
    HEADER_BYTES,
    Exposed,
    Held,
    Manifest,
    Participant,
    SharedWeights,
    TransferPlan,
    Transport,
    join,
    share_trained,
)
from rallypoint.weights.transports import BUCKET_BYTES

PUBLISHED = "published"
"""Folder within that of the run, for the way `folder`."""

_PATIENCE_S = 10.0
"""How long the one that failed first may take to say so after another one stopped because of it."""
_NUMBERS = itertools.count(1)


class TransportEnd:
    """A worker's end of the transport, which it opens at the first publish, and again after one that failed."""

    def __init__(self, context: WorkerContext, spec: WorkerSpec) -> None:
        self._context, self._spec = context, spec
        self._transport: Transport | None = None

    def open(self, way: Way, plan: TransferPlan, place: int, exposed: Exposed | None) -> None:
        """Meet the others, who read what is exposed from where it is."""
        self.close()
        assert self._spec.rendezvous is not None, "who publishes has a place to meet"
        device = self._spec.config.cluster.device
        self._transport = join(way, self._spec.rendezvous, plan, place, device=device, exposed=exposed)

    @property
    def is_open(self) -> bool:
        """Whether this worker takes part."""
        return self._transport is not None

    @property
    def transport(self) -> Transport:
        """The open transport."""
        assert self._transport is not None, "the driver opens it before it publishes"
        return self._transport

    def close(self) -> None:
        """Leave, if it is open."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def share_published(config: RunConfig, shard: ModelShard) -> SharedWeights | None:
    """Move what an actor's rank publishes to memory that takers on its node can read; None if no taker may read it.

    What sleeps is kept elsewhere meanwhile, and masters are rounded on their way.

    Args:
        config: of the run.
        shard: of the actor, before an engine has it.
    """
    may_stay = config.cluster.device == "cpu" and weights_way(config) in ("memory", None)
    if not may_stay or "actor" in config.sleeping or shard.sharding.half is not None:
        return None
    return share_trained(shard.model)


def way_between(config: RunConfig, actor: Sequence[Process], rollout: Sequence[Process]) -> Way:
    """Return the way that weights take from some processes to others.

    Raises:
        PlacementError: the config names one that does not lead there.
    """
    nodes = {process.info.node_id: process.info.node for process in (*actor, *rollout)}
    way = weights_way(config, len(nodes))
    assert way is not None, "it is known where the processes are"
    if way in ("memory", "ipc") and len(nodes) > 1:
        raise PlacementError(
            f"rollout.weights={way} leads from process to process of one node, but actor and rollout are on "
            f"{len(nodes)} ({', '.join(sorted(nodes.values()))}); expected auto, broadcast or folder"
        )
    return way


def make_plan(
    config: RunConfig,
    way: Way,
    held: Sequence[Mapping[str, Held]],
    actor: Sequence[Process],
    rollout: Sequence[Process],
) -> TransferPlan:
    """Return who takes part in a transport: all rollout ranks, and the ranks of the actor that have something to send.

    Args:
        config: of the run.
        way: that the weights take.
        held: by the ranks of the actor.
        actor: the processes of its ranks.
        rollout: the processes of the rollout role's ranks.
    """
    checksum = "xxh3" if config.cluster.device == "cpu" else "sums"
    manifest = Manifest.of(held, bucket_bytes=BUCKET_BYTES[way] + HEADER_BYTES, checksum=checksum)
    roots = {bucket.sender for bucket in manifest.buckets}
    takers = {id(process): rank for rank, process in enumerate(rollout)}
    senders = {id(actor[root]): root for root in sorted(roots)}
    processes = dict.fromkeys([*senders, *takers])
    members = tuple(Participant(senders.get(process), takers.get(process)) for process in processes)
    name = f"weights {next(_NUMBERS)} {uuid.uuid4().hex[:8]}"
    return TransferPlan(name, members, manifest, config.cluster.call_timeout_s)


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
