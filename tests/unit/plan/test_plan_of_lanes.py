"""What the plan says of processes that compute in lanes."""

import dataclasses
import json
from pathlib import Path

import pytest

from rallypoint.config import RunConfig, load_config
from rallypoint.models.head import CHUNK_BYTES
from rallypoint.plan import make_plan
from rallypoint.plan import role_memory as memory_module


def load(*overrides: str) -> RunConfig:
    return load_config("base.yaml", overrides).config


def of_tensors(memory, num_lanes: int) -> float:
    """What tensors of a pass take of a role's activations, without heaps, libraries and the compiled decoder."""
    known = vars(memory_module)
    heap = known["_HEAP"] if num_lanes == 1 else known["_HEAP_OF_LANES"]
    return (memory.activations - known["_LIBRARY_BYTES"] - known["_DECODER_BYTES"]) / heap


def test_lanes_need_room_for_sums_of_gradients_of_their_own_and_for_heaps(here: Path):
    rows = ("cluster.pools.main=[1]", "rollout={group_size: 1, num_prompts: 32}")  # that have no tokens in common
    one, four = (make_plan(load(f"cluster.num_cpus_per_process={cpus}", *rows)).memory[0] for cpus in (1, 4))
    four_without = dataclasses.replace(four, activations=four.activations - 3 * four.gradients)
    assert of_tensors(four_without, 4) == pytest.approx(of_tensors(one, 1), abs=1)
    for alone in ("cluster.device=cuda", "engine.max_tokens_per_micro_batch=31"):  # no room for a second row
        one, four = (
            make_plan(load(f"cluster.num_cpus_per_process={cpus}", "cluster.pools.main=[1]", alone)).memory[0]
            for cpus in (1, 4)
        )
        assert four.activations == one.activations


def test_lanes_hold_the_whole_groups_that_fit_into_their_share_of_the_cap(here: Path):
    # Groups of 4 rows of 16 tokens under a cap of 192: 3 of them in one lane, or 1 in each of two.
    common = ("cluster.pools.main=[1]", "recipe=grpo", "engine.max_tokens_per_micro_batch=192", "rollout.group_size=4")
    common += ("rollout.num_prompts=12", "actor.num_mini_batches=1")
    one, two = (make_plan(load(*common, f"cluster.num_cpus_per_process={cpus}")).memory[0] for cpus in (1, 2))
    assert two.activations - two.gradients < one.activations


def test_every_lane_of_a_reference_has_a_chunk_of_logits(here: Path):
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 24}
    (here / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 150_000, **sizes}))
    common = ("model.create=null", f"model.path={here}", "cluster.pools.main=[1]", "rollout.num_prompts=256")
    room = "engine.max_tokens_per_micro_batch=8192"
    one, two = (make_plan(load(*common, room, f"cluster.num_cpus_per_process={cpus}")).memory[2] for cpus in (1, 2))
    assert one.role == "reference"
    assert of_tensors(two, 2) == pytest.approx(of_tensors(one, 1) + CHUNK_BYTES, abs=2)
