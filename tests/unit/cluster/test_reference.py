"""What the ranks of another group get when a result is passed on by reference: the same as by value."""

import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rallypoint.cluster import Mesh, broadcast, collect, joined, scatter, shard
from rallypoint.cluster.dispatch import rule_of
from rallypoint.cluster.reference import Fetch, ResultReference, attach, detach, whole


class Consumer:
    """Methods under each rule."""

    @broadcast
    def broadcasted(self, *args, **kwargs): ...

    @collect
    def collected(self, *args, **kwargs): ...

    @shard
    def sharded(self, *args, **kwargs): ...

    @scatter
    def scattered(self, *args, **kwargs): ...


def parts_of(method, num_ranks, *args, **kwargs) -> Any:
    return rule_of(method).split(Mesh({"dp": num_ranks}), args, kwargs)


def seen(method, num_ranks, *args, **kwargs):
    """What each rank sees and how many handles it is sent, where a handle is a tuple around its value."""
    found = []
    for part in parts_of(method, num_ranks, *args, **kwargs):
        args, kwargs, handles = detach(
            tuple(map(whole, part.args)), {name: whole(value) for name, value in part.kwargs.items()}
        )
        args, kwargs = pickle.loads(pickle.dumps((args, kwargs)))
        found.append((*attach(args, kwargs, [value for (value,) in handles]), len(handles)))
    return found


def reference(*results, join=joined):
    return ResultReference(tuple((result,) for result in results), join)


@given(st.lists(st.lists(st.integers(), max_size=4), min_size=1, max_size=4), st.integers(1, 5))
def test_a_sharded_result_of_any_number_of_ranks_is_sharded_over_any_other(results, num_ranks):
    found = seen(Consumer.sharded, num_ranks, reference(*results))
    assert joined([args[0] for args, _, _ in found]) == joined(results)


def test_parts_stay_with_the_rank_of_their_number_even_if_uneven():
    found = seen(Consumer.sharded, 2, reference([1, 2, 3], [4]), [5, 6])
    assert found == [(([1, 2, 3], [5]), {}, 1), (([4], [6]), {}, 1)]


def test_another_number_of_ranks_fetches_the_whole_and_cuts_it_as_the_value_would_be():
    found = seen(Consumer.sharded, 3, batch=reference([1, 2], [3, 4]))
    by_value = parts_of(Consumer.sharded, 3, batch=[1, 2, 3, 4])
    assert [kwargs for _, kwargs, _ in found] == [part.kwargs for part in by_value]
    assert [num_handles for *_, num_handles in found] == [2, 2, 2]


def test_broadcast_and_collect_see_the_joined_whole():
    for method in (Consumer.broadcasted, Consumer.collected):
        assert seen(method, 3, reference([1], [2, 3]), key=4) == [(([1, 2, 3],), {"key": 4}, 2)] * 3


def test_a_broadcast_result_is_one_part_and_is_cut_there():
    first = reference([1, 2, 3, 4], join=lambda results: results[0])
    parts = parts_of(Consumer.sharded, 2, first)
    assert [part.args[0].value([[1, 2, 3, 4]]) for part in parts] == [[1, 2], [3, 4]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_rule_of_ones_own_is_joined_before_it_is_cut(num_ranks):
    """As many parts as ranks do not mean that part i is what rank i would get."""
    backwards = reference([1, 2], [3, 4], join=_backwards)
    found = seen(Consumer.sharded, num_ranks, backwards)
    by_value = parts_of(Consumer.sharded, num_ranks, [3, 4, 1, 2])
    assert [args for args, *_ in found] == [part.args for part in by_value]


def _backwards(results):
    return [item for result in reversed(results) for item in result]


def test_what_cannot_be_split_is_never_taken_for_the_whole():
    entries = reference({"a": [1]}, {"a": [2]})
    with pytest.raises(TypeError, match="a dict that is passed on to a sharded call cannot be split: wait for it"):
        seen(Consumer.sharded, 2, entries)
    assert [args for args, *_ in seen(Consumer.sharded, 1, entries)] == [({"a": [1, 2]},)]
    assert [args for args, *_ in seen(Consumer.sharded, 3, entries)] == [({"a": [1, 2]},)] * 3, "a dict goes to all"
    assert [args for args, *_ in seen(Consumer.sharded, 2, reference(None, None))] == [(None,)] * 2


def test_results_of_every_rank_are_scattered_one_to_each():
    every = reference("a", "b", join=list)
    assert seen(Consumer.scattered, 2, every, 5) == [(("a", 5), {}, 1), (("b", 5), {}, 1)]
    other = reference(["a", "b", "c"], join=_first)
    assert [args for args, *_ in seen(Consumer.scattered, 3, other)] == [("a",), ("b",), ("c",)]
    with pytest.raises(ValueError, match="one item per rank: 3 ranks, found 2 items"):
        seen(Consumer.scattered, 3, every)


def _first(results):
    return results[0]


def test_values_and_references_mix_and_only_handles_are_taken_out():
    args, kwargs, handles = detach((1, Fetch(("a", "b"), list), [2]), {"x": Fetch(("c",), _first), "y": 3})
    assert handles == ["a", "b", "c"]
    assert attach(args, kwargs, ["A", "B", "C"]) == ((1, ["A", "B"], [2]), {"x": "C", "y": 3})


def test_a_reference_inside_of_another_argument_is_refused_where_it_would_be_sent():
    with pytest.raises(TypeError, match="a reference must be an argument of its own"):
        pickle.dumps([reference([1])])


def test_arguments_without_references_are_left_as_they_are():
    args, kwargs = ([1],), {"x": [2]}
    same_args, same_kwargs, handles = detach(args, kwargs)
    assert same_args is args
    assert same_kwargs is kwargs
    assert handles == []
    assert attach(args, kwargs, [])[0] is args
