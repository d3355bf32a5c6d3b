"""Bounds that the config has in common with what also runs without it; imports nothing."""

MIN_TEMPERATURE = 1e-3
"""That is not 0: logits are divided by it, and must stay finite."""

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has; far larger numbers would not fit into a tensor."""

BLOCK_TOKENS = 32
"""Tokens in a block of keys and values."""
