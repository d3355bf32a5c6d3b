"""Sizes and bounds that a computation has in common with the config that allows it and the plan that counts it.

Each stands here once, imported by the module that computes with it. Imports nothing.
"""

MIN_TEMPERATURE = 1e-3
"""The lowest temperature but 0: logits are divided by it, and must stay finite."""

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has; far larger numbers would not fit into a tensor."""

BLOCK_TOKENS = 32
"""Tokens in a block of keys and values."""

PREFILL_TOKENS = 8192
"""Tokens of prompts that are computed in one step; one prompt may have more."""

SAMPLED_BLOCK = 256
"""Tokens whose probabilities are summed before the block with the drawn one is searched."""

LONGEST_FOR_PRODUCTS = 512
"""Tokens of the longest rows that batched products attend to on CPUs. With longer ones torch's fused kernel is faster
(benchmarks/attention.py), or in bfloat16 keeps less: products keep a score for each two tokens."""

QUERIES_PER_BLOCK, QUERIES_PER_BLOCK_IN_HALF = 64, 192
"""Queries of a block of these products. Larger ones multiply more that the mask throws away; smaller ones keep cores
less busy, and copy every part of the keys, which weighs more in half precision: two blocks are best up to here."""

CHUNK_BYTES, CHUNK_BYTES_ON_ACCELERATORS = 64 * 2**20, 256 * 2**20
"""Logits of one product of the head: on a CPU, and where a product must be larger to keep a device busy. With 152,000
tokens in half precision these are 220 rows and 880."""

KEPT_BYTES, KEPT_BYTES_ON_ACCELERATORS = 256 * 2**20, 2**30
"""Logits that wait for their backward pass."""

CACHE_MARGIN = 0.1
"""Share of an accelerator's memory left free by a cache that is sized by free memory: for holes between tensors,
libraries, captured steps."""

MOST_VLLM_RANK = 512
"""Highest rank of the adapters that vLLM takes."""

OPTIMIZER_BYTES = 2**28
"""Masters that an offloaded optimizer has on the device together, each with two moments; or one that is larger."""
