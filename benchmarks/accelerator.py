"""An update on one accelerator: tokens per second, the share of its peak, and memory beside the prediction.

    python benchmarks/accelerator.py                       # Qwen3 shapes of 0.6B and 1.7B, random weights, bfloat16
    python benchmarks/accelerator.py --models 0.6B --activations checkpoint
    python benchmarks/accelerator.py --models 0.6B --any-order        # what deterministic kernels cost
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
from transformers import Qwen3Config, Qwen3ForCausalLM

from rallypoint.algorithms import policy_loss
from rallypoint.config import load_config
from rallypoint.engine import TrainingEngine, policy_outputs
from rallypoint.engine.determinism import prepare_process
from rallypoint.models import ATTENTION, ModelShard
from rallypoint.models.layers import replace_layers
from rallypoint.observability.flops import device_peak, flops_of
from rallypoint.plan.run_plan import make_plan
from rallypoint.types import ActorBatch, Metrics, offsets_from_lengths

GROUP_SIZE = 8
COLUMNS = {
    "model": "",
    "activations": "",
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
}


def config_of(name: str) -> Qwen3Config:
    tiny = name == "tiny"
    return Qwen3Config(
        **SIZES[name],
        num_key_value_heads=8,
        head_dim=16 if tiny else 128,
        vocab_size=500 if tiny else 151_936,
        tie_word_embeddings=True,
        pad_token_id=None,
        attn_implementation=ATTENTION,
    )


def make_batch(vocabulary: int, num_rows: int, length: int) -> ActorBatch:
    """Rows of one length, the first half of them the prompt, which the rollouts of a group share."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (num_rows, length), generator=generator)
    tokens[:, : length // 2] = tokens[::GROUP_SIZE, : length // 2].repeat_interleave(GROUP_SIZE, 0)
    mask = (torch.arange(length) >= length // 2).expand(num_rows, length)
    num_tokens = num_rows * length
    return ActorBatch(
        offsets=offsets_from_lengths(torch.full((num_rows,), length)),
        tokens=tokens.flatten(),
        loss_mask=mask.flatten(),
        prompt_index=torch.arange(num_rows) // GROUP_SIZE,
        sample_index=torch.arange(num_rows) % GROUP_SIZE,
        rollout_logprobs=torch.zeros(num_tokens),
        old_logprobs=torch.full((num_tokens,), -float(torch.tensor(vocabulary).log())),
        reference_logprobs=None,
        advantages=torch.randn(num_tokens, generator=generator),
    )


def predicted_bytes(name: str, num_rows: int, length: int, activations: str) -> int:
    """Return what `--dry-run` says of the actor of such a run."""
    with tempfile.TemporaryDirectory() as folder:
        model = {**config_of(name).to_dict(), "model_type": "qwen3"}
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
    deterministic: bool = True,
) -> dict[str, str | float]:
    """Return a row of the table."""
    gc.collect()  # what the line before held
    before = 0
    if device.type != "cpu":
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
    with device:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config_of(name)).to(torch.bfloat16).eval()  # pyright: ignore[reportArgumentType]
    replace_layers(model)
    config = load_config("grpo", ["data.train=x.jsonl", "model.path=x", "reward.function=x.py:y"]).config
    engine = TrainingEngine(
        ModelShard.whole(model),
        optimizer=config.actor.optimizer,
        max_tokens_per_micro_batch=16_384,
        activations=activations,  # pyright: ignore[reportArgumentType]
        deterministic=deterministic,
    )
    batch = make_batch(model.config.vocab_size, num_rows, length)

    def loss(rows: ActorBatch, at: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        logprobs, mask = policy_outputs(engine.shard, rows, at, 1.0).logprobs, torch.ones(len(at), dtype=torch.bool)
        old, weights = rows.old_logprobs[at].to(device), rows.advantages[at].to(device)
        clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
        return policy_loss(logprobs, old, weights, mask.to(device), **clips).sum, Metrics()

    seconds: list[float] = []
    for _ in range(times + 1):  # the first warms up
        began = time.perf_counter()
        engine.train(batch, loss, denominator=batch.num_loss_tokens, step=1, num_steps=1)  # ends with a number
        seconds.append(time.perf_counter() - began)
    taken = statistics.median(seconds[1:])
    flops = flops_of(model).forward_backward((batch.lengths - 1).tolist(), batch.num_loss_tokens)
    share = flops / taken / device_peak(device, torch.bfloat16)
    peak = (torch.accelerator.max_memory_allocated() - before) / 2**30 if device.type != "cpu" else float("nan")
    return {
        "model": name,
        "activations": activations,
        "seconds": taken,
        "tokens_per_s": batch.num_tokens / taken,
        "mfu": share,
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
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="a file to which every row is appended, too")
    wanted = parser.parse_args(arguments)
    device = torch.device(wanted.device) if wanted.device else torch.accelerator.current_accelerator()
    if device is None:
        raise SystemExit("no accelerator was found; --models tiny --device cpu shows that it runs")
    if device.type != "cpu":  # as in every run
        prepare_process()
    table = Table(COLUMNS, wanted.json)
    for name in wanted.models:
        for activations in wanted.activations:
            rows = (wanted.times, wanted.rows, wanted.length)
            table.add(**measure(name, device, activations, *rows, deterministic=not wanted.any_order))


if __name__ == "__main__":
    main()
