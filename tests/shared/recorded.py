"""What stands in for an accelerator on a CPU: a mode that refuses to look at numbers, and a graph that replays them."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LOOKS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.item.default,
}
"""Operations after which the host waits for the device, whatever they are given."""


class NoLooks(TorchDispatchMode):
    """Refuses what has the host wait for a device, and counts what it lets through."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.num += 1
        assert func not in LOOKS, f"{func} waits for the device"
        indices = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else []
        assert all(index is None or index.dtype == torch.int64 for index in indices), "a mask is looked at"
        return found


class Tape(NoLooks):
    """A graph of operations: the same ones, on the same memory, as often as it is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.num_replays = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        """Compute all again: what was made anew is written to where it was made then."""
        self.num_replays += 1
        with torch.no_grad():
            for func, args, kwargs, then in self.calls:
                for old, new in zip(tree_leaves(then), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Tapes:
    """Captures steps as tapes, see `accelerator.graphs.Capture`."""

    def __init__(self, spoil: Callable[[Tape], None] | None = None) -> None:
        self.made: list[Tape] = []
        self._spoil = spoil

    def __call__(self, step):
        tape = Tape()
        self.made.append(tape)
        with tape:
            step()
        if self._spoil is not None:
            self._spoil(tape)
        return tape.replay

    @property
    def num_replays(self) -> int:
        return sum(tape.num_replays for tape in self.made)
