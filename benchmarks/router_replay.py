"""How far trainer and sampler of a small mixture of experts are apart, with router replay and without.

    python benchmarks/router_replay.py

Rollouts of random weights in the shape of Qwen3-MoE are sampled by the native engine, and computed again by the
trainer's pass over packed rows. Prints a table: mean and largest difference of logprobs, in nats.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from rallypoint.engine import policy_outputs, trained_positions
from rallypoint.generation import NativeEngine, SamplingParams, generate
from rallypoint.model_files import load_policy
from rallypoint.models import ModelShard
from rallypoint.types import Prompts, RolloutBatch, offsets_from_lengths


def gap(shard: ModelShard, batch: RolloutBatch) -> torch.Tensor:
    """Return the difference of each sampled token's logprobs: [N]."""
    with torch.no_grad():
        found = policy_outputs(shard, batch, trained_positions(batch), 1.0).logprobs.float().cpu()
    return (found - batch.rollout_logprobs[batch.loss_mask]).abs()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=32, moe_intermediate_size=96, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
        initializer_range=0.05, max_position_embeddings=1024,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(sizes).save_pretrained(folder)
        print("| type | replay | mean gap | largest gap |\n|---|---|---:|---:|")
        for dtype in ("float32", "bfloat16"):
            shard = load_policy(folder, dtype=dtype, device=torch.device(options.device))
            engine = NativeEngine(shard.model, records_experts=True, cache_tokens=16_384)
            generator = torch.Generator().manual_seed(1)
            prompts = Prompts(
                offsets=offsets_from_lengths(torch.full((8,), 32)),
                tokens=torch.randint(0, 512, (256,), generator=generator),
                prompt_index=torch.arange(8),
            )
            params = SamplingParams(max_new_tokens=options.response_tokens, seed=1)
            batch = generate(engine, prompts, params, version=0, group_size=8)
            for name, rows in (("on", batch), ("off", dataclasses.replace(batch, experts=None))):
                found = gap(shard, rows)
                print(f"| {dtype} | {name} | {float(found.mean()):.2g} | {float(found.max()):.2g} |")


if __name__ == "__main__":
    main()
