"""Which prompts may be sampled now, and which groups are trained on next.

Owns: the order of prompts, the bound on staleness, the state to be saved. Must not know: how a group is sampled, or
from where. Pure logic: nothing here waits.

Consumes: `complete`, `loaded`. Produces: prompts to admit, and groups in the order of their admission. Waits for: a
slot; there are (S+1) * P of them for max_staleness S and P prompts a step. A group has a slot from its admission until
weights have been loaded that were trained on it. Unblocked by: `loaded`.

So the groups of step k are admitted when at least k - S steps have been loaded, and none of their tokens is older: the
bound holds whatever the latencies. It is checked all the same when groups are taken, by the versions of their tokens.

>>> groups = Groups(num_prompts=2, max_staleness=1)
>>> groups.loaded(0)
>>> list(groups.admit()), list(groups.admit())
([0, 1, 2, 3], [])
>>> for index in (3, 1, 0):
...     groups.complete(index, f"group {index}", oldest_version=0)
>>> groups.take(), groups.take()
(['group 0', 'group 1'], None)
>>> list(groups.admit())
[]
>>> groups.loaded(1)
>>> list(groups.admit())
[4, 5]
"""

from __future__ import annotations

from typing import Generic, TypeVar

from rallypoint.errors import StalenessError

GroupT = TypeVar("GroupT")


class Groups(Generic[GroupT]):
    """Groups from their admission to the step that is trained on them."""

    def __init__(self, *, num_prompts: int, max_staleness: int = 0, num_taken: int = 0) -> None:
        """Begin with no group under way.

        Args:
            num_prompts: P, prompts of a step.
            max_staleness: S, how many loads the oldest token of a group may be behind the newest one.
            num_taken: groups that a run that goes on was trained on before; the one number that is saved.
        """
        self._num_prompts, self._max_staleness = num_prompts, max_staleness
        self.num_taken = self._num_admitted = self._num_released = num_taken
        self._complete: dict[int, tuple[GroupT, int | None]] = {}
        self._versions: list[int] = []
        """The newest S+1 versions that were loaded; a token may be as old as the first of them."""

    @property
    def num_under_way(self) -> int:
        """Groups that were admitted and not taken."""
        return self._num_admitted - self.num_taken

    def loaded(self, version: int) -> None:
        """Take note that the ranks have new weights, which were trained on all groups that were taken."""
        self._versions = [*self._versions, version][-1 - self._max_staleness :]
        self._num_released = self.num_taken

    def admit(self) -> range:
        """Return the indices of the prompts that get the free slots; index i is the i-th prompt of the run."""
        first = self._num_admitted
        self._num_admitted = self._num_released + (self._max_staleness + 1) * self._num_prompts
        return range(first, self._num_admitted)

    def complete(self, index: int, group: GroupT, oldest_version: int | None) -> None:
        """Take a group that was sampled; None for one without a rollout."""
        assert self.num_taken <= index < self._num_admitted, "a group that was admitted and not taken"
        self._complete[index] = (group, oldest_version)

    def take(self) -> list[GroupT] | None:
        """Return the groups of the next step in order of admission; None if some are under way.

        Raises:
            StalenessError: a token is older than allowed.
        """
        indices = range(self.num_taken, self.num_taken + self._num_prompts)
        if any(index not in self._complete for index in indices):
            return None
        for index in indices:
            self._check(index, self._complete[index][1])
        self.num_taken = indices.stop
        return [self._complete.pop(index)[0] for index in indices]

    def _check(self, index: int, oldest: int | None) -> None:
        if oldest is not None and oldest < self._versions[0]:
            raise StalenessError(
                f"prompt {index} was sampled from version {oldest}; the newest is {self._versions[-1]}, and with "
                f"max_staleness {self._max_staleness} the oldest allowed is {self._versions[0]}"
            )
