"""The learning suite: every algorithm trains tasks with a known optimum, and is judged by how much of it it reaches.

    from learning.cells import CELLS
    from learning.training import judge, learn

    curves = [learn(CELLS["gspo"], TASKS["sort"], seed) for seed in range(5)]
    judge(curves).passes

Owns: the training of a table, and the bound. Must not know: processes, models. What trains are the project's
own formulas: `weigh`, `ActorLoss` and `ClippedValueLoss`, with the defaults that a config has, two mini-batches twice a
step, so that ratios leave 1; the policy is a table (`tasks`). `check` runs all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from learning.cells import Cell
from learning.tasks import Task, cut_off
from rallypoint.algorithms import (
    GAE,
    KL,
    ActorLoss,
    ClippedValueLoss,
    LossInputs,
    TokenOutputs,
    kl_penalty,
    weigh,
    weigh_valued,
)
from rallypoint.algorithms.shaping import overlong_penalty
from rallypoint.types import ActorBatch, JudgedBatch, Sequences

GROUP_SIZE = 16
LEARNING_RATE = 0.1
"""Learning rate of the first step; it falls to 0, linearly."""
BOUND = 0.85
"""Share of the possible gain that the mean of the seeds must reach, less its 95 % interval."""
_LAST = 10
"""Steps at the end of a curve whose mean is its result."""
_T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Number of seeds -> Student's t."""


def learn(cell: Cell, task: Task, seed: int) -> list[float]:
    """Train a table from its start, and return the share of the possible gain after 0, 1, ... steps.

    0 is the policy at the start, 1 the optimum. Where a distance is to be held, it is the smaller over the larger.
    """
    return list(_Learner(cell, task, seed).shares())


class _Learner:
    """One training."""

    def __init__(self, cell: Cell, task: Task, seed: int) -> None:
        self.cell, self.task, self.generator = cell, task, torch.Generator().manual_seed(seed)
        self.kl = None if cell.kl is None else dataclasses.replace(cell.kl, coef=cell.coef(task))
        start = torch.zeros(task.shape) if cell.kl is None else torch.randn(task.shape, generator=self.generator)
        self.table, self.reference = start.clone().requires_grad_(), start
        self.critic = torch.zeros(task.shape[0], requires_grad=True)
        self.optimizer = torch.optim.Adam([self.table], lr=LEARNING_RATE)
        self.critic_optimizer = torch.optim.Adam([self.critic], lr=LEARNING_RATE)
        self.past = [start]
        self.measure = _measure(cell, task, start)

    def shares(self) -> list[float]:
        """Train; see `learn`."""
        shares, num_steps = [self.measure(self.table)], self.cell.num_steps
        for step in range(1, num_steps + 1):
            self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - (step - 1) / num_steps)
            self.step()
            every = self.cell.refresh_every_steps
            if every is not None and step % every == 0:
                self.reference = self.table.detach().clone()
            self.past.append(self.table.detach().clone())
            shares.append(self.measure(self.table))
        return shares

    def step(self) -> None:
        """Sample, judge, weigh and learn, as the page of a recipe does."""
        cell = self.cell
        sampler = self.past[max(0, len(self.past) - 1 - cell.staleness)]
        scored = self.task.sample(sampler, GROUP_SIZE, self.generator)
        if cell.cut_share:
            scored = cut_off(scored, cell.cut_share, self.generator)
        if cell.overlong is not None:
            scored, _ = cell.overlong(scored)
        old, reference = self.logprobs(scored, self.table.detach()), self.logprobs(scored, self.reference)
        batch = scored.judged(old_logprobs=old, reference_logprobs=None if self.kl is None else reference)
        self.update(self.weighed(batch))
        if cell.adaptive is not None and self.kl is not None:
            found = float(kl_penalty(old, reference, "k3").sum()) / batch.num_loss_tokens
            self.kl = dataclasses.replace(self.kl, coef=cell.adaptive.next(self.kl.coef, found, len(batch)))

    def weighed(self, batch: JudgedBatch) -> ActorBatch:
        """Weigh the tokens; with a critic, train that first."""
        advantage, aggregation, mask = self.cell.advantage, self.cell.aggregation, self.cell.mask
        if not isinstance(advantage, GAE):
            return weigh(batch, advantage, kl=self.kl, aggregation=aggregation, mask=mask)
        values = torch.where(batch.loss_mask, self.critic.detach()[self.observations(batch)], 0.0)
        valued = batch.valued(values)
        actor_batch, critic_batch = weigh_valued(valued, advantage, kl=self.kl, aggregation=aggregation, mask=mask)
        loss = ClippedValueLoss(clip=self.cell.value_clip)
        for _ in range(4):
            inputs = _inputs(critic_batch, is_first_step=False)
            found = self.critic[self.observations(critic_batch)][inputs.positions]
            _minimise(self.critic_optimizer, loss(found, inputs)[0] / loss.denominator(critic_batch))
        return actor_batch

    def update(self, batch: ActorBatch) -> None:
        """Take an optimizer step for each mini-batch, of whole prompts."""
        loss = ActorLoss(
            objective=self.cell.objective,
            corrections=self.cell.corrections,
            aggregation=self.cell.aggregation,
            length=float(self.task.longest),
            entropy_coef=0.0,
            kl=self.kl,
            is_single_update=self.cell.num_epochs * self.cell.num_mini_batches == 1,
        )
        batch = loss.with_selected(batch, len(self.past))
        is_first_step = True
        for _ in range(self.cell.num_epochs):
            prompts = torch.randperm(len(self.task.starts), generator=self.generator)
            order = prompts[batch.prompt_index].argsort(stable=True)
            for part in batch.rows(order).split(self.cell.num_mini_batches):
                if not part.num_loss_tokens:
                    continue  # its rows are masked: a step of nothing, as in a run
                inputs = _inputs(part, is_first_step=is_first_step)
                total, _ = loss(self.outputs(part, inputs.positions), inputs)
                _minimise(self.optimizer, total / loss.denominator(part))
                is_first_step = False

    def observations(self, rows: Sequences) -> Tensor:
        """Return what the policy sees at each token: [T]."""
        return self.task.sees[rows.tokens // self.task.shape[1]]

    def logprobs(self, rows: Sequences, table: Tensor) -> Tensor:
        """Return the log-probability of each token, by a table: [T]."""
        actions = (rows.tokens % self.task.shape[1])[:, None]
        found = table[self.observations(rows)].log_softmax(-1).gather(1, actions).squeeze(1)
        return torch.where(rows.loss_mask, found, 0.0)

    def outputs(self, rows: Sequences, at: Tensor) -> TokenOutputs:
        """Return logprobs and entropies of the trained tokens: [N]."""
        of_token = self.table[self.observations(rows)].log_softmax(-1)[at]
        logprobs = of_token.gather(1, (rows.tokens % self.task.shape[1])[at, None]).squeeze(1)
        return TokenOutputs(logprobs=logprobs, entropy=-(of_token.exp() * of_token).sum(-1).detach())


def _inputs(rows: Any, *, is_first_step: bool) -> LossInputs[Any]:
    at = rows.loss_mask.nonzero().flatten()
    return LossInputs(rows=rows, positions=at, send=lambda tensor: tensor, is_first_step=is_first_step)


def _minimise(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _measure(cell: Cell, task: Task, start: Tensor) -> Callable[[Tensor], float]:
    """Return what makes of a table the share of the possible gain."""
    goal, overlong = cell.goal(task), cell.overlong
    if overlong is not None:
        max_tokens, buffer, factor = overlong.max_tokens, overlong.buffer, overlong.factor
        task = task.penalised(
            lambda lengths: overlong_penalty(lengths, max_tokens=max_tokens, buffer=buffer, factor=factor)
        )
    divergence = functools.partial(
        _divergence, "k1" if cell.kl is None else _of(cell.kl), start.double().log_softmax(-1)
    )
    if goal == "distance":
        assert cell.adaptive is not None, "a distance is what an adaptive coefficient holds"
        target = cell.adaptive.target

        @torch.no_grad()
        def held(table: Tensor) -> float:
            found = float(divergence(table.double().log_softmax(-1))[task.sees[task.starts]].mean())
            return min(found, target) / max(found, target)

        return held

    def pull(logprobs: Tensor) -> Tensor:
        return cell.coef(task) * divergence(logprobs)

    value = functools.partial(task.value, pull=pull if goal == "score and pull" else None)
    best = _highest(value, start) if goal == "score and pull" else task.optimum()
    first = float(value(start))

    @torch.no_grad()
    def share(table: Tensor) -> float:
        return (float(value(table)) - first) / (best - first)

    return share


def _of(kl: KL) -> str:
    """Return the divergence that a KL pulls along: that of its gradient, see `algorithms.kl`."""
    return "k1" if kl.placement == "reward" or kl.importance_corrected or kl.estimator == "k2" else kl.estimator


def _divergence(kind: str, reference: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(policy || reference), for k3 KL(reference || policy), for abs the sum of |policy - reference|: [K]."""
    if kind == "abs":
        return (logprobs.exp() - reference.exp()).abs().sum(-1)
    first, second = (reference, logprobs) if kind == "k3" else (logprobs, reference)
    return (first.exp() * (first - second)).sum(-1)


def _highest(value: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Return the highest value of any table, by climbing its exact gradient."""
    table = start.double().clone().requires_grad_()
    optimizer = torch.optim.Adam([table], lr=0.1)
    found = []
    for _ in range(400):
        total = value(table)
        found.append(float(total.detach()))
        _minimise(optimizer, -total)
    return max(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the curves of some seeds show."""

    mean: float
    """Share of the possible gain at the end, over the seeds."""
    half_width: float
    """Half the width of the 95 % interval of that mean."""

    @property
    def passes(self) -> bool:
        """Whether the lower end of the interval is above `BOUND`."""
        return self.mean - self.half_width >= BOUND


def judge(curves: Sequence[Sequence[float]]) -> Verdict:
    """Judge the curves of two to ten seeds by the mean of their last steps.

    >>> judge([[0.0, 0.9], [0.0, 0.8], [0.0, 0.85]])
    Verdict(mean=0.425, half_width=0.062...)
    """
    ends = [math.fsum(curve[-_LAST:]) / len(curve[-_LAST:]) for curve in curves]
    mean = math.fsum(ends) / len(ends)
    deviation = math.sqrt(math.fsum((end - mean) ** 2 for end in ends) / (len(ends) - 1))
    return Verdict(mean=mean, half_width=_T95[len(ends)] * deviation / math.sqrt(len(ends)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """An algorithm on a task."""

    cell: Cell
    task: str
    curves: Sequence[Sequence[float]]
    """Learning curve of each seed."""

    @property
    def verdict(self) -> Verdict:
        """What the curves show."""
        return judge(self.curves)

    def described(self) -> dict[str, object]:
        """Return all of it as plain values."""
        verdict = {**dataclasses.asdict(self.verdict), "passes": self.verdict.passes}
        return {"axis": self.cell.axis, "name": self.cell.name, "task": self.task, **verdict, "curves": self.curves}
