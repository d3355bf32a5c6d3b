"""What an update measures, beside the same update written down again: row by row, in plain torch, with no engine."""

import asyncio
import dataclasses
import math
from typing import cast

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from rallypoint.algorithms import DistillationLoss
from rallypoint.algorithms.policy_losses import Clip
from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.cluster.dispatch import rule_of
from rallypoint.config import load_config
from rallypoint.recipes.recipe import actor_loss_of
from rallypoint.roles.actor import Actor, ActorWorker
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.types import ActorBatch, DistilledBatch, Metrics, Sequences

LENGTHS, ADVANTAGES = (3, 2, 3, 1, 2, 3, 1, 2), (1.0, -1.0, 0.5, -2.0, -0.5, 2.0, 1.5, -1.0)
"""Answers of eight rows, two to a prompt."""


def within(numbers, low, high):
    return ((numbers >= low) & (numbers <= high)).float()


TIS_AND_MASK = "[{name: tis, cap: 1.2}, {name: mask, low: 0.7, high: 9.0}]"
WEIGHTS = {
    TIS_AND_MASK: lambda rho, _: rho.clamp(max=1.2) * within(rho, 0.7, 9.0),
    "[{name: tis, level: sequence, cap: 1.1}]": lambda rho, _: rho.prod().clamp(max=1.1),
    "[{name: icepop, low: 0.7, high: 1.4}]": lambda rho, _: rho * within(rho, 0.7, 1.4),
    "[{name: mask, level: product, low: 0.8, high: 1.3}]": lambda rho, _: within(rho.prod(), 0.8, 1.3),
    "[{name: mask, level: geometric, low: 0.8, high: 1.2}]": lambda rho, _: within(rho.log().mean().exp(), 0.8, 1.2),
    "[{name: kl_mask, estimator: k2, max_kl: 0.03}]": lambda rho, _: within(rho.log().square().mean() / 2, 0.0, 0.03),
    "[{name: kl_mask, estimator: k3, max_kl: 0.03}]": lambda rho, _: within((rho - 1 - rho.log()).mean(), 0.0, 0.03),
    "[{name: off_policy_mask, delta: 0.1}]": lambda _, left: within(left.mean(), -math.inf, 0.1),
}
"""Corrections -> the weight of a row's tokens, by their rho = old / rollout and their log(rollout / policy)."""
CONFIG = (
    "data.max_prompt_tokens=2",
    "rollout={max_response_tokens: 3, num_prompts: 4, group_size: 2}",
    "engine.max_tokens_per_micro_batch=11",
    "actor={num_mini_batches: 2, num_epochs: 2, entropy_coef: 0.01}",
    "actor.optimizer={lr: 0.02, warmup_ratio: 0, schedule: constant}",
    "loss={name: clip, clip_low: 0.1, clip_high: 0.3}",
    "kl={coef: 0.1, placement: loss, estimator: k3}",
    f"correction={TIS_AND_MASK}",
)


class OneRank:
    """A group of one worker, in this process."""

    def __init__(self, worker):
        self.worker, self.mesh = worker, worker.context.mesh

    async def call(self, method, *arguments):
        return rule_of(method).join([method(self.worker, *arguments)])


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model", num_layers=1, num_heads=2, num_key_value_heads=1, initializer_range=0.3)


@pytest.fixture
def start(tmp_path, folder):
    """Returns a function that starts an actor with its batch, by a config and a loss."""

    def start(*overrides, loss=None):
        config = load_config("digits-grpo", [*CONFIG, *overrides]).config
        context = WorkerContext("actor", 0, Mesh({"dp_replicate": 1}), 1, "cpu", {}, lambda: None)
        loss = loss or actor_loss_of(config)
        worker = ActorWorker(context, WorkerSpec(config, folder, SharedFolder.marked(tmp_path), None), loss)
        return Actor(config, OneRank(worker), loss), worker, batch_of(worker, config.aggregation)

    return start


def batch_of(worker, aggregation):
    """Rows as a sampler found them that is a little off, with the logprobs of another reference."""
    draw = torch.Generator().manual_seed(5)
    rows = Sequences(
        offsets=torch.tensor([0, *(2 + length for length in LENGTHS)]).cumsum(0),
        tokens=torch.randint(0, 20, (sum(LENGTHS) + 16,), generator=draw),
        loss_mask=torch.cat([torch.tensor([False, False] + [True] * length) for length in LENGTHS]),
        prompt_index=torch.arange(8) // 2,
        sample_index=torch.arange(8) % 2,
    )
    old = worker.logprobs([rows])[0].values.clone()
    noise, other, said = (torch.randn(len(old), generator=draw) * rows.loss_mask for _ in range(3))
    by_row = 1 / torch.tensor(LENGTHS).double()
    return rows.widen(
        DistilledBatch,
        rollout_logprobs=old + 0.3 * noise,
        old_logprobs=old,
        reference_logprobs=old + 0.2 * other,
        advantages=torch.tensor(ADVANTAGES).repeat_interleave(rows.lengths) * rows.loss_mask,
        loss_weights=None if aggregation == "token" else by_row,
        teacher_logprobs=torch.where(rows.prompt_index.repeat_interleave(rows.lengths) == 3, math.nan, old + said),
    )


def rows_of(batch):
    """Yield the fields of each row at its trained tokens."""
    for first, last in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        yield (
            batch.tokens[first:last],
            {
                name: getattr(batch, name)[first + 2 : last]
                for name in ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages", "teacher_logprobs")
            },
        )


def said_by(model, tokens):
    """Return the logprobs of a row's answer, and the entropies of the distributions they come from."""
    scores = model(tokens[None]).logits[0, 1:-1].log_softmax(-1)
    return scores.gather(1, tokens[2:, None])[:, 0], -(scores.exp() * scores).sum(1)


@dataclasses.dataclass
class Plain:
    """The same update: AdamW over mini-batches, each row for itself; the sums that the metrics are quotients of."""

    aggregation: str
    correction: str = TIS_AND_MASK
    sums: dict = dataclasses.field(default_factory=dict)

    def note(self, name, numbers, weight):
        total, count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (total + float(numbers.sum()) * weight, count + len(numbers) * weight)

    def update(self, folder, parts):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.99), weight_decay=0.0)
        for part in parts:
            whole = part.num_loss_tokens if self.aggregation == "token" else len(part)
            optimizer.zero_grad()
            loss = sum(self.row(*said_by(model, tokens), **fields) for tokens, fields in rows_of(part)) / whole
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            self.note("grad_norm", norm[None], 1.0)
            optimizer.step()
        return {f"actor/{name}": total / count for name, (total, count) in self.sums.items()}

    def row(self, new, entropy, *, rollout_logprobs, old_logprobs, reference_logprobs, advantages, teacher_logprobs):
        ratio = (new - old_logprobs).exp()
        rho = (old_logprobs - rollout_logprobs).exp()
        weight = of_kl = WEIGHTS[self.correction](rho, (rollout_logprobs - new).detach()) * torch.ones(len(new))
        if "off_policy_mask" in self.correction:  # of what should become less likely, and the KL knows nothing of that
            weight, of_kl = torch.where(advantages < 0, weight, 1.0), 1.0
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.3) * advantages) * weight
        kl = (reference_logprobs - new).exp() - 1 - (reference_logprobs - new)
        by_row = 1.0 if self.aggregation == "token" else 1 / len(new)
        lost = policy - 0.01 * entropy + 0.1 * kl * of_kl
        for name, numbers in (("loss", lost), ("policy_loss", policy), ("entropy", entropy), ("reference_kl", kl)):
            self.note(name, numbers.detach(), by_row)
        is_clipped = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.9))
        self.note("clip_fraction", is_clipped.float(), 1.0)
        self.note("approx_kl", (ratio - 1 - ratio.log()).detach(), 1.0)
        for name, numbers in (("", weight), ("_square", weight**2), ("_dropped", (weight == 0).float())):
            self.note(f"correction{name}", numbers, 1.0)
        return lost.sum() * by_row


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("cap", [11, 99])
def test_what_an_update_measures_is_what_its_mini_batches_epochs_and_rows_say(start, folder, aggregation, cap):
    actor, _, batch = start(f"aggregation={aggregation}", f"engine.max_tokens_per_micro_batch={cap}")
    parts = actor.cut(batch, 1).parts
    assert len(parts) == 4
    assert len({part.num_loss_tokens for part in parts}) > 1, "no mean of means"
    expected = Plain(aggregation).update(folder, parts)
    found = asyncio.run(actor.update(batch, 1)).scalars()
    assert expected["actor/clip_fraction"] > 0.1
    assert expected["actor/correction_dropped"] > 0.05
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-4)
    assert found["actor/num_tokens"] == 2 * sum(LENGTHS)
    assert found["actor/lr"] == 0.02
    assert found["actor/ratio_error"] < 1e-5


@pytest.mark.parametrize("correction", [one for one in WEIGHTS if one != TIS_AND_MASK])
def test_every_correction_measures_the_weights_that_it_gives(start, folder, correction):
    actor, _, batch = start("aggregation=token", f"correction={correction}")
    expected = Plain("token", correction).update(folder, actor.cut(batch, 1).parts)
    found = asyncio.run(actor.update(batch, 1)).scalars()
    assert 0.1 < expected["actor/correction"] < 0.99, "it does something"
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-4)


def test_ranks_together_measure_what_one_rank_measures(start):
    """Weights that hardly move let one rank after the other see its rows as all of them at once would."""
    moves = ("actor.optimizer.lr=1e-12", "checks.ratio_tolerance=1e3")
    _, worker, batch = start(*moves)
    batch = dataclasses.replace(batch, old_logprobs=batch.rollout_logprobs)  # else every ratio would be 1
    actor, worker, _ = start(*moves)
    batches = actor.cut(cast("ActorBatch", batch), 1)
    alone = worker.train(batches, 1).scalars()
    each = [worker.train(part, 1) for part in batches.split(3)]
    assert len({len(part) for of_rank in batches.split(3) for part in of_rank.parts}) > 1, "some have fewer rows"
    together = Metrics.join(each).scalars()
    assert alone["clip_fraction"] > 0.05
    for name in alone.keys() - {"grad_norm", "mfu"}:
        assert together[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("name", ["policy_gradient", "reverse"])
def test_the_divergence_from_a_teacher_is_that_of_the_student_that_sampled_however_often_it_learns(start, name):
    objective = Clip(clip_low=0.2, clip_high=0.2, dual_clip=None)
    actor, _, batch = start(loss=DistillationLoss(name=name, objective=objective))
    judged = batch.loss_mask & batch.teacher_logprobs.isfinite()
    gap = (batch.old_logprobs - batch.teacher_logprobs)[judged].double()
    found = asyncio.run(actor.update(batch, 1)).scalars()
    assert found["actor/teacher_judged"] == pytest.approx(float(judged.sum()) / sum(LENGTHS))
    assert found["actor/teacher_kl"] == pytest.approx(float(gap.mean()), rel=1e-4)
