"""Results that travel by reference: from the workers that made them to the workers that need them.

The driver holds a `ResultReference`: one runtime handle for each part of a result, and the function that joins them.
Ranks are sent a `Fetch`: which of the parts they need. The parts themselves never pass through the driver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn


@dataclasses.dataclass(frozen=True, slots=True)
class ResultReference:
    """Stands for the result of a call in the arguments of another one; the result need not exist yet."""

    parts: tuple[Any, ...]
    """The runtime's own handles of the ranks' results, in rank order."""
    join: Callable[[Sequence[Any]], Any]
    makers: tuple[Any, ...] = ()
    """The processes that compute it."""

    def whole(self) -> Fetch:
        """Return what to send to a rank that needs all of it."""
        return Fetch(self.parts, self.join)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a reference must be an argument of its own, not a part of one: it cannot stand in a list")


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """Sent to a rank in place of a value: the parts to get, and what to do with them."""

    parts: tuple[Any, ...]
    """The runtime's handles; where values stand in a list of their own, their places in it."""
    join: Callable[[Sequence[Any]], Any]
    cut: Callable[[Any, int], Sequence[Any]] | None = None
    """Cuts the whole into `num_parts`, of which the rank takes the one at `index`; None: it takes the whole."""
    index: int = 0
    num_parts: int = 1

    def value(self, parts: Sequence[Any]) -> Any:
        """Return the argument for the method, from the values of the parts."""
        whole = self.join(parts)
        return whole if self.cut is None else self.cut(whole, self.num_parts)[self.index]


def whole(value: Any) -> Any:
    """Return what to send to a rank for an argument that no rule has cut."""
    return value.whole() if isinstance(value, ResultReference) else value


Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def detach(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs, list[Any]]:
    """Take the handles out of the arguments, so that a runtime can wait for them where it waits best.

    >>> args, kwargs, handles = detach((Fetch(("a", "b"), list), 3), {"x": Fetch(("c",), list)})
    >>> handles, args[0].parts, kwargs["x"].parts
    (['a', 'b', 'c'], (0, 1), (2,))
    >>> attach(args, kwargs, ["A", "B", "C"])
    ((['A', 'B'], 3), {'x': ['C']})
    """
    handles: list[Any] = []

    def out(value: Any) -> Any:
        if not isinstance(value, Fetch):
            return value
        first = len(handles)
        handles.extend(value.parts)
        return dataclasses.replace(value, parts=tuple(range(first, len(handles))))

    if not any(isinstance(value, Fetch) for value in (*args, *kwargs.values())):
        return args, kwargs, handles
    return tuple(map(out, args)), {name: out(value) for name, value in kwargs.items()}, handles


def attach(args: Args, kwargs: Kwargs, values: Sequence[Any]) -> tuple[Args, Kwargs]:
    """Put values where `detach` took their handles from."""
    if not values:
        return args, kwargs

    def into(value: Any) -> Any:
        return value.value([values[place] for place in value.parts]) if isinstance(value, Fetch) else value

    return tuple(map(into, args)), {name: into(value) for name, value in kwargs.items()}
