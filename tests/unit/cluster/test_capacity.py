"""What can never fit is said before anything is asked of Ray."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rallypoint.cluster import ResourcePool
from rallypoint.cluster.capacity import Node, misfit, table

GIB = 2**30


def node(name, cpus, gpus=0, memory_gib=0, labels=None, **others):
    return Node(name, {"CPU": cpus, "GPU": gpus, "memory": memory_gib * GIB, **others}, labels or {})


def test_what_fits_has_nothing_to_say():
    nodes = [node("a", 2), node("b", 1)]
    for counts in ([2, 1], [1, 2], [1], [2], [1, 1]):
        assert misfit([ResourcePool(counts)], nodes) is None


def test_the_table_puts_most_processes_beside_most_room():
    nodes = [node("small", 1), node("large", 4), node("middle", 2)]
    assert misfit([ResourcePool([2, 3, 2], name="main")], nodes) == (
        "pool 'main' cannot fit on this cluster:\n"
        "  node        wanted  available\n"
        "  1 (large)   3 CPU   4 CPU\n"
        "  2 (middle)  2 CPU   2 CPU\n"
        "  3 (small)   2 CPU   1 CPU      too little"
    )


def test_room_is_measured_by_what_is_scarce():
    """The node with the most cores is not the one with the most room."""
    nodes = [node("cores", 64, gpus=0), node("devices", 8, gpus=8)]
    assert misfit([ResourcePool([8], num_gpus=1)], nodes) is None
    said = misfit([ResourcePool([8, 1], num_gpus=1)], nodes)
    assert said is not None
    assert "1 (devices)  8 CPU, 8 GPU  8 CPU, 8 GPU\n" in said
    assert "2 (cores)    1 CPU, 1 GPU  64 CPU, 0 GPU  too little" in said


def test_a_node_that_is_not_there_is_missing():
    said = misfit([ResourcePool([1, 1])], [node("a", 8)])
    assert said is not None
    assert "2      1 CPU   no such node  missing" in said


@pytest.mark.parametrize(
    ("takes", "missing"),
    [
        ({"memory_gib": 5}, "1 CPU, 5 GiB memory  8 CPU, 4 GiB memory  too little"),
        ({"resources": {"TPU": 4}}, "1 CPU, 4 TPU  8 CPU, 0 TPU  too little"),
        ({"num_gpus": 0.5}, "1 CPU, 0.5 GPU  8 CPU, 0 GPU  too little"),
    ],
)
def test_memory_and_other_resources_are_asked_before_anything_is_created(takes, missing):
    said = misfit([ResourcePool([1], **takes)], [node("a", 8, memory_gib=4)])
    assert said is not None
    assert missing in said


def test_fractions_add_up_as_a_person_would_add_them():
    assert misfit([ResourcePool([3], num_cpus=0.1)], [node("a", 0.3)]) is None
    assert misfit([ResourcePool([4], num_cpus=0.1)], [node("a", 0.3)]) is not None


def test_labels_choose_the_nodes_and_the_table_says_so():
    nodes = [node("a", 4, labels={"zone": "x", "kind": "fast"}), node("b", 8, labels={"zone": "y"})]
    assert misfit([ResourcePool([4], labels={"zone": "x"})], nodes) is None
    said = misfit([ResourcePool([8], labels={"zone": "x"})], nodes)
    assert said is not None
    assert said.endswith("(only nodes with the labels {'zone': 'x'}: 1 of 2)")
    assert "(b)" not in said
    none = misfit([ResourcePool([1], labels={"zone": "y", "kind": "fast"})], nodes)
    assert none is not None
    assert "no such node  missing" in none


def test_pools_that_fit_one_by_one_must_also_fit_together():
    one, other = ResourcePool([2], name="one"), ResourcePool([2], name="other")
    assert misfit([one, other], [node("a", 4)]) is None
    assert misfit([one, other], [node("a", 2), node("b", 2)]) is None
    said = misfit([one, other], [node("a", 3)])
    assert said is not None
    assert "not all of them at the same time" in said
    assert "pool 'one'" in said
    assert "pool 'other'" in said


def test_where_nodes_may_join_only_what_is_too_large_for_those_there_is_hopeless():
    nodes = [node("a", 2)]
    assert misfit([ResourcePool([2, 2])], nodes, grows=True) is None, "a second node may join"
    assert misfit([ResourcePool([2]), ResourcePool([2])], nodes, grows=True) is None, "one of them may end"
    assert misfit([ResourcePool([3])], nodes, grows=True) is not None


def test_many_equal_nodes_of_which_one_is_small_are_seen_through_at_once():
    nodes = [node(str(number), 8) for number in range(63)] + [node("small", 4)]
    assert misfit([ResourcePool([8] * 63 + [4])], nodes) is None
    said = misfit([ResourcePool([8] * 64)], nodes)
    assert said is not None
    assert "64 (small)  8 CPU   4 CPU      too little" in said


def brute_force(counts, sizes):
    """Whether every count finds a node of its own, by trying all."""
    if not counts:
        return True
    return any(
        size >= counts[0] and brute_force(counts[1:], sizes[:index] + sizes[index + 1 :])
        for index, size in enumerate(sizes)
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(0, 5), max_size=4))
def test_the_verdict_is_that_of_trying_everything(counts, sizes):
    nodes = [node(str(index), size) for index, size in enumerate(sizes)]
    fits = brute_force(counts, sizes)
    said = misfit([ResourcePool(counts)], nodes)
    assert (said is None) == fits
    assert any(word in (said or "") for word in ("too little", "missing")) != fits, "a row of the table says why"


def test_the_table_can_show_what_is_free_instead():
    assert table(ResourcePool([2]), [node("a", 1)]) == (
        "  node   wanted  available\n  1 (a)  2 CPU   1 CPU      too little"
    )
