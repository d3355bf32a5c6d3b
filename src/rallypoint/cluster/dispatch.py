"""How one call on a group becomes calls on its ranks, and their results one result.

The rule stands on the worker's method, as a decorator. It depends on the types of the arguments, never
on their values, and it modifies none of them. The decorated method stays what it was: calling it on a
worker object is a plain call.

>>> class Adder:
...     @shard
...     def doubled(self, numbers: list[int], factor: int) -> list[int]:
...         return [factor * number for number in numbers]
>>> rule = rule_of(Adder.doubled)
>>> parts = rule.split(2, ([1, 2, 3], 10), {})
>>> [part.args for part in parts]
[([1], 10), ([2, 3], 10)]
>>> rule.join([Adder().doubled(*part.args, **part.kwargs) for part in parts])
[10, 20, 30]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar, cast, runtime_checkable

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


@runtime_checkable
class Splittable(Protocol):
    """Something that can be dealt out to ranks."""

    def split(self, num_parts: int) -> Sequence[Self]:
        """Cut into that many parts, in order; parts may be empty."""
        ...


@runtime_checkable
class Joinable(Protocol):
    """Something whose parts, one from each rank, make a whole."""

    @classmethod
    def join(cls, parts: Sequence[Any]) -> Any:
        """Put the parts of the ranks together, in rank order."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The arguments of one rank."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A pair of functions: arguments to parts (the first N ranks get one each), results to a result."""

    name: str
    split: Callable[[int, tuple[Any, ...], Mapping[str, Any]], Sequence[Part]]
    join: Callable[[Sequence[Any]], Any]


def dispatched(rule: Rule) -> Callable[[MethodT], MethodT]:
    """Give a method a rule; `broadcast`, `collect`, `shard` and `first_rank` are such decorators."""

    def decorate(method: MethodT) -> MethodT:
        method.__dispatch__ = rule  # pyright: ignore[reportFunctionMemberAccess]
        return method

    return decorate


def rule_of(method: Callable[..., Any]) -> Rule:
    """Return the rule of a worker's method.

    Raises:
        TypeError: the method has none, so a group cannot know who is to be called.
    """
    rule = getattr(method, "__dispatch__", None)
    if not isinstance(rule, Rule):
        name = getattr(method, "__qualname__", repr(method))
        raise TypeError(f"{name} has no dispatch rule; decorate it with @broadcast, @collect, @shard or @first_rank")
    return rule


def _to_all(num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Part]:
    return [Part(args, kwargs)] * num_ranks


def _to_first(num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Part]:
    del num_ranks
    return [Part(args, kwargs)]


def _shards(num_ranks: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Part]:
    """Split what can be split (`Splittable`, lists); the same of everything else for every rank."""
    if not any(isinstance(value, list | Splittable) for value in (*args, *kwargs.values())):
        raise TypeError("a sharded call needs at least one argument that can be split: a carrier or a list")
    positional = [_cut(value, num_ranks) for value in args]
    named = {name: _cut(value, num_ranks) for name, value in kwargs.items()}
    return [
        Part(tuple(parts[rank] for parts in positional), {name: parts[rank] for name, parts in named.items()})
        for rank in range(num_ranks)
    ]


def _cut(value: Any, num_parts: int) -> Sequence[Any]:
    if isinstance(value, list):
        items = cast("list[Any]", value)
        borders = [len(items) * part // num_parts for part in range(num_parts + 1)]
        return [items[borders[part] : borders[part + 1]] for part in range(num_parts)]
    return value.split(num_parts) if isinstance(value, Splittable) else [value] * num_parts


def _joined(results: Sequence[Any]) -> Any:
    first = results[0]
    if first is None:
        return None
    if isinstance(first, list):
        return [item for result in results for item in result]
    if isinstance(first, Joinable):
        return type(first).join(results)
    raise TypeError(f"the results of the ranks cannot be joined: {type(first).__name__} has no `join`")


def _of_first(results: Sequence[Any]) -> Any:
    return results[0]


broadcast = dispatched(Rule("broadcast", _to_all, _of_first))
"""Same arguments to every rank, all of which do the same; the first rank's result."""

collect = dispatched(Rule("collect", _to_all, _joined))
"""Same arguments to every rank; the results of all of them, joined in rank order."""

shard = dispatched(Rule("shard", _shards, _joined))
"""Carriers and lists are split over the ranks, everything else goes to all; results are joined in order."""

first_rank = dispatched(Rule("first_rank", _to_first, _of_first))
"""Only rank 0 is called."""
