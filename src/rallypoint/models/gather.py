"""Whole tensors from the parts that ranks hold, one tensor at a time.

Owns: what travels to rank 0. Must not know: what becomes of it there. Beside its parts rank 0 has one whole tensor,
if whoever asks lets go of one before the next, and everybody a few megabytes on their way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rallypoint.models.part import Part, rectangles_of
from rallypoint.parallel import DeviceMesh

_ROUND_BYTES = 4 * 2**20
"""That travel at once."""


def gather(
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    mesh: DeviceMesh,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor whole, on rank 0; the other ranks yield nothing, but have to be asked until the end.

    Args:
        tensors: what this rank holds.
        parts: which rectangle of the whole each of them is; the names are those of all ranks, in the same order.
        mesh: the ranks.
        dtypes: to which they are converted, one by one; None for their own.
    """
    table = _exchange_parts(parts, mesh)
    for name, tensor in tensors.items():
        own = tensor if dtypes is None else tensor.to(dtypes[name])
        if not table[0][name].is_whole:
            own = _gathered(own, [part[name] for part in table], mesh)
        if mesh.rank == 0:
            yield name, own
        del own  # before there is another one


def _gathered(tensor: Tensor, parts: Sequence[Part], mesh: DeviceMesh) -> Tensor:
    """Return a tensor whole on rank 0, and as it is on the others."""
    # In rounds, because gloo keeps what its threads have sent and received last.
    most = max(1, _ROUND_BYTES // len(parts) // tensor.itemsize)
    cuts = [list(rectangles_of(part, most)) if part.num_elements else [] for part in parts]
    whole = tensor.new_empty(parts[0].shape) if mesh.rank == 0 else tensor
    for turn in itertools.zip_longest(*cuts):
        sent = [tensor.new_empty(0, dtype=torch.uint8)] * len(parts)
        if (own := turn[mesh.rank]) is not None:
            sent[0] = tensor[own.within(parts[mesh.rank])].reshape(-1).view(torch.uint8)
        arriving = turn if mesh.rank == 0 else [None] * len(parts)
        sizes = [0 if part is None else part.num_elements * tensor.itemsize for part in arriving]
        for part, piece in zip(arriving, mesh.everyone.exchange(sent, sizes), strict=True):
            if part is not None:
                whole[part.within(Part.whole(whole.shape))] = piece.view(tensor.dtype).view(part.sizes)
    return whole


def _exchange_parts(parts: Mapping[str, Part], mesh: DeviceMesh) -> list[dict[str, Part]]:
    """Return what every rank sends of each tensor: nothing where another one has the same."""
    if mesh.everyone.size == 1:
        return [dict(parts)]
    is_copy = mesh.replicas.rank > 0
    numbers = [number for part in parts.values() for number in (*part.starts, *part.sizes)]
    mine = torch.tensor([0] * len(numbers) if is_copy else numbers)
    table: list[dict[str, Part]] = []
    for row in mesh.everyone.all_gather(mine.unsqueeze(0), [1] * mesh.everyone.size):
        left = iter(row.flatten().tolist())
        table.append(
            {
                name: Part(part.shape, tuple(next(left) for _ in part.shape), tuple(next(left) for _ in part.shape))
                for name, part in parts.items()
            }
        )
    return table
