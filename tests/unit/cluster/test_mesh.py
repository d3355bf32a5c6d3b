"""Ranks as the cells of a grid."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rallypoint.cluster import Mesh

AXES = st.dictionaries(
    st.sampled_from(["dp", "dp_replicate", "dp_shard", "sp", "tp"]), st.integers(1, 3), min_size=1, max_size=4
)


def test_the_last_axis_varies_fastest():
    mesh = Mesh({"dp_replicate": 2, "dp_shard": 2, "tp": 2})
    assert [tuple(mesh.coordinates(rank).values()) for rank in range(8)] == [
        (r, s, t) for r in range(2) for s in range(2) for t in range(2)
    ]
    assert [mesh.part(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.leaders == (0, 2, 4, 6)


def test_peers_may_lie_apart():
    mesh = Mesh({"tp": 2, "dp": 2})
    assert [mesh.part(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert mesh.leaders == (0, 1)


def test_without_a_data_parallel_axis_there_is_one_part():
    mesh = Mesh({"tp": 3})
    assert (mesh.num_parts, mesh.leaders, [mesh.part(rank) for rank in range(3)]) == (1, (0,), [0, 0, 0])


@given(AXES)
def test_every_part_has_one_leader_and_equally_many_ranks(axes):
    mesh = Mesh(axes)
    parts = [mesh.part(rank) for rank in range(mesh.size)]
    assert [mesh.part(rank) for rank in mesh.leaders] == list(range(mesh.num_parts)), "leaders in the order of parts"
    assert {parts.count(part) for part in parts} == {mesh.size // mesh.num_parts}
    assert len({tuple(mesh.coordinates(rank).items()) for rank in range(mesh.size)}) == mesh.size


@pytest.mark.parametrize(("axes", "found"), [({}, "none"), ({"dp": 0, "tp": 2}, "dp=0"), ({"tp": -1}, "tp=-1")])
def test_an_axis_of_no_ranks_is_refused(axes, found):
    with pytest.raises(ValueError, match=f"axes of size 1 or more, found {found}"):
        Mesh(axes)
