"""How much memory a cache takes of a device that others are on, too.

Owns: a cache between two sizes. Must not know: what lies in it.
"""

from __future__ import annotations

import dataclasses

import torch

from rallypoint.errors import CacheError
from rallypoint.plan.role_memory import CACHE_MARGIN

_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class CacheRoom:
    """Sizes that a cache may have; which it gets is decided when it is reserved, and anew after every sleep."""

    most_tokens: int
    """All that are of use."""
    least_tokens: int
    """No request can have more."""
    spared_bytes: int = 0
    """Left free for what else there will be beside the cache."""
    share: float = 1.0
    """Of the device's memory, this process's."""

    @classmethod
    def of(cls, size: int | CacheRoom) -> CacheRoom:
        """Return a size as it is, and a number of tokens as one without choice."""
        return size if isinstance(size, CacheRoom) else cls(size, size)

    def num_tokens(self, token_bytes: int, device: torch.device | None) -> int:
        """Return how many tokens to reserve memory for now.

        Args:
            token_bytes: of the keys and values of one.
            device: where they will lie, the current one if None; not a CPU if there is a choice.

        Raises:
            CacheError: one row has no room, whatever is spared.
        """
        if self.least_tokens >= self.most_tokens:
            return self.most_tokens
        if self._free(device) - self.spared_bytes < self.most_tokens * token_bytes:
            torch.accelerator.empty_cache()  # what torch has freed itself
        free = self._free(device)
        if free < self.least_tokens * token_bytes:
            raise CacheError(
                f"the keys and values of one row at its longest, {self.least_tokens:,} tokens, take "
                f"{self.least_tokens * token_bytes / _MIB:,.0f} MiB, but the device has {max(0, free) / _MIB:,.0f} "
                "MiB for them when rollouts begin; have other roles sleep (engine.sleep=true), divide the model "
                "(actor.mesh.dp_shard, rollout.placement), or lower rollout.max_response_tokens or "
                "data.max_prompt_tokens"
            )
        return max(self.least_tokens, min(self.most_tokens, (free - self.spared_bytes) // token_bytes))

    def _free(self, device: torch.device | None) -> int:
        """Return the bytes of the device that this process may still take, less a margin."""
        free, total = torch.accelerator.get_memory_info(device)
        mine = self.share * total - torch.accelerator.memory_reserved(device)
        return int(min(free, mine) - CACHE_MARGIN * self.share * total)
