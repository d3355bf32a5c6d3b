"""What a family of models is to us: what its decoder is built of, by the names that transformers has for it.

A decoder layer is two blocks, attention and MLP. On every rank of a tensor-parallel group a block gets the whole input
and computes an addend of its output with what the rank has: heads, columns of the MLP. So each weight inside a block is
cut, or the gradient that a rank has of it is an addend too. Outside the blocks, every rank has and computes everything.
In a mixture of experts the experts are the block, and the router is outside.

Facts only, without torch or transformers: a config is checked against them before anything is loaded. Classes of
modules are named where ours compute the same; a class that no family names stays what it is, and works as well.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias


class Cut(enum.Enum):
    """What a rank has of a module inside a block."""

    OUTPUTS = "some outputs: rows of the weight, and of the bias"
    INPUTS = "some inputs: columns of the weight; the bias is whole, and its gradient a sum over the ranks"
    SUMMED = "all of it, and the gradient is a sum over the ranks"


@dataclasses.dataclass(frozen=True, slots=True)
class Norm:
    """An RMSNorm of transformers: x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    eps: str = "variance_epsilon"
    """The attribute with its eps."""
    offset: float = 0.0


Window: TypeAlias = Callable[[Any], int | None]
"""(an attention) -> the tokens that it looks back, itself among them; None for all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Models that are built alike."""

    model_type: str
    """As in config.json."""
    blocks: Mapping[str, Mapping[str, Cut]]
    """Block of a decoder layer -> its modules -> what a rank has of them."""
    norms: Mapping[str, Norm] = dataclasses.field(default_factory=dict[str, Norm])
    """Classes of its norms that are an RMSNorm."""
    attentions: Mapping[str, Window] = dataclasses.field(default_factory=dict[str, Window])
    """Classes of its attentions that are Llama's but for a window, biases, or norms of heads."""
    mlps: tuple[str, ...] = ()
    """Classes of its MLPs that are down(act(gate(x)) * up(x)), with a `config.hidden_act`."""
    routers: tuple[str, ...] = ()
    """Classes of its routers that choose by softmax as Qwen3-MoE's do."""
    experts: str | None = None
    """Where a layer has experts, if it has any; they take the place of the block that they are in."""
    stored_experts: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict[str, tuple[str, ...]])
    """Weight of the experts -> its matrices, one below the other, that a file has of each expert apart."""
    is_plain: bool = False
    """Whether its layers are Llama's but for biases and norms of heads: tokens are drawn in fewer operations then."""
    caps_logits: bool = False
    """Whether its config has a `final_logit_softcapping`."""
    ties_embeddings: bool = False
    """Whether embedding and head are one matrix where config.json does not say."""

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed."""
        return any(HEAD_NORMS.keys() <= block.keys() for block in self.blocks.values())


ATTENTION = {"q_proj": Cut.OUTPUTS, "k_proj": Cut.OUTPUTS, "v_proj": Cut.OUTPUTS, "o_proj": Cut.INPUTS}
"""A rank has some heads."""
HEAD_NORMS = {"q_norm": Cut.SUMMED, "k_norm": Cut.SUMMED}
"""Norms of single heads, with weights that all heads share."""
GATED_MLP = {"gate_proj": Cut.OUTPUTS, "up_proj": Cut.OUTPUTS, "down_proj": Cut.INPUTS}


def no_window(attention: Any) -> None:
    """Look back on everything."""
    del attention


def own_window(attention: Any) -> int | None:
    """Ask an attention that knows, since layers may differ."""
    return attention.sliding_window
