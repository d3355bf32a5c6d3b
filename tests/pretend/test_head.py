"""The head of a language model on a GPU: products large enough to keep it busy, and memory as the plan has it."""

import torch

from rallypoint.models.head import CHUNK_BYTES_ON_ACCELERATORS, KEPT_BYTES_ON_ACCELERATORS, head_outputs

DEVICE = torch.device("pretend:0")


def test_products_are_as_large_as_a_device_likes_them_and_memory_stays_below_what_is_planned(pretend):
    vocabulary, num_tokens = 2**16, 2**11 + 1
    states = torch.zeros(num_tokens, 4, dtype=torch.bfloat16, device=DEVICE)
    weight = torch.zeros(vocabulary, 4, dtype=torch.bfloat16, device=DEVICE)
    targets = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    before = pretend.allocated()
    pretend.reset()
    with torch.no_grad():
        head_outputs(states, weight, None, targets, 1.0)
    products = pretend.kernels["mm"] + pretend.kernels["addmm"]
    assert products == 2
    # A chunk, and two tensors in float32 that are as large; then some numbers of each token.
    assert pretend.peak() - before < 5.1 * CHUNK_BYTES_ON_ACCELERATORS
    assert KEPT_BYTES_ON_ACCELERATORS == 4 * CHUNK_BYTES_ON_ACCELERATORS
