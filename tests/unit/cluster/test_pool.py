"""Ranks are a function of node and device, and views hold every process once."""

import dataclasses
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rallypoint.cluster import PoolView, ResourcePool, merge
from rallypoint.cluster.pool import Placed


def place(pool, nodes, devices=None):
    """Processes as a runtime would describe them: named node:number, on the nodes given for the pool's entries."""
    counts = pool.processes_per_node
    return [
        Placed(f"{node}:{number}", node, devices[number] if devices else ())
        for node, count in zip(nodes, counts, strict=True)
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("counts", "nodes", "expected"),
    [
        ([2, 1], "AB", ["A:0", "A:1", "B:0"]),
        ([1, 2], "AB", ["A:0", "B:0", "B:1"]),
        ([1, 2], "BA", ["B:0", "A:0", "A:1"]),
        ([4, 4], "AB", [f"{node}:{number}" for node in "AB" for number in range(4)]),
    ],
)
def test_ranks_go_through_the_nodes_in_the_order_of_the_spec(counts, nodes, expected):
    pool = ResourcePool(counts)
    assert pool.num_processes == len(expected)
    assert pool.ranks({pool: place(pool, nodes)}) == expected


def test_on_a_node_ranks_follow_the_device_numbers_as_numbers():
    pool = ResourcePool([3, 2], num_gpus=1)
    devices = ["10", "1", "0"]
    placed = [Placed(f"A{device}", "A", (device,)) for device in devices]
    placed += [Placed(f"B{device}", "B", (device,)) for device in ["3", "2"]]
    assert pool.ranks({pool: placed}) == ["A0", "A1", "A10", "B2", "B3"]


def test_a_process_with_several_devices_counts_by_its_lowest_whatever_their_order():
    pool = ResourcePool([2], num_gpus=2)
    assert pool.ranks({pool: [Placed("high", "A", ("2", "1")), Placed("low", "A", ("3", "0"))]}) == ["low", "high"]


def test_processes_that_share_a_device_or_have_none_keep_their_order():
    pool = ResourcePool([4], num_gpus=0.5)
    placed = [
        Placed(name, "A", devices) for name, devices in zip("abcd", [("1",), ("0",), ("1",), ("0",)], strict=True)
    ]
    assert pool.ranks({pool: placed}) == ["b", "d", "a", "c"]
    assert pool.ranks({pool: [dataclasses.replace(one, devices=()) for one in placed]}) == ["a", "b", "c", "d"]


def test_what_a_process_takes_is_said_in_rays_words():
    pool = ResourcePool(
        [2, 1],
        num_cpus=0.5,
        num_gpus=0.25,
        memory_gib=1.5,
        resources={"TPU": 4},
        labels={"ray.io/accelerator-type": "H100"},
    )
    assert pool.bundle == {"CPU": 0.5, "GPU": 0.25, "memory": 1.5 * 2**30, "TPU": 4}
    assert pool.node_bundles == [
        {"CPU": 1.0, "GPU": 0.5, "memory": 3 * 2**30, "TPU": 8},
        {"CPU": 0.5, "GPU": 0.25, "memory": 1.5 * 2**30, "TPU": 4},
    ]
    assert (pool.device, pool.num_threads) == ("cuda", 1)


@pytest.mark.parametrize(
    ("settings", "device", "num_threads"),
    [
        ({}, "cpu", 1),
        ({"num_cpus": 3.5}, "cpu", 3),
        ({"num_gpus": 1, "num_cpus": 0}, "cuda", 1),
        ({"resources": {"TPU": 1}, "device": "tpu"}, "tpu", 1),
    ],
)
def test_device_and_threads_follow_from_what_is_taken(settings, device, num_threads):
    pool = ResourcePool([1], **settings)
    assert (pool.device, pool.num_threads) == (device, num_threads)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"processes_per_node": []}, r"needs one number of 1 or more for each node, found \[\]"),
        ({"processes_per_node": [2, 0]}, r"found \[2, 0\]"),
        ({"num_cpus": -1}, "must take something, found {'CPU': -1}"),
        ({"num_cpus": 0}, "must take something, found nothing"),
        ({"num_gpus": 1.5}, "can share one GPU or have whole ones, found 1.5"),
    ],
)
def test_a_pool_that_makes_no_sense_is_refused_with_its_name(wrong, message):
    with pytest.raises(ValueError, match=f"pool 'odd'.*{message}"):
        ResourcePool(**{"processes_per_node": [1], "name": "odd", **wrong})


def test_pools_that_look_alike_are_two_pools():
    assert ResourcePool([2]) != ResourcePool([2])


@st.composite
def placements(draw):
    """Some pools, and where their processes are; machines are shared between pools."""
    pools, placed = [], {}
    for number in range(draw(st.integers(1, 3))):
        counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        nodes = draw(st.permutations("ABCD"))[: len(counts)]
        pool = ResourcePool(counts, name=str(number))
        pools.append(pool)
        placed[pool] = [dataclasses.replace(one, process=f"{number}/{one.process}") for one in place(pool, nodes)]
    return pools, placed


def sizes_of(draw, total):
    """Cut a number of processes into sizes of one and more."""
    borders = draw(st.sets(st.integers(1, total - 1))) if total > 1 else set()
    return [stop - start for start, stop in itertools.pairwise([0, *sorted(borders), total])]


@given(placements())
def test_a_merged_pool_has_every_process_once_and_machines_in_one_piece(drawn):
    pools, placed = drawn
    merged = merge(*pools)
    ranks = merged.ranks(placed)
    assert sorted(ranks) == sorted(one.process for processes in placed.values() for one in processes)
    node_of = {one.process: one.node_id for processes in placed.values() for one in processes}
    machines = [machine for machine, _ in itertools.groupby(ranks, key=node_of.__getitem__)]
    assert len(machines) == len(set(machines)), "the ranks of a machine are consecutive"
    assert machines[0] == placed[pools[0]][0].node_id, "the machine that is named first comes first"
    assert merged.num_processes == len(ranks)


@given(placements(), st.data())
def test_the_parts_of_a_split_have_their_sizes_and_together_every_process_once(drawn, data):
    pools, placed = drawn
    whole = merge(*pools) if len(pools) > 1 else pools[0]
    sizes = sizes_of(data.draw, whole.num_processes)
    parts = whole.split(sizes)
    assert [part.num_processes for part in parts] == sizes
    assert [len(part.ranks(placed)) for part in parts] == sizes
    together = [process for part in parts for process in part.ranks(placed)]
    assert sorted(together) == sorted(whole.ranks(placed))
    assert sorted(merge(*parts).ranks(placed)) == sorted(together), "split and merged again, nothing is lost"
    if isinstance(whole, ResourcePool):
        assert together == whole.ranks(placed), "the views of one pool have its ranks in its order"


@given(placements(), st.data())
def test_a_split_of_a_split_is_a_split(drawn, data):
    pools, placed = drawn
    first = merge(*pools).split(sizes_of(data.draw, sum(pool.num_processes for pool in pools)))
    again = [piece for part in first for piece in part.split(sizes_of(data.draw, part.num_processes))]
    assert sorted(process for piece in again for process in piece.ranks(placed)) == sorted(merge(*pools).ranks(placed))


def test_a_split_of_a_merged_pool_may_cross_the_border_of_two_pools():
    old, new = ResourcePool([2], name="old"), ResourcePool([2], name="new")
    placed = {old: place(old, "A"), new: place(new, "B")}
    first, middle, last = merge(old, new).split([1, 2, 1])
    assert [view.ranks(placed) for view in (first, middle, last)] == [["A:0"], ["A:1", "B:0"], ["B:1"]]
    assert (middle.sources, middle.name) == ((old, new), "old+new[1:3]")


@pytest.mark.parametrize("sizes", [[], [2], [1, 1], [0, 3], [4], [-1, 4]])
def test_sizes_that_do_not_add_up_are_refused(sizes):
    with pytest.raises(ValueError, match=r"pool 'main' has 3 processes: .* must add up to that"):
        ResourcePool([2, 1], name="main").split(sizes)


def test_pools_that_have_a_process_in_common_cannot_be_merged():
    pool = ResourcePool([4], name="main")
    first, second = pool.split([2, 2])
    middle = PoolView("middle", merge(*pool.split([1, 2, 1])[1:2]).parts)
    assert merge(second, first).num_processes == 4
    for overlapping in [(pool, pool), (pool, first), (first, first), (first, middle), (middle, second)]:
        with pytest.raises(ValueError, match="both have processes of pool 'main'"):
            merge(*overlapping)
    with pytest.raises(ValueError, match="one pool at least"):
        merge()
