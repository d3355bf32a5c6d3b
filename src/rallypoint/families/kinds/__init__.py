"""Kinds of layers, a file each: what one layer weighs, keeps, remembers and computes, as its config.json says.

Must not know: torch, devices, roles, other kinds. A decoder layer is a mixer, which moves tokens' content along a row,
and an MLP, which works on each token. Plans, caches and checks ask all kinds the same questions (`kind.py`) and name
none, so a new kind is one file and an entry below.

`read_layers` asks the kinds one after the other which layers are theirs; the last of each list takes what is left:

    layer                0        1        2        3
    LinearAttention      its      its      its      -
    Attention                                       its
    Experts              -        its      its      its         first_k_dense_replace=1
    MLP                  its

A variant of a kind is a field of it that `read` sets, such as a gate on attention's output; layers that differ in a
field, such as a window, are different layers of one kind.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rallypoint.families import FAMILIES
from rallypoint.families.family import Family
from rallypoint.families.kinds.attention import Attention
from rallypoint.families.kinds.experts import Experts
from rallypoint.families.kinds.kind import Kind, Mixer, PerToken
from rallypoint.families.kinds.latent_attention import LatentAttention
from rallypoint.families.kinds.linear_attention import LinearAttention
from rallypoint.families.kinds.mlp import MLP

__all__ = [
    "MIXERS",
    "MLP",
    "MLPS",
    "Attention",
    "Experts",
    "Kind",
    "LatentAttention",
    "Layers",
    "LinearAttention",
    "Mixer",
    "PerToken",
    "read_layers",
    "small_model",
]

MIXERS: tuple[type[Mixer], ...] = (LinearAttention, LatentAttention, Attention)
MLPS: tuple[type[PerToken], ...] = (Experts, MLP)

KindT = TypeVar("KindT", bound=Kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """Equal layers of a model."""

    count: int
    mixer: Mixer
    mlp: PerToken


def read_layers(values: Mapping[str, Any], family: Family | None) -> tuple[Layers, ...]:
    """Return the layers that the fields of a config.json tell of, equal ones together.

    Args:
        values: the fields.
        family: facts that config.json does not say; None of a family that is not known.

    Raises:
        KeyError, ValueError, TypeError: fields are missing or no numbers.
    """
    pairs = zip(_read(MIXERS, values, family), _read(MLPS, values, family), strict=True)
    return tuple(Layers(count, *pair) for pair, count in collections.Counter(pairs).items())


def small_model(model_type: str, values: Mapping[str, int]) -> dict[str, int]:
    """Return the fields of config.json of a small model, with layers of all kinds that its family has.

    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    >>> small_model("llama", sizes) == sizes | {"head_dim": 16}
    True
    >>> small_model("qwen3_moe", sizes)["num_experts"]
    8

    Args:
        model_type: of the family.
        values: plain fields, see `Kind.small`; others stay.
    """
    kinds: tuple[type[Kind], ...] = (*reversed(MIXERS), *reversed(MLPS))  # what is special comes last, and wins
    found = [kind.small(values, FAMILIES[model_type]) for kind in kinds]
    return {name: value for fields in (values, *found) for name, value in fields.items()}


def _read(kinds: Sequence[type[KindT]], values: Mapping[str, Any], family: Family | None) -> list[KindT]:
    """Return the kind of each layer: the first that it can be."""
    found = zip(*(kind.read(values, family) for kind in kinds), strict=True)
    possible = [[kind for kind in of_layer if kind is not None] for of_layer in found]
    return [first for first, *_ in possible]
