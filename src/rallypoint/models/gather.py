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
    table = given_by_ranks(parts, mesh)
    for name, tensor in tensors.items():
        own = tensor if dtypes is None else tensor.to(dtypes[name])
        if not (name in table[0] and table[0][name].is_whole):
            own = _gathered(own, parts[name].shape, [given.get(name) for given in table], mesh)
        if mesh.rank == 0:
            yield name, own
        del own  # before there is another one


def _gathered(tensor: Tensor, shape: Sequence[int], parts: Sequence[Part | None], mesh: DeviceMesh) -> Tensor:
    """Return a tensor of that shape whole on rank 0, and as it is on the others."""
    # In rounds, because gloo keeps what its threads have sent and received last.
    most = max(1, _ROUND_BYTES // len(parts) // tensor.itemsize)
    cuts = [[] if part is None else list(rectangles_of(part, most)) for part in parts]
    whole = tensor.new_empty(shape) if mesh.rank == 0 else tensor
    mine = parts[mesh.rank]
    for turn in itertools.zip_longest(*cuts):
        sent = [tensor.new_empty(0, dtype=torch.uint8)] * len(parts)
        if mine is not None and (own := turn[mesh.rank]) is not None:
            sent[0] = tensor[own.within(mine)].reshape(-1).view(torch.uint8)
        arriving = turn if mesh.rank == 0 else [None] * len(parts)
        sizes = [0 if part is None else part.num_elements * tensor.itemsize for part in arriving]
        for part, piece in zip(arriving, mesh.everyone.exchange(sent, sizes), strict=True):
            if part is not None:
                whole[part.within(Part.whole(whole.shape))] = piece.view(tensor.dtype).view(part.sizes)
    return whole


def given_by_ranks(parts: Mapping[str, Part], mesh: DeviceMesh) -> list[dict[str, Part]]:
    """Return what every rank gives to the whole tensors: all that it has but what a lower rank has, too.

    Args:
        parts: which rectangle of each whole tensor this rank has; the names are those of all ranks, in the same order.
        mesh: the ranks.
    """
    mine = torch.tensor([number for part in parts.values() for number in (*part.starts, *part.sizes)])
    table: list[dict[str, Part]] = []
    taken: set[tuple[str, Part]] = set()
    for row in mesh.everyone.all_gather(mine.unsqueeze(0), [1] * mesh.everyone.size):
        left, given = iter(row.flatten().tolist()), dict[str, Part]()
        for name, part in parts.items():
            theirs = Part(part.shape, tuple(next(left) for _ in part.shape), tuple(next(left) for _ in part.shape))
            if theirs.num_elements and (name, theirs) not in taken:
                given[name] = theirs
                taken.add((name, theirs))
        table.append(given)
    return table
