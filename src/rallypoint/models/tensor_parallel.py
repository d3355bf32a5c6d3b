"""Tensor parallelism: a model cut over ranks by heads, columns of the MLP, experts and vocabulary.

Owns: the rectangle of every weight that a rank has, and the collectives: at the entry of a block (backward), at its
exit (forward), after the embedding, and in the head. Must not know: where weights come from, or how gradients become a
step. No model code changes: modules stay, with smaller weights and with hooks.

Invariant: outside the blocks, all ranks compute the same numbers from the same weights, bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from rallypoint.config.shape import misfit_of
from rallypoint.errors import ModelError
from rallypoint.families import FAMILIES, Cut, Family
from rallypoint.models.head import head_outputs, likeliest, lm_head
from rallypoint.models.kinds.linear_attention import keep_heads
from rallypoint.models.part import Part
from rallypoint.parallel import Collective, reduce, replicate


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParts:
    """The parts of a model that a rank has after the cut."""

    parts: Mapping[str, Part]
    """Name of every parameter (the first one, if tied) -> the part that the rank has."""
    summed: frozenset[str]
    """Parameters that every rank has whole, and whose gradient is the sum over the ranks."""
    dealt: frozenset[str] = frozenset()
    """Parameters of experts, if these are dealt over `ep`."""

    @classmethod
    def whole(cls, model: nn.Module) -> TensorParts:
        """Return the parts of a model that is not cut."""
        return cls({name: Part.whole(weight.shape) for name, weight in model.named_parameters()}, frozenset())


def cut_model(model: PreTrainedModel, family: Family, tp: Collective) -> TensorParts:
    """Cut a model for one rank, in place.

    Args:
        model: whole; on the meta device or any other.
        family: of the model.
        tp: the ranks.

    Raises:
        ModelError: a size does not divide by the number of ranks, or a weight is not in the family's plan.
    """
    cutter = Cutter(type(model).__name__, tp, "tp")
    if tp.size > 1:
        _check_heads(model, tp)
        cutter.cut_vocabulary(model)
        for layer in cast("nn.ModuleList", model.base_model.layers):
            modules = dict(layer.named_modules())
            for name, plan in family.blocks.items():
                if family.experts in modules and str(family.experts).startswith(f"{name}."):
                    cutter.cut_experts(modules[str(family.experts)])
                elif name in modules:  # a layer has attention of one kind
                    cutter.cut_block(modules[name], plan)
                    keep_heads(modules[name], tp.size)
    names = {weight: name for name, weight in model.named_parameters()}
    parts = {name: cutter.parts.get(weight, Part.whole(weight.shape)) for weight, name in names.items()}
    return TensorParts(parts, frozenset(names[weight] for weight in cutter.summed))


def _check_heads(model: PreTrainedModel, tp: Collective) -> None:
    """Refuse to cut within a head, which the shapes of the projections do not show."""
    heads = {
        "attention heads": cast("int", model.config.num_attention_heads),
        "key/value heads": cast("int", model.config.num_key_value_heads),
    }
    if num_keys := getattr(model.config, "linear_num_key_heads", None):
        heads["key heads of linear attention"] = num_keys
    if misfit := misfit_of(tp.size, heads):
        raise ModelError(f"{type(model).__name__}: tp={misfit}")


class Cutter:
    """Cuts one model along an axis of the mesh, and records the parts."""

    def __init__(self, model_name: str, ranks: Collective, axis: str) -> None:
        self._model_name, self._ranks, self._axis = model_name, ranks, axis
        self.parts: dict[nn.Parameter, Part] = {}
        self.summed: set[nn.Parameter] = set()

    def cut_vocabulary(self, model: PreTrainedModel) -> None:
        """Give the rank the embeddings and logits of some tokens; tied weights stay one."""
        embedding, head = cast("nn.Embedding", model.get_input_embeddings()), model.get_output_embeddings()
        tied = isinstance(head, nn.Linear) and head.weight is embedding.weight
        num_tokens = embedding.num_embeddings
        tokens = vocabulary_of_rank(self._ranks.rank, self._ranks.size, num_tokens)
        self._narrow(embedding, "weight", 0, tokens)
        embedding.num_embeddings = len(tokens)
        if embedding.padding_idx is not None:
            padding = embedding.padding_idx
            embedding.padding_idx = padding - tokens.start if padding in tokens else None
        _look_up_own_tokens(embedding, tokens, self._ranks)
        if head is None:
            return
        if type(head) is not nn.Linear:
            raise ModelError(f"{self._model_name} has a {type(head).__name__} for its head; expected a plain nn.Linear")
        if tied:
            head.weight = embedding.weight
        else:
            self._narrow(head, "weight", 0, tokens)
        if head.bias is not None:
            self._narrow(head, "bias", 0, tokens)
        model.set_output_embeddings(VocabParallelLinear(head, num_tokens, self._ranks))

    def cut_block(self, block: nn.Module, plan: Mapping[str, Cut]) -> None:
        """Give the rank its part of a block, which still takes the whole input and returns the whole output."""
        unknown = [name for name, _ in block.named_parameters() if name.split(".")[0] not in plan]
        if unknown:
            raise ModelError(
                f"{self._model_name}: {', '.join(unknown)} of {type(block).__name__} cannot be cut over ranks (tp > 1)"
            )
        cuts = {Cut.OUTPUTS: self._cut_outputs, Cut.INPUTS: self._cut_inputs, Cut.SUMMED: self._sum}
        there = {name.split(".")[0] for name, _ in block.named_parameters()}
        for name, cut in plan.items():
            if name in there:
                cuts[cut](block, name)
        _share_block(block, self._ranks)

    def cut_experts(self, experts: nn.Module) -> None:
        """Give the rank some experts; their module still takes all tokens and returns the output of all experts."""
        _share_experts(experts, self.narrow_experts(experts), self._ranks)

    def narrow_experts(self, experts: nn.Module) -> range:
        """Give the rank some experts, and return which."""
        weights = dict(experts.named_parameters())
        num_experts = len(next(iter(weights.values())))
        own = self._own(num_experts, "experts")
        for name in weights:
            self._narrow(experts, name, 0, own)
        experts.num_experts = len(own)  # pyright: ignore[reportArgumentType]
        return own

    def _cut_outputs(self, block: nn.Module, name: str) -> None:
        if name in (own := dict(block.named_parameters(recurse=False))):  # a number of each head
            self._narrow(block, name, 0, self._own(len(own[name]), name))
            return
        linear = cast("nn.Linear", block.get_submodule(name))
        own = self._own(linear.weight.shape[0], f"outputs of {name}")
        for weight_name, _ in list(linear.named_parameters(recurse=False)):
            self._narrow(linear, weight_name, 0, own)
        linear.out_features = len(own)

    def _cut_inputs(self, block: nn.Module, name: str) -> None:
        linear = cast("nn.Linear", block.get_submodule(name))
        own = self._own(linear.weight.shape[1], f"inputs of {name}")
        self._narrow(linear, "weight", 1, own)
        linear.in_features = len(own)
        if linear.bias is not None:
            self.summed.add(linear.bias)
            setattr(block, name, AddendLinear(linear, adds_bias=self._ranks.rank == 0))

    def _sum(self, block: nn.Module, name: str) -> None:
        self.summed.update(block.get_submodule(name).parameters())

    def _own(self, size: int, what: str) -> range:
        """Return this rank's equal part of a size."""
        if misfit := misfit_of(self._ranks.size, {what: size}):
            raise ModelError(f"{self._model_name}: {self._axis}={misfit}")
        part = size // self._ranks.size
        return range(part * self._ranks.rank, part * (self._ranks.rank + 1))

    def _narrow(self, module: nn.Module, name: str, dim: int, own: range) -> None:
        """Replace a parameter by some of its indices along a dimension."""
        whole = module.get_parameter(name)
        part = Part.whole(whole.shape).narrow(dim, own.start, len(own))
        weight = nn.Parameter(whole.detach().narrow(dim, own.start, len(own)).clone(), whole.requires_grad)
        setattr(module, name, weight)
        self.parts[weight] = part


class AddendLinear(nn.Linear):
    """A linear layer whose outputs are summed over ranks: all ranks have the bias, and one adds it."""

    def __init__(self, part: nn.Linear, *, adds_bias: bool) -> None:
        super().__init__(part.in_features, part.out_features, device="meta")
        self.weight, self.bias, self.adds_bias = part.weight, part.bias, adds_bias

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - the name in torch; see the class
        return functional.linear(input, self.weight, self.bias if self.adds_bias else None)


def _share_block(block: nn.Module, tp: Collective) -> None:
    """Sum the gradients of a block's input, and the ranks' terms of its output."""

    def enter(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (replicate(args[0], tp), *args[1:]), options
        return args, options | {"hidden_states": replicate(options["hidden_states"], tp)}

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del args
        return (reduce(output[0], tp), *output[1:]) if isinstance(output, tuple) else reduce(output, tp)

    block.register_forward_pre_hook(enter, with_kwargs=True)
    block.register_forward_hook(leave)


def _look_up_own_tokens(embedding: nn.Embedding, tokens: range, tp: Collective) -> None:
    """Have an embedding look up its own tokens, and sum over ranks for the others."""
    foreign: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        foreign.append((args[0] < tokens.start) | (args[0] >= tokens.stop))
        return ((args[0] - tokens.start).masked_fill(foreign[-1], 0),)

    def after(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        del args
        return reduce(output.masked_fill(foreign.pop().unsqueeze(-1), 0.0), tp)

    embedding.register_forward_pre_hook(before)
    embedding.register_forward_hook(after)


def _share_experts(experts: nn.Module, own: range, tp: Collective) -> None:
    """Renumber experts: this rank's own from 0, and all others after them."""

    def enter(_: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        states, chosen, shares = args
        return replicate(states, tp), renumbered(chosen, own), replicate(shares, tp)

    def leave(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del args
        return reduce(output, tp)

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(leave)


def renumbered(chosen: Tensor, own: range) -> Tensor:
    """Return experts numbered from the first own one; all others are after the last.

    >>> renumbered(torch.tensor([0, 4, 5, 7]), range(4, 6)).tolist()
    [2, 0, 1, 2]
    """
    foreign = (chosen < own.start) | (chosen >= own.stop)
    return (chosen - own.start).masked_fill(foreign, len(own))


def vocabulary_of_rank(rank: int, num_ranks: int, num_tokens: int) -> range:
    """Return the part of the vocabulary of a rank; sizes differ by at most one token.

    >>> [vocabulary_of_rank(rank, 3, 20) for rank in range(3)]
    [range(0, 6), range(6, 13), range(13, 20)]
    """
    return range(num_tokens * rank // num_ranks, num_tokens * (rank + 1) // num_ranks)


class VocabParallelLinear(nn.Linear):
    """A head with the weights of some tokens, whose forward pass returns only their logits."""

    def __init__(self, part: nn.Linear, num_tokens: int, tp: Collective) -> None:
        """Take over this rank's part of a head.

        Args:
            part: head with the weights of this rank's tokens, see `vocabulary_of_rank`.
            num_tokens: V: of all ranks.
            tp: the ranks.
        """
        tokens = vocabulary_of_rank(tp.rank, tp.size, num_tokens)
        super().__init__(part.in_features, len(tokens), device="meta")
        self.weight, self.bias = part.weight, part.bias
        self.tokens, self.num_tokens, self.tp = tokens, num_tokens, tp

    def all_logits(self, states: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, with the same bits on every rank: [B, E] -> [B, V]."""
        sizes = [len(vocabulary_of_rank(rank, self.tp.size, self.num_tokens)) for rank in range(self.tp.size)]
        parts = self.tp.all_gather(self(states).t(), sizes)
        return torch.cat([part.t() for part in parts], 1)


def vocab_parallel_outputs(
    states: Tensor,
    head: VocabParallelLinear,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return logprobs and entropies as `head_outputs` does, for the whole vocabulary on every rank.

    With w the total probability of a rank's tokens, and logprobs and entropies of each part by itself:

        logprob = logprob_of_part + log(w)        entropy = sum over ranks of w * (entropy_of_part - log(w))

    Ranks exchange tensors of [N], or [N, M] with targets of that shape, and the gradient of the states in the backward
    pass.

    Args:
        states: [N, E] that chose the tokens; equal on every rank.
        head: this rank's part.
        targets: [N] or [N, M] int64, the tokens.
        temperature: that the logits are divided by.
        softcap: see `head_outputs`.
        chunk_bytes: bound on this rank's logits in one product; None for the device's default.
    """
    tokens, tp = head.tokens, head.tp
    own = (targets >= tokens.start) & (targets < tokens.stop)
    logprobs, entropy, normaliser = head_outputs(
        replicate(states, tp),
        head.weight,
        head.bias,
        (targets - tokens.start).clamp(0, len(tokens) - 1),
        temperature,
        softcap=softcap,
        chunk_bytes=chunk_bytes,
    )
    largest = normaliser.detach().clone()
    tp.all_reduce_max(largest)
    total = reduce((normaliser - largest).exp(), tp)
    # The results of every rank depend on the total, so that its gradients are summed.
    log_share = normaliser - replicate(largest + total.log(), tp)
    # With a token for each state both are of one shape, and one sum does.
    entropy = log_share.exp() * (entropy - log_share)
    if targets.dim() > 1:
        logprobs = torch.where(own, logprobs + log_share.unsqueeze(1), 0.0)
        return reduce(logprobs, tp), reduce(entropy, tp)
    logprobs, entropy = reduce(torch.stack([torch.where(own, logprobs + log_share, 0.0), entropy]), tp)
    return logprobs, entropy


def vocab_parallel_likeliest(
    states: Tensor, head: VocabParallelLinear, targets: Tensor, temperature: float, num: int, *, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `likeliest` for the whole vocabulary on every rank: of the likeliest of each part."""
    tokens, tp = head.tokens, head.tp
    own = (targets >= tokens.start) & (targets < tokens.stop)
    local = (targets - tokens.start).clamp(0, len(tokens) - 1)
    chosen, most, ids, normaliser = likeliest(states, head.weight, head.bias, local, temperature, num, softcap=softcap)
    largest = normaliser.clone()
    tp.all_reduce_max(largest)
    total, chosen = (normaliser - largest).exp(), torch.where(own, chosen, 0.0)
    tp.all_reduce_sum([total, chosen])
    sizes = [len(states)] * tp.size
    most, place = torch.cat(tp.all_gather(most, sizes), 1).topk(num, dim=-1)
    ids = torch.cat(tp.all_gather(ids + tokens.start, sizes), 1).gather(1, place)
    return chosen, most, ids, largest + total.log()


def peers_of(model: PreTrainedModel) -> Collective:
    """Return the ranks over which a language model is cut: they make every pass together."""
    head = model.get_output_embeddings()
    return head.tp if isinstance(head, VocabParallelLinear) else Collective()


def whole_logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary, of a model that may be cut, before a softcap: [B, E] -> [B, V]."""
    head = lm_head(model)
    return head.all_logits(states) if isinstance(head, VocabParallelLinear) else head(states)


def family_of(model_type: str) -> Family:
    """Return a family by the `model_type` of its config.json.

    Raises:
        ModelError: it is not known.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"models of type {model_type!r} cannot be cut over ranks (tp > 1); those of type {', '.join(FAMILIES)} can"
        )
    return FAMILIES[model_type]
