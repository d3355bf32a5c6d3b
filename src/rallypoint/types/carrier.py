"""What all carriers share: rows of different lengths, stored end to end without padding.

Owns: how a carrier is checked, cut into rows, joined again and pickled. Must not know: what any field
means. Invariants: a carrier is never modified; every tensor field is flat and on the CPU.

A worked example: two rows of 3 and 2 tokens.

>>> import torch
>>> from rallypoint.types import Sequences
>>> batch = Sequences(
...     offsets=torch.tensor([0, 3, 5]),
...     tokens=torch.tensor([7, 8, 9, 4, 5]),
...     loss_mask=torch.tensor([False, True, True, False, True]),
...     prompt_index=torch.tensor([0, 0]),
...     sample_index=torch.tensor([0, 1]),
... )
>>> len(batch), batch.lengths.tolist()
(2, [3, 2])
>>> batch.rows([1]).tokens.tolist()
[4, 5]
>>> first, second = batch.split(2)
>>> Sequences.join([second, first]).tokens.tolist()
[4, 5, 7, 8, 9]

Shape legend, used everywhere: P prompts per step, G rollouts per prompt, B = P*G rows, T tokens (of a
row, or of a packed stream), V vocabulary, H heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

# Tensors that arrive from another process are views of read-only shared memory, on purpose.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


CarrierT = TypeVar("CarrierT", bound="Carrier")


def per_token(*, optional: bool = False, columns: bool = False, fill: bool = False) -> Any:
    """Declare a dataclass field of shape [T], or [T, columns], aligned with the tokens; None if it is left out.

    Where it is to be filled, a part that has none is joined to others as zeros.
    """
    metadata = {"axis": "T", "columns": columns, "fill": fill}
    return dataclasses.field(default=None, metadata=metadata) if optional else dataclasses.field(metadata=metadata)


def per_row(*, optional: bool = False, columns: bool = False) -> Any:
    """Declare a dataclass field of shape [B], or [B, columns], one entry a row; None where it is left out."""
    metadata = {"axis": "B", "columns": columns}
    return dataclasses.field(default=None, metadata=metadata) if optional else dataclasses.field(metadata=metadata)


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Return where each row begins, and the end of the last: [B] -> [B+1].

    >>> offsets_from_lengths(torch.tensor([3, 2])).tolist()
    [0, 3, 5]
    """
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return offsets


def token_index(offsets: Tensor, rows: Tensor) -> Tensor:
    """Return the positions of the tokens of some rows, row after row.

    >>> token_index(torch.tensor([0, 3, 5, 9]), torch.tensor([2, 0])).tolist()
    [5, 6, 7, 8, 0, 1, 2]
    """
    lengths = (offsets[1:] - offsets[:-1])[rows]
    starts = torch.repeat_interleave(offsets[:-1][rows] - offsets_from_lengths(lengths)[:-1], lengths)
    return starts + torch.arange(len(starts))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Carrier:
    """Rows of different lengths, stored end to end."""

    offsets: Tensor
    """[B+1] int64: row b is tokens offsets[b] to offsets[b+1]."""

    rows_together: ClassVar[int] = 1
    """Neighbours of a group that a loss compares: they are in one mini-batch, on one rank, in one pass."""

    def __post_init__(self) -> None:
        # One carrier is made for every prompt of a step: this is fast because it asks torch for little.
        offsets = cast("list[int]", self.offsets.tolist()) if self.offsets.dim() == 1 else []  # pyright: ignore[reportUnknownMemberType]
        if not offsets or offsets[0] or any(end < start for start, end in itertools.pairwise(offsets)):
            raise ValueError(f"{type(self).__name__}.offsets: expected 0 and then no decrease, found {self.offsets}")
        expected = {"T": offsets[-1], "B": len(offsets) - 1}
        for name, axis in self._field_axes():
            value = cast("Tensor | None", getattr(self, name))
            flat = value[:, 0] if value is not None and name in self._columns() and value.dim() == 2 else value
            if flat is not None and flat.shape != (expected[axis],):
                raise ValueError(
                    f"{type(self).__name__}.{name}: expected shape [{expected[axis]}] ({axis}), "
                    f"found {list(flat.shape)}"
                )

    @classmethod
    @functools.cache
    def _field_axes(cls) -> tuple[tuple[str, str], ...]:
        return tuple((f.name, f.metadata["axis"]) for f in dataclasses.fields(cls) if "axis" in f.metadata)

    @classmethod
    @functools.cache
    def _columns(cls) -> frozenset[str]:
        return frozenset(f.name for f in dataclasses.fields(cls) if f.metadata.get("columns"))

    @classmethod
    @functools.cache
    def _filled(cls) -> frozenset[str]:
        return frozenset(f.name for f in dataclasses.fields(cls) if f.metadata.get("fill"))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """[B] int64: tokens of each row."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def row_of_token(self) -> Tensor:
        """[T] int64: the row that each token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def rows(self, rows: Sequence[int] | Tensor) -> Self:
        """Return these rows, in this order, as a carrier of their own."""
        row_index = torch.as_tensor(rows, dtype=torch.int64)
        tokens = token_index(self.offsets, row_index)
        picked: dict[str, Any] = {"offsets": offsets_from_lengths(self.lengths[row_index])}
        for name, axis in self._field_axes():
            value = cast("Tensor | None", getattr(self, name))
            picked[name] = None if value is None else value[tokens if axis == "T" else row_index]
        return dataclasses.replace(self, **picked)

    def padded(self, length: int) -> Self:
        """Return the rows with zeros (False) after each of them, all of one length: [B * length] tokens.

        Training packs; this is for the other side of the parity table, see `TrainingEngine`.

        Raises:
            ValueError: a row is longer.
        """
        if len(self) and int(self.lengths.max()) > length:
            raise ValueError(f"a row of {int(self.lengths.max())} tokens cannot be padded to {length}")
        within = torch.arange(self.num_tokens) - self.offsets[:-1][self.row_of_token]
        place = self.row_of_token * length + within
        wider: dict[str, Any] = {"offsets": torch.arange(len(self) + 1) * length}
        for name, axis in self._field_axes():
            value = cast("Tensor | None", getattr(self, name))
            if value is not None and axis == "T":
                empty = value.new_zeros(len(self) * length, *value.shape[1:])
                wider[name] = empty.index_copy_(0, place, value)
        return dataclasses.replace(self, **wider)

    def split(self, num_parts: int) -> list[Self]:
        """Cut into consecutive parts whose row counts differ as little as they can; some may be empty."""
        together = self.rows_together
        borders = [together * (len(self) // together * part // num_parts) for part in range(num_parts + 1)]
        return [self.rows(range(start, stop)) for start, stop in itertools.pairwise(borders)]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Put parts one after another; the inverse of `split`."""
        joined: dict[str, Any] = {"offsets": offsets_from_lengths(torch.cat([part.lengths for part in parts]))}
        for name, _ in cls._field_axes():
            values = [cast("Tensor | None", getattr(part, name)) for part in parts]
            present = [value for value in values if value is not None]
            if present and name in cls._filled():
                parts_of, like = zip(parts, values, strict=True), present[0]
                sizes = like.shape[1:]
                present = [like.new_zeros(part.num_tokens, *sizes) if x is None else x for part, x in parts_of]
            joined[name] = torch.cat(present) if present else None
        return dataclasses.replace(parts[0], **joined)

    def widen(self, wider: type[CarrierT], **fields: Tensor | None) -> CarrierT:
        """Return a carrier of the next stage: the fields of this one and some more."""
        names = {f.name for f in dataclasses.fields(wider)}
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in names}
        merged: dict[str, Any] = {**own, **fields}
        return wider(**merged)

    def __reduce__(self) -> tuple[Any, ...]:
        # Tensors travel as numpy arrays: the object store then reads and writes them without a copy, and
        # thirty times faster than torch's own pickling. `contiguous` because a view would ship the whole
        # storage after it.
        state = {
            f.name: value.contiguous().numpy() if isinstance(value := getattr(self, f.name), Tensor) else value
            for f in dataclasses.fields(self)
        }
        return (_rebuild, (type(self), state))


def _rebuild(cls: type[Carrier], state: dict[str, Any]) -> Carrier:
    return cls(**{name: _tensor(value) for name, value in state.items()})


def _tensor(value: object) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value  # pyright: ignore[reportUnknownMemberType]
