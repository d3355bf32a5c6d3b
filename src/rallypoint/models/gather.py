"""Whole tensors from the parts that ranks hold, one tensor at a time.

Owns: what travels to rank 0. Must not know: what becomes of it there. No rank but 0 ever holds more than its parts, and
rank 0 one whole tensor beside its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rallypoint.models.part import Part
from rallypoint.parallel import DeviceMesh


def gather(tensors: Mapping[str, Tensor], parts: Mapping[str, Part], mesh: DeviceMesh) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor whole, on rank 0; the other ranks yield nothing, but have to be asked until the end.

    Args:
        tensors: what this rank holds.
        parts: which rectangle of the whole each of them is; the names are those of all ranks, in the same order.
        mesh: the ranks.
    """
    table = _exchange_parts(parts, mesh)
    for name, tensor in tensors.items():
        if table[0][name].is_whole:
            if mesh.rank == 0:
                yield name, tensor
            continue
        sent = [tensor.reshape(-1).view(torch.uint8), *[tensor.new_empty(0, dtype=torch.uint8)] * (len(table) - 1)]
        if not table[mesh.rank][name].num_elements:
            sent[0] = sent[-1]
        sizes = [part[name].num_elements * tensor.dtype.itemsize if mesh.rank == 0 else 0 for part in table]
        received = mesh.everyone.exchange(sent, sizes)
        if mesh.rank == 0:
            whole = tensor.new_empty(parts[name].shape)
            for part, piece in zip(table, received, strict=True):
                whole[part[name].within(Part.whole(whole.shape))] = piece.view(tensor.dtype).view(part[name].sizes)
            yield name, whole


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
