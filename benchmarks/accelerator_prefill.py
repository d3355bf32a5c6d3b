"""Prompts on one accelerator: tokens per second of prefill, alone, behind a common instruction, and with a tight cache.

    python benchmarks/accelerator_prefill.py                      # Qwen3 shape of 0.6B, random weights, bfloat16
    python benchmarks/accelerator_prefill.py --model tiny --device cpu --rows 16 --cache-gib 0.01

- apart: every prompt is another from its first token on;
- common: all begin with the same instruction, whose keys and values are computed once and looked back to;
- tight: a turn of long responses with a cache for a part of its rows: what is preempted is computed again.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from accelerator import SIZES, make_shard
from accelerator_rollouts import seconds, submit, token_bytes_of
from figures import Table
from transformers import PreTrainedModel

from rallypoint.generation import NativeEngine

COLUMNS = {
    "model": "",
    "kind": "",
    "rows": "d",
    "prompt tokens": "d",
    "tokens each": "d",
    "cached tokens": "d",
    "first s": ".3f",
    "s": ".3f",
    "tokens/s": ",.0f",
    "preempted": "d",
}


@torch.no_grad()
def measure(
    model: PreTrainedModel, kind: str, num_rows: int, num_tokens: int, cache_tokens: int, times: int
) -> dict[str, object]:
    """Return a row of the table; every turn has other prompts."""
    num_prompt = 512
    engine = NativeEngine(model, max_rows=num_rows, cache_tokens=cache_tokens)

    def turn(seed: int) -> float:
        num_common = 0 if kind == "apart" else 96
        submit(engine, num_rows, num_tokens, seed, num_prompt=num_prompt, num_common=num_common)

        def finish() -> None:
            while engine.has_work:
                engine.step()

        return seconds(finish, model.device)

    first, *others = [turn(7919 * number) for number in range(times + 1)]
    taken = statistics.median(others)
    num_preempted = engine.num_preempted // (times + 1)
    engine.sleep()
    return {
        "model": "",
        "kind": kind,
        "rows": num_rows,
        "prompt_tokens": num_prompt,
        "tokens_each": num_tokens,
        "cached_tokens": cache_tokens,
        "first_s": first,
        "seconds": taken,
        "tokens_per_s": num_rows * (num_prompt if num_tokens == 1 else num_tokens) / taken,
        "preempted": num_preempted,
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the table; `arguments` are those of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B", choices=SIZES)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="of each response with a tight cache")
    parser.add_argument("--cache-gib", type=float, default=30.0, help="of keys and values where there is enough")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--device", help="default: the accelerator that torch finds")
    parser.add_argument("--json", type=Path, help="a file to which every row is appended, too")
    wanted = parser.parse_args(arguments)
    device = (
        torch.device(wanted.device) if wanted.device else torch.accelerator.current_accelerator(check_available=True)
    )
    if device is None:
        raise SystemExit("no accelerator was found; --model tiny --device cpu shows that it runs")
    model = make_shard(wanted.model, device, "float32" if device.type == "cpu" else "bfloat16").model
    ample = int(wanted.cache_gib * 2**30) // token_bytes_of(model)
    table = Table(COLUMNS, wanted.json)
    num_rows, num_tokens = wanted.rows, wanted.tokens
    tight = int(0.15 * 4 * num_rows * (512 + num_tokens))
    for kind, rows, each, cache in (
        ("apart", num_rows, 1, ample),
        ("common", num_rows, 1, ample),
        ("enough", 4 * num_rows, num_tokens, 5 * num_rows * (512 + num_tokens)),
        ("tight", 4 * num_rows, num_tokens, tight),
    ):
        times = wanted.times if each == 1 else 1
        table.add(**{**measure(model, kind, rows, each, cache, times), "model": wanted.model})


if __name__ == "__main__":
    main()
