"""What the cores of a process do in a second, while other processes of a run keep theirs busy.

Must not know: models, plans.

Run as `python -m rallypoint.cpu.speed RANK ASKED`, once for every rank, where ASKED is an `Asked` in JSON. They meet
through a file that is not there yet, and rank 0 prints one object of JSON. Each number is the best of some tries, on
average over the ranks, so that it is what a machine gives that does nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn import functional

_TRIES, _LEAST_S = 7, 0.015
_LARGE = 2**23
"""Numbers of a tensor that lies in no cache."""
_SUMMED = 2**20
"""Numbers of a tensor that is summed over the ranks, in float32 as gradients are."""
_MANY = 25
"""Small operations that are timed together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What is measured; all ranks are asked for the same."""

    num_ranks: int
    num_threads: int
    dtype: str
    place: str
    """Path of the file."""
    widths: Sequence[int]
    """Widths of products, [rows, width] x [width, width]."""
    rows: Sequence[int]
    """Rows of the same, each for every width."""
    numbers: Sequence[int]
    """Sizes of tensors that elementwise operations work on."""


class Stopwatch:
    """Times what all ranks do at once; of one thread its own seconds, which other programs hardly change."""

    def __init__(self, num_ranks: int, num_threads: int) -> None:
        self._num_ranks, self._clock = num_ranks, time.thread_time if num_threads == 1 else time.perf_counter

    def rate(self, amount: float, work: Callable[[], object], *, waits: bool = False) -> float:
        """Return how much of something is done a second, where `work` does an amount of it, or waits for others."""
        clock = time.perf_counter if waits else self._clock
        if self._num_ranks > 1:
            dist.barrier()
        work()
        found = list[float]()
        while len(found) < _TRIES or (sum(found) < _LEAST_S and not waits):  # ranks that wait try as often as others
            start = clock()
            work()
            found.append(clock() - start)
        return amount / min(found)


def products(watch: Stopwatch, asked: Asked, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Return operations a second of products, [rows, width] x [width, width]: forward, and in whole updates."""
    forward, update = list[float](), list[float]()
    for width, rows in itertools.product(asked.widths, asked.rows):
        weight, states = torch.randn(width, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)
        gradient, operations = torch.zeros_like(weight), 2.0 * rows * width**2

        def both(weight=weight, states=states, gradient=gradient) -> None:
            torch.mm(states, weight)
            gradient.add_(states.t() @ states)

        forward.append(watch.rate(operations, lambda states=states, weight=weight: functional.linear(states, weight)))
        update.append(3 / (1 / forward[-1] + 2 / watch.rate(2 * operations, both)))
    return forward, update


def traffic(watch: Stopwatch, states: torch.Tensor) -> float:
    """Return the bytes a second that elementwise operations read and write, with as many sigmoids as a layer has."""
    torch.empty(5 * len(states))  # once freed, glibc keeps memory as in a process that has trained
    return watch.rate(11 * states.nbytes, lambda: (states * states + states) * functional.silu(states))


def small_operations() -> None:
    """Do some of what a layer does between its products, on very few numbers."""
    states, index = torch.zeros(16, 8), torch.arange(16)
    for _ in range(_MANY):
        rotated = torch.cat([states[:, 4:], states[:, :4]], 1)
        states = (states * 0.5 + rotated.view(16, 2, 4).transpose(0, 1).reshape(16, 8))[index]


_OPERATIONS = 9
"""Small operations of one turn of `small_operations`."""


def main(rank: int, asked: Asked) -> None:
    """Measure, and print."""
    num_ranks, dtype = asked.num_ranks, getattr(torch, asked.dtype)
    torch.set_num_threads(asked.num_threads)
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{asked.place}", rank=rank, world_size=num_ranks)
    watch = Stopwatch(num_ranks, asked.num_threads)
    forward, update = products(watch, asked, dtype)
    large, summed = torch.randn(_LARGE, dtype=dtype), torch.randn(_SUMMED)
    found = [
        1 / watch.rate(_MANY * _OPERATIONS, small_operations),
        watch.rate(3 * large.nbytes, lambda: large.add_(large)),
        watch.rate(summed.nbytes, lambda: dist.all_reduce(summed) if num_ranks > 1 else summed.add_(0), waits=True),
        *(traffic(watch, torch.randn(numbers, dtype=dtype)) for numbers in asked.numbers),
        *forward,
        *update,
    ]
    mean = torch.tensor(found, dtype=torch.float64)
    if num_ranks > 1:
        dist.all_reduce(mean)
    launch_s, bandwidth, gathered, *rates = (mean / num_ranks).tolist()
    if not rank:
        lists = {"traffic": len(asked.numbers), "forward": len(forward), "update": len(update)}
        taken = iter(rates)
        named = {name: list(itertools.islice(taken, length)) for name, length in lists.items()}
        print(json.dumps({"launch_s": launch_s, "bandwidth": bandwidth, "gathered": gathered, **named}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Asked(**json.loads(sys.argv[2])))
