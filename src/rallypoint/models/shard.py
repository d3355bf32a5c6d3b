"""A model of which this rank holds a part: built without memory, cut, then allocated; and its whole tensors again.

Owns: that order. Must not know: where weights come from. Invariant: after `build`, `parts` has the rectangle that this
rank holds of every parameter and saved buffer, by its first name.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rallypoint.errors import ModelError
from rallypoint.models.attention import ATTENTION
from rallypoint.models.kinds.expert_parallel import deal_experts
from rallypoint.models.kinds.experts import EXPERTS
from rallypoint.models.kinds.router_replay import take_replays
from rallypoint.models.layers import allocate_joined, replace_layers
from rallypoint.models.lora import Adapters, add_adapters, is_adapter_weight
from rallypoint.models.part import Part, rectangles_of
from rallypoint.models.tensor_parallel import TensorParts, cut_model, family_of
from rallypoint.parallel import Collective, DeviceMesh, Sharding, TensorCuts, held, shard_rows

MAKING = threading.RLock()
"""Lock held while transformers makes a model: `from_pretrained` takes `tie_weights` away for all threads meanwhile, and
two at once take it away for ever; and a new model is drawn from torch's own generator."""
_ROUND_BYTES = 4 * 2**20
"""Bytes in flight at once when tensors are gathered."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ModelShard:
    """One rank's part of a model."""

    model: PreTrainedModel
    parts: Mapping[str, Part]
    """Name of a parameter or saved buffer -> the part that this rank holds."""
    mesh: DeviceMesh
    """Ranks that hold the model together."""
    sharding: Sharding
    """FSDP2's side of it: passes, and sums of gradients."""

    @classmethod
    def whole(cls, model: PreTrainedModel, mesh: DeviceMesh | None = None) -> ModelShard:
        """Return a model that every rank has whole, and shard it if the mesh has `dp_shard`; one rank by default."""
        return _sharded(model, mesh or DeviceMesh.solo(), None)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the model."""
        return all(part.is_whole for part in self.parts.values())

    @property
    def has_adapters(self) -> bool:
        """Whether adapters, and the modules named with them, are trained instead of all weights."""
        return any(map(is_adapter_weight, self.parts))

    def trained(self) -> dict[str, Tensor]:
        """Return this rank's parts of the trained weights: of adapters, if the model has any."""
        tensors = self.tensors()
        return {name: tensors[name] for name in trained_weights(self.model)}

    def tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of every name in `parts`, as plain tensors that share its memory."""
        found = dict(saved_tensors(self.model))
        return {name: held(found[name]) for name in self.parts}

    def written_dtypes(self) -> dict[str, torch.dtype]:
        """Return the type in which each of `tensors` is saved: the model's, also for float32 masters."""
        half, weights = self.sharding.half, {name for name, _ in self.model.named_parameters()}
        return {name: half if half and name in weights else tensor.dtype for name, tensor in self.tensors().items()}


def build(
    config: PreTrainedConfig,
    factory: Any,
    *,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    trust_remote_code: bool,
    adapters: Adapters | None = None,
    frozen: bool = False,
) -> ModelShard:
    """Return a model on the meta device, cut for this rank: shapes without memory.

    Args:
        config: of the whole model.
        factory: the Auto class of transformers that knows its kind.
        dtype: of its parameters.
        mesh: the ranks that hold it together.
        trust_remote_code: whether Python code of its folder may run.
        adapters: adapters to add, so that only they are trained.
        frozen: whether it will never be trained.

    Raises:
        ModelError: its family cannot be cut, its sizes do not divide by the number of ranks, or adapters do not fit it.
    """
    with MAKING, torch.device("meta"):
        # Without a dtype, for which transformers would change torch's default in all threads.
        model: PreTrainedModel = factory.from_config(
            config,
            dtype=None,
            attn_implementation=ATTENTION,
            experts_implementation=EXPERTS,
            trust_remote_code=trust_remote_code,
        )
    replace_layers(model)
    take_replays(model.base_model)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    model.config.dtype = dtype
    tensor = None
    if mesh.tp.size > 1:
        tensor = cut_model(model, family_of(model.config.model_type), mesh.tp)
    elif mesh.ep.size > 1 or adapters is not None:
        tensor = TensorParts.whole(model)
    if tensor is not None and mesh.ep.size > 1:
        tensor = deal_experts(model, mesh.ep, tensor)
    if tensor is not None and adapters is not None:
        tensor = add_adapters(model, adapters, tensor)
    return _sharded(model.eval(), mesh, tensor, frozen=frozen)


def _sharded(
    model: PreTrainedModel, mesh: DeviceMesh, tensor: TensorParts | None, *, frozen: bool = False
) -> ModelShard:
    """Shard what tensor parallelism has left of a model; all of it for None."""
    parts = {name: Part.whole(tensor.shape) for name, tensor in saved_tensors(model)}
    parts |= {} if tensor is None else tensor.parts
    weights = {name: parts[name] for name, _ in model.named_parameters()}
    sharding = shard_model(model, mesh, tensor, frozen=frozen)
    return ModelShard(model, parts | shard_parts(weights, mesh.shard), mesh, sharding)


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what files hold: parameters, each once under its first name, and persistent buffers."""
    yield from model.named_parameters()
    yield from _saved_buffers(model)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights by name: all of them, and what is saved beside them, in a model without adapters."""
    found: dict[str, Tensor] = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if any(map(is_adapter_weight, found)) or not found:
        return found
    return found | dict(_saved_buffers(model))  # biases of routers


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def allocate(shard: ModelShard, device: torch.device) -> None:
    """Allocate every tensor; parameters are uninitialized, and buffers that no file holds are computed.

    Weights of layers with the same input are neighbours in memory.

    Raises:
        ModelError: transformers does not compute a buffer, or computes NaN or infinity from the config.
    """
    made: dict[int, nn.Parameter] = {}
    joined = {id(weight): part for weight, part in allocate_joined(shard.model, device)}
    for module in shard.model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in made:  # tied weights stay one
                memory = joined[id(weight)] if id(weight) in joined else torch.empty_like(weight, device=device)
                made[id(weight)] = nn.Parameter(memory, weight.requires_grad)
                # Tells transformers' `_init_weights` to leave it alone: its values come from a file.
                made[id(weight)]._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
            setattr(module, name, made[id(weight)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.zeros_like(buffer, device=device))
    _compute_buffers(shard.model)


@torch.no_grad()
def _compute_buffers(model: PreTrainedModel) -> None:
    """Have every model compute the buffers that are not saved, such as the frequencies of rotary embeddings.

    Twice, on zeros and on ones, to find buffers that transformers does not compute.
    """
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    # Of nested models, the innermost computes its own buffers.
    responsible = {module: inner for inner in models for module in inner.modules()}
    for module, inner in responsible.items():
        buffers = {name: getattr(module, name) for name in sorted(module._non_persistent_buffers_set)}
        if not buffers:
            continue
        inner._init_weights(module)
        first = {name: buffer.clone() for name, buffer in buffers.items()}
        if wild := [name for name, buffer in first.items() if not buffer.isfinite().all()]:
            rope = inner.config.to_dict().get("rope_parameters")
            raise ModelError(
                f"config.json makes {', '.join(wild)} of {type(module).__name__} NaN or infinite; correct its "
                f"rope_parameters (in older files rope_theta and rope_scaling): {rope}"
            )
        for buffer in buffers.values():
            buffer.fill_(1)
        inner._init_weights(module)
        if left := [name for name, buffer in buffers.items() if not torch.equal(buffer, first[name])]:
            raise ModelError(
                f"{type(model).__name__}: transformers does not compute {', '.join(left)} of {type(module).__name__} "
                "anew; the family is not supported"
            )


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return every weight, and what is saved beside them, by name; a tied one appears once, under its first name."""
    return dict(saved_tensors(model))


def shard_model(
    model: PreTrainedModel, mesh: DeviceMesh, tensor: TensorParts | None = None, *, frozen: bool = False
) -> Sharding:
    """Shard a model over the mesh's `dp_shard`, in place; it may be on the meta device.

    Args:
        model: whole, or cut by tensor parallelism; `requires_grad` says which weights are trained.
        mesh: the ranks.
        tensor: the parts that tensor parallelism has left.
        frozen: whether it will never be trained, whatever `requires_grad` says.
    """
    # Families that are not sharded may name their layers differently.
    layers = list(cast("nn.ModuleList", model.base_model.layers)) if mesh.shard.size > 1 else []
    cuts = TensorCuts()
    if tensor is not None:
        cut = {name for name, part in tensor.parts.items() if not part.is_whole}
        cuts = TensorCuts(cut, tensor.summed, tensor.dealt)
    return Sharding(model, layers, mesh, cuts, frozen=frozen)


def shard_parts(parts: Mapping[str, Part], shard: Collective) -> dict[str, Part]:
    """Return the rows that a rank of `dp_shard` holds of the parts of its group."""
    return {name: part.rows(*shard_rows(part.sizes[0], shard.rank, shard.size)) for name, part in parts.items()}


def gather(
    tensors: Mapping[str, Tensor],
    parts: Mapping[str, Part],
    mesh: DeviceMesh,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor whole on rank 0; other ranks yield nothing, but must iterate to the end.

    Rank 0 needs memory for one whole tensor more than its parts, if the caller drops each before the next; every rank
    needs a few megabytes for what is in flight.

    Args:
        tensors: this rank's parts.
        parts: the rectangle that each of them is; all ranks have the same names in the same order.
        mesh: the ranks.
        dtypes: types to convert them to, one by one; None for their own.
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
    """Return a tensor whole on rank 0, and unchanged on the others."""
    # In rounds, because gloo keeps the buffers that its threads sent and received last.
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
    """Return the parts that every rank contributes to the whole tensors: those that no lower rank holds, too.

    Args:
        parts: this rank's part of each whole tensor; all ranks have the same names in the same order.
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
