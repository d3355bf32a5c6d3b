"""A family of models: the modules of its decoder, by their names in transformers.

A decoder layer has two blocks, attention and MLP. On every rank of a tensor-parallel group, a block gets the whole
input and computes a term of its output from the rank's part: heads, or columns of the MLP. So a weight inside a block
is either cut, or its gradient is summed over ranks. Outside the blocks, every rank has and computes everything. In a
mixture the experts are a block, and the MLP beside them is one; the router is outside.

Only facts, without torch or transformers: configs are checked against them before anything is loaded. Classes of
modules are named where ours compute the same; transformers' own code runs for all others.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Cut(enum.Enum):
    """The part of a module inside a block that a rank has."""

    OUTPUTS = "outputs"
    """Some outputs: rows of the weight, and of the bias; or some of one weight's numbers, as of heads."""
    INPUTS = "inputs"
    """Some inputs: columns of the weight; the bias is whole, and its gradient a sum over the ranks."""
    SUMMED = "summed"
    """All of it, and the gradient is a sum over the ranks."""


CUTS = {
    # A rank has some heads.
    "attention": {"q_proj": Cut.OUTPUTS, "k_proj": Cut.OUTPUTS, "v_proj": Cut.OUTPUTS, "o_proj": Cut.INPUTS},
    # All heads share the weights of their norms.
    "head_norms": {"q_norm": Cut.SUMMED, "k_norm": Cut.SUMMED},
    # Of linear attention, beside the products with its inputs: a rank has some key heads, and their value heads.
    "delta_rule": dict.fromkeys(("conv1d", "A_log", "dt_bias"), Cut.OUTPUTS)
    | {"norm": Cut.SUMMED, "out_proj": Cut.INPUTS},
    "gated_mlp": {"gate_proj": Cut.OUTPUTS, "up_proj": Cut.OUTPUTS, "down_proj": Cut.INPUTS},
}
"""Modules that blocks of many families have, by a name for them."""


def _joined(parts: Sequence[str | Mapping[str, Cut]]) -> dict[str, Cut]:
    """Return the modules of a block, which is written as names of `CUTS` and modules of its own."""
    return {name: cut for part in parts for name, cut in (CUTS[part] if isinstance(part, str) else part).items()}


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Norm(_Facts):
    """An RMSNorm of transformers: x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    eps: str = "variance_epsilon"
    """Name of the attribute with its eps."""
    offset: float = 0.0


class Family(_Facts):
    """Models with the same modules."""

    blocks: Mapping[str, Annotated[Mapping[str, Cut], BeforeValidator(_joined)]]
    """Block of a decoder layer -> its modules, of which some models may lack some -> the part that a rank has."""
    norms: Mapping[str, Norm] = {}
    """Classes of norms that are an RMSNorm."""
    attentions: Mapping[str, str | None] = {}
    """Classes of attentions that differ from Llama's only in a window, biases, or norms of heads -> the attribute with
    the number of tokens that each sees, itself included; None if all see all."""
    mlps: tuple[str, ...] = ()
    """Classes of MLPs that are down(act(gate(x)) * up(x)), with a `config.hidden_act`."""
    routers: tuple[str, ...] = ()
    """Classes of routers that choose by softmax, as in Qwen3-MoE; shares add up to 1 if they do not say otherwise."""
    biased_routers: tuple[str, ...] = ()
    """Classes of routers that choose by sigmoid and a bias of each expert, as in DeepSeek-V3."""
    within: str | None = None
    """Value of `model_type` of models that see as well, whose files hold it as their `language_model`."""
    linear_attentions: tuple[str, ...] = ()
    """Classes of layers that compute the gated delta rule as in Qwen3.5."""
    has_latents: bool = False
    """Whether keys and values of all heads are products of one latent of a token, as in DeepSeek-V3."""
    grouped: tuple[str, ...] = ()
    """Modules of these with all queries, keys and values, one below the other in files; see `linear_attention`."""
    experts: str | None = None
    """Name of the experts in a layer; they take the place of the block that contains them."""
    stored_experts: Mapping[str, tuple[str, ...]] = {}
    """Weight of the experts -> its matrices, one below the other, which files have for each expert separately."""
    stacks_experts: bool = False
    """Whether published files have all experts of a layer in one tensor instead; both forms are read."""
    is_plain: bool = False
    """Whether its layers differ from Llama's only in biases and norms of heads, so that the plain decoder can run
    them."""
    gates_attention: bool = False
    """Whether what comes out of attention has a gate, if config.json does not say."""
    has_biases: bool = False
    """Whether all products of a layer have biases, those of experts and routers, too."""
    small_experts: Mapping[str, bool | int | Literal["quarter"]] = {}
    """Fields of config.json of a small mixture: 8 experts of a quarter of the width inside an MLP, two for a token."""
    caps_logits: bool = False
    """Whether its config has a `final_logit_softcapping`."""
    ties_embeddings: bool = False
    """Whether embedding and head are tied if config.json does not say."""

    @property
    def has_sinks(self) -> bool:
        """Whether heads have sinks, see `rallypoint.models.sinks`."""
        return any("sinks" in block for block in self.blocks.values())

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normalized."""
        return any(CUTS["head_norms"].keys() <= block.keys() for block in self.blocks.values())
