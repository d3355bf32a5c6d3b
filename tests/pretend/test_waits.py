"""How often the host waits for the device while it trains, and how much it copies: indices, without a wait."""

import dataclasses
import itertools

import pytest
import torch
from grids import thinned
from tiny_models import make_tiny_model

from rallypoint.config import LoRAConfig, OptimizerConfig
from rallypoint.engine import TrainingEngine, critic_values, policy_outputs
from rallypoint.model_files import load_critic, load_policy
from rallypoint.models import ModelShard
from rallypoint.models.kinds.expert_parallel import deal_experts
from rallypoint.models.tensor_parallel import TensorParts
from rallypoint.parallel import DeviceMesh
from rallypoint.types import Metrics, Sequences, offsets_from_lengths

DEVICE = torch.device("pretend:0")
ROW, PROMPT = 20, 6
OUTPUTS = {"policy": lambda *args: policy_outputs(*args, 1.0).logprobs, "critic": critic_values}


def rows(num):
    """Return so many rows, two of a prompt, whose trained tokens are those behind it."""
    place = torch.arange(num * ROW) % ROW
    tokens = torch.randint(20, (num // 2, ROW), generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 0)
    tokens[1::2, PROMPT:] = 7
    return Sequences(
        offsets=offsets_from_lengths(torch.full((num,), ROW)),
        tokens=tokens.flatten(),
        loss_mask=place >= PROMPT,
        prompt_index=torch.arange(num) // 2,
        sample_index=torch.arange(num) % 2,
    )


@pytest.mark.parametrize(
    ("activations", "outputs"),
    thinned(
        itertools.product(["keep", "checkpoint", "offload"], OUTPUTS),
        ("keep", "policy"),
        ("checkpoint", "critic"),
        ("offload", "policy"),
    ),
)
def test_a_micro_batch_is_trained_without_a_wait(pretend, tmp_path, activations, outputs):
    folder = make_tiny_model(tmp_path / "model")
    load = load_policy if outputs == "policy" else load_critic
    shard = load(folder, dtype="float32", device=DEVICE)
    engine = TrainingEngine(
        shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=2 * ROW, activations=activations
    )

    def loss(part, at):
        return OUTPUTS[outputs](shard, part, at).sum(), Metrics()

    counted = []
    for num in (4, 4, 8):  # in the first step the optimizer makes its state
        pretend.reset()
        engine.train(rows(num), loss, denominator=1.0, step=1, num_steps=2)
        counted.append((pretend.syncs.copy(), pretend.copies.copy(), pretend.bytes.copy()))
    _, (few, copies, num_bytes), (many, more_copies, more_bytes) = counted
    # The losses of all micro-batches, and the norm of the gradient.
    assert few == many == {"copy to the host": 1, "item": 1}
    assert more_copies["to the device"] - copies["to the device"] <= 2 * (14 + 4 * (activations == "offload"))
    # Indices: of each token a few numbers for each head.
    per_token = (more_bytes["to the device"] - num_bytes["to the device"]) / (4 * ROW)
    assert per_token < 8 * 20 + (200 if activations == "offload" else 0)


class Mirror:
    """Two ranks, of which the other does what this one does."""

    rank, size = 0, 2

    def all_reduce_sum(self, tensors):
        for tensor in tensors:
            tensor.mul_(2)

    def all_reduce_max(self, tensor):
        pass

    def all_gather(self, tensor, sizes):
        return [tensor, tensor]

    def exchange(self, parts, sizes):
        return [parts[0], parts[0]]


class Elsewhere(Mirror):
    """Two ranks, of which the other gives zeros, as many as this one expects."""

    def all_gather(self, tensor, sizes):
        return [tensor.new_zeros(size, *tensor.shape[1:]) for size in sizes]

    def trade(self, tensor, given, taken):
        return tensor.new_zeros(sum(taken), *tensor.shape[1:])


def test_ranks_that_share_tokens_by_keys_and_values_wait_for_nothing_in_a_layer(pretend, tmp_path):
    counted = []
    for num_layers in (1, 2):
        folder = make_tiny_model(tmp_path / str(num_layers), num_layers=num_layers)
        mesh = dataclasses.replace(DeviceMesh.solo(), cp=Elsewhere(), tokens=Elsewhere(), replicas=Elsewhere())
        shard = ModelShard.whole(load_policy(folder, dtype="float32", device=DEVICE).model, mesh)
        engine = TrainingEngine(shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=2 * ROW)
        for num in (2, 2, 4):
            pretend.reset()
            engine.train(
                rows(num),
                lambda part, at, shard=shard: (policy_outputs(shard, part, at, 1.0).logprobs.sum(), Metrics()),
                denominator=1.0,
                step=1,
                num_steps=2,
            )
            counted.append((pretend.syncs.copy(), pretend.copies["to the device"]))
    waits, copies = zip(*counted, strict=True)
    assert waits[1] == waits[2] == waits[4] == waits[5] == {"copy to the host": 1, "item": 1}
    # Indices are those of a micro-batch, whatever the number of its layers.
    assert copies[2] - copies[1] == copies[5] - copies[4]


OF_EXPERTS = LoRAConfig(rank=3, target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))


MIXTURES = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("family", "ranks", "lora"),
    thinned(
        [*itertools.product(MIXTURES, (1, 2), (None,)), ("gpt_oss", 1, OF_EXPERTS)],
        ("qwen3_moe", 2, None),
        ("deepseek_v3", 1, None),
        ("gpt_oss", 1, OF_EXPERTS),
    ),
)
def test_layers_of_experts_wait_for_nothing_on_one_rank_or_dealt_over_two(pretend, tmp_path, family, ranks, lora):
    counted, first = [], 2 if family in ("glm4_moe", "deepseek_v3") else 1  # where the first of several has no experts
    for num_layers in (first, first + 1):
        folder = make_tiny_model(
            tmp_path / str(num_layers), architecture=family, num_key_value_heads=4, num_layers=num_layers
        )
        shard = load_policy(folder, dtype="float32", device=DEVICE, lora=lora)
        if ranks == 2:
            deal_experts(shard.model, Mirror(), TensorParts.whole(shard.model))
            mesh = dataclasses.replace(DeviceMesh.solo(), ep=Mirror(), passes=Mirror())
            shard = ModelShard.whole(shard.model, mesh)
        engine = TrainingEngine(shard, optimizer=OptimizerConfig(), max_tokens_per_micro_batch=2 * ROW)
        for num in (2, 2, 4):
            pretend.reset()
            engine.train(
                rows(num),
                lambda part, at, shard=shard: (OUTPUTS["policy"](shard, part, at).sum(), Metrics()),
                denominator=1.0,
                step=1,
                num_steps=2,
            )
            counted.append(pretend.syncs.copy())
    assert counted[1] == counted[2] == counted[4] == counted[5] == {"copy to the host": 1, "item": 1}


def test_what_a_loss_tells_of_a_micro_batch_is_all_that_is_waited_for(runs, pretend):
    def waited(name, cap):
        pretend.reset()
        tiny = ("cluster.runtime=inline", "cluster.pools={main: [1]}", "cluster.device=pretend", "trainer.num_steps=1")
        runs.run(name, *tiny, "recipe=grpo", "validation.every_steps=99", f"engine.max_tokens_per_micro_batch={cap}")
        return sum(pretend.syncs.values()), pretend.kernels["embedding_dense_backward"]

    (many, num_trained), (few, fewer_trained) = waited("small", 48), waited("large", 512)
    assert num_trained - fewer_trained >= 4
    # Of a micro-batch its metrics, and the logprobs of the policy and of the reference before.
    assert many - few <= (11 + 2) * (num_trained - fewer_trained)
