"""One result made of several futures, and several futures that one result is dealt out to.

Must not know: what the results are. A cancelled whole cancels its parts, and the other way round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

PartT = TypeVar("PartT")
WholeT = TypeVar("WholeT")


def joined(parts: Sequence[Future[PartT]], combine: Callable[[Sequence[PartT]], WholeT]) -> Future[WholeT]:
    """Return what is combined of the results of all parts, once they are there; an error of one is that of the whole.

    >>> parts = [Future(), Future()]
    >>> whole = joined(parts, sum)
    >>> parts[1].set_result(3), whole.done(), parts[0].set_result(4), whole.result()
    (None, False, None, 7)
    """
    whole: Future[WholeT] = Future()
    lock, left = threading.Lock(), len(parts)

    def end(_: Future[PartT]) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = not left
        if is_last and any(part.cancelled() for part in parts):
            whole.cancel()
        elif is_last and whole.set_running_or_notify_cancel():
            error = next((error for part in parts if (error := part.exception())), None)
            if error is None:
                whole.set_result(combine([part.result() for part in parts]))
            else:
                whole.set_exception(error)

    for part in parts:
        part.add_done_callback(end)
    whole.add_done_callback(lambda done: done.cancelled() and [part.cancel() for part in parts])
    return whole


def dealt(whole: Future[Sequence[PartT]], num_parts: int) -> list[Future[PartT]]:
    """Return a future for each of the results that a list will have.

    >>> whole = Future()
    >>> first, second = dealt(whole, 2)
    >>> whole.set_result("ab"), first.result(), second.result()
    (None, 'a', 'b')
    """

    def take(place: int) -> Callable[[Sequence[Sequence[PartT]]], PartT]:
        return lambda results: results[0][place]

    return [joined([whole], take(place)) for place in range(num_parts)]
