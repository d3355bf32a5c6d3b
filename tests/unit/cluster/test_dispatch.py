"""How one call becomes calls on ranks: the rules without any process."""

import copy
import dataclasses
import re
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rallypoint.cluster import (
    DispatchRule,
    Joinable,
    Mesh,
    RankArguments,
    Splittable,
    broadcast,
    collect,
    dispatched,
    first_rank,
    joined,
    scatter,
    shard,
)
from rallypoint.cluster.dispatch import rule_of

TWO = Mesh({"dp": 2})
GRID = Mesh({"dp": 2, "tp": 2})


@dataclasses.dataclass(frozen=True)
class Rows:
    """The smallest carrier."""

    values: tuple[int, ...]

    def __len__(self):
        return len(self.values)

    def split(self, num_parts):
        borders = [len(self) * part // num_parts for part in range(num_parts + 1)]
        return [Rows(self.values[borders[part] : borders[part + 1]]) for part in range(num_parts)]

    @classmethod
    def join(cls, parts):
        return cls(tuple(value for part in parts for value in part.values))


class Worker:
    """Methods under each rule."""

    @broadcast
    def broadcasted(self, *args, **kwargs): ...

    @collect
    def collected(self, *args, **kwargs): ...

    @shard
    def sharded(self, *args, **kwargs): ...

    @scatter
    def scattered(self, *args, **kwargs): ...

    @first_rank
    def first(self, *args, **kwargs): ...

    def plain(self): ...


def split(method, mesh, *args, **kwargs) -> Any:
    return rule_of(method).split(mesh, args, kwargs)


def test_broadcast_and_collect_give_the_same_to_all_and_keep_one_or_every_result():
    for method in (Worker.broadcasted, Worker.collected):
        parts = split(method, GRID, 1, [2, 3], key=(4,))
        assert parts == [RankArguments((1, [2, 3]), {"key": (4,)})] * 4
    assert rule_of(Worker.broadcasted).answering(GRID) == (0,)
    assert list(rule_of(Worker.collected).answering(GRID)) == [0, 1, 2, 3]
    assert rule_of(Worker.broadcasted).join(["a"]) == "a"
    assert rule_of(Worker.collected).join(["a", {"b": 1}, None]) == ["a", {"b": 1}, None]


def test_the_first_rank_is_called_alone():
    assert split(Worker.first, GRID, 1) == [RankArguments((1,), {}), None, None, None]


def test_shard_gives_one_part_to_all_peers_and_hears_their_leader():
    mesh = Mesh({"dp": 2, "sp": 2, "tp": 2})
    parts = split(Worker.sharded, mesh, Rows((1, 2, 3, 4)), [5, 6, 7, 8], "mode", key=[1, 2, 3, 4])
    assert [part.args[0].values for part in parts] == [(1, 2)] * 4 + [(3, 4)] * 4
    assert [part.args[1:] for part in parts] == [([5, 6], "mode")] * 4 + [([7, 8], "mode")] * 4
    assert [part.kwargs for part in parts] == [{"key": [1, 2]}] * 4 + [{"key": [3, 4]}] * 4
    assert parts[0] is parts[3], "the very same object, so that it can be sent once"
    assert list(rule_of(Worker.sharded).answering(mesh)) == [0, 4]


@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(4, [1, 1, 2]), (3, [1, 1, 1]), (2, [0, 1, 1]), (1, [0, 0, 1]), (0, [0, 0, 0])]
)
def test_uneven_batches_and_fewer_rows_than_ranks_are_legal(num_rows, sizes):
    rows = list(range(num_rows))
    parts = split(Worker.sharded, Mesh({"dp": 3}), rows, batch=Rows(tuple(rows)))
    assert [len(part.args[0]) for part in parts] == sizes
    assert [part.kwargs["batch"].values for part in parts] == [tuple(part.args[0]) for part in parts], (
        "rows stay together"
    )
    assert joined([part.args[0] for part in parts]) == rows


@given(st.lists(st.integers()), st.integers(1, 5), st.integers(1, 3))
def test_what_is_split_and_joined_is_what_it_was(rows, dp, tp):
    mesh = Mesh({"dp": dp, "tp": tp})
    rule = rule_of(Worker.sharded)
    before = copy.deepcopy(rows)
    parts = split(Worker.sharded, mesh, rows, batch=Rows(tuple(rows)))
    answers = [parts[rank] for rank in rule.answering(mesh)]
    assert rule.join([part.args[0] for part in answers]) == rows == before
    assert rule.join([part.kwargs["batch"] for part in answers]).values == tuple(rows)
    sizes = [len(part.args[0]) for part in answers]
    assert max(sizes) - min(sizes) <= 1


def test_nothing_that_was_passed_is_modified():
    rows, batch, options = [3, 1, 2], Rows((1, 2, 3)), {"deep": [1, 2]}
    before = copy.deepcopy((rows, batch, options))
    for method in (Worker.broadcasted, Worker.collected, Worker.sharded, Worker.first):
        split(method, TWO, rows, batch=batch, options=options)
    split(Worker.scattered, TWO, rows[:2], batch=batch, options=options)
    assert (rows, batch, options) == before
    parts = split(Worker.sharded, Mesh({"dp": 1}), rows)
    parts[0].args[0].append(4)
    assert rows == [3, 1, 2], "a part is a list of its own"


@pytest.mark.parametrize("whole", ["text", b"bytes", bytearray(b"b"), (1, 2), {"a": [1]}, {1}, 3, None, range(4)])
def test_what_is_no_carrier_and_no_list_goes_to_every_rank_as_a_whole(whole):
    parts = split(Worker.sharded, TWO, [1, 2], whole, key=whole)
    assert [(part.args[1], part.kwargs["key"]) for part in parts] == [(whole, whole)] * 2
    with pytest.raises(TypeError, match="at least one argument that can be split: a carrier or a list"):
        split(Worker.sharded, TWO, whole, key=whole)


def test_arguments_that_are_split_must_have_equally_many_rows():
    with pytest.raises(ValueError, match=r"equally many rows, found 2 and 3; .* as a whole can be a tuple"):
        split(Worker.sharded, TWO, [1, 2, 3], stops=[1, 2])
    with pytest.raises(ValueError, match="equally many rows, found 0 and 2"):
        split(Worker.sharded, TWO, Rows((1, 2)), [])


def test_a_carrier_that_is_cut_into_another_number_of_parts_is_refused():
    class Chunks:
        """Cuts by size and not by number, as torch's tensors do."""

        def split(self, size):
            return [self] * 5

    assert isinstance(Chunks(), Splittable)
    with pytest.raises(ValueError, match=r"Chunks.split\(2\) must return as many parts, found 5"):
        split(Worker.sharded, TWO, Chunks())


def test_scatter_gives_item_i_to_rank_i_and_the_rest_to_all():
    assert split(Worker.scattered, GRID, ("a", "b", "c", "d"), 5, key=[6]) == [
        RankArguments((item, 5), {"key": [6]}) for item in "abcd"
    ]
    assert rule_of(Worker.scattered).join([1, 2, 3, 4]) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((), TypeError, "a sequence with one item per rank as its first positional argument"),
        ((3,), TypeError, "a sequence with one item per rank"),
        (([1, 2, 3],), ValueError, "one item per rank: 2 ranks, found 3 items"),
        (([],), ValueError, "one item per rank: 2 ranks, found 0 items"),
    ],
)
def test_scatter_without_an_item_for_every_rank_is_refused(args, error, message):
    with pytest.raises(error, match=message):
        split(Worker.scattered, TWO, *args)


@pytest.mark.parametrize(
    ("results", "whole"),
    [
        ([[1], [2, 3], []], [1, 2, 3]),
        ([None, None], None),
        ([Rows((1,)), Rows((2,))], Rows((1, 2))),
        ([{"a": [1], "b": None}, {"a": [2], "b": None}], {"a": [1, 2], "b": None}),
        ([{"a": {"b": [1]}}, {"a": {"b": [2]}}], {"a": {"b": [1, 2]}}),
        ([{}, {}], {}),
        ([[1]], [1]),
        ([{"a": 1}], {"a": 1}),
    ],
)
def test_results_of_the_ranks_are_joined_in_order(results, whole):
    before = copy.deepcopy(results)
    assert joined(results) == whole
    assert results == before


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([[1], None], "some are NoneType and others list"),
        ([[1], (2,)], "some are list and others tuple"),
        ([{"a": [1]}, {"b": [1]}], re.escape("their keys differ from ['a']")),
        ([{"a": [1], 2: []}, {"a": [1]}], re.escape("their keys differ from ['a', 2]")),
        ([{"a": 1.0}, {"a": 2.0}], "float has no `join`; return a list or a carrier, or use @collect"),
        ([1, 2], "int has no `join`"),
        (["a", "b"], "str has no `join`"),
        (["a"], "str has no `join`"),
        ([b"a", b"b"], "bytes has no `join`"),
        ([(1,), (2,)], "tuple has no `join`"),
    ],
)
def test_results_that_have_no_whole_say_what_they_are(results, message):
    with pytest.raises(TypeError, match=f"the results of the ranks cannot be joined: {message}"):
        joined(results)


def test_a_method_keeps_its_own_behaviour_and_needs_a_rule_to_be_called_on_a_group():
    class Adder:
        @shard
        def add(self, rows: list[int], number: int) -> list[int]:
            """Add."""
            return [row + number for row in rows]

    assert Adder().add([1], number=2) == [3]
    assert (Adder.add.__name__, Adder.add.__doc__) == ("add", "Add.")
    with pytest.raises(TypeError, match=r"Worker.plain has no dispatch rule; decorate it with @broadcast, @collect"):
        rule_of(Worker.plain)


def test_a_rule_of_ones_own_is_a_pair_of_functions():
    def every_other(mesh, args, kwargs):
        return [RankArguments(args, kwargs) if rank % 2 else None for rank in range(mesh.size)]

    class Mine:
        @dispatched(DispatchRule("odd ranks", every_other, sum, lambda mesh: range(1, mesh.size, 2)))
        def count(self, number): ...

    rule = rule_of(Mine.count)
    assert rule.split(GRID, (1,), {}) == [None, RankArguments((1,), {}), None, RankArguments((1,), {})]
    assert (list(rule.answering(GRID)), rule.join([1, 2])) == ([1, 3], 3)


def test_carriers_are_recognised_by_what_they_can():
    assert isinstance(Rows(()), Splittable)
    assert isinstance(Rows(()), Joinable)
