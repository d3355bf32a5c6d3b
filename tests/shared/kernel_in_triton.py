"""Run by tests with TRITON_INTERPRET=1: what the kernel finds on a CPU, beside products; a line for each case.

Without cases: whether the trial that decides on a device finds the kernel right, which takes it half a minute.
"""

import json
import sys

import torch

from rallypoint.generation.native.accelerator.backend import PagedAttention, is_right
from rallypoint.generation.native.accelerator.kernel import PagedKernel
from rallypoint.generation.native.block_manager import AttentionMetadata, BlockManager
from rallypoint.generation.native.kv_cache import KVCache, LayerShapes
from rallypoint.models.products import Limits

SINKS = torch.tensor([0.5, -1.0, 2.0, 30.0])
LIMITS = {
    "all": Limits(),
    "window": Limits(window=9),
    "softcap": Limits(softcap=1.5),
    "both": Limits(70, 2.0),
    "sinks": Limits(9, sinks=SINKS),
    "together": Limits(9, 1.5, SINKS),
}


@torch.no_grad()
def difference(lengths, heads, kv_heads, dim, limits, dtype, num_columns) -> float:
    """The largest one over two layers and three steps, of which the last is in another block, and of what is stored."""
    generator = torch.Generator().manual_seed(len(lengths) + dim)
    found = []
    for kernel in (PagedKernel(), None):
        generator.manual_seed(7)
        manager, shapes = BlockManager(40), LayerShapes(2, heads, kv_heads, dim, torch.zeros(0, dtype=dtype))
        cache = KVCache(40, shapes)
        for memory in (cache.keys, cache.values):
            memory.copy_(torch.randn(memory.shape, generator=generator))
        rows = []
        for length in lengths:  # a prompt of some tokens ends within a block
            prompt = [manager.allocate_shared(None, (length, *range(length % 7)))]
            rows.append((3, length - 1, prompt + [manager.allocate() for _ in range(length // 32 + 2)]))
        metadata = AttentionMetadata.of(rows)
        layout = PagedAttention(cache, metadata, num_rows=4, num_columns=num_columns, num_steps=3, kernel=kernel)
        outs = []
        for _ in range(3):
            for layer in range(2):
                # As they come out of a layer: parts of one tensor, heads side by side.
                states = torch.randn(len(layout.tokens), heads + 2 * kv_heads, dim, generator=generator).to(dtype)
                outs.append(layout.attend(layer, *states.split([heads, kv_heads, kv_heads], 1), dim**-0.5, limits))
            layout.advance(torch.zeros(len(lengths), dtype=torch.int64))
        found.append([*outs, cache.keys, cache.values])
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def main() -> None:
    for case in map(json.loads, sys.argv[1:]):
        case["limits"], case["dtype"] = LIMITS[case["limits"]], getattr(torch, case["dtype"])
        print(difference(**case), flush=True)
    if not sys.argv[1:]:
        print(json.dumps(is_right(PagedKernel(), LayerShapes(1, 4, 2, 16, torch.zeros(1)))))


if __name__ == "__main__":
    main()
