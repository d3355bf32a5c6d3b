import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.models.part import Part

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@st.composite
def parts(draw, shape):
    part = Part.whole(shape)
    for dim in range(len(shape)):
        start = draw(st.integers(0, part.sizes[dim]))
        part = part.narrow(dim, start, draw(st.integers(0, part.sizes[dim] - start)))
    return part


def places(part):
    """Mark a part's elements in a tensor of the whole."""
    marked = torch.zeros(part.shape, dtype=torch.bool)
    marked[part.within(Part.whole(part.shape))] = True
    return marked


@given(st.data(), shapes)
def test_the_overlap_is_what_lies_in_both_parts(data, shape):
    one, other = data.draw(parts(shape)), data.draw(parts(shape))
    both = places(one) & places(other)
    overlap = one.overlap(other)
    assert (overlap is None) == (not both.any())
    if overlap is not None:
        assert torch.equal(places(overlap), both)


@given(st.data(), shapes)
def test_a_part_is_found_in_the_tensor_of_a_larger_one(data, shape):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    outer = data.draw(parts(shape))
    inner = outer.narrow(0, outer.sizes[0] // 2, outer.sizes[0] - outer.sizes[0] // 2)
    held = whole[outer.within(Part.whole(shape))]
    assert torch.equal(held[inner.within(outer)], whole[inner.within(Part.whole(shape))])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 1), st.integers(1, 6))
def test_cuts_and_rows_of_all_ranks_cover_a_weight_once(num_cuts, num_shards, dim, size):
    whole = Part.whole([size * num_cuts, size * num_cuts])
    cover = torch.zeros(whole.shape, dtype=torch.int)
    for index in range(num_cuts):
        cut = whole.cut(dim, index, num_cuts)
        per_shard = -(-cut.sizes[0] // num_shards)
        for shard in range(num_shards):
            first, last = (min(cut.sizes[0], place * per_shard) for place in (shard, shard + 1))
            part = cut.rows(first, last)
            assert part.num_elements == int(places(part).sum())
            cover += places(part)
    assert (cover == 1).all()


def test_a_cut_that_does_not_come_out_even_is_refused():
    with pytest.raises(ValueError, match=r"dimension 1 of \[6, 4\] does not divide into 3"):
        Part.whole([6, 4]).cut(dim=1, index=0, count=3)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7), (7, 7)])
def test_rows_outside_of_a_part_are_refused(start, stop):
    with pytest.raises(ValueError, match="not within a part"):
        Part.whole([6, 4]).rows(start, stop)
