"""The times at which the groups of each step were admitted, sampled and scored, for `rally simulate`.

Owns: the file `timeline.jsonl`, a line a step. Must not know: what the times mean for other settings.

    {"step": 1, "asked_s": 0.0, "taken_s": 2.5, "loaded_s": 0.0, "busy_s": [2.1],
     "groups": [[0, 0, 0.0, 2.0, 2.5, 8, 80, 12], ...]}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from rallypoint.disk import naming
from rallypoint.errors import RunFolderError

TIMELINE = "timeline.jsonl"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupTimes:
    """Times of a group from its admission to its scores, in seconds since the latest start of the run."""

    index: int
    """Index of its prompt in the run."""
    rank: int
    """Rank of the rollout role that sampled it."""
    admitted_s: float
    sampled_s: float
    scored_s: float
    num_rows: int
    """Its rollouts."""
    num_tokens: int
    """Tokens sampled, of all of them."""
    num_steps: int
    """Tokens of the longest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of a step's batch, in seconds since the latest start of the run."""

    step: int
    asked_s: float
    """When the trainer asked for the batch."""
    taken_s: float
    """When the trainer got the batch."""
    loaded_s: float
    """When the weights of the previous step had been loaded."""
    busy_s: tuple[float, ...]
    """Seconds that each rank has sampled since the previous batch was taken."""
    groups: tuple[GroupTimes, ...]

    def to_json(self) -> str:
        """Return the line; groups are lists of their fields, to a tenth of a millisecond."""
        values = dataclasses.asdict(self)
        values["groups"] = [[round(value, 4) for value in group.values()] for group in values["groups"]]
        return json.dumps({name: round(one, 4) if isinstance(one, float) else one for name, one in values.items()})

    @classmethod
    def from_json(cls, line: str) -> StepTimes:
        """Read a line back.

        Raises:
            ValueError: it is no such line.
        """
        try:
            values = json.loads(line)
            names = [field.name for field in dataclasses.fields(GroupTimes)]
            groups = tuple(GroupTimes(**dict(zip(names, group, strict=True))) for group in values.pop("groups"))
            return cls(groups=groups, busy_s=tuple(values.pop("busy_s")), **values)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(str(error)) from error


@dataclasses.dataclass(slots=True)
class Timeline:
    """The file of one run; a resumed run continues it."""

    path: Path
    _is_cut: bool = False

    def write(self, times: StepTimes) -> None:
        """Append a step; lines of it or of later ones, which an interrupted run left, are dropped.

        Raises:
            DiskError: the disk is full or not writable.
        """
        with naming(self.path):
            if not self._is_cut and self.path.exists():
                kept = [one.to_json() + "\n" for one in self.read() if one.step < times.step]
                self.path.write_text("".join(kept), encoding="utf-8")
            self._is_cut = True
            with self.path.open("a", encoding="utf-8") as file:
                file.write(times.to_json() + "\n")

    def read(self) -> list[StepTimes]:
        """Return its steps.

        Raises:
            RunFolderError: a line that is not the last is damaged.
        """
        return list(self._lines())

    def _lines(self) -> Iterator[StepTimes]:
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):  # torn by a kill
                return
            try:
                yield StepTimes.from_json(line)
            except ValueError as error:
                raise RunFolderError(f"{self.path}, line {number} is damaged ({error}): remove the line") from error
