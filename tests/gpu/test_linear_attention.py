"""flash-linear-attention on an accelerator: what our own scan computes, for heads of Qwen3.5's sizes."""

import pytest
import torch

from rallypoint.models.kinds.delta_kernel import is_right
from rallypoint.models.kinds.linear_attention import DeltaHeads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]


@pytest.mark.parametrize("num_values", [16, 32])
def test_the_kernel_finds_what_our_scan_finds(num_values):
    kernel = pytest.importorskip("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    heads = DeltaHeads(num_keys=16, num_values=num_values, key_dim=128, value_dim=128)
    try:
        assert is_right(kernel, torch.device("cuda"), torch.bfloat16, heads)
    except RuntimeError as error:  # a version of Triton that computes something else on Hopper
        if "Triton" not in str(error):
            raise
        pytest.skip("flash-linear-attention does not run with this Triton")
