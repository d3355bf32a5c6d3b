"""Bounds that the config has in common with what also runs without it; imports nothing."""

MIN_TEMPERATURE = 1e-3
"""That is not 0: logits are divided by it, and must stay finite."""

NUM_KERNELS = 128
"""That a process on a CPU keeps of those that oneDNN compiles: more than a layer needs, forward and backward."""
