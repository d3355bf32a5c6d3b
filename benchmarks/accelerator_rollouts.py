"""Rollouts on one accelerator: tokens per second, beside what its memory would allow.

    python benchmarks/accelerator_rollouts.py                  # Qwen3 shapes of 0.6B and 1.7B, random weights, bfloat16
    python benchmarks/accelerator_rollouts.py --models 0.6B --batches 256 --no-graphs
    python benchmarks/accelerator_rollouts.py --models experts --batches 8 64     # a mixture; --lora 16: with adapters
    python benchmarks/accelerator_rollouts.py --models tiny --device cpu --dtype float32     # whether it runs at all

Every step reads all weights once and the keys and values of every row. The limit is what that takes at the rate at
which the device copies 1 GiB, measured in the same run; all else of a step is what is lost. Prompts are computed before
the clock starts: two runs differ in the number of their tokens, and what is between them is what one takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerator import SIZES, make_shard
from figures import Table
from transformers import PreTrainedModel

from rallypoint.generation import NativeEngine, Request, SamplingParams
from rallypoint.generation.native.accelerator.backend import AcceleratorBackend
from rallypoint.generation.native.accelerator.graphs import captures_on

PROMPT_TOKENS = 256
COLUMNS = {
    "model": "",
    "batch": "d",
    "graphs": "d",
    "ms a step": ".2f",
    "tokens/s": ",.0f",
    "GiB of weights": ".2f",
    "GiB of cache": ".2f",
    "limit, tokens/s": ",.0f",
    "of it": ".0%",
}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of work that may go on when the call has returned."""
    began = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second that are read and written while memory is copied."""
    source, into = torch.ones(2, num_bytes, dtype=torch.uint8, device=device).unbind(0)
    times = [seconds(lambda: into.copy_(source), device) for _ in range(20)]
    return 2 * num_bytes / statistics.median(times[5:])


def refuse(step: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG001
    raise RuntimeError("--no-graphs")


def token_bytes_of(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token."""
    config = model.config
    numbers = config.num_hidden_layers * (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
    return 2 * numbers * model.dtype.itemsize


def submit(
    engine: NativeEngine,
    batch: int,
    num_tokens: int,
    seed: int,
    *,
    num_prompt: int = PROMPT_TOKENS,
    num_common: int = 0,
    group_size: int = 1,
) -> None:
    """Ask an engine for so many tokens of each of so many rows, whose prompts begin with the same few tokens."""
    params = SamplingParams(max_new_tokens=num_tokens, temperature=1.0, seed=seed)
    for row in range(batch):
        own = row // group_size * 31 + seed
        prompt = tuple((0 if place < num_common else own) % 400 + place * 7 % 100 for place in range(num_prompt))
        engine.submit(
            Request(tokens=prompt, params=params, prompt_index=row // group_size, sample_index=row % group_size)
        )


def sampled(engine: NativeEngine, batch: int, num_tokens: int, seed: int) -> None:
    """Have an engine draw so many tokens of each of so many rows, whose prompts differ."""
    submit(engine, batch, num_tokens, seed)
    while engine.has_work:
        engine.step()


def measure(
    model: PreTrainedModel, name: str, wanted: argparse.Namespace, batch: int, rate: float
) -> dict[str, str | float]:
    """Return a row of the table."""
    few, many = wanted.tokens // 4, wanted.tokens
    makes = refuse if wanted.no_graphs else captures_on(model.device)
    num_captured = 0

    def counted(step: Callable[[], None]) -> Callable[[], None]:
        nonlocal num_captured
        replay = refuse(step) if makes is None else makes(step)
        num_captured += 1
        return replay

    rows_tokens = batch * (PROMPT_TOKENS + many + 64)
    backend = AcceleratorBackend(model, capture=counted)
    engine = NativeEngine(model, max_rows=batch, cache_tokens=rows_tokens + 1024, backend=backend)
    differences: list[float] = []
    for turn in range(wanted.times + 1):  # the first one warms up, and captures
        taken = [
            seconds(lambda num=num, turn=turn: sampled(engine, batch, num, 2 * turn + (num == few)), model.device)
            for num in (few, many)
        ]
        differences.append(taken[1] - taken[0])
    step = statistics.median(differences[1:]) / (many - few)
    weights = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    cache = batch * (PROMPT_TOKENS + (few + many) / 2) * token_bytes_of(model)
    limit = (weights + cache) / rate
    return {
        "model": name,
        "batch": batch,
        "graphs": num_captured,
        "ms_a_step": step * 1e3,
        "tokens_per_s": batch / step,
        "weights_gib": weights / 2**30,
        "cache_gib": cache / 2**30,
        "limit_tokens_per_s": batch / limit,
        "share_of_limit": limit / step,
    }


@torch.no_grad()
def main(arguments: list[str] | None = None) -> None:
    """Print the table; `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B", "1.7B"], choices=SIZES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--tokens", type=int, default=256, help="of each row; a quarter of them is taken off")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--no-graphs", action="store_true", help="launch every step kernel by kernel")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="with adapters of all layers")
    parser.add_argument("--json", type=Path, help="a file to which every row is appended, too")
    wanted = parser.parse_args(arguments)
    device = (
        torch.device(wanted.device) if wanted.device else torch.accelerator.current_accelerator(check_available=True)
    )
    if device is None:
        raise SystemExit("no accelerator was found; --models tiny --device cpu --dtype float32 shows that it runs")
    rate = bandwidth(device, 2**26 if device.type == "cpu" else 2**30)
    print(f"{device}, torch {torch.__version__}, copies at {rate / 1e9:,.0f} GB/s read and written\n")
    table = Table(COLUMNS, wanted.json)
    for name in wanted.models:
        model = make_shard(name, device, wanted.dtype, lora_rank=wanted.lora).model
        for batch in wanted.batches:
            table.add(**measure(model, name, wanted, batch, rate))


if __name__ == "__main__":
    main()
