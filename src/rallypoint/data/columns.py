"""The columns of a file: what they are called there, which are missing, and which are nearly right.

Owns: their names. Must not know: what the cells mean.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

from rallypoint.data.files import Problems, Row, suggestion
from rallypoint.data.locate import DataSet

COLUMNS = ("prompt", "tools", "reward_model", "ground_truth", "data_source", "ability", "extra_info")
_ELSEWHERE = {
    "prompt": ("question", "problem", "instruction", "query", "input", "messages", "conversations"),
    "reward_model": ("answer", "solution", "final_answer", "expected_answer", "target", "output", "label"),
}
"""Names of these columns in other data sets, the likeliest first; the second is our `ground_truth`."""


class NamedColumns:
    """The columns of one file, some of which may have other names there."""

    def __init__(self, dataset: DataSet, known: Collection[str]) -> None:
        self._theirs = {own: name for own, name in dataset.columns.items() if own in known}
        self._key = dataset.columns_key

    def theirs(self, place: str) -> str:
        """Return what a column, or a part of one such as `prompt[0].role`, is called in the file."""
        own = place.partition("[")[0].partition(".")[0]
        return self._theirs.get(own, own) + place.removeprefix(own)

    def misnamed(self, own: str, names: Sequence[str], where: str) -> str:
        """Return the problem that a column which was named is not among some."""
        theirs = self._theirs[own]
        hint = suggestion(theirs, list(names)) or f"; found {quoted(names)}"
        return f"{where}: column '{theirs}', which {self._key}.{own} names, is missing{hint}"


class Columns(NamedColumns):
    """The columns of a file of prompts."""

    def __init__(self, dataset: DataSet, label: str, unit: str, require_ground_truth: bool, problems: Problems) -> None:
        super().__init__(dataset, COLUMNS)
        self._label, self._unit, self._problems = label, unit, problems
        self.require_ground_truth = require_ground_truth
        self._checked: set[tuple[str, ...]] = set()
        self._bad: dict[tuple[str, ...], tuple[list[str], int]] = {}
        self._lookalikes: set[str] = set()
        # A ground truth that was named is read, whatever else there is.
        hidden = {"reward_model"} if "ground_truth" in self._theirs else set[str]()
        self._same = [name for name in COLUMNS if name not in self._theirs and name not in hidden]

    def wanted(self, names: Sequence[str]) -> list[str]:
        """Return which columns of a table are read."""
        wanted = {*self._theirs.values(), *self._same}
        return [name for name in names if name in wanted]

    def ours(self, row: Row) -> Row:
        """Return a row under our names."""
        if not self._theirs:
            return row
        same = {name: row[name] for name in self._same if name in row}
        return same | {name: row[theirs] for name, theirs in self._theirs.items() if theirs in row}

    def are_there(self, names: Iterable[str]) -> bool:
        """Return whether a table has all that are required; report those that are not, and names nearly right."""
        names = list(names)
        missing = [self._missing(column, names, self._label) for column in self._required(names)]
        for problem in missing:
            self._problems.add(problem)
        self._find_lookalikes(names, self._label)
        return not missing

    def are_in(self, names: tuple[str, ...], where: str) -> bool:
        """Return the same of one row; rows that lack the same columns are one problem, see `report`."""
        if names in self._checked:
            return True
        if missing := self._required(names):
            usual = [self._missing(column, names, where) for column in missing], 0
            first, count = self._bad.get(names, usual)
            self._bad[names] = first, count + 1
        else:
            self._checked.add(names)
            self._find_lookalikes(names, where)
        return not missing

    def report(self) -> None:
        """Report the rows that lack a column; call it when the file has been read."""
        for missing, count in self._bad.values():
            for problem in missing:
                more = f" (and {count - 1:,} {self._unit}s more)" if count > 1 else ""
                self._problems.add(problem + more)

    def _required(self, names: Sequence[str]) -> list[str]:
        required = [own for own, theirs in self._theirs.items() if theirs not in names]
        if "prompt" in self._same and "prompt" not in names:
            required.append("prompt")
        has_truth = {"reward_model", "ground_truth"} & {*self._theirs, *names}
        if self.require_ground_truth and not has_truth:
            required.append("reward_model")
        return required

    def _missing(self, column: str, names: Sequence[str], where: str) -> str:
        if column in self._theirs:
            return self.misnamed(column, names, where)
        hint = suggestion(column, [name for name in names if name not in COLUMNS])
        if not hint and (elsewhere := next((name for name in _ELSEWHERE[column] if name in names), None)):
            own = "ground_truth" if column == "reward_model" else column
            hint = f"; {elsewhere!r} may be it: set {self._key}.{own}={elsewhere}"
        return f"{where}: column '{column}' is missing{hint or f'; found {quoted(names)}'}"

    def _find_lookalikes(self, names: Sequence[str], where: str) -> None:
        strangers = [name for name in names if name not in {*COLUMNS, *self._theirs.values()}]
        for column in {*self._same} - {*names, *self._required(names)}:
            for name in difflib.get_close_matches(column, strangers, n=1, cutoff=0.85):
                if name not in self._lookalikes:
                    self._lookalikes.add(name)
                    self._problems.add(f"{where}: unknown column '{name}'; did you mean '{column}'?")


def quoted(names: Sequence[str]) -> str:
    """Return names in quotes, for an error."""
    return ", ".join(map(repr, names)) or "no column"
