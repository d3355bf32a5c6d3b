"""A policy so small that expectations over its responses are sums: what a loss gives in the mean is compared exactly.

    from rallypoint.algorithms import ADVANTAGES, weigh
    from enumerable_policy import POLICY

    def loss(logprobs, batch):
        advantages = weigh(batch, ADVANTAGES["rloo"](whiten=False), kl=None).advantages
        return -(logprobs * advantages).sum()

    found = POLICY.expected_gradient(loss, group_size=2)
    found.allclose(-POLICY.gradient_of(POLICY.mean_reward))     # True: it climbs the mean reward

Owns: this policy, its groups, and gradients of them. Must not know: any advantage, loss or KL.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from rallypoint.types import JudgedBatch
from rallypoint.types.carrier import offsets_from_lengths

Response = tuple[int, ...]
Divergence = Literal["reverse", "forward", "variation"]
"""KL(policy || reference), KL(reference || policy), or the sum of |policy - reference|: twice the total variation."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EnumerablePolicy:
    """Responses are two tokens of K: K logits for the first one, and K for the second one after each first.

    With a `stop_token`, responses that begin with it are of this token alone.
    Row 0 of a table is about the first token; row 1 + a about the second one after token a.
    """

    logits: Tensor
    """[1+K, K] float64, by which expectations are taken and gradients are."""
    reference: Tensor
    """[1+K, K] logprobs of the reference."""
    rewards: Tensor
    """[K, K] reward of each response, on its last token; of one token, the mean of its row."""
    values: Tensor
    """[1+K] what a critic says before each token."""
    stop_token: int | None = None
    """The first token that ends a response; None if all have two."""

    @classmethod
    def random(cls, num_tokens: int, seed: int) -> EnumerablePolicy:
        """Return one of random numbers."""
        shapes = [
            (1 + num_tokens, num_tokens),
            (1 + num_tokens, num_tokens),
            (num_tokens, num_tokens),
            (1 + num_tokens,),
        ]
        logits, reference, rewards, values = (
            torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + index))
            for index, shape in enumerate(shapes)
        )
        return cls(logits=logits, reference=reference.log_softmax(-1), rewards=rewards, values=values)

    @property
    def responses(self) -> list[Response]:
        """Every response that there is."""
        tokens = range(len(self.rewards))
        pairs = [(first, second) for first in tokens if first != self.stop_token for second in tokens]
        return [*pairs] if self.stop_token is None else [(self.stop_token,), *pairs]

    @property
    def logprobs(self) -> Tensor:
        """[1+K, K] of the policy."""
        return self.logits.log_softmax(-1)

    def token_logprobs(self, table: Tensor, response: Response) -> Tensor:
        """Return logprobs of the tokens of a response, by a table: [2], or [1] if it stops."""
        seen = (0, *(1 + token for token in response))
        return torch.stack([table[row, token] for row, token in zip(seen, response, strict=False)])

    def batch(self, responses: Sequence[Response], *, sampler: Tensor | None = None) -> JudgedBatch:
        """Return a group: one prompt of one token, and these responses.

        Args:
            responses: of the group.
            sampler: [1+K, K] logprobs of the policy that sampled them; None: the policy itself.
        """
        num = len(responses)
        old = self.stream(self.logprobs if sampler is None else sampler, responses)
        lengths = [len(response) for response in responses]
        rewards = [x for response in responses for x in (*[0.0] * len(response), float(self.rewards[response].mean()))]
        return JudgedBatch(
            offsets=offsets_from_lengths(1 + torch.tensor(lengths)),
            tokens=torch.tensor([token for response in responses for token in (0, *response)]),
            loss_mask=torch.tensor([place > 0 for length in lengths for place in range(1 + length)]),
            rollout_logprobs=old,
            prompt_index=torch.zeros(num, dtype=torch.int64),
            sample_index=torch.arange(num),
            versions=torch.zeros(num, dtype=torch.int64),
            truncated=torch.zeros(num, dtype=torch.bool),
            token_rewards=torch.tensor(rewards, dtype=torch.float64),
            old_logprobs=old,
            reference_logprobs=self.stream(self.reference, responses),
        )

    def stream(self, table: Tensor, responses: Sequence[Response]) -> Tensor:
        """Return the logprobs of a group's tokens, by a table; 0 for prompts: [T]."""
        nothing = torch.zeros(1, dtype=torch.float64)
        return torch.cat([x for response in responses for x in (nothing, self.token_logprobs(table, response))])

    def state_values(self, responses: Sequence[Response]) -> Tensor:
        """Return what the critic says before each of a group's tokens; 0 for prompts: [T]."""
        values = self.values.tolist()
        found = [x for response in responses for x in (0.0, values[0], *(values[1 + t] for t in response[:-1]))]
        return torch.tensor(found, dtype=torch.float64)

    def expected_gradient(
        self,
        loss: Callable[[Tensor, JudgedBatch], Tensor],
        *,
        group_size: int = 1,
        sampler: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of a loss by the logits, a rollout, in expectation over all groups: [1+K, K].

        Args:
            loss: (the policy's logprobs of a group's tokens, with gradient: [T], the group) -> the sum that is
                minimised, of a loss that does not depend on the order of rows.
            group_size: responses in a group.
            sampler: [1+K, K] logprobs of the policy that samples; None: the policy itself.
        """
        sampled = self.logprobs if sampler is None else sampler
        logits = self.logits.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        # Each group in one order only, for the order of rows changes no result.
        for responses in itertools.combinations_with_replacement(self.responses, group_size):
            num_orders = math.factorial(group_size) // math.prod(map(math.factorial, Counter(responses).values()))
            logprob = math.fsum(float(self.token_logprobs(sampled, response).sum()) for response in responses)
            batch = self.batch(responses, sampler=sampler)
            found = loss(self.stream(logits.log_softmax(-1), responses), batch)
            total = total + num_orders * math.exp(logprob) / group_size * found
        return torch.autograd.grad(total, logits)[0]

    def gradient_of(self, objective: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the gradient by the logits of a function of the table of logprobs: [1+K, K]."""
        logits = self.logits.clone().requires_grad_()
        return torch.autograd.grad(objective(logits.log_softmax(-1)), logits)[0]

    def mean_reward(self, table: Tensor) -> Tensor:
        """Return the expected reward, by a table of logprobs."""
        terms = [self.token_logprobs(table, r).sum().exp() * self.rewards[r].mean() for r in self.responses]
        return torch.stack(terms).sum()

    def response_divergence(self, table: Tensor, kind: Divergence = "reverse") -> Tensor:
        """Return the divergence of whole responses from the reference, by a table of logprobs."""
        pairs = [(self.token_logprobs(table, r), self.token_logprobs(self.reference, r)) for r in self.responses]
        policy, reference = (torch.stack([pair[side].sum() for pair in pairs]) for side in (0, 1))
        return _divergence(policy, reference, kind)

    def token_divergence(self, table: Tensor, kind: Divergence, *, sampler: Tensor | None = None) -> Tensor:
        """Return the divergence of the next token, summed over both places, after prefixes that are sampled.

        Args:
            table: [1+K, K] logprobs.
            kind: of divergence.
            sampler: [1+K, K] logprobs of the policy that samples the prefixes; None: the policy itself, held fixed.
        """
        sampled = self.logprobs if sampler is None else sampler
        prefixes = torch.cat([torch.ones(1, dtype=torch.float64), sampled[0].exp()])
        if self.stop_token is not None:
            prefixes[1 + self.stop_token] = 0.0
        return (prefixes * _divergence(table, self.reference, kind)).sum()


def _divergence(policy: Tensor, reference: Tensor, kind: Divergence) -> Tensor:
    """Return the divergence over the last dimension, from logprobs."""
    if kind == "variation":
        return (policy.exp() - reference.exp()).abs().sum(-1)
    over, under = (policy, reference) if kind == "reverse" else (reference, policy)
    return (over.exp() * (over - under)).sum(-1)


POLICY = EnumerablePolicy.random(num_tokens=3, seed=1)
"""The one that checks use: nine responses."""
