"""Which kernels CUDA would take: in order in training passes, and while sampling none that copies a whole cache."""

import os

import pytest
import torch
from pretend_device import is_strict
from tiny_models import make_tiny_model

from rallypoint.config import OptimizerConfig
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.errors import DeterminismError
from rallypoint.generation import NativeEngine, Request, SamplingParams
from rallypoint.model_files import load_policy
from rallypoint.types import Metrics, Sequences, offsets_from_lengths

DEVICE = torch.device("pretend:0")
UNORDERED, COPIED = "attention backward in any order", "whole copies to write in order"


@pytest.fixture
def shard(tmp_path):
    folder = make_tiny_model(tmp_path / "model", architecture="qwen3", num_layers=1, max_positions=256)
    return load_policy(folder, dtype="float32", device=DEVICE)


@pytest.fixture
def rows():
    return Sequences(
        offsets=offsets_from_lengths(torch.tensor([9, 5])),
        tokens=torch.arange(14),
        loss_mask=torch.ones(14, dtype=torch.bool).index_fill(0, torch.tensor([0, 9]), False),
        prompt_index=torch.arange(2),
        sample_index=torch.zeros(2, dtype=torch.int64),
    )


def trained(shard, rows, *, deterministic, extra=lambda logprobs: None):
    """Make an update, and return whether its loss ran strictly."""
    engine = TrainingEngine(
        shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=9, deterministic=deterministic
    )
    found = []

    def loss(part, at):
        found.append(is_strict())
        logprobs = policy_outputs(shard, part, at, 1.0).logprobs
        extra(logprobs)
        return logprobs.sum(), Metrics()

    engine.train(rows, loss, denominator=1.0, step=1, num_steps=2)
    return found


def test_an_update_adds_in_order_unless_the_config_says_otherwise(pretend, shard, rows):
    assert trained(shard, rows, deterministic=True) == [True, True]
    assert not pretend.kernels[UNORDERED]
    assert trained(shard, rows, deterministic=False) == [False, False]
    assert pretend.kernels[UNORDERED] == 2
    assert not is_strict()


def test_an_operator_without_order_is_refused_in_an_update_by_name(shard, rows):
    with pytest.raises(DeterminismError, match=r"cumsum.*engine.deterministic=false"):
        trained(shard, rows, deterministic=True, extra=lambda logprobs: logprobs.cumsum(0))
    assert not is_strict()
    trained(shard, rows, deterministic=False, extra=lambda logprobs: logprobs.cumsum(0))


def test_numbers_of_tokens_are_computed_in_order(shard, rows):
    engine, found = TrainingEngine(shard, optimizer=None, max_tokens_per_micro_batch=9), []

    def outputs(part, at):
        found.append(is_strict())
        return policy_outputs(shard, part, at, 1.0).logprobs

    engine.evaluate(rows, outputs)
    assert found == [True, True]
    assert not is_strict()


def test_prompts_are_written_into_the_cache_without_a_copy_of_it(pretend, shard):
    def sample():
        engine = NativeEngine(shard.model)
        engine.submit(
            Request(tokens=(1, 2, 3), params=SamplingParams(max_new_tokens=3), prompt_index=0, sample_index=0)
        )
        while engine.has_work:
            engine.step()

    sample()
    assert not pretend.kernels[COPIED]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        sample()
    finally:
        torch.use_deterministic_algorithms(False)
    assert pretend.kernels[COPIED], "it is counted where it happens"


def test_a_run_adds_in_order_copies_no_cache_and_leaves_the_process_as_it_was(runs, pretend):
    torch.backends.cuda.enable_cudnn_sdp(True)
    workspace = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    try:
        once = ("trainer.num_steps=1", "validation.every_steps=99", "model.dtype=bfloat16", "engine.activations=keep")
        runs.run("once", "cluster.runtime=inline", "cluster.pools={main: [1]}", "cluster.device=pretend", *once)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    finally:
        torch.backends.cuda.enable_cudnn_sdp(False)
        if workspace is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
    assert pretend.kernels["attention by flash"]
    assert not pretend.kernels["attention by cudnn"], "it would build a graph for each shape"
    assert not pretend.kernels[UNORDERED]
    assert not pretend.kernels[COPIED]
