"""The actor's worker, called as the plain object that it is."""

import asyncio
import contextlib
import dataclasses
import itertools
import math
import re
from typing import cast

import pytest
import torch
from full_disks import files_end_at
from grids import thinned
from tiny_models import make_tiny_model
from transformers import AutoModelForCausalLM

from rallypoint.algorithms.estimators import GRPO
from rallypoint.cluster import Mesh, WorkerContext, WorkerGroup
from rallypoint.cluster.dispatch import rule_of
from rallypoint.config import LoRAConfig, load_config
from rallypoint.config.sections.learning import ActorConfig
from rallypoint.errors import NotFiniteError, OffPolicyError, WeightsMismatchError
from rallypoint.generation import Request, SamplingParams, as_turn
from rallypoint.models import trained_weights
from rallypoint.recipes.recipe import actor_loss_of
from rallypoint.roles.actor import Actor, ActorWorker
from rallypoint.roles.colocated import ActorParts
from rallypoint.roles.connections import PUBLISHED
from rallypoint.roles.judging import check_judged
from rallypoint.roles.learner import MiniBatches
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.roles.publishing import SharedTensors, WrittenFolder, with_room
from rallypoint.roles.rank_engine import SliceRequest
from rallypoint.roles.reference import ReferenceWorker
from rallypoint.roles.rollout import RolloutWorker
from rallypoint.run.agreement import WORST_OLD, WORST_ROLLOUT, Agreement
from rallypoint.types import ActorBatch, ScoredBatch, Sequences, Trajectory, assemble
from rallypoint.weights import published_folder


@pytest.fixture
def ticks():
    """One entry for each sign that a worker got on with its work."""
    return []


@pytest.fixture
def spec(tmp_path):
    folder = make_tiny_model(
        tmp_path / "model", num_layers=1, num_heads=2, num_key_value_heads=1, initializer_range=0.2
    )
    return WorkerSpec(load_config("digits").config, folder, SharedFolder.marked(tmp_path), None)


@pytest.fixture
def context(ticks):
    return WorkerContext("actor", 0, Mesh({"dp_replicate": 1}), 1, "cpu", {}, lambda: ticks.append(1))


@pytest.fixture
def worker(context, spec):
    return ActorWorker(context, spec, actor_loss_of(spec.config))


def sample(rollout, num_samples, max_new_tokens, *, version):
    """Have a rollout worker answer the prompt 3 9 so many times."""
    params = SamplingParams(max_new_tokens=max_new_tokens, seed=0)
    new = [(n, Request(tokens=(3, 9), params=params, sample_index=n)) for n in range(num_samples)]
    found = {number: [] for number, _ in new}
    orders = SliceRequest(new=tuple(new), version=version)
    while not all(outputs and outputs[-1].finish_reason for outputs in found.values()):
        for output in rollout.advance(orders).outputs:
            found[output.request_id].append(output)
        orders = SliceRequest(version=version)
    trajectories = [Trajectory(turns=(as_turn((3, 9), outputs),)) for outputs in found.values()]
    return assemble(trajectories, prompt_index=0, sample_index=list(found), is_narrowed=False)


def judged(worker, shift_at=None, by=0.0):
    """Two rows of a prompt and three answers, with old_logprobs as the worker itself computes them."""
    rows = Sequences(
        offsets=torch.tensor([0, 5, 9]),
        tokens=torch.tensor([3, 9, 10, 11, 0, 3, 12, 13, 0]),
        loss_mask=torch.tensor([False, False, True, True, True, False, False, True, True]),
        prompt_index=torch.tensor([40, 41]),
        sample_index=torch.tensor([0, 3]),
    )
    old = worker.logprobs([rows])[0].values.clone()
    if shift_at is not None:
        old[shift_at] += by
    return learnt_from(rows, old)


def learnt_from(rows, old):
    """What an actor gets of rows that were sampled as they were judged."""
    return rows.widen(
        ActorBatch,
        rollout_logprobs=old,
        old_logprobs=old,
        reference_logprobs=old,
        advantages=rows.loss_mask.float(),
    )


def cut(batch, num_mini_batches=1, num_epochs=1, seed=0, step=1):
    learner = ActorConfig(num_epochs=num_epochs, num_mini_batches=num_mini_batches)
    return MiniBatches.cut(batch, learner, lambda part: part.num_loss_tokens, seed=seed, step=step, attention_cost=0.01)


def test_the_first_update_of_a_step_has_a_ratio_of_1(worker):
    metrics = worker.train(cut(judged(worker)), 1).scalars()
    assert metrics["ratio_error"] < 1e-6
    assert metrics["clip_fraction"] == 0


def test_an_update_reports_how_much_of_the_device_it_used(worker):
    used = worker.train(cut(judged(worker), num_epochs=2), 1)["mfu"]
    # Of 5 and 4 tokens, twice: 3 x (2 x weights x tokens + attention of pairs + logits of 5 trained tokens), where the
    # last of a row chooses nothing.
    weights = 16 * (2 * 16 + 2 * 8) + 3 * 16 * 32
    assert used.total == 2 * 3 * (2 * weights * 7 + 4 * 16 * (16 + 9) + 2 * 16 * 20 * 5)
    assert used.scalar > 0


def test_long_work_shows_that_it_gets_on_so_that_its_deadline_does_not_end_it(worker, context, spec, ticks):
    batch = judged(worker)  # one micro-batch
    assert len(ticks) == 1
    worker.train(cut(batch, num_mini_batches=2, num_epochs=3), 1)
    assert len(ticks) == 1 + 6
    ticks.clear()
    ReferenceWorker(context, spec, shares_actor=False).logprobs([batch, batch])
    assert len(ticks) == 2
    ticks.clear()
    sample(RolloutWorker(context, spec, shares_actor=True), 2, 5, version=0)
    assert len(ticks) == 5


def test_beside_an_unsharded_actor_rollouts_are_sampled_from_its_own_memory_and_nothing_is_published(
    worker, context, spec
):
    def send():
        raise AssertionError("nothing is sent")

    ActorParts(worker.engine, send, send).leave(context)
    rollout = RolloutWorker(context, spec, shares_actor=True)
    before = sample(rollout, 4, 9, version=0)
    worker.train(cut(judged(worker), num_epochs=3), 20)
    rollout.load(3, SharedTensors(), None)
    owned, sampled = worker.engine.shard.trained(), trained_weights(rollout._shard.model)
    assert owned.keys() == sampled.keys()
    for name, weight in owned.items():
        assert (weight.data_ptr(), weight.shape) == (sampled[name].data_ptr(), sampled[name].shape)
    assert not (spec.folder.path / PUBLISHED).exists()
    after = sample(rollout, 4, 9, version=3)
    assert (after.rollout_logprobs - worker.logprobs([after])[0].values).abs().max() < 1e-5
    assert not torch.equal(after.rollout_logprobs, before.rollout_logprobs)


def test_another_ratio_in_the_first_update_is_refused_and_names_prompt_sample_and_token(worker):
    with pytest.raises(OffPolicyError, match=r"differs by 0\.\d+ .* prompt 41 sample 3, token 2 of its row"):
        worker.train(cut(judged(worker, shift_at=7, by=0.1)), 1)


@pytest.fixture
def half_worker(context, spec):
    half = spec.config.model.model_copy(update={"dtype": "bfloat16"})
    return ActorWorker(
        context,
        dataclasses.replace(spec, config=spec.config.model_copy(update={"model": half})),
        actor_loss_of(spec.config),
    )


def off_by(worker, errors):
    """Rows of 48, 20 and 3 tokens whose old logprobs are off at some places of the stream."""
    offsets = torch.tensor([0, 48, 68, 71])
    mask = torch.ones(71, dtype=torch.bool)
    mask[offsets[:-1]] = False
    tokens = torch.randint(3, 20, (71,), generator=torch.Generator().manual_seed(0))
    samples = torch.zeros(3, dtype=torch.int64)
    rows = Sequences(offsets=offsets, tokens=tokens, loss_mask=mask, prompt_index=torch.arange(3), sample_index=samples)
    old = worker.logprobs([rows])[0].values.clone()
    for place, error in errors.items():
        old[place] += error
    return cut(learnt_from(rows, old))


def test_in_bfloat16_single_tokens_may_be_rounded_otherwise_and_the_largest_is_reported(half_worker, worker):
    rounded = {5: 0.05, 30: -0.03, 60: 0.06, 69: 0.05}
    metrics = half_worker.train(off_by(half_worker, rounded), 1).scalars()
    assert metrics["ratio_error_max"] == pytest.approx(0.06, rel=0.1)
    assert metrics["ratio_error"] == pytest.approx((0.05 + 0.03 + 0.06 + 0.05) / 68, rel=0.1)
    with pytest.raises(OffPolicyError, match=r"ratio must be 1 .* prompt 1 sample 0, token 12 of its row"):
        worker.train(off_by(worker, rounded), 1)


@pytest.mark.parametrize(
    ("errors", "named"),
    [
        (
            {**dict.fromkeys(range(1, 71), 0.15), 10: 0.2},
            r"differs by 0\.18, by 0\.14 on average, and 0 of 68 tokens .* prompt 0 sample 0, token 10 ",
        ),
        (
            dict.fromkeys((68, 69, 70), 1.5) | {60: 1.6, 61: 1.5},
            r"on average, and 4 of 68 tokens by more than 0\.5, .* prompt 1 sample 0, token 12 ",
        ),
    ],
    ids=["all tokens a little", "few tokens by much"],
)
def test_in_bfloat16_a_wrong_mean_and_wrong_tokens_are_refused_and_the_worst_is_named(half_worker, errors, named):
    with pytest.raises(OffPolicyError, match=named):
        half_worker.train(off_by(half_worker, errors), 1)


def test_in_bfloat16_a_tolerance_of_ones_own_is_that_of_the_mean(context, spec):
    half = {"model.dtype": "bfloat16", "checks.ratio_tolerance": 0.02}
    config = load_config("digits", [f"{name}={value}" for name, value in half.items()]).config
    worker = ActorWorker(context, dataclasses.replace(spec, config=config), actor_loss_of(config))
    with pytest.raises(OffPolicyError, match=r"by 0\.03\d* on average, .*checks.ratio_tolerance=0.02"):
        worker.train(off_by(worker, dict.fromkeys(range(1, 71), 0.035)), 1)


def test_logprobs_that_are_nan_are_called_so_and_not_off_policy_and_such_weights_are_not_saved(context, spec, tmp_path):
    said = []
    worker = ActorWorker(dataclasses.replace(context, say=said.append), spec, actor_loss_of(spec.config))
    batch = cut(judged(worker))
    with torch.no_grad():
        worker.engine.model.get_output_embeddings().weight[0, 0] = float("nan")
    before = {name: weight.clone() for name, weight in worker.engine.weights.items()}
    metrics = worker.train(batch, 7).scalars()
    assert metrics.keys() == {"not_finite", "mfu"}
    assert [line.partition(" prompt 4")[0] for line in said] == ["step 7: the loss is nan for"]
    after = worker.engine.weights
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    with pytest.raises(NotFiniteError, match=r"lm_head.weight: NaN or infinite, so that nothing is saved"):
        worker.save(tmp_path / "saved", tmp_path / "state.safetensors", False)


def test_a_mini_batch_whose_loss_is_not_finite_is_left_out_and_the_others_are_learned_from(context, spec):
    weights = []
    for is_poisoned in (False, True):
        loss, num_passes = actor_loss_of(spec.config), itertools.count()

        class Poisoned:
            def __call__(self, outputs, inputs, loss=loss, num_passes=num_passes, is_poisoned=is_poisoned):
                total, metrics = loss(outputs, inputs)
                return total * (float("inf") if is_poisoned and next(num_passes) == 0 else 1.0), metrics

        worker = ActorWorker(context, spec, Poisoned())
        batches = cut(judged(worker))
        parts = batches.parts * (1 + is_poisoned)
        metrics = worker.train(dataclasses.replace(batches, parts=parts, denominators=batches.denominators * 2), 1)
        assert ("not_finite" in metrics) is is_poisoned
        weights.append({name: weight.clone() for name, weight in worker.engine.weights.items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_that_nobody_judged_is_learned_from_to_the_same_bits_and_compared_with_its_rollouts(
    context, spec, dtype
):
    config = load_config("digits", ["actor.num_mini_batches=1", f"model.dtype={dtype}"]).config
    spec = dataclasses.replace(spec, config=config)
    weights, measured = [], []
    for is_judged in (True, False):
        worker = ActorWorker(dataclasses.replace(context, shared={}), spec, actor_loss_of(config))
        batch = judged(worker)
        sampled = batch.rollout_logprobs.clone()
        sampled[7] += 0.25
        # As if the pass that judged had rounded otherwise, within the tolerance.
        assert batch.old_logprobs is not None
        old = batch.old_logprobs + 5e-3 * batch.loss_mask if is_judged else None
        metrics = worker.train(cut(dataclasses.replace(batch, old_logprobs=old, rollout_logprobs=sampled)), 20)
        measured.append(metrics.scalars())
        weights.append(worker.engine.shard.trained())
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    both = (measured[0].keys() & measured[1].keys()) - {"mfu"}
    assert both >= {"loss", "policy_loss", "grad_norm", "entropy", "reference_kl"}
    assert both.isdisjoint({"clip_fraction", "approx_kl"})
    assert {name: measured[0][name] for name in both} == {name: measured[1][name] for name in both}
    assert measured[0]["ratio_error_max"] == pytest.approx(5e-3, rel=0.1)
    assert "ratio_error" not in measured[1]
    found = measured[1]
    agreement = Agreement.of([{"step": 20, "rollout/num_tokens": 5, **found}])
    assert agreement is not None
    assert agreement.largest == pytest.approx(0.25, abs=1e-2)
    assert agreement.mean == pytest.approx(0.25 / 5, abs=1e-2)
    assert (agreement.prompt, agreement.sample, agreement.place, agreement.token) == (41, 3, 2, 13)
    assert found[WORST_ROLLOUT] - found[WORST_OLD] == pytest.approx(0.25, abs=1e-2)
    assert found["kl/reference_mean"] == pytest.approx(0, abs=1e-4)


class OneWorker:
    """A group of one worker, in this process."""

    def __init__(self, worker):
        self.worker, self.mesh = worker, worker.context.mesh
        self.calls = []

    async def call(self, method, *arguments):
        self.calls.append(method.__name__)
        return rule_of(method).join([method(self.worker, *arguments)])

    async def retried(self, work):
        return await work()


def actor_of(config, worker, loss):
    return Actor(config, cast("WorkerGroup[ActorWorker[ActorBatch]]", OneWorker(worker)), loss)


def one_update_actor(worker, *overrides):
    config = load_config("digits", ["actor.num_mini_batches=1", *overrides]).config
    return actor_of(config, worker, actor_loss_of(config))


@pytest.mark.parametrize(
    ("overrides", "is_rare"),
    [
        ((), True),
        (("kl.placement=reward",), False),
        (("actor.num_epochs=2",), False),
        (("actor.num_mini_batches=2",), False),
    ],
)
def test_two_batches_of_a_start_and_some_later_ones_are_judged_and_all_where_the_update_cannot(
    worker, overrides, is_rare
):
    actor, num_steps = one_update_actor(worker, *overrides), 35 if is_rare else 5
    steps_judged = []

    async def steps():
        for step in range(1, num_steps + 1):
            batch = judged(worker)
            old = await actor.old_logprobs(batch)
            if old is not None:
                assert batch.old_logprobs is not None
                assert torch.equal(old, batch.old_logprobs)
                steps_judged.append(step)
            await actor.update(dataclasses.replace(batch, old_logprobs=old), step)

    asyncio.run(steps())
    assert steps_judged == ([1, 2, 33] if is_rare else [1, 2, 3, 4, 5])


def test_rows_without_a_signal_are_not_judged_and_their_gap_is_not_measured(context, spec, ticks):
    config = alone_in_a_micro_batch()
    loss = actor_loss_of(config)
    worker = ActorWorker(context, dataclasses.replace(spec, config=config), loss)
    actor = actor_of(config, worker, loss)
    batch = scored_rows(four_rows(worker, [0.0] * 4), [1.0, 0.0, 0.5, 0.5])
    equal = scored_rows(four_rows(worker, [0.0] * 4), [0.5] * 4)
    whole = asyncio.run(actor.old_logprobs(batch))
    ticks.clear()
    old = asyncio.run(actor.old_logprobs(batch, ESTIMATOR))
    none = asyncio.run(actor.old_logprobs(equal, ESTIMATOR))  # computes nothing
    assert len(ticks) == 2
    masking = actor_of(alone_in_a_micro_batch("rollout.mask_truncated=true"), worker, loss)
    masked = asyncio.run(masking.old_logprobs(batch, ESTIMATOR))  # the first row was cut off
    assert whole is not None
    assert masked is not None
    assert bool(masked[batch.row_of_token == 0].isnan().all())
    assert torch.equal(masked[batch.row_of_token == 1], whole[batch.row_of_token == 1])
    assert old is not None
    assert none is not None
    assert torch.equal(old[:9], whole[:9])
    assert bool(old[9:].isnan().all())
    found = check_judged(batch.judged(old_logprobs=old, reference_logprobs=None), config.checks)
    assert found.scalars()["rollout/logprob_gap_mean"] == 0.0
    assert bool(none.isnan().all())


@pytest.mark.parametrize("more", ["actor.entropy_coef=0.01", "kl={placement: loss}", "kl={placement: reward}"])
def test_where_other_terms_need_them_all_rows_are_judged(context, spec, more):
    config = alone_in_a_micro_batch(more)
    loss = actor_loss_of(config)
    worker = ActorWorker(context, dataclasses.replace(spec, config=config), loss)
    batch = scored_rows(four_rows(worker, [0.0] * 4), [1.0, 0.0, 0.5, 0.5])
    old = asyncio.run(actor_of(config, worker, loss).old_logprobs(batch, ESTIMATOR))
    assert old is not None
    assert not bool(old.isnan().any())


ESTIMATOR = GRPO(token_discount=None, whiten=False)


def scored_rows(rows, scores):
    """Return these rows with a score each on their last token; the first was cut off."""
    rewards = torch.zeros(rows.num_tokens)
    rewards[rows.offsets[1:] - 1] = torch.tensor(scores)
    return ScoredBatch(
        offsets=rows.offsets,
        tokens=rows.tokens,
        loss_mask=rows.loss_mask,
        prompt_index=rows.prompt_index,
        sample_index=rows.sample_index,
        rollout_logprobs=rows.old_logprobs.clone(),
        sampled_logprobs=None,
        token_rewards=rewards,
        versions=torch.zeros(4, dtype=torch.int64),
        truncated=torch.tensor([True, False, False, False]),
    )


def test_a_batch_for_several_updates_that_nobody_judged_is_refused_before_the_first(worker):
    actor = one_update_actor(worker, "actor.num_epochs=3")
    with pytest.raises(ValueError, match="3 optimizer steps needs old_logprobs"):
        asyncio.run(actor.update(dataclasses.replace(judged(worker), old_logprobs=None), 1))
    assert cast("OneWorker", actor._group).calls == []


@pytest.mark.parametrize(("epochs", "is_judged"), [(1, False), (1, True), (3, True)])
def test_an_update_tells_the_entropy_of_each_token_by_the_policy_that_it_began_with(worker, spec, epochs, is_judged):
    model = AutoModelForCausalLM.from_pretrained(spec.model_path, dtype=torch.float64)
    actor, batch = one_update_actor(worker, f"actor.num_epochs={epochs}"), judged(worker)
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for start, end in itertools.pairwise(batch.offsets.tolist()):
        with torch.no_grad():
            logits = model(batch.tokens[None, start:end]).logits[0]
        shares = (logits / worker.config.temperature).softmax(-1)
        expected[start + 1 : end] = -(shares * shares.log()).sum(-1)[:-1]
    asyncio.run(actor.update(batch if is_judged else dataclasses.replace(batch, old_logprobs=None), 1))
    learned = actor.learned
    assert learned is not None
    assert learned.entropies is not None
    torch.testing.assert_close(learned.entropies.double(), expected * batch.loss_mask, atol=1e-5, rtol=0)
    assert torch.equal(learned.old_logprobs, batch.old_logprobs)


def test_what_the_update_leaves_out_has_no_entropy(context, spec):
    config = alone_in_a_micro_batch("actor.num_mini_batches=1")
    worker = ActorWorker(context, dataclasses.replace(spec, config=config), actor_loss_of(config))
    batch, actor = four_rows(worker, [1.0, 0.0, 0.0, -1.0]), actor_of(config, worker, actor_loss_of(config))
    asyncio.run(actor.update(dataclasses.replace(batch, old_logprobs=None), 1))
    assert actor.learned is not None
    for found in (actor.learned.entropies, actor.learned.old_logprobs):
        known = {int(row) for row in batch.row_of_token[found.isfinite() & batch.loss_mask]}
        assert known == {0, 3}


def test_rollouts_of_another_policy_are_refused_in_a_batch_that_nobody_judged_and_the_worst_token_is_named(worker):
    actor, batch = one_update_actor(worker), judged(worker)
    sampled = batch.rollout_logprobs.clone()
    sampled[4] -= 6.0
    batch = dataclasses.replace(batch, old_logprobs=None, rollout_logprobs=sampled)
    named = r"differ by 1\.2 nats .*; worst at prompt 40 sample 0, token 4 .*: -8\.\d+ sampled, -2\.\d+ recomputed"
    with pytest.raises(OffPolicyError, match=named):
        asyncio.run(actor.update(batch, 1))
    with pytest.raises(OffPolicyError, match="differ by nan nats"):
        asyncio.run(actor.update(dataclasses.replace(batch, rollout_logprobs=sampled * float("nan")), 1))


def four_rows(worker, advantages):
    """Four rows of 5, 4, 5 and 3 tokens, of two prompts, with an advantage each."""
    lengths = torch.tensor([5, 4, 5, 3])
    tokens = torch.tensor([3, 9, 10, 11, 0, 3, 9, 13, 0, 4, 8, 11, 10, 0, 4, 8, 0])
    rows = Sequences(
        offsets=torch.tensor([0, 5, 9, 14, 17]),
        tokens=tokens,
        loss_mask=torch.tensor([letter == "1" for letter in "00111001100111001"]),
        prompt_index=torch.tensor([40, 40, 41, 41]),
        sample_index=torch.tensor([0, 1, 0, 1]),
    )
    batch = learnt_from(rows, worker.logprobs([rows])[0].values.clone())
    spread = torch.tensor(advantages).repeat_interleave(lengths) * rows.loss_mask
    return dataclasses.replace(batch, reference_logprobs=None, advantages=spread)


def alone_in_a_micro_batch(*overrides):
    """A config whose micro-batches hold five tokens."""
    small = ("data.max_prompt_tokens=2", "rollout={max_response_tokens: 3, num_prompts: 2, group_size: 2}")
    cap = ("engine.max_tokens_per_micro_batch=5", "actor.num_mini_batches=2", "kl=null", "actor.entropy_coef=0")
    return load_config("digits-grpo", [*small, *cap, *overrides]).config


@pytest.mark.parametrize("cap", [5, 100])
def test_tokens_of_high_covariance_are_chosen_among_all_of_the_step_and_not_of_a_mini_batch(context, spec, cap):
    """A quarter of nine tokens are two, those of the first row that are likeliest; each mini-batch has five or four."""
    config = alone_in_a_micro_batch("loss={name: kl_cov, fraction: 0.25}", f"engine.max_tokens_per_micro_batch={cap}")
    loss = actor_loss_of(config)
    worker = ActorWorker(context, dataclasses.replace(spec, config=config), loss)
    batch = four_rows(worker, [3.0, -1.0, -1.0, -1.0])
    sampled = torch.where(batch.loss_mask, torch.arange(17.0) / -10, 0.0)
    actor = actor_of(config, worker, loss)
    found = actor._with_selected(dataclasses.replace(batch, rollout_logprobs=sampled), step=1)
    assert found.selected is not None
    assert found.selected.nonzero().flatten().tolist() == [2, 3]
    assert asyncio.run(actor.update(batch, 1)).scalars()["actor/apart_fraction"] == pytest.approx(2 / 9)


SIGNALS = {
    "one group without": ([1.0, -1.0, 0.0, 0.0], 2),
    "single rows without": ([1.0, 0.0, 0.0, -0.5], 2),
    "all": ([1.0, -1.0, 0.5, -0.5], 4),
    "none": ([0.0, 0.0, 0.0, 0.0], 0),
}


@pytest.mark.parametrize(
    ("which", "aggregation"),
    thinned(
        itertools.product(SIGNALS, ["token", "sequence", "fixed_length"]),
        ("one group without", "token"),
        ("one group without", "sequence"),
        ("single rows without", "sequence"),
        ("single rows without", "fixed_length"),
        ("all", "sequence"),
        ("none", "fixed_length"),
    ),
)
def test_rows_without_a_signal_are_not_computed_and_the_weights_are_the_same_to_the_bit(
    context, spec, ticks, which, aggregation
):
    advantages, num_needed = SIGNALS[which]
    config = alone_in_a_micro_batch(f"aggregation={aggregation}")
    loss, weights, scalars = actor_loss_of(config), [], []
    for skips in (False, True):
        spec = dataclasses.replace(spec, config=config)
        worker = ActorWorker(dataclasses.replace(context, shared={}), spec, loss)
        actor, batch = actor_of(config, worker, loss), four_rows(worker, advantages)
        if aggregation == "sequence":
            batch = dataclasses.replace(batch, loss_weights=torch.tensor([1 / 3, 1 / 2, 1 / 3, 1.0]).double())
        ticks.clear()
        if skips:
            scalars.append(asyncio.run(actor.update(batch, 5)).scalars())
            assert len(ticks) == num_needed
        else:
            worker.train(actor.cut(batch, 5), 5)
            assert len(ticks) == 4
        weights.append({name: weight.clone() for name, weight in worker.engine.shard.trained().items()})
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    found = scalars[0]
    assert found["actor/num_tokens"] == 9
    assert found["actor/skipped_fraction"] == found["actor/without_signal"] == 1 - num_needed / 4
    # The second mini-batch has ratios near 1; the loss is the mean that the rule of the name takes.
    masks = torch.tensor([3.0, 2.0, 3.0, 1.0])
    by_row = {"token": masks, "sequence": torch.ones(4), "fixed_length": masks}[aggregation] * -torch.tensor(advantages)
    denominator = {"token": 9.0, "sequence": 4.0, "fixed_length": 4 * 3.0}[aggregation]
    assert found["actor/policy_loss"] == pytest.approx(float(by_row.sum()) / denominator, abs=2e-2)
    assert found["actor/loss"] == found["actor/policy_loss"]


@pytest.mark.parametrize("more", ["actor.entropy_coef=0.01", "kl={placement: loss}"])
def test_where_other_terms_learn_from_them_rows_without_a_signal_are_computed(context, spec, ticks, more):
    config = alone_in_a_micro_batch(more)
    loss = actor_loss_of(config)
    worker = ActorWorker(context, dataclasses.replace(spec, config=config), loss)
    batch = four_rows(worker, [1.0, -1.0, 0.0, 0.0])
    batch = dataclasses.replace(batch, reference_logprobs=batch.old_logprobs) if "kl" in more else batch
    ticks.clear()
    metrics = asyncio.run(actor_of(config, worker, loss).update(batch, 5)).scalars()
    assert len(ticks) == 4
    assert "actor/skipped_fraction" not in metrics
    assert metrics["actor/without_signal"] == 0.5


def test_logprobs_that_are_infinite_are_nan_as_a_ratio_to_them_could_be_clipped_to_a_finite_one(worker):
    class Broken(OneWorker):
        async def retried(self, work):
            (found,) = await super().retried(work)
            found.values[found.values < 0] = -math.inf
            return [found]

    batch = judged(worker)
    config = load_config("digits").config
    actor = Actor(config, cast("WorkerGroup", Broken(worker)), actor_loss_of(config))
    found = asyncio.run(actor.logprobs(batch))
    assert torch.equal(found.isnan(), batch.loss_mask)


def test_an_update_with_a_nan_among_the_recomputed_logprobs_is_left_out(context, spec):
    said = []
    worker = ActorWorker(dataclasses.replace(context, say=said.append), spec, actor_loss_of(spec.config))
    before = {name: weight.clone() for name, weight in worker.engine.weights.items()}
    batch = judged(worker, shift_at=7, by=float("nan"))
    check_judged(batch, spec.config.checks)
    assert worker.train(cut(batch), 1).scalars()["not_finite"] == 1
    assert said[0].startswith("step 1: the loss is nan for prompt 4")
    assert all(torch.equal(before[name], after) for name, after in worker.engine.weights.items())


def test_later_mini_batches_may_have_other_ratios_and_do_not_enter_the_check(worker):
    twice = cut(judged(worker), num_mini_batches=2, num_epochs=5)
    metrics = worker.train(twice, 20).scalars()
    assert metrics["ratio_error"] < 1e-6
    assert metrics["approx_kl"] > 0


def test_mini_batches_hold_every_row_once_an_epoch_whatever_the_number_of_ranks(worker):
    batch = judged(worker)
    batches = cut(batch, num_mini_batches=2, num_epochs=3, seed=5, step=7)
    assert len(batches.parts) == 6
    assert sum(cast("tuple[float, ...]", batches.denominators)) == 3 * batch.num_loss_tokens
    for ranks in (1, 2, 3):
        dealt = batches.split(ranks)
        assert all(part.denominators == batches.denominators for part in dealt)
        for index, whole in enumerate(batches.parts):
            joined = ActorBatch.join([part.parts[index] for part in dealt])
            in_order = lambda rows: rows.rows(rows.prompt_index.argsort()).tokens  # noqa: E731
            assert torch.equal(in_order(joined), in_order(whole))


def test_rows_of_a_prompt_are_in_the_same_mini_batch(worker):
    batch = judged(worker)
    rows = batch.rows([0, 1] * 4)
    batch = dataclasses.replace(rows, prompt_index=torch.tensor([7, 3, 7, 9, 2, 3, 9, 2]))
    for step in range(1, 4):
        parts = cut(batch, num_mini_batches=2, step=step).parts
        assert [len(set(part.prompt_index.tolist())) for part in parts] == [2, 2]
    orders = {tuple(cut(batch, num_mini_batches=2, step=step).parts[0].prompt_index.tolist()) for step in range(9)}
    assert len(orders) > 3


def test_a_mini_batch_without_trained_tokens_is_no_update(worker):
    batch = judged(worker)
    untrained = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    assert cut(untrained, num_mini_batches=2).parts == ()


def test_a_role_measures_the_memory_of_its_turns_and_begins_anew(worker):
    worker.logprobs([judged(worker)])
    assert set(worker.memory()) <= {"memory_gib"}
    assert worker.memory() == {}


def test_a_role_that_sleeps_between_its_turns_computes_the_same(worker, context, spec):
    rows = judged(worker)
    before = worker.logprobs([rows])[0].values
    for weight in worker.engine.model.parameters():
        weight.data = weight.data.clone()  # on CPUs, memory that a file was read into cannot be given back
    worker.lease.sleep_between(worker.engine)
    assert not any(weight.untyped_storage().nbytes() for weight in worker.engine.model.parameters())
    assert torch.equal(worker.logprobs([rows])[0].values, before)
    assert not any(weight.untyped_storage().nbytes() for weight in worker.engine.model.parameters())


def test_with_adapters_only_they_are_published_and_the_reference_keeps_the_initial_policy(context, spec):
    lora = spec.config.model.model_copy(update={"lora": LoRAConfig(rank=2)})
    spec = dataclasses.replace(spec, config=spec.config.model_copy(update={"model": lora}))
    actor = ActorWorker(context, spec, actor_loss_of(spec.config))
    reference = ReferenceWorker(context, spec, shares_actor=True)
    rollout = RolloutWorker(context, spec, shares_actor=False)
    batch = judged(actor)
    before = actor.logprobs([batch])[0].values
    assert torch.equal(reference.logprobs([batch])[0].values, before)
    actor.train(cut(batch, num_epochs=3), 20)
    assert not torch.equal(actor.logprobs([batch])[0].values, before)
    assert torch.equal(reference.logprobs([batch])[0].values, before)
    held = actor.held()
    assert held
    assert all(".lora_" in name for name in held)
    published, why = actor.write_published(3)
    assert why == ""
    folder = WrittenFolder()
    rollout.load(3, folder, published)
    sampled = sample(rollout, 2, 5, version=3)
    with pytest.raises(WeightsMismatchError, match="expected weights of version 5, found 3"):
        rollout.load(5, folder, published)
    with pytest.raises(WeightsMismatchError, match="version 5 was not loaded whole"):
        sample(rollout, 2, 5, version=3)
    rollout.load(4, folder, actor.write_published(4)[0])
    assert torch.equal(sample(rollout, 2, 5, version=4).tokens, sampled.tokens)
    gap = (sampled.rollout_logprobs - actor.logprobs([sampled])[0].values).abs()
    assert gap.max() < 1e-5


def test_weights_that_no_disk_takes_are_published_once_there_is_room_with_a_line_meanwhile(context, spec):
    said, tries = [], []
    actor = ActorWorker(dataclasses.replace(context, say=said.append), spec, actor_loss_of(spec.config))

    async def write():
        tries.append(1)
        with files_end_at(200) if len(tries) < 3 else contextlib.nullcontext():
            return actor.write_published(3)

    written = asyncio.run(with_room(write, again_s=0.0))
    assert len(tries) == 3
    published_folder.verify(written, 3)
    waits, ends = said
    assert re.search(r"version_000003.* cannot be written: .*the run waits, and tries again", waits)
    assert ends == "weights of version 3 are published"
