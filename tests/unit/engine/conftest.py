"""A tiny policy, ragged batches, and a loss that any rank of any cut can compute."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny_model
from transformers import PreTrainedModel

from rallypoint.engine.forward import TokenStream
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard, lm_head
from rallypoint.types import ActorBatch, Mean, Metrics, offsets_from_lengths


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory) -> Callable[..., str]:
    """Return a function that creates a model and returns its folder."""

    @functools.cache
    def make(architecture="llama") -> str:
        folder: Path = tmp_path_factory.mktemp("model")
        return make_tiny_model(
            folder, architecture=architecture, tie_embeddings=architecture == "qwen3", max_positions=1024
        )

    return make


@pytest.fixture
def make_policy(make_folder) -> Callable[..., PreTrainedModel]:
    """Return a function that loads a policy of its own in any precision."""

    def make(dtype=torch.float64, architecture="llama") -> PreTrainedModel:
        return load_policy(make_folder(architecture), dtype="float32").model.to(dtype)

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., ActorBatch]:
    """Return a function that makes rows of given lengths, with holes in their masks."""

    def make(lengths, *, seed=0, masked_rows=()) -> ActorBatch:
        generator = torch.Generator().manual_seed(seed)
        offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
        num_tokens = int(offsets[-1])
        loss_mask = torch.rand(num_tokens, generator=generator) < 0.7
        loss_mask[offsets[:-1][torch.tensor(lengths) > 0]] = False
        for row in masked_rows:
            loss_mask[offsets[row] : offsets[row + 1]] = False
        return ActorBatch(
            offsets=offsets,
            tokens=torch.randint(20, (num_tokens,), generator=generator),
            loss_mask=loss_mask,
            prompt_index=torch.arange(len(lengths)) // 2 + 40,
            sample_index=torch.arange(len(lengths)) % 2,
            rollout_logprobs=torch.zeros(num_tokens),
            old_logprobs=torch.randn(num_tokens, generator=generator) - 3,
            reference_logprobs=None,
            advantages=torch.randn(num_tokens, generator=generator),
        )

    return make


@pytest.fixture(scope="session")
def policy_gradient() -> Callable:
    """Return a function from a model to its loss, in the model's own precision throughout."""

    def of(model):
        shard = ModelShard.whole(model)

        def loss(part, at):
            stream = TokenStream(shard, part, at)
            everything = lm_head(model)(stream.join(stream.states())).log_softmax(-1)
            logprobs = everything.gather(-1, part.tokens[at].unsqueeze(-1)).squeeze(-1)
            ratio = (logprobs - part.old_logprobs[at]).exp()
            total = -(ratio.clamp(0.8, 1.2) * part.advantages[at] + 0.3 * logprobs).sum()
            return total, Metrics({"loss": Mean(float(total.detach()), len(at))})

        return loss

    return of
