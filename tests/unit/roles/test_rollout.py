"""The worker that samples, called as the plain object that it is."""

import time

import pytest
import torch
from tiny_models import make_tiny_model

from rallypoint.cluster import Mesh, WorkerContext
from rallypoint.config import load_config
from rallypoint.generation import Request, SamplingParams
from rallypoint.models import PackedRows, lm_head
from rallypoint.recipes.recipe import actor_loss_of
from rallypoint.roles.actor import ActorWorker
from rallypoint.roles.colocated import ActorParts
from rallypoint.roles.placement import SharedFolder, WorkerSpec
from rallypoint.roles.publishing import SharedTensors
from rallypoint.roles.rank_engine import SliceRequest
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
    rollout.load(1, SharedTensors("shared"), None)
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
