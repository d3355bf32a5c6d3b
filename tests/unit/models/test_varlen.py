"""Attention of a packed stream in one call: which keys rows read, compared with rectangles in float64."""

import pytest
import torch

from rallypoint.models import PackedRows, SharedPrefixes
from rallypoint.models.products import Limits
from rallypoint.models.varlen import PackedKeys, by_products, find_varlen, is_right
from rallypoint.types import offsets_from_lengths

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8

# Lengths, groups, and how many first tokens the rows of a group have in common.
LAYOUTS = {
    "rows apart": ([5, 1, 12, 7], [0, 1, 2, 3], 0),
    "groups": ([9, 12, 7, 20, 21], [0, 0, 0, 1, 1], 6),
    "a row within another": ([9, 6, 12], [0, 0, 0], 6),
    "rows alike": ([9, 9, 9, 4], [0, 0, 0, 1], 9),
    "a row of nothing": ([0, 5, 3], [0, 0, 1], 2),
}


def layout_of(name):
    lengths, groups, common = LAYOUTS[name]
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.cat(
            [torch.full((min(common, n),), group), torch.randint(9, 20, (max(0, n - common),), generator=generator)]
        )
        for n, group in zip(lengths, groups, strict=True)
    ]
    offsets = offsets_from_lengths(torch.tensor(lengths))
    return offsets, SharedPrefixes.of(offsets, torch.cat(rows), torch.tensor(groups))


def attended(attend, num_tokens, has_sinks=False):
    """Return the output of some random states, and the gradients of all of them."""
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(num_tokens, heads, DIM, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    if has_sinks:
        states.append(torch.randn(HEADS, generator=generator, dtype=torch.float64).requires_grad_())
    out = attend(*states)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return out, *torch.autograd.grad(out, states, weights)


@pytest.mark.parametrize("num_filler", [0, 3])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (4, False), (4, True)])
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_attend_as_in_rectangles(name, is_shared, window, has_sinks, num_filler):
    offsets, shared = layout_of(name)
    shared = shared if is_shared else SharedPrefixes.none(offsets)
    num_tokens = len(shared.kept) + num_filler
    keys, rows = PackedKeys(offsets, CPU, shared), PackedRows(offsets, CPU, shared, num_filler=num_filler)

    def limits(sinks):
        return Limits(window, sinks=sinks[0] if sinks else None)

    found = attended(
        lambda query, key, value, *sinks: keys.attend(by_products, query, key, value, DIM**-0.5, limits(sinks)),
        num_tokens,
        has_sinks,
    )
    expected = attended(
        lambda query, key, value, *sinks: rows.attend(0, query, key, value, DIM**-0.5, limits(sinks)),
        num_tokens,
        has_sinks,
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_stream_that_asks_nothing_has_no_output():
    keys = PackedKeys(torch.tensor([0]), CPU, SharedPrefixes.none(torch.tensor([0])))
    states = [torch.zeros(0, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    assert keys.attend(by_products, *states, 1.0, Limits()).shape == (0, HEADS, DIM)


@pytest.mark.parametrize("share", [1, 3])
def test_a_kernel_is_right_only_if_outputs_and_gradients_are(share):
    def beyond_its_window(query, key, value, rows, scaling, limits):
        return by_products(query, key, value, rows, scaling, Limits())

    def from_the_beginning(query, key, value, rows, scaling, limits):
        # Queries counted from the beginning of their keys, as some kernels do.
        queries, keys = rows
        first = torch.cat(
            [
                torch.arange(int(start), int(start) + int(num))
                for start, num in zip(keys.offsets[:-1], queries.offsets.diff(), strict=True)
            ]
        )
        return by_products(query, key[first], value[first], (queries, queries), scaling, limits)

    def without_gradient_of_values(query, key, value, rows, scaling, limits):
        return by_products(query, key, value.detach() + 0 * value, rows, scaling, limits)

    def without_sinks(query, key, value, rows, scaling, limits):
        return by_products(query, key, value, rows, scaling, Limits(limits.window)) + 0 * limits.sinks.sum()

    assert is_right(by_products, CPU, torch.float32, share, DIM, has_sinks=True)
    assert not is_right(without_sinks, CPU, torch.float32, share, DIM, has_sinks=True)
    for kernel in (beyond_its_window, from_the_beginning, without_gradient_of_values):
        assert not is_right(kernel, CPU, torch.float32, share, DIM)
    assert is_right(by_products, CPU, torch.float32, share, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_rectangles(dtype):
    assert find_varlen(torch.zeros(3, HEADS, DIM, dtype=dtype), KV_HEADS, Limits()) is None
