"""How one call on a group becomes calls on its ranks, and how their results become one result.

The rule is a decorator on the worker's method. It depends on the types of the arguments, never
on their values, and it modifies none of them. The decorated method stays a plain method: it can be
called on a worker object.

| rule | who is called, with what | result |
|---|---|---|
| `broadcast` | all ranks, the same | rank 0's |
| `collect` | all ranks, the same | a list, one entry per rank |
| `shard` | all ranks, carriers and lists split over the data-parallel axes | the leaders', joined |
| `scatter` | item i of the first argument to rank i, the rest to all | a list, one entry per rank |
| `first_rank` | rank 0 | rank 0's |
| `dispatched(DispatchRule(...))` | as your pair of functions says | as your pair of functions says |

>>> class Adder:
...     @shard
...     def doubled(self, numbers: list[int], factor: int) -> list[int]:
...         return [factor * number for number in numbers]
>>> rule = rule_of(Adder.doubled)
>>> parts = rule.split(Mesh({"dp": 2}), ([1, 2, 3], 10), {})
>>> [part.args for part in parts]
[([1], 10), ([2, 3], 10)]
>>> rule.join([Adder().doubled(*part.args, **part.kwargs) for part in parts])
[10, 20, 30]
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast, runtime_checkable

from rallypoint.cluster.mesh import Mesh
from rallypoint.cluster.reference import Fetch, ResultReference

MethodT = TypeVar("MethodT", bound=Callable[..., Any])
WorkerT = TypeVar("WorkerT")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
P = ParamSpec("P")

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


@runtime_checkable
class Splittable(Protocol):
    """Something that can be split over ranks."""

    def split(self, num_parts: int) -> Sequence[Self]:
        """Cut into that many parts, in order; parts may be empty.

        Rows that belong together in two arguments of a call reach the same rank if both are cut as lists are: part i
        ends before row `num_rows * (i + 1) // num_parts`.
        """
        ...


@runtime_checkable
class Joinable(Protocol):
    """Something that can be joined from parts, one from each rank."""

    @classmethod
    def join(cls, parts: Sequence[Any]) -> Any:
        """Put the parts of the ranks together, in rank order."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RankArguments:
    """The arguments of one rank."""

    args: Args
    kwargs: Kwargs


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchRule:
    """A pair of functions: arguments to one part per rank, results to a result."""

    name: str
    split: Callable[[Mesh, Args, Kwargs], Sequence[RankArguments | None]]
    """Returns one entry per rank; a rank whose entry is None is not called."""
    join: Callable[[Sequence[Any]], Any]
    """Gets the results of the ranks that answer, in rank order."""
    answering: Callable[[Mesh], Sequence[int]] = lambda mesh: range(mesh.size)
    """Ranks whose results are kept; those of the others never leave their process."""


def dispatched(rule: DispatchRule) -> Callable[[MethodT], MethodT]:
    """Give a method your own rule."""

    def decorate(method: MethodT) -> MethodT:
        method.__dispatch__ = rule  # pyright: ignore[reportFunctionMemberAccess]
        return method

    return decorate


def rule_of(method: Callable[..., Any]) -> DispatchRule:
    """Return the rule of a worker's method.

    Raises:
        TypeError: the method has none, so a group cannot know which ranks to call.
    """
    rule = getattr(method, "__dispatch__", None)
    if not isinstance(rule, DispatchRule):
        name = getattr(method, "__qualname__", repr(method))
        raise TypeError(
            f"{name} has no dispatch rule; decorate it with @broadcast, @collect, @shard, @scatter or @first_rank"
        )
    return rule


def collect(method: Callable[Concatenate[WorkerT, P], ResultT]) -> Callable[Concatenate[WorkerT, P], list[ResultT]]:
    """Same arguments to every rank; a list of all their results, such as the metrics of every rank."""
    return cast("Callable[Concatenate[WorkerT, P], list[ResultT]]", dispatched(_COLLECT)(method))


def scatter(
    method: Callable[Concatenate[WorkerT, ItemT, P], ResultT],
) -> Callable[Concatenate[WorkerT, Sequence[ItemT], P], list[ResultT]]:
    """Item i of the first argument to rank i, every other argument to all; a list of the results."""
    return cast("Callable[Concatenate[WorkerT, Sequence[ItemT], P], list[ResultT]]", dispatched(_SCATTER)(method))


def _to_all(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[RankArguments]:
    return [RankArguments(args, kwargs)] * mesh.size


def _to_first(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[RankArguments | None]:
    return [RankArguments(args, kwargs), *[None] * (mesh.size - 1)]


def _shards(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[RankArguments]:
    values = (*args, *kwargs.values())
    if not any(_can_be_split(value) or isinstance(value, ResultReference) for value in values):
        raise TypeError("a sharded call needs at least one argument that can be split: a carrier or a list")
    lengths = {len(value) for value in values if _can_be_split(value) and isinstance(value, Sized)}
    if len(lengths) > 1:
        raise ValueError(
            f"arguments that are split must have equally many rows, found {' and '.join(map(str, sorted(lengths)))}; "
            "what is meant for every rank as a whole can be a tuple"
        )
    positional = [_cut(value, mesh.num_parts) for value in args]
    named = {name: _cut(value, mesh.num_parts) for name, value in kwargs.items()}
    parts = [
        RankArguments(tuple(cut[index] for cut in positional), {name: cut[index] for name, cut in named.items()})
        for index in range(mesh.num_parts)
    ]
    return [parts[mesh.part(rank)] for rank in range(mesh.size)]


def _items(mesh: Mesh, args: Args, kwargs: Kwargs) -> list[RankArguments]:
    if not args or not isinstance(args[0], Sequence | ResultReference):
        raise TypeError("a scattered call needs a sequence with one item per rank as its first positional argument")
    items = _one_per_rank(args[0], mesh.size)
    return [RankArguments((item, *args[1:]), kwargs) for item in items]


def _one_per_rank(value: Any, num_ranks: int) -> Sequence[Any]:
    if isinstance(value, ResultReference):
        if value.join is list and len(value.parts) == num_ranks:  # the results of as many ranks
            return [Fetch((part,), _of_first) for part in value.parts]
        return _cut_there(value, _one_per_rank, num_ranks)
    if len(value) != num_ranks:
        raise ValueError(f"a scattered call needs one item per rank: {num_ranks} ranks, found {len(value)} items")
    return value


def _can_be_split(value: Any) -> bool:
    return isinstance(value, list | Splittable) and not isinstance(value, str | bytes | bytearray)


def _cut(value: Any, num_parts: int) -> Sequence[Any]:
    """Return the parts of an argument; every rank gets all of what cannot be split."""
    if isinstance(value, ResultReference):
        if len(value.parts) == num_parts and value.join in (joined, list):
            # It is cut already, and part i stays with rank i.
            return [Fetch((part,), value.join, _own, 0, num_parts) for part in value.parts]
        return _cut_there(value, _cut, num_parts)
    if not _can_be_split(value):
        return [value] * num_parts
    if isinstance(value, list):
        items = cast("list[Any]", value)
        borders = [len(items) * part // num_parts for part in range(num_parts + 1)]
        return [items[borders[part] : borders[part + 1]] for part in range(num_parts)]
    parts = value.split(num_parts)
    if len(parts) != num_parts:
        raise ValueError(f"{type(value).__name__}.split({num_parts}) must return as many parts, found {len(parts)}")
    return parts


def _cut_there(value: ResultReference, cut: Callable[[Any, int], Sequence[Any]], num_parts: int) -> list[Fetch]:
    """Let the ranks cut a value that the driver does not have."""
    return [dataclasses.replace(value.whole(), cut=cut, index=part, num_parts=num_parts) for part in range(num_parts)]


def _own(value: Any, num_parts: int) -> Sequence[Any]:
    """Take the part of a rank as it is.

    Raises:
        TypeError: there is more than one part and they cannot be split, so that every rank would need all of them.
    """
    if num_parts > 1 and value is not None and not _can_be_split(value):
        raise TypeError(
            f"a {type(value).__name__} that is passed on to a sharded call cannot be split: wait for it, and pass "
            "the value"
        )
    return [value]


def joined(results: Sequence[Any]) -> Any:
    """Put the results of the ranks together, in rank order.

    Lists are concatenated, carriers joined by their own `join`, dicts joined entry by entry, and None from every rank
    is None.

    Raises:
        TypeError: the results are of different types, have different keys, or have no order to be joined in.
    """
    first = results[0]
    kinds = sorted({type(result).__name__ for result in results})
    if len(kinds) > 1:
        raise TypeError(f"the results of the ranks cannot be joined: some are {' and others '.join(kinds)}")
    is_carrier = isinstance(first, Joinable) and not isinstance(first, str | bytes | bytearray)
    if first is None or (len(results) == 1 and (is_carrier or isinstance(first, list | dict))):
        return first  # not copied
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, dict):
        keys = cast("dict[Any, Any]", first).keys()
        if any(result.keys() != keys for result in results):
            raise TypeError(f"the results of the ranks cannot be joined: their keys differ from {list(keys)}")
        return {key: joined([result[key] for result in results]) for key in keys}
    if is_carrier:
        return type(first).join(results)
    raise TypeError(
        f"the results of the ranks cannot be joined: {type(first).__name__} has no `join`; "
        "return a list or a carrier, or use @collect for one result per rank"
    )


_of_first = operator.itemgetter(0)
_COLLECT = DispatchRule("collect", _to_all, list)
_SCATTER = DispatchRule("scatter", _items, list)

broadcast = dispatched(DispatchRule("broadcast", _to_all, _of_first, lambda _: (0,)))
"""Same arguments to every rank, all of which do the same; the first rank's result."""
shard = dispatched(DispatchRule("shard", _shards, joined, lambda mesh: mesh.leaders))
"""Carriers and lists are split over the data-parallel ranks, everything else goes to all; results are joined."""
first_rank = dispatched(DispatchRule("first_rank", _to_first, _of_first, lambda _: (0,)))
"""Only rank 0 is called."""
