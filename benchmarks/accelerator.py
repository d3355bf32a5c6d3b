"""An update on one accelerator: tokens per second, the share of its peak, and memory beside the prediction.

    python benchmarks/accelerator.py                       # Qwen3 shapes of 0.6B and 1.7B, random weights, bfloat16
    python benchmarks/accelerator.py --models 0.6B --activations checkpoint
    python benchmarks/accelerator.py --models 0.6B --any-order        # what deterministic kernels cost
    python benchmarks/accelerator.py --models 0.6B --ragged           # lengths that no update has had before
    python benchmarks/accelerator.py --models experts --rows 32        # a mixture: four layers of Qwen3-30B-A3B
    python benchmarks/accelerator.py --models tiny --device cpu        # whether it runs at all

64 rows of 512 prompt and 512 response tokens, eight rollouts a prompt, at most 16,384 tokens in a micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from figures import Table
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from rallypoint.algorithms.losses import policy_loss
from rallypoint.config import LoRAConfig, load_config
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.engine.determinism import prepare_process
from rallypoint.model_files.adapters import adapters_of
from rallypoint.models import ATTENTION, ModelShard
from rallypoint.models.shard import allocate, build
from rallypoint.observability.flops import device_peak, flops_of
from rallypoint.parallel import DeviceMesh
from rallypoint.prepare.plan import make_plan
from rallypoint.types import ActorBatch, Metrics, offsets_from_lengths

GROUP_SIZE = 8
COLUMNS = {
    "model": "",
    "activations": "",
    "rows": "",
    "first s": ".3f",
    "s": ".3f",
    "tokens/s": ",.0f",
    "MFU": ".0%",
    "peak GiB": ".2f",
    "predicted GiB": ".2f",
}
SIZES = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16, "intermediate_size": 128},
    "experts": {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "intermediate_size": 6144},
    "tiny-experts": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 16, "intermediate_size": 128},
}
"""`experts` is four layers of Qwen3-30B-A3B, with its heads and vocabulary."""


def config_of(name: str) -> PreTrainedConfig:
    tiny = name.startswith("tiny")
    sizes = {
        **SIZES[name],
        "num_key_value_heads": 4 if name == "experts" else 8,
        "head_dim": 16 if tiny else 128,
        "vocab_size": 500 if tiny else 151_936,
        "tie_word_embeddings": True,
        "pad_token_id": None,
        "attn_implementation": ATTENTION,
    }
    if not name.endswith("experts"):
        return Qwen3Config(**sizes)
    experts = (8, 2, 32) if tiny else (128, 8, 768)
    mixture = dict(zip(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), experts, strict=True))
    return Qwen3MoeConfig(**sizes, **mixture, norm_topk_prob=True)


def make_batch(vocabulary: int, lengths: torch.Tensor, *, seed: int = 0) -> ActorBatch:
    """Rows of such lengths, [B], the first half of each the prompt, which the rollouts of a group share."""
    generator = torch.Generator().manual_seed(seed)
    shared = lengths.view(-1, GROUP_SIZE).amin(1).repeat_interleave(GROUP_SIZE) // 2
    prompts = torch.randint(vocabulary, (len(lengths) // GROUP_SIZE, int(lengths.max())), generator=generator)
    rows = [torch.randint(vocabulary, (int(length),), generator=generator) for length in lengths]
    for at, (row, num) in enumerate(zip(rows, shared.tolist(), strict=True)):
        row[:num] = prompts[at // GROUP_SIZE, :num]
    num_tokens = int(lengths.sum())
    return ActorBatch(
        offsets=offsets_from_lengths(lengths),
        tokens=torch.cat(rows),
        loss_mask=torch.cat([torch.arange(len(row)) >= num for row, num in zip(rows, shared.tolist(), strict=True)]),
        prompt_index=torch.arange(len(lengths)) // GROUP_SIZE,
        sample_index=torch.arange(len(lengths)) % GROUP_SIZE,
        rollout_logprobs=torch.zeros(num_tokens),
        old_logprobs=torch.full((num_tokens,), -float(torch.tensor(vocabulary).log())),
        reference_logprobs=None,
        advantages=torch.randn(num_tokens, generator=generator),
    )


def lengths_of(num_rows: int, length: int, *, is_ragged: bool, seed: int) -> torch.Tensor:
    """[B] of one length, or between an eighth of it and all, others for every seed."""
    if not is_ragged:
        return torch.full((num_rows,), length)
    return torch.randint(length // 8, length + 1, (num_rows,), generator=torch.Generator().manual_seed(seed))


def make_shard(name: str, device: torch.device, dtype: str = "bfloat16", *, lora_rank: int = 0) -> ModelShard:
    """Random weights of a shape, laid out as those of a file; with adapters of such a rank."""
    lora = LoRAConfig(rank=lora_rank) if lora_rank else None
    kind, adapters = getattr(torch, dtype), adapters_of(lora) if lora else None
    mesh = DeviceMesh.solo()
    made = {"dtype": kind, "mesh": mesh, "trust_remote_code": False, "adapters": adapters}
    shard = build(config_of(name), AutoModelForCausalLM, **made)
    allocate(shard, device)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in shard.model.parameters():
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(0.0, 0.02)
    return shard


def make_engine(name: str, device: torch.device, activations: str, *, deterministic: bool) -> TrainingEngine:
    """Random weights under an optimizer."""
    config = load_config("grpo", ["data.train=x.jsonl", "model.path=x", "reward.function=x.py:y"]).config
    return TrainingEngine(
        make_shard(name, device),
        optimizer=config.actor.optimizer,
        max_tokens_per_micro_batch=16_384,
        activations=activations,  # pyright: ignore[reportArgumentType]
        deterministic=deterministic,
    )


def take_update(engine: TrainingEngine, batch: ActorBatch) -> None:
    """One optimizer step on a batch, which ends with numbers on the host."""
    device = engine.shard.model.device

    def loss(rows: ActorBatch, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        logprobs, mask = policy_outputs(engine.shard, rows, at, 1.0).logprobs, torch.ones(len(at), dtype=torch.bool)
        assert rows.old_logprobs is not None, "`make_batch` has them"
        old, weights = rows.old_logprobs[at].to(device), rows.advantages[at].to(device)
        clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
        return policy_loss(logprobs, old, weights, mask.to(device), **clips).sum, Metrics()

    engine.train(batch, loss, denominator=batch.num_loss_tokens, step=1, num_steps=1)


def predicted_bytes(name: str, num_rows: int, length: int, activations: str) -> int:
    """Return what `--dry-run` says of the actor of such a run."""
    with tempfile.TemporaryDirectory() as folder:
        model = config_of(name).to_dict()
        (Path(folder) / "config.json").write_text(json.dumps(model, default=str))
        overrides = [f"model={{path: {folder}, dtype: bfloat16}}", "data.train=unused.jsonl", "data.generate=null"]
        overrides += [f"rollout={{num_prompts: {num_rows // GROUP_SIZE}, group_size: {GROUP_SIZE}}}"]
        overrides += [f"rollout.max_response_tokens={length // 2}", f"data.max_prompt_tokens={length // 2}"]
        overrides += ["reward.function=unused.py:score", "cluster.device=cuda", f"engine.activations={activations}"]
        plan = make_plan(load_config("grpo", overrides).config)
    return next(memory.total for memory in plan.memory if memory.role == "actor")


def measure(
    name: str,
    device: torch.device,
    activations: str,
    times: int,
    num_rows: int,
    length: int,
    *,
    deterministic: bool,
    is_ragged: bool,
) -> dict[str, str | float]:
    """Return a row of the table."""
    gc.collect()  # what the line before held
    before = 0
    if device.type != "cpu":
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
    engine = make_engine(name, device, activations, deterministic=deterministic)
    vocabulary, flops = config_of(name).vocab_size, flops_of(engine.shard.model)
    seconds: list[float] = []
    rates: list[float] = []
    shares: list[float] = []
    for turn in range(times + 1):  # the first warms up
        lengths = lengths_of(num_rows, length, is_ragged=is_ragged, seed=turn)
        batch = make_batch(vocabulary, lengths, seed=turn if is_ragged else 0)
        began = time.perf_counter()
        take_update(engine, batch)
        seconds.append(time.perf_counter() - began)
        rates.append(batch.num_tokens / seconds[-1])
        needed = flops.forward_backward((batch.lengths - 1).tolist(), batch.num_loss_tokens)
        shares.append(needed / seconds[-1] / device_peak(device, torch.bfloat16))
    peak = (torch.accelerator.max_memory_allocated() - before) / 2**30 if device.type != "cpu" else float("nan")
    return {
        "model": name,
        "activations": activations,
        "rows": "ragged" if is_ragged else "equal",
        "first_s": seconds[0],
        "seconds": statistics.median(seconds[1:]),
        "tokens_per_s": statistics.median(rates[1:]),
        "mfu": statistics.median(shares[1:]),
        "peak_gib": peak,
        "predicted_gib": predicted_bytes(name, num_rows, length, activations) / 2**30,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the table; `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "1.7B"], choices=SIZES)
    parser.add_argument("--activations", nargs="+", default=["keep", "checkpoint"])
    parser.add_argument(
        "--any-order", action="store_true", help="without engine.deterministic: kernels may add in any order"
    )
    parser.add_argument("--ragged", action="store_true", help="rows of many lengths, others in every update")
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="a file to which every row is appended, too")
    wanted = parser.parse_args(arguments)
    device = (
        torch.device(wanted.device) if wanted.device else torch.accelerator.current_accelerator(check_available=True)
    )
    if device is None:
        raise SystemExit("no accelerator was found; --models tiny --device cpu shows that it runs")
    if device.type != "cpu":  # as in every run
        prepare_process()
    table = Table(COLUMNS, wanted.json)
    for name in wanted.models:
        for activations in wanted.activations:
            rows = (wanted.times, wanted.rows, wanted.length)
            kinds = {"deterministic": not wanted.any_order, "is_ragged": wanted.ragged}
            table.add(**measure(name, device, activations, *rows, **kinds))


if __name__ == "__main__":
    main()
