"""The head and the embedding of which every rank of a tensor-parallel group has a part of the vocabulary.

Owns: which tokens are whose, and how logprobs and entropies of all tokens follow from those of the parts. Must not
know: how a part is computed, or what is done with the results.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rallypoint.models.head import head_statistics
from rallypoint.parallel import Collective, reduce, replicate


def vocabulary_of(rank: int, num_ranks: int, num_tokens: int) -> range:
    """Return the tokens of a rank; ranks differ by one token at most.

    >>> [vocabulary_of(rank, 3, 20) for rank in range(3)]
    [range(0, 6), range(6, 13), range(13, 20)]
    """
    return range(num_tokens * rank // num_ranks, num_tokens * (rank + 1) // num_ranks)


class VocabParallelLinear(nn.Linear):
    """A head that has the weights of some tokens: its forward pass returns their logits only."""

    def __init__(self, part: nn.Linear, tokens: range, tp: Collective) -> None:
        """Take over this rank's part of a head.

        Args:
            part: with the weights of the tokens only.
            tokens: which.
            tp: the ranks that have the others.
        """
        super().__init__(part.in_features, len(tokens), device="meta")
        self.weight, self.bias = part.weight, part.bias
        self.tokens, self.tp = tokens, tp


def vocab_parallel_outputs(
    states: Tensor,
    head: VocabParallelLinear,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return on every rank what `head_outputs` returns for the whole vocabulary: logprobs and entropies, [N] each.

    With w the share of all probability that a rank's tokens have, and the logprob and entropy among these alone:

        logprob = logprob_of_part + log(w)        entropy = sum over ranks of w * (entropy_of_part - log(w))

    Ranks exchange numbers of [N], and in the backward pass the gradient of the states.

    Args:
        states: [N, E] that chose the tokens; the same on every rank.
        head: this rank's part.
        targets: [N] int64, the tokens.
        temperature: that the logits are divided by.
        softcap: see `head_outputs`.
        chunk_bytes: of this rank's logits that may exist at once; None: as the kind of device likes it.
    """
    tokens, tp = head.tokens, head.tp
    own = (targets >= tokens.start) & (targets < tokens.stop)
    logprobs, entropy, normaliser = head_statistics(
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
    # Each rank's part of the results depends on the total: their gradients add up.
    log_share = normaliser - replicate(largest + total.log(), tp)
    logprobs = torch.where(own, logprobs + log_share, 0.0)
    logprobs, entropy = reduce(torch.stack([logprobs, log_share.exp() * (entropy - log_share)]), tp)
    return logprobs, entropy
