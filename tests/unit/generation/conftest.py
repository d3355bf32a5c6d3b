"""Tiny policies, prompts of different lengths, and how they are sampled."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sampling_cases import decode
from tiny_models import make_tiny_model
from transformers import PreTrainedModel

from rallypoint.generation import GenerationEngine, HFEngine, NativeEngine, SamplingParams
from rallypoint.model_files import load_policy
from rallypoint.types import Prompts, offsets_from_lengths

ENGINES = {
    "hf": lambda model, decode=decode: HFEngine(model, decode=decode, version=4),
    "native": lambda model, decode=decode: NativeEngine(model, decode=decode, version=4),
    "native, exact": lambda model, decode=decode: NativeEngine(model, decode=decode, version=4, mode="exact"),
    "native, little memory": lambda model, decode=decode: NativeEngine(model, decode=decode, version=4, max_rows=3),
}


@pytest.fixture(params=ENGINES)
def make_engine(request) -> Callable[..., GenerationEngine]:
    """Return a function that makes an engine of a policy: each of them in turn."""
    return ENGINES[request.param]


@pytest.fixture(scope="session")
def slow_engine() -> Callable[..., GenerationEngine]:
    """Return the function that makes the engine that the others are compared with."""
    return ENGINES["hf"]


@pytest.fixture
def engine(make_engine, make_policy) -> GenerationEngine:
    """An engine of the shared policy: each of them in turn."""
    return make_engine(make_policy())


@pytest.fixture(scope="session")
def make_policy(tmp_path_factory) -> Callable[..., PreTrainedModel]:
    """Return a function that creates a policy; what it returns is shared and must not be changed."""

    @functools.cache
    def make(architecture="llama", num_key_value_heads=2, initializer_range=0.3) -> PreTrainedModel:
        folder: Path = tmp_path_factory.mktemp("model")
        make_tiny_model(
            folder,
            architecture=architecture,
            num_key_value_heads=num_key_value_heads,
            initializer_range=initializer_range,
            max_positions=1024,
        )
        return load_policy(str(folder), dtype="float32").model

    return make


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., Prompts]:
    """Return a function that makes prompts of given lengths, numbered from `first`."""

    def make(lengths, *, first=7) -> Prompts:
        offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
        generator = torch.Generator().manual_seed(0)
        return Prompts(
            offsets=offsets,
            tokens=torch.randint(1, 20, (int(offsets[-1]),), generator=generator),
            prompt_index=torch.arange(len(lengths)) + first,
        )

    return make


@pytest.fixture(scope="session")
def params() -> SamplingParams:
    """The shared way of sampling: <eos> is token 0, and a few more end a rollout, so that lengths differ."""
    return SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, stop_tokens=(0, 5, 11))
