"""The worker that samples, called as the plain object that it is."""

import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_tiny_model

from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.cluster.rendezvous import open_rendezvous
from rallypoint.config import load_config
from rallypoint.errors import MembershipLostError, PeerFailedError, WeightsMismatchError
from rallypoint.generation import Request, SamplingParams
from rallypoint.models import PackedRows, lm_head
from rallypoint.recipes.recipe import actor_loss_of
from rallypoint.roles.actor import ActorWorker
from rallypoint.roles.colocated import ActorParts
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.roles.publishing import SharedTensors
from rallypoint.roles.rank_engine import GuestEngine, SliceRequest
from rallypoint.roles.rollout import RolloutWorker


@pytest.fixture
def model(tmp_path):
    return make_tiny_model(tmp_path / "model", num_layers=2)


@pytest.fixture
def spec(tmp_path, model):
    return WorkerSpec(load_config("digits").config, model, SharedFolder.marked(tmp_path), None)


@torch.no_grad()
def logprobs_of(model, tokens):
    """Return what a model says of every token but the first, each after those before it."""
    rows = PackedRows(torch.tensor([0, len(tokens)]), torch.device("cpu"))
    states = model.base_model(
        input_ids=torch.tensor([tokens]), position_ids=rows.position_ids, use_cache=False, rows=rows
    ).last_hidden_state
    return lm_head(model)(states[0, :-1]).log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


def test_a_request_under_way_goes_on_under_published_weights_as_if_they_had_read_all_of_it(spec):
    ticks = []

    def tick():
        ticks.append(None)
        if len(ticks) == 5:
            time.sleep(0.3)  # longer than a slice, so that it ends in the middle of the response

    context = WorkerContext("rollout", 0, Mesh({"dp_replicate": 1}), 1, "cpu", {}, tick)
    ActorWorker(context, spec, actor_loss_of(spec.config))
    rollout = RolloutWorker(context, spec, shares_actor=True)
    rollout.open_guests(4)
    prompt, params = (3, 4, 5), SamplingParams(max_new_tokens=12)
    first = rollout.advance_guests(SliceRequest(new=((7, Request(tokens=prompt, params=params)),)))
    assert first[-1].finish_reason is None

    model = ActorParts.find(context).engine.shard.model
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    rollout.load(1, SharedTensors(), None)
    rest = rollout.advance_guests(SliceRequest())
    while rest[-1].finish_reason is None:  # on a busy machine a slice is not enough
        rest += rollout.advance_guests(SliceRequest())

    assert {output.version for output in first} == {0}
    assert {output.version for output in rest} == {1}
    before, after = ([token for output in outputs for token in output.tokens] for outputs in (first, rest))
    assert len(before) + len(after) == 12
    assert rest[-1].finish_reason == "length"
    expected = logprobs_of(model, [*prompt, *before, *after])[-len(after) :]
    torch.testing.assert_close(torch.tensor([p for output in rest for p in output.logprobs]), expected)


REQUEST = Request(tokens=(3, 4), params=SamplingParams(max_new_tokens=5))


@contextlib.contextmanager
def sharing_a_model(tmp_path, model, *overrides, tick=lambda rank: None, lease_s=20):
    """Open two ranks that share a model, which may fail whenever they tick, and threads for them."""
    mesh = Mesh({"dp_replicate": 1, "dp_shard": 1, "ep": 1, "sp": 1, "tp": 2})
    config = load_config(
        "digits", ["cluster.pools={main: [2]}", "actor.mesh.tp=2", "rollout.mesh.tp=2", *overrides]
    ).config
    with open_rendezvous("memory", "rollouts", lease_s=lease_s) as rendezvous, ThreadPoolExecutor(2) as pool:
        spec = WorkerSpec(config, model, SharedFolder.marked(tmp_path), rendezvous)

        def worker(rank):
            context = WorkerContext("actor", rank, mesh, 1, "cpu", {}, lambda: tick(rank))
            ActorWorker(context, spec, actor_loss_of(config))
            return RolloutWorker(dataclasses.replace(context, role="rollout"), spec, shares_actor=True)

        yield list(pool.map(worker, range(2))), pool


def answered(rank):
    """Return the tokens that a rank gives a person, or why there are none."""
    outputs = rank.advance_guests(SliceRequest(new=((1, REQUEST),)))
    while outputs[-1].finish_reason is None:  # on a busy machine a slice is not enough
        outputs += rank.advance_guests(SliceRequest())
    return outputs[-1].error or [token for output in outputs for token in output.tokens]


def test_a_slice_for_persons_that_fails_costs_their_requests_and_ranks_that_share_a_model_go_on(tmp_path, model):
    failing = set()

    def tick(rank):
        assert rank not in failing, "out of luck"

    with sharing_a_model(tmp_path, model, tick=tick) as (ranks, pool):
        in_vain = list(pool.map(answered, ranks))
        assert all("these requests failed and are lost: AssertionError: it is opened" in str(one) for one in in_vain)
        list(pool.map(lambda rank: rank.open_guests(2), ranks))
        expected = list(pool.map(answered, ranks))
        assert len(expected[0]) == 5
        ranks[1]._problem = "version 1 was not loaded whole"
        others, own = pool.map(answered, ranks)
        assert str(others) == "these requests failed and are lost: another rank failed"
        assert str(own).startswith("these requests failed and are lost: WeightsMismatchError: version 1 was not loaded")
        ranks[1]._problem = None
        assert list(pool.map(answered, ranks)) == expected
        failing |= {0, 1}
        assert ["AssertionError: out of luck" in str(one) for one in pool.map(answered, ranks)] == [True, True]
        failing.clear()
        assert list(pool.map(answered, ranks)) == expected
        asked = SliceRequest(new=((2, REQUEST),), num_steps=9)
        sampled = pool.map(lambda rank: rank.advance(asked).outputs[-1].tokens, ranks)
        assert [[*tokens] for tokens in sampled] == expected


def test_a_rank_that_fails_alone_in_a_slice_for_persons_leaves_the_others_which_do_not_wait_for_it(tmp_path, model):
    failing = {0}

    def tick(rank):
        assert rank not in failing, "out of luck"

    with sharing_a_model(tmp_path, model, tick=tick) as (ranks, pool):
        for rank in ranks:
            rank._guests._grace_s = 2.0
        list(pool.map(lambda rank: rank.open_guests(2), ranks))
        fails, waits = (pool.submit(answered, rank) for rank in ranks)
        with pytest.raises(AssertionError, match="out of luck"):
            fails.result()
        with pytest.raises((PeerFailedError, MembershipLostError)):
            waits.result(timeout=100)  # the model's own deadline is half an hour


def test_a_rank_that_is_called_late_for_a_slice_for_persons_is_waited_for(tmp_path, model):
    with sharing_a_model(tmp_path, model) as (ranks, pool):
        for rank in ranks:
            rank._guests._grace_s = 1.0
        list(pool.map(lambda rank: rank.open_guests(2), ranks))
        first = pool.submit(answered, ranks[0])
        time.sleep(3)
        assert answered(ranks[1]) == first.result()


class LosesAnEnd:
    """Ends the request of an earlier slice, and fails before it says so."""

    def __init__(self):
        self.open = (1,)
        self.engine = SimpleNamespace(version=0, max_request_tokens=9, wake=lambda: None, sleep=lambda: None)

    def take(self, asked, *, streamed):
        return []

    def sample(self, *, until_one_ends):
        self.open = ()
        raise RuntimeError("no memory")


def test_a_request_of_a_person_that_ended_in_a_slice_that_failed_is_answered():
    training = SimpleNamespace(together=contextlib.nullcontext, engine=SimpleNamespace(version=0))
    guests = GuestEngine(training, WorkerContext("rollout", 0, Mesh({"tp": 1}), 1, "cpu", {}, lambda: None))
    guests.open(LosesAnEnd, None, None)
    (end,) = guests.advance(SliceRequest(), contextlib.nullcontext)
    assert (end.request_id, str(end.error)) == (1, "these requests failed and are lost: RuntimeError: no memory")


def test_a_rank_that_fails_ends_what_it_samples_with_others(tmp_path, model):
    with sharing_a_model(tmp_path, model) as (ranks, pool):
        both = [pool.submit(rank.advance, SliceRequest(new=((1, REQUEST),), num_steps=9)) for rank in ranks]
        first, second = (one.result() for one in both)
        assert first.outputs == second.outputs
        assert first.outputs[-1].finish_reason == "length"

        list(pool.map(lambda rank: rank.open_guests(2), ranks))
        assert list(pool.map(answered, ranks)) == [[*first.outputs[-1].tokens]] * 2

        calls = zip(ranks, (0, 7), strict=True)
        waits, fails = [
            pool.submit(rank.advance, SliceRequest(((2, REQUEST),), version=version)) for rank, version in calls
        ]
        with pytest.raises(WeightsMismatchError, match="version 7"):
            fails.result()
        with pytest.raises((PeerFailedError, MembershipLostError)):
            waits.result()
