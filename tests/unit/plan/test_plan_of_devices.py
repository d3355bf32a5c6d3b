"""What the plan counts of a pass on an accelerator, where kernels are fused and products large."""

import dataclasses
from pathlib import Path

from rallypoint.config import RunConfig, load_config
from rallypoint.config.shape import shape_of
from rallypoint.plan.role_memory import role_memory


def load(device: str) -> RunConfig:
    more = (
        "data.max_prompt_tokens=1024",
        "rollout.max_response_tokens=1024",
        "recipe=grpo",
        "actor.num_mini_batches=1",
        "model.dtype=float32",
        "engine.activations=keep",
    )
    return load_config("digits-grpo", [f"cluster.device={device}", *more]).config


def test_scores_are_counted_where_no_fused_kernel_knows_what_is_done_to_them(here: Path):
    config = load("cuda")
    shape = shape_of(config)
    assert shape is not None
    fused, capped = (
        role_memory(config, "actor", dataclasses.replace(shape, caps_scores=caps)) for caps in (False, True)
    )
    # Of every query a number for each key before it, in all layers.
    rows = config.engine.max_tokens_per_micro_batch // config.max_row_tokens
    scores = 4 * shape.num_layers * rows * shape.num_heads * config.max_row_tokens**2 // 2
    assert capped.activations - fused.activations > 0.8 * scores


def test_larger_chunks_of_the_head_are_counted(here: Path):
    shape = shape_of(load("cpu"))
    assert shape is not None
    wide = dataclasses.replace(shape, vocab_size=150_000)
    here_and_there = [role_memory(load(device), "actor", wide).activations for device in ("cpu", "cuda")]
    assert here_and_there[1] > 2**30 > here_and_there[0] / 4
