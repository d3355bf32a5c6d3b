"""Rows of token ids in memory: conversations, or pairs of them, end to end.

Owns: where a row begins and ends. Must not know: tokenizers, tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Written = tuple["NDArray[np.int32]", "NDArray[np.bool_]"]
"""Token ids of a row, and which of them are trained: each [T]."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedExample:
    """A conversation as a row of token ids, or a pair as the chosen and the rejected one."""

    name: str
    rows: tuple[Written, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows of token ids end to end; an example is one of them, or the chosen and the rejected one."""

    tokens: NDArray[np.int32]
    """[T]."""
    is_trained: NDArray[np.bool_]
    """[T]."""
    offsets: NDArray[np.int64]
    """[B + 1]: row b is tokens offsets[b] to offsets[b + 1]."""
    names: tuple[str, ...]
    """Names of the examples."""
    rows_per_example: int
    dropped: tuple[str, ...]
    """Names of the examples that were too long, with on_too_long="drop", or had no trained token left; with "error" it
    is empty."""
    truncated: tuple[str, ...]
    """Names of the examples whose end was cut off, with on_too_long="truncate"."""
    is_part: bool = False
    """Whether there are more examples than were read."""
    bad: tuple[str, ...] = ()
    """Examples that cannot be used and were left out, each with the reason; see `Conversations.may_drop`."""
    shortened: tuple[str, ...] = ()
    """Names of the examples of which the template leaves out a part of a trained turn, one for each such turn."""
    misaligned: tuple[str, ...] = ()
    """Names of the examples in which the tokens before a trained turn differ from the prompt of a model."""

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, example: int) -> EncodedExample:
        first, num = example * self.rows_per_example, self.rows_per_example
        parts = [slice(*self.offsets[row : row + 2].tolist()) for row in range(first, first + num)]
        return EncodedExample(self.names[example], tuple((self.tokens[part], self.is_trained[part]) for part in parts))

    def digests(self) -> Iterator[bytes]:
        """Yield a digest of each example, the same for examples whose tokens and masks are equal."""
        bounds = self.offsets[:: self.rows_per_example].tolist()
        import numpy as np

        lengths = np.diff(self.offsets).reshape(-1, self.rows_per_example)
        for example, (start, stop) in enumerate(itertools.pairwise(bounds)):
            parts = lengths[example], self.tokens[start:stop], self.is_trained[start:stop]
            yield hashlib.blake2b(b"".join(part.tobytes() for part in parts), digest_size=16).digest()

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row."""
        import numpy as np

        return int(np.diff(self.offsets).max())

    def counts(self) -> dict[str, float]:
        """Return what there is to know of them, for the metrics."""
        return {
            "data/num_examples": len(self),
            "data/num_tokens": len(self.tokens),
            "data/num_trained_tokens": int(self.is_trained.sum()),
        }
