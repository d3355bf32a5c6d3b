"""The experts that rollouts were sampled with, beside those that a pass over the finished rows chooses."""

import dataclasses
import itertools

import pytest
import torch
from grids import thinned

from rallypoint.generation import NativeEngine, generate
from rallypoint.generation.native.accelerator.backend import AcceleratorBackend
from rallypoint.generation.protocol import Request
from rallypoint.models import PackedRows
from rallypoint.models.kinds.experts import routers_of
from rallypoint.models.kinds.router_replay import recorded, written

WAYS = {
    "fast": {},
    "exact": {"mode": "exact"},
    "two at once": {"max_rows": 2},
    "preempted": {"cache_tokens": 128},
    "several steps at once": {"backend": AcceleratorBackend},
}


def chosen_by(model, batch):
    """Return what the routers choose for the token before each, in one pass over all rows: [T, bytes]."""
    routers, rows = routers_of(model), PackedRows(batch.offsets, model.device)
    with torch.no_grad(), recorded(routers) as chosen:
        model.base_model(
            input_ids=batch.tokens.unsqueeze(0), position_ids=rows.position_ids, use_cache=False, rows=rows
        )
    found = written(routers, chosen).roll(1, 0)
    found[batch.offsets[:-1]] = 0
    return found


KV_HEADS = {"qwen3_moe": 2, "gpt_oss": 2, "glm4_moe": 2, "deepseek_v3": 4}


@pytest.mark.parametrize(
    ("way", "family"),
    thinned(
        itertools.product(WAYS, KV_HEADS),
        *itertools.product(["fast"], KV_HEADS),
        ("exact", "glm4_moe"),
        ("two at once", "qwen3_moe"),
        ("preempted", "gpt_oss"),
        ("several steps at once", "deepseek_v3"),
    ),
)
def test_rollouts_have_the_experts_of_every_token_that_was_computed(make_policy, make_prompts, params, way, family):
    model = make_policy(family, KV_HEADS[family])
    made = {name: value(model) if name == "backend" else value for name, value in WAYS[way].items()}
    engine = NativeEngine(model, records_experts=True, **made)
    params = dataclasses.replace(params, max_new_tokens=40, stop_tokens=() if way == "preempted" else (0,))
    batch = generate(engine, make_prompts([5, 40, 2, 40, 64]), params, version=0, group_size=3)
    assert batch.experts.shape == (batch.num_tokens, len(routers_of(model)) * 2)
    assert torch.equal(batch.experts, chosen_by(model, batch))
    assert (engine.num_preempted > 0) == (way == "preempted")


def test_a_prompt_found_inside_a_longer_one_has_its_experts(make_policy, params):
    model = make_policy("qwen3_moe")
    engine = NativeEngine(model, records_experts=True)
    found = []
    for prompt in [tuple(range(1, 20)) * 4, tuple(range(1, 20)) * 3 + (1, 2), (tuple(range(1, 20)) * 4)[:64]]:
        engine.submit(Request(tokens=prompt, params=params))
        while engine.has_work:
            found += [one.prompt_experts for one in engine.step() if one.finish_reason]
    assert len(found[0]) == 76 * 4
    assert all(one == found[0][: len(one)] for one in found[2:])
    assert not any(found[0][:4])


def test_outputs_without_a_mixture_have_none(make_policy, make_prompts, params):
    assert generate(NativeEngine(make_policy()), make_prompts([3]), params, version=0, group_size=1).experts is None
