"""Attention of the shapes that occur, by the rules after which CUDA picks a kernel: none keeps all scores."""

import pytest
import torch
from accelerator_forms import accelerator_forms
from grids import paired

from rallypoint.models import PackedRows
from rallypoint.models.fused import attend_fused
from rallypoint.models.products import Limits
from rallypoint.types import offsets_from_lengths

DEVICE = torch.device("pretend:0")
LENGTHS = [300, 40, 7, 1]


def attended(device, dtype, num_heads, num_kv_heads, size, window):
    """Return what rows find, and the gradients."""
    generator = torch.Generator().manual_seed(0)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    states = [torch.randn(sum(LENGTHS), num, size, generator=generator).to(device, dtype) for num in heads]
    states = [part.requires_grad_() for part in states]
    rows = PackedRows(offsets_from_lengths(torch.tensor(LENGTHS)), device)
    out = rows.attend(0, *states, 0.3, Limits(window))
    gradients = torch.autograd.grad(out.square().sum(), states)
    return [part.detach().cpu() for part in (out, *gradients)]


@pytest.mark.parametrize(
    ("dtype", "heads", "size", "window"),
    paired([torch.float32, torch.bfloat16], [(2, 2), (4, 2), (4, 1)], [16, 12], [None, 64, 100]),
)
def test_no_layer_keeps_all_scores(pretend, dtype, heads, size, window):
    shape = (dtype, *heads, size, window)
    there = attended(DEVICE, *shape)
    assert not pretend.kernels["attention by math"]
    assert pretend.kernels["attention by flash" if dtype == torch.bfloat16 else "attention by efficient"]
    with accelerator_forms():
        assert all(map(torch.equal, there, attended(torch.device("cpu"), *shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_that_look_back_at_a_cache_keep_none_either(pretend, dtype):
    query, key = (torch.ones(1, heads, num, 16, device=DEVICE, dtype=dtype) for heads, num in ((4, 3), (2, 9)))
    mask = torch.ones(3, 9, dtype=torch.bool, device=DEVICE).tril(6)
    attend_fused(query, key, key, 0.3, mask)
    assert pretend.kernels["attention by efficient"] == 1
    assert not pretend.kernels["attention by math"]


def test_more_rows_than_a_grid_has_blocks_are_taken_in_parts(pretend):
    query, key = (torch.ones(70_000, heads, 2, 8, device=DEVICE) for heads in (2, 1))
    attend_fused(query, key, key, 0.3)
    assert pretend.kernels["attention by efficient"] == 2
