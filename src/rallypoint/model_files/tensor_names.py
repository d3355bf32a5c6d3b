"""The names of weights in Hugging Face files, by families.

Most families store every weight under its own name. The experts of a layer are one tensor in memory; in files they are
that, or one or two tensors for each expert. Channels of linear attention are in memory by key heads, and in files all
queries, all keys, then all values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from rallypoint.families import FAMILIES
from rallypoint.model_files.pieces import Piece, Sources, same_names
from rallypoint.models.lora import is_adapter_weight
from rallypoint.models.part import Part


def by_key_heads(num_heads: int, widths: Sequence[int], name: str, shape: Sequence[int]) -> Sequence[Piece]:
    """Return the pieces of a weight whose rows are by key heads in memory.

    >>> pieces = by_key_heads(2, [1, 1, 2], "in_proj_qkv.weight", [8, 4])
    >>> [(piece.stored.starts[0], piece.part.starts[0], piece.part.sizes[0]) for piece in pieces]
    [(0, 0, 1), (1, 4, 1), (2, 1, 1), (3, 5, 1), (4, 2, 2), (6, 6, 2)]

    Args:
        num_heads: key heads.
        widths: rows of the query, the key and the values of a key head.
        name: of the weight.
        shape: of the whole weight.
    """
    whole, pieces, first = Part.whole(shape), list[Piece](), 0
    for place, width in enumerate(widths):
        for head in range(num_heads):
            start = head * sum(widths) + sum(widths[:place])
            pieces.append(Piece(name, whole.rows(start, start + width), whole.rows(first, first + width)))
            first += width
    return pieces


def experts_apart(matrices: Mapping[str, Sequence[str]], name: str, shape: Sequence[int]) -> Sequence[Piece]:
    """Return the pieces of a weight of experts where files have each expert's matrices by themselves; of others, none.

    >>> qwen = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    >>> [piece.tensor for piece in experts_apart(qwen, "mlp.experts.gate_up_proj", [2, 8, 4])]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['mlp.experts.0.gate_proj.weight', 'mlp.experts.0.up_proj.weight',
     'mlp.experts.1.gate_proj.weight', 'mlp.experts.1.up_proj.weight']

    Args:
        matrices: see `Family.stored_experts`.
        name: of the weight.
        shape: of the whole weight.
    """
    layer, _, kind = name.rpartition(".experts.")
    stored = matrices.get(kind) if layer else None
    if stored is None:
        return ()
    return [
        Piece(
            f"{layer}.experts.{expert}.{matrix}.weight",
            Part.whole(shape).rows(expert, expert + 1).cut(1, index, len(stored)),
            Part.whole([shape[1] // len(stored), shape[2]]),
        )
        for expert in range(shape[0])
        for index, matrix in enumerate(stored)
    ]


def own_names(model: PreTrainedModel) -> Sources:
    """Return the places of a model's weights in files that have each of them under its own name.

    So have those of adapters, and those of optimizers: what they keep of a weight is called `weight/what`.
    """
    family, config = FAMILIES.get(str(model.config.model_type)), model.config.get_text_config()

    def find(name: str, shape: Sequence[int]) -> Sequence[Piece]:
        module = name.partition("/")[0].rpartition(".")[0].removesuffix(".lora_B")
        if family is None or not shape or not module.endswith(family.grouped or ("\0",)):
            return same_names(name, shape)
        num_heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // num_heads * config.linear_value_head_dim
        return by_key_heads(num_heads, [key_dim, key_dim, values], name, shape)

    return find


def sources_of(model: PreTrainedModel) -> Sources:
    """Return the names of a model's weights in the files that are written; adapters have files of their own."""
    return forms_of(model)[0]


def forms_of(model: PreTrainedModel) -> Sequence[Sources]:
    """Return the names of a model's weights in all files that can be read, those that are written first."""
    family, own = FAMILIES.get(str(model.config.model_type)), own_names(model)
    matrices = {} if family is None else family.stored_experts

    def stacked(name: str, shape: Sequence[int]) -> Sequence[Piece]:
        return () if is_adapter_weight(name) else own(name, shape)

    def apart(name: str, shape: Sequence[int]) -> Sequence[Piece]:
        return experts_apart(matrices, name, shape) or stacked(name, shape)

    if not matrices:
        return [stacked]
    return [stacked, apart] if family is not None and family.stacks_experts else [apart, stacked]
