"""Tasks of a few states whose every policy has a value that is computed, not estimated; and their optimum.

Owns: the tasks, as tables of a Markov decision process; rows sampled from them; the exact value of a policy, with a
pull to a reference or without. Must not know: how a policy is trained.

    bandit   eight prompts, ten arms each, of which one pays with probability 0.9; one token
    chain    five steps forward pay 1, stopping on the way 0.2: one to five tokens, rewarded at the end
    copy     four of five symbols, to be repeated: each right one is rewarded at once
    sort     three of three symbols, to be sorted: the share of right places is rewarded at the end

Each row has two rewards besides, for algorithms of several: what its even places earned, ten times, and what its odd
places did, a tenth.

A policy is a table of logits, [K, A]: a row for each of K observations, a column for each of A actions. A token holds
the state that it was sampled in and the action: state * A + action.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from rallypoint.types import ScoredBatch
from rallypoint.types.carrier import offsets_from_lengths

PARTS = ("even", "odd")
"""Names of the two rewards of a row."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """S states, A actions, P prompts; actions lead from one state to one other."""

    name: str
    starts: Tensor
    """[P] int64: the state that each prompt begins in."""
    follows: Tensor
    """[S, A] int64: the state after an action; -1 where the response ends."""
    rewards: Tensor
    """[S, A] float64: the reward of an action, or its chance of 1 if `is_chance`."""
    sees: Tensor
    """[S] int64: the row of the policy's table that acts in a state."""
    longest: int
    """Tokens of the longest response."""
    rewarded_at_end: bool = False
    """Whether the sum of a row's rewards arrives with its last token."""
    is_chance: bool = False
    """Whether rewards are drawn: 1, or 0."""

    @property
    def shape(self) -> tuple[int, int]:
        """Observations and actions: of a policy's table."""
        return int(self.sees.max()) + 1, self.follows.shape[1]

    def value(self, table: Tensor, pull: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the expected score of a policy, the mean over prompts, differentiable; exact.

        Args:
            table: [K, A] logits.
            pull: [K, A] logprobs -> [K] what acting by an observation costs.
        """
        logprobs = table.double().log_softmax(-1)
        policy, cost = logprobs.exp()[self.sees], 0.0 if pull is None else pull(logprobs)[self.sees]
        values = torch.zeros(len(self.sees), dtype=torch.float64)
        for _ in range(self.longest):
            after = torch.where(self.follows >= 0, values[self.follows], 0.0)
            values = (policy * (self.rewards + after)).sum(-1) - cost
        return values[self.starts].mean()

    def optimum(self) -> float:
        """Return the expected score of the best policy: by value iteration."""
        values = torch.zeros(len(self.sees), dtype=torch.float64)
        for _ in range(self.longest):
            values = (self.rewards + torch.where(self.follows >= 0, values[self.follows], 0.0)).amax(-1)
        return float(values[self.starts].mean())

    def penalised(self, penalty: Callable[[Tensor], Tensor]) -> Task:
        """Return the task with a penalty for length in its rewards, of which values and the optimum are computed.

        Args:
            penalty: [S] int64 tokens of the response that ends in each state -> [S] what it loses.
        """
        lengths, here = torch.zeros(len(self.sees), dtype=torch.int64), self.starts
        for length in range(1, self.longest + 1):
            lengths[here] = length
            after = self.follows[here].flatten()
            here = after[after >= 0]
        ends = self.follows < 0
        return dataclasses.replace(self, rewards=self.rewards - torch.where(ends, penalty(lengths)[:, None], 0.0))

    def sample(self, table: Tensor, group_size: int, generator: torch.Generator) -> ScoredBatch:
        """Return a group of rows for every prompt, with one token of prompt before each response.

        Args:
            table: [K, A] logits of the sampler.
            group_size: rows for each prompt.
            generator: of all draws.
        """
        logprobs, num_actions = table.log_softmax(-1), table.shape[1]
        states = self.starts.repeat_interleave(group_size)
        num_rows, here = len(states), torch.arange(len(states))
        columns: list[tuple[Tensor, Tensor, Tensor, Tensor]] = [
            (here, states * num_actions, torch.zeros(num_rows), torch.zeros(num_rows))
        ]
        while len(here):
            of_state = logprobs[self.sees[states]]
            actions = torch.multinomial(of_state.exp(), 1, generator=generator)
            rewards = self.rewards[states].gather(1, actions).float().squeeze(1)
            if self.is_chance:
                rewards = torch.bernoulli(rewards, generator=generator)
            columns.append((here, states * num_actions + actions[:, 0], of_state.gather(1, actions)[:, 0], rewards))
            states = self.follows[states, actions[:, 0]]
            here, states = here[states >= 0], states[states >= 0]
        rows, tokens, sampled, rewards = (torch.cat(column) for column in zip(*columns, strict=True))
        order = rows.argsort(stable=True)  # row by row, and in a row by time
        offsets = offsets_from_lengths(torch.bincount(rows, minlength=num_rows))
        mask = torch.ones(len(rows), dtype=torch.bool)
        mask[offsets[:-1]] = False
        rewards = rewards[order]
        odd = (torch.arange(len(rows)) - offsets[rows[order]]) % 2 == 0  # the prompt's token is before them
        parts = torch.zeros(num_rows, 2, dtype=torch.float64)
        parts.index_put_((rows[order], odd.long()), rewards * torch.where(odd, 0.1, 10.0).double(), accumulate=True)
        if self.rewarded_at_end:
            scores = torch.zeros(num_rows).index_add_(0, rows[order], rewards)
            rewards = torch.zeros_like(rewards)
            rewards[offsets[1:] - 1] = scores
        return ScoredBatch(
            offsets=offsets,
            tokens=tokens[order],
            loss_mask=mask,
            prompt_index=torch.arange(len(self.starts)).repeat_interleave(group_size),
            sample_index=torch.arange(group_size).repeat(len(self.starts)),
            rollout_logprobs=sampled[order],
            versions=torch.zeros(num_rows, dtype=torch.int64),
            truncated=torch.zeros(num_rows, dtype=torch.bool),
            token_rewards=rewards,
            reward_parts=parts,
            part_names=PARTS,
        )


def cut_off(batch: ScoredBatch, share: float, generator: torch.Generator) -> ScoredBatch:
    """Return the rows, of which a share is truncated, as by a limit: after a token of chance, without its end's reward.

    A response of one token stays whole.
    """
    lengths = batch.lengths - 1  # the prompt's token is before them
    is_cut = (torch.rand(len(batch), generator=generator) < share) & (lengths > 1)
    drawn = 1 + (torch.rand(len(batch), generator=generator) * (lengths - 1)).long()
    kept = 1 + torch.where(is_cut, drawn, lengths)
    tokens = torch.arange(batch.num_tokens) - batch.offsets[batch.row_of_token] < kept[batch.row_of_token]
    by_token = {
        name: getattr(batch, name)[tokens] for name in ("tokens", "loss_mask", "rollout_logprobs", "token_rewards")
    }
    return dataclasses.replace(batch, offsets=offsets_from_lengths(kept), truncated=is_cut, **by_token)


def bandit() -> Task:
    """Return the task; see above."""
    chances = 0.5 * torch.rand(8, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chances[torch.arange(8), torch.arange(8)] = 0.9
    return Task(
        name="bandit",
        starts=torch.arange(8),
        follows=torch.full((8, 10), -1),
        rewards=chances,
        sees=torch.arange(8),
        longest=1,
        is_chance=True,
    )


def chain() -> Task:
    """Return the task; see above. The actions are to stop and to go on."""
    return Task(
        name="chain",
        starts=torch.zeros(8, dtype=torch.int64),
        follows=torch.tensor([[-1, 1], [-1, 2], [-1, 3], [-1, 4], [-1, -1]]),
        rewards=torch.tensor([[0.2, 0.0]] * 4 + [[0.2, 1.0]], dtype=torch.float64),
        sees=torch.arange(5),
        longest=5,
    )


def copy() -> Task:
    """Return the task; see above. A policy sees the symbol that is next."""
    symbols = torch.randint(5, (8, 4), generator=torch.Generator().manual_seed(1))
    return _spelling("copy", symbols, symbols.flatten(), 5, rewarded_at_end=False)


def sort() -> Task:
    """Return the task; see above. A policy sees which symbols there are, and the place that is next."""
    symbols = torch.tensor(list(itertools.combinations_with_replacement(range(3), 3)))
    return _spelling("sort", symbols, torch.arange(symbols.numel()), 3, rewarded_at_end=True)


def _spelling(name: str, wanted: Tensor, sees: Tensor, num_symbols: int, *, rewarded_at_end: bool) -> Task:
    """Return the task of writing down a row of `wanted`, [P, L], for each prompt."""
    num_prompts, length = wanted.shape
    places = torch.arange(num_prompts * length)
    after = torch.where(places % length == length - 1, -1, places + 1)
    rewards = torch.nn.functional.one_hot(wanted.flatten(), num_symbols).double() / length
    return Task(
        name=name,
        starts=places[::length],
        follows=after[:, None].expand(-1, num_symbols),
        rewards=rewards,
        sees=sees,
        longest=length,
        rewarded_at_end=rewarded_at_end,
    )


TASKS = {task.name: task for task in (bandit(), chain(), copy(), sort())}
"""Every task by name."""
