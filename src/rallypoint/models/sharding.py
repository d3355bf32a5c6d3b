"""How a transformers model is sharded over ranks with FSDP2: layer by layer, and which rows of a weight stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from rallypoint.models.part import Part
from rallypoint.models.tensor_parallel import TensorParts
from rallypoint.parallel import Collective, DeviceMesh, Sharding, TensorCuts, shard_rows


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, tensor: TensorParts | None = None, *, frozen: bool = False
) -> Sharding:
    """Shard a model over the mesh's `dp_shard`, in place; it may be on the meta device.

    Args:
        model: whole, or as tensor parallelism has left it; what is trained is known (`requires_grad`).
        mesh: the ranks.
        tensor: what tensor parallelism has left of it.
        frozen: whether it will never be trained, whatever requires a gradient now.
    """
    # A family that is not sharded may name its layers otherwise.
    layers = list(cast("nn.ModuleList", model.base_model.layers)) if mesh.shard.size > 1 else []
    cuts = TensorCuts()
    if tensor is not None:
        cuts = TensorCuts({name for name, part in tensor.parts.items() if not part.is_whole}, tensor.summed)
    return Sharding(model, layers, mesh, cuts, frozen=frozen)


def shard_parts(parts: Mapping[str, Part], shard: Collective) -> dict[str, Part]:
    """Return what a rank of `dp_shard` holds of each weight, of which its group holds the given parts."""
    return {name: part.rows(*shard_rows(part.sizes[0], shard.rank, shard.size)) for name, part in parts.items()}
