"""Weights for a server in an environment of its own: what its workers are told, and how they take tensors over.

Owns: the invitation to a transfer, as text, and tensors that are put together from buckets. Must not know: which server
it is. Its workers import this where only torch is certain. They open the memory of the ranks that send, like any other
receiver of the node, so that weights take no way through files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from rallypoint.model_files.pieces import Piece, stored_tensors
from rallypoint.models.part import Part
from rallypoint.transport_kinds import TRANSPORT_KINDS, TransportKind
from rallypoint.weights.buffers import kinds_of_memory
from rallypoint.weights.endpoints import Receiver, Runs
from rallypoint.weights.manifest import CHECKSUM_BYTES, CHECKSUMS_START, RELAY, Held, Manifest
from rallypoint.weights.same_node import SameNodeTransport, join_as_receiver
from rallypoint.weights.transfer import Participant, TransferPlan


@dataclasses.dataclass(frozen=True, slots=True)
class Invitation:
    """What the workers of a server are told to take part in a transfer."""

    kind: TransportKind
    """Kind of the transport, within a node."""
    plan: TransferPlan
    places: Sequence[int]
    """Indices of the workers among the members."""
    addresses: Sequence[bytes]
    """Where members listen; see `same_node.meet_members`."""
    pieces: Mapping[str, Sequence[Piece]]
    """Name of a weight -> the tensors that it consists of in files, which is what a server loads."""

    def text(self) -> str:
        """Return it as JSON."""
        plan, manifest = self.plan, self.plan.manifest
        ranks = [
            {name: [str(one.dtype).removeprefix("torch."), *_sizes(one.part)] for name, one in held.items()}
            for held in manifest.ranks
        ]
        pieces = {
            name: [[one.tensor, *map(_sizes, (one.part, one.stored))] for one in found]
            for name, found in self.pieces.items()
        }
        return json.dumps(
            {
                "kind": self.kind.name,
                "name": plan.name,
                "members": list(map(dataclasses.astuple, plan.members)),
                "timeout_s": plan.timeout_s,
                "bucket_bytes": manifest.bucket_bytes,
                "checksum": manifest.checksum,
                "ranks": ranks,
                "places": list(self.places),
                "addresses": [address.hex() for address in self.addresses],
                "pieces": pieces,
            }
        )

    @classmethod
    def read(cls, text: str) -> Invitation:
        """Return what `text` has written."""
        told = json.loads(text)
        ranks = [
            {name: Held(getattr(torch, dtype), _part(*sizes)) for name, (dtype, *sizes) in held.items()}
            for held in told["ranks"]
        ]
        manifest = Manifest.of(ranks, bucket_bytes=told["bucket_bytes"], checksum=told["checksum"])
        members = tuple(Participant(*member) for member in told["members"])
        if any(member.sender == RELAY for member in members):
            manifest = manifest.relayed()
        pieces = {
            name: [Piece(tensor, _part(*part), _part(*stored)) for tensor, part, stored in found]
            for name, found in told["pieces"].items()
        }
        return cls(
            kind=TRANSPORT_KINDS[told["kind"]],
            plan=TransferPlan(told["name"], members, manifest, told["timeout_s"]),
            places=told["places"],
            addresses=[bytes.fromhex(address) for address in told["addresses"]],
            pieces=pieces,
        )


class ServerReceiver:
    """One worker of a server that receives weights, from when it has connected until it is closed."""

    def __init__(self, invitation: Invitation, worker: int, device: torch.device) -> None:
        """Connect to all ranks that send.

        Args:
            invitation: of the server.
            worker: number of this worker.
            device: that it loads tensors on.

        Raises:
            PeerFailedError: a rank went away.
            PublishError: it was silent for too long.
        """
        self._plan, self._pieces, self._device = invitation.plan, invitation.pieces, device
        self.digest = ""
        """Digest of the checksums of what was received last."""
        self._transport: SameNodeTransport = join_as_receiver(
            invitation.plan, invitation.places[worker], invitation.addresses, kinds_of_memory(invitation.kind, device)
        )

    def tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Receive a version, and yield the tensors that files would have, in memory of their own, as each is complete.

        Raises:
            WeightsMismatchError: at the end: a bucket was damaged, or of another version. What was yielded until then
                may be damaged on accelerators.
            PeerFailedError: a rank went away.
        """
        self.digest = ""
        sink = _Assembly(self._plan.manifest, version, self._device)
        for _ in self._transport.received(sink):
            for name, weight in sink.take_complete():
                yield from stored_tensors(lambda name, _: self._pieces[name], name, weight).items()
        sink.finish()
        self.digest = sink.digest()

    def close(self) -> None:
        """Leave; ranks that send get an error."""
        self._transport.close()


class _Assembly(Receiver):
    """A receiver without a model: it puts whole weights together."""

    def __init__(self, manifest: Manifest, version: int, device: torch.device) -> None:
        self._weights = _Arriving(manifest, device)
        super().__init__(manifest, self._weights, version, device)
        self._num_left = {name: math.prod(shape) for name, (_, shape) in manifest.shapes.items()}
        self._complete = [name for name, num in self._num_left.items() if not num]
        self._checksums: list[Tensor] = []

    def unpack(self, index: int, memory: Tensor, in_place: Runs | None = None) -> None:
        """See `Receiver.unpack`."""
        super().unpack(index, memory, in_place)
        if index in self._missing:
            return  # it was damaged: what is incomplete is not loaded
        rectangles = self._manifest.buckets[index].rectangles
        self._checksums.append(memory[CHECKSUMS_START : CHECKSUMS_START + len(rectangles) * CHECKSUM_BYTES].clone())
        for rectangle in rectangles:
            self._num_left[rectangle.name] -= rectangle.part.num_elements
            if not self._num_left[rectangle.name]:
                self._complete.append(rectangle.name)

    def take_complete(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that are complete now, and keep nothing of them."""
        complete, self._complete = self._complete, []
        for name in complete:
            weight = self._weights[name]
            del self._weights[name]
            self._bytes.forget(name)
            yield name, weight

    def digest(self) -> str:
        """Return a digest of all checksums."""
        return xxhash.xxh3_128_hexdigest(torch.cat(self._checksums).cpu().numpy().data)


class _Arriving(dict[str, Tensor]):
    """Weights, each in memory from its first rectangle on."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        super().__init__()
        self._manifest, self._device = manifest, device

    def __missing__(self, name: str) -> Tensor:
        dtype, shape = self._manifest.shapes[name]
        return self.setdefault(name, torch.empty(shape, dtype=dtype, device=self._device))


def _sizes(part: Part) -> tuple[Sequence[int], ...]:
    return part.shape, part.starts, part.sizes


def _part(shape: Sequence[int], starts: Sequence[int], sizes: Sequence[int]) -> Part:
    return Part(tuple(shape), tuple(starts), tuple(sizes))
