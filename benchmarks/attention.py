"""Attention over packed rows on a CPU, forward and backward: batched products beside torch's fused kernel.

    python benchmarks/attention.py                    # rows of 64 to 2,048 tokens, 5 heads of 64, one thread
    python benchmarks/attention.py --dtypes float32 --heads 16 --threads 2

Each call has as many rows of a length as make 8,192 tokens. `products` and `fused` are the two ways of
`rallypoint.models.attention.PackedRows`, which takes the first up to 512 tokens. `flex_attention` is not among them: it
has no backward pass on CPUs. Milliseconds are of CPU, all threads, medians of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from rallypoint.models import attention
from rallypoint.types import offsets_from_lengths

NUM_TOKENS = 8_192
WAYS = {"products": 2**31, "fused": 0}
"""Each with the longest row that is computed by products."""


def turn(way: str, length: int, states: list[torch.Tensor]) -> float:
    """Return the CPU seconds of one call, forward and backward."""
    attention._LONGEST_FOR_PRODUCTS = WAYS[way]  # pyright: ignore[reportPrivateUsage, reportConstantRedefinition]
    rows = attention.PackedRows(offsets_from_lengths(torch.full((NUM_TOKENS // length,), length)), torch.device("cpu"))
    began = time.process_time()
    rows.attend(0, states[0], states[1], states[2], states[0].shape[-1] ** -0.5).sum().backward()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--times", type=int, default=7)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    print("| type | tokens of a row | products, ms | fused, ms | fused over products |")
    print("|---|---:|---:|---:|---:|")
    for dtype in wanted.dtypes:
        for length in wanted.lengths:
            shape = (NUM_TOKENS // length * length, wanted.heads, wanted.head_dim)
            states = [torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=True) for _ in range(3)]
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(wanted.times + 1):
                for way, taken in seconds.items():
                    if number:  # the first call finds its kernels
                        taken.append(turn(way, length, states))
                    else:
                        turn(way, length, states)
            products, fused = (1000 * statistics.median(seconds[way]) for way in WAYS)
            print(f"| {dtype} | {length} | {products:.1f} | {fused:.1f} | {fused / products:.2f} |", flush=True)


if __name__ == "__main__":
    main()
