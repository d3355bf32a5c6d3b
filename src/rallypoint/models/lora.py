"""Low-rank adapters (LoRA, arXiv 2106.09685): frozen linear layers and experts with a small trained update.

Owns: the layer, which layers of a model are adapted, how adapters are cut over ranks, their initial values, merging.
Must not know: files (`model_files.adapters`), or who trains. Invariants: the weights of the base model keep their names
and places, so that code which reads or cuts a model by names works as before; exactly the weights that require a
gradient are trained, published and saved.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rallypoint.config import LoRAConfig
from rallypoint.errors import ModelError
from rallypoint.families import MIXTURES
from rallypoint.models.kinds.expert_adapters import (
    MATRICES,
    LoRAExperts,
    add_update,
    do_products_aside,
    merged_updates,
    remove_updates,
    scaling_of,
    update_name,
    updated_weight,
)
from rallypoint.models.part import Part
from rallypoint.models.tensor_parallel import AddendLinear, TensorParts

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the trained weights of an adapted layer, as in PEFT."""

MERGE_WITH_PEFT = "merge the adapter into its model with peft's merge_and_unload, and use that"
"""What to do with an adapter that we cannot compute."""

ALL_LINEAR = "all-linear"
"""Target that means every linear layer of the decoder, without head and embedding; PEFT's word."""


class LoRALinear(nn.Linear):
    """A linear layer with a low-rank update: y = x W^T + b + scaling (x A^T) B^T; W and b are frozen.

    W is [N, M], A is [rank, M], B is [N, rank], and scaling is alpha / rank, or alpha / sqrt(rank) with rslora.

    >>> layer = LoRALinear(nn.Linear(3, 2, bias=False), rank=1, alpha=2.0, rslora=False)
    >>> with torch.no_grad():
    ...     for weight in layer.parameters():
    ...         _ = weight.fill_(1.0)
    >>> layer(torch.ones(1, 3))  # 3 + 2 x 3
    tensor([[9., 9.]], grad_fn=<ViewBackward0>)
    >>> [name for name, weight in layer.named_parameters() if weight.requires_grad]
    ['lora_A.weight', 'lora_B.weight']
    """

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float, rslora: bool) -> None:
        """Take over the weights of a layer; the update's weights are uninitialized.

        Args:
            base: the layer; its tensors are shared, not copied.
            rank: of the update.
            alpha: the numerator of the scaling.
            rslora: whether the scaling falls with the root of the rank only (arXiv 2312.03732).
        """
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if base.bias is not None:
            base.bias.requires_grad_(False)
        self._adds_bias = base.adds_bias if isinstance(base, AddendLinear) else True
        self.rank, self.alpha, self.rslora = rank, alpha, rslora
        on_meta = {"bias": False, "device": "meta", "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, rank, **on_meta).to_empty(device=base.weight.device)
        self.lora_B = nn.Linear(rank, base.out_features, **on_meta).to_empty(device=base.weight.device)

    @property
    def scaling(self) -> float:
        """Factor of the update."""
        return scaling_of(self.rank, self.alpha, rslora=self.rslora)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - torch's own name; see the class
        frozen = functional.linear(input, self.weight, self.bias if self._adds_bias else None)
        # One product in place: neither the update nor the sum takes memory of its own.
        low = self.lora_A(input).flatten(0, -2)
        return frozen.view(len(low), -1).addmm_(low, self.lora_B.weight.T, alpha=self.scaling).view_as(frozen)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return W + scaling B A in W's type; computed in float32, or float64 if W is."""
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        update = self.lora_B.weight.to(exact) @ self.lora_A.weight.to(exact)
        return (self.weight.to(exact) + self.scaling * update).to(self.weight.dtype)

    def extra_repr(self) -> str:  # noqa: D102
        return f"{super().extra_repr()}, rank={self.rank}, scaling={self.scaling:g}"


@dataclasses.dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model, and the source of their initial values."""

    lora: LoRAConfig
    whole: tuple[str, ...]
    """Names of modules that are trained whole, such as the head of a critic."""
    folder: Path | None
    """Folder of an existing adapter; None for new ones."""


def add_adapters(model: PreTrainedModel, adapters: Adapters, cut: TensorParts) -> TensorParts:
    """Freeze a model, and give layers of its decoder a trained update that is cut over ranks as the layers are.

    A rank with some outputs of a layer (rows of W) has all of A and the same rows of B; gradients of A are summed over
    ranks. A rank with some inputs (columns of W) has the same columns of A and all of B, whose gradients are summed.
    Where gradients of W are summed, those of A and B are. A rank with some experts of a layer has A and B of these.

    Args:
        model: changed in place; the updates are on the devices of their layers, uninitialized.
        adapters: which layers, and the size of their updates.
        cut: the parts of the model that this rank has.

    Returns:
        The parts of the model and its adapters that this rank has.

    Raises:
        ModelError: a target matches no linear layer or no matrices of experts of the decoder (the nearest names are
            given), the model lacks a module of `whole`, or it is one of two that share their weight.
    """
    lora = adapters.lora
    names = {name for name, _ in model.named_modules()}
    if not names.issuperset(adapters.whole):
        lacking = ", ".join(sorted(set(adapters.whole) - names))
        raise ModelError(
            f"{type(model).__name__} has no {lacking}, which the adapter has weights of; is it a critic's?"
        )
    _check_not_tied(model, adapters.whole)
    model.requires_grad_(False)
    parts, summed = dict(cut.parts), set(cut.summed)
    for name in _targets(model, lora.target_modules):
        base = model.get_submodule(name)
        # Other subclasses may do more than multiply by their weight.
        if not isinstance(base, nn.Linear) or type(base) not in (nn.Linear, AddendLinear):
            raise ModelError(f"{type(model).__name__}: {name} is a {type(base).__name__}, which cannot be adapted")
        model.set_submodule(name, LoRALinear(base, rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora))
        weight, a, b = parts[f"{name}.weight"], f"{name}{A}", f"{name}{B}"
        (outputs, inputs), (first, start), (num_outputs, num_inputs) = weight.shape, weight.starts, weight.sizes
        parts[a] = Part.whole([lora.rank, inputs]).narrow(1, start, num_inputs)
        parts[b] = Part.whole([outputs, lora.rank]).narrow(0, first, num_outputs)
        if f"{name}.weight" in cut.summed:
            summed |= {a, b}
        summed |= {a} if num_outputs < outputs else {b} if num_inputs < inputs else set()
    of_experts = _adapt_experts(model, lora, cut)
    for name in adapters.whole:
        model.get_submodule(name).requires_grad_(True)
    return TensorParts({**parts, **of_experts.parts}, frozenset(summed), of_experts.dealt)


def _adapt_experts(model: PreTrainedModel, lora: LoRAConfig, cut: TensorParts) -> TensorParts:
    """Do as `add_adapters` for experts, and return the parts of their updates."""
    parts, dealt = dict[str, Part](), set(cut.dealt)
    for name in _expert_targets(model, lora.target_parameters):
        layer, _, matrix = name.rpartition(".")
        experts, of_weight = model.get_submodule(layer), cut.parts[name]
        update = LoRAExperts(
            experts.get_parameter(matrix),
            is_transposed=bool(experts.is_transposed),
            rank=lora.rank,
            alpha=lora.alpha,
            rslora=lora.rslora,
        )
        add_update(experts, matrix, update)
        (num_experts, *_), (first, *_), (num_here, *_) = of_weight.shape, of_weight.starts, of_weight.sizes
        for suffix, weight in ((A, update.lora_A.weight), (B, update.lora_B.weight)):
            full = update_name(layer, matrix) + suffix
            parts[full] = Part.whole([num_experts, *weight.shape[1:]]).narrow(0, first, num_here)
            dealt |= {full} if name in cut.dealt else set()
    return TensorParts(parts, frozenset(), frozenset(dealt))


def _check_not_tied(model: PreTrainedModel, whole: Sequence[str]) -> None:
    """Refuse an embedding or a head of its own where they are one matrix: PEFT parts them, and the rest stays as it is.

    Raises:
        ModelError: there is one.
    """
    head = model.get_output_embeddings()
    if head is None or not model.config.get_text_config().tie_word_embeddings:
        return
    both = {id(head), id(model.get_input_embeddings())}
    if parted := [name for name in whole if id(model.get_submodule(name)) in both]:
        raise ModelError(
            f"the adapter holds {' and '.join(parted)} whole (modules_to_save), but embedding and head of this "
            f"{type(model).__name__} are one matrix (tie_word_embeddings), which PEFT would make two; {MERGE_WITH_PEFT}"
        )


def first_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the initial values of A of a layer, as in PEFT; they depend only on the seed and the layer's name.

    Uniform in +-1/sqrt(M). B starts as zeros.

    Args:
        name: of the layer.
        shape: [rank, M] or of experts [X, rank, M], the whole of A.
        seed: of the run.
    """
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1)
    bound = shape[-1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def is_adapter_weight(name: str) -> bool:
    """Whether a name is that of A or B of a layer.

    >>> is_adapter_weight("layers.0.q_proj.lora_A.weight"), is_adapter_weight("layers.0.q_proj.weight")
    (True, False)
    """
    return name.endswith((A, B))


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """Return the adapted layers of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}


def adapted_experts(model: nn.Module) -> dict[str, LoRAExperts]:
    """Return the adapted experts of a model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoRAExperts)}


def adapt_alike(other: PreTrainedModel, model: PreTrainedModel) -> None:
    """Give a model the same adapters as another one has, if any, but without values: for counting operations.

    Args:
        other: model with adapters, whole or cut.
        model: the same model, whole; changed in place.
    """
    layers, stacks = adapted_layers(other), adapted_experts(other)
    if one := next(iter([*layers.values(), *stacks.values()]), None):
        lora = LoRAConfig(
            rank=one.rank,
            alpha=one.alpha,
            rslora=one.rslora,
            target_modules=tuple(layers),
            target_parameters=tuple(map(updated_weight, stacks)),
        )
        add_adapters(model, Adapters(lora, (), None), TensorParts.whole(model))
        do_products_aside(model)


def merge_layers(model: nn.Module) -> None:
    """Add every update to its weight, and put plain frozen layers back."""
    for name, adapted in adapted_layers(model).items():
        plain = nn.Linear(adapted.in_features, adapted.out_features, bias=False, device="meta")
        plain.weight, plain.bias = nn.Parameter(adapted.merged(), requires_grad=False), adapted.bias
        model.set_submodule(name, plain)
    for layer in {updated_weight(name).rpartition(".")[0] for name in adapted_experts(model)}:
        experts = model.get_submodule(layer)
        for matrix, weight in merged_updates(experts).items():
            setattr(experts, matrix, nn.Parameter(weight, requires_grad=False))
        remove_updates(experts)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a snapshot of a model, which shares the frozen weights and copies the trained ones."""
    return copy.deepcopy(model, {id(weight): weight for weight in model.parameters() if not weight.requires_grad})


def short_names(model: PreTrainedModel) -> list[str]:
    """Return the shortest targets that match exactly the adapted layers: last parts of names, or full names."""
    chosen = set(adapted_layers(model))
    endings = sorted({name.rpartition(".")[2] for name in chosen})
    return endings if set(_named(endings, _linear_layers(model))) == chosen else sorted(chosen)


def short_parameters(model: PreTrainedModel) -> list[str]:
    """Return the shortest targets that match exactly the adapted matrices of experts; see `short_names`."""
    chosen = {updated_weight(name) for name in adapted_experts(model)}
    family = MIXTURES.get(str(model.config.model_type))
    endings = sorted({f"{family.experts}.{name.rpartition('.')[2]}" for name in chosen}) if family else []
    return endings if set(_named(endings, _stacks(model))) == chosen else sorted(chosen)


def _targets(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Return the names of the layers that targets match."""
    layers = _linear_layers(model)
    unknown = [name for name in wanted if name != ALL_LINEAR and not _named([name], layers)]
    if unknown:
        endings = {name.rpartition(".")[2] for name in layers}
        known = sorted(endings | set(layers))
        near = sorted({near for name in unknown for near in difflib.get_close_matches(name, known, n=3, cutoff=0.5)})
        raise ModelError(
            f"model.lora.target_modules: {', '.join(map(repr, unknown))} matches no linear layer in the decoder of "
            f"{type(model).__name__}; did you mean {', '.join(near or sorted(endings))}? Others are not adapted"
        )
    return layers if ALL_LINEAR in wanted else _named(wanted, layers)


def _expert_targets(model: PreTrainedModel, wanted: Sequence[str]) -> list[str]:
    """Return the names of the weights of experts that targets match."""
    stacks = _stacks(model)
    if unknown := [name for name in wanted if not _named([name], stacks)]:
        family = MIXTURES.get(str(model.config.model_type))
        endings = [f"{family.experts}.{matrix}" for matrix in MATRICES] if family else []
        remedy = f"expected {' or '.join(endings)}" if endings else (
            f"it has no experts; models of type {', '.join(MIXTURES)} have. Linear layers are model.lora.target_modules"
        )  # fmt: skip
        raise ModelError(
            f"model.lora.target_parameters: {', '.join(map(repr, unknown))} matches no matrices of experts in the "
            f"decoder of {type(model).__name__}; {remedy}"
        )
    return _named(wanted, stacks)


def _stacks(model: PreTrainedModel) -> list[str]:
    """Return the full names of the matrices of experts, in the order of the model."""
    family = MIXTURES.get(str(model.config.model_type))
    if family is None:
        return []
    inside = {id(module) for module in model.base_model.modules()}
    return [
        f"{name}.{matrix}" for name, module in model.named_modules()
        if id(module) in inside and name.endswith(f".{family.experts}") for matrix in MATRICES
    ]  # fmt: skip


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the full names of the decoder's linear layers, in the order of the model."""
    inside = {id(module) for module in model.base_model.modules()}
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and id(module) in inside
        and not name.endswith((".lora_A", ".lora_B"))
    ]  # fmt: skip


def _named(endings: Iterable[str], layers: Sequence[str]) -> list[str]:
    return [name for name in layers if any(name == ending or name.endswith(f".{ending}") for ending in endings)]
