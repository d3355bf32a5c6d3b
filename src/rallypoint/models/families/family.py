"""What a family of models is to us: which of its matrices are cut, along which dimension.

A decoder layer is two blocks, attention and MLP. On every rank of a tensor-parallel group a block gets the whole input
and computes an addend of its output with what the rank has: heads, columns of the MLP. So each weight inside a block is
cut, or the gradient that a rank has of it is an addend too. Outside the blocks, every rank has and computes everything.
In a mixture of experts the experts are the block, and the router is outside.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping


class Cut(enum.Enum):
    """What a rank has of a module inside a block."""

    OUTPUTS = "some outputs: rows of the weight, and of the bias"
    INPUTS = "some inputs: columns of the weight; the bias is whole, and its gradient a sum over the ranks"
    SUMMED = "all of it, and the gradient is a sum over the ranks"


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Models that are built alike."""

    model_type: str
    """As in config.json."""
    blocks: Mapping[str, Mapping[str, Cut]]
    """Block of a decoder layer -> its modules -> what a rank has of them."""
    experts: str | None = None
    """Where a layer has experts, if it has any; they take the place of the block that they are in."""
    caps_logits: bool = False
    """Whether its config has a `final_logit_softcapping`."""


ATTENTION = {"q_proj": Cut.OUTPUTS, "k_proj": Cut.OUTPUTS, "v_proj": Cut.OUTPUTS, "o_proj": Cut.INPUTS}
"""A rank has some heads."""
HEAD_NORMS = {"q_norm": Cut.SUMMED, "k_norm": Cut.SUMMED}
"""Norms of single heads, with weights that all heads share."""
GATED_MLP = {"gate_proj": Cut.OUTPUTS, "up_proj": Cut.OUTPUTS, "down_proj": Cut.INPUTS}
