"""The rollouts of every step, a parquet file for each, written beside the loop.

Owns: the columns, and how much room the files take. Must not know: how rollouts are sampled, or who looks at them.

    rollouts/step_000040.parquet          a row for each rollout of step 40: its batch in order, then what was replaced
    rollouts/validation_000040.parquet    those of the validation after it

Consumes: the rollouts of a step. Produces: its file, whole or not at all. Waits for: steps. Unblocked by: `put`,
`close`. A file that cannot be written is left out and named, and the run goes on: no weight depends on it.

Files take `max_gib` at most. Beyond that the older steps are thinned out: of the steps around the one that is n steps
old, about every n/8-th stays, if eight of the newest have room.

>>> steps = list(range(1, 17))
>>> while len(steps) > 8:
...     steps.remove(least_wanted(steps, newest=16))
>>> steps
[4, 8, 10, 12, 13, 14, 15, 16]
"""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from rallypoint.checkpoint import sync
from rallypoint.data import Example
from rallypoint.disk import explain
from rallypoint.environments.attempts import Attempt, answer_in
from rallypoint.environments.scoring import Scored, ScoredGroup
from rallypoint.errors import RunFolderError
from rallypoint.journal import Journal
from rallypoint.types import ActorBatch, RolloutBatch, Sequences

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

Kind: TypeAlias = Literal["step", "validation"]

_NAME = re.compile(r"(step|validation)_(\d+)\.parquet")
_GIB = 2**30
_RESERVE = _GIB
"""Bytes of the disk that rollouts leave free: checkpoints and metrics need them more."""
_MAX_WAITING = _GIB
"""Bytes of rollouts that may wait for a slow disk."""
_ROWS_PER_GROUP = 64
_PATIENCE_S = 60.0
"""Seconds that a checkpoint, or the end of a run, waits for a slow disk."""


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout in words, for people."""

    name: str
    prompt: str
    response: str
    ground_truth: str
    score: float
    truncated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepRollouts:
    """The rollouts of a step or of a validation, and what became of them."""

    rows: RolloutBatch
    """All that were sampled."""
    scored: Scored
    """Those that have a score."""
    examples: Sequence[Example]
    """Example of each of `rows`."""
    texts: Sequence[str]
    """Response of each, without special tokens."""
    learned: Sequences | None = None
    """What the actor learned from, in any order; None before it has, and of a validation."""
    replaced: Set[int] = frozenset()
    """Indices of the prompts whose groups were replaced by others: nothing was learned from them."""

    @classmethod
    def of(
        cls, rows: RolloutBatch, scored: Scored, groups: Sequence[ScoredGroup], replaced: Set[int] = frozenset()
    ) -> Self:
        """Return the rollouts of these groups, which together are these rows."""
        examples = [example for group in groups for example in group.examples]
        return cls(rows, scored, examples, [text for group in groups for text in group.texts], replaced=replaced)

    def records(self, limit: int) -> tuple[RolloutRecord, ...]:
        """Return the first `limit` rollouts that have a score."""
        scores = self.scored.batch.scores[:limit].tolist()
        return tuple(
            RolloutRecord(
                name=self.examples[row].name,
                prompt=self.examples[row].prompt[-1].content,
                response=self.texts[row],
                ground_truth=str(self.examples[row].ground_truth),
                score=score,
                truncated=bool(self.rows.truncated[row]),
            )
            for row, score in zip(self.scored.kept_rows, scores, strict=False)
        )

    def attempts(self) -> list[Attempt]:
        """Return those that have a score, for pass@k and the like."""
        scored, scores = self.scored, self.scored.batch.scores.tolist()
        return [
            Attempt(
                source=self.examples[row].data_source,
                prompt=int(self.rows.prompt_index[row]),
                score=scores[place],
                acc=scored.extras[place].get("acc"),
                answer=scored.answers[place] or answer_in(self.texts[row]),
            )
            for place, row in enumerate(scored.kept_rows)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the fields that grow with tokens, about."""
        return self.rows.num_tokens * 48 + 2 * sum(map(len, self.texts))

    def table(self, step: int) -> pa.Table:
        """Return a row for each rollout, with the columns of docs/tracking.md."""
        import pyarrow as pa

        rows, batch, kept = self.rows, self.scored.batch, self.scored.kept_rows
        place = {row: place for place, row in enumerate(kept)}
        scores, names, answers = batch.scores.tolist(), batch.part_names, self.scored.answers
        parts = [()] * len(kept) if batch.reward_parts is None else _nulls(batch.reward_parts.tolist())
        why = {failure.row: f"{failure.kind}: {failure.reason}" for failure in self.scored.failures}
        numbers, text, floats = pa.map_(pa.string(), pa.float64()), pa.string(), pa.float32()

        def each(of: Callable[[int], Any], kind: pa.DataType) -> pa.Array:
            return pa.array([of(row) for row in range(len(rows))], kind)

        def of_kept(of: Callable[[int], Any], kind: pa.DataType) -> pa.Array:
            return each(lambda row: of(place[row]) if row in place else None, kind)

        columns = {
            "step": each(lambda _: step, pa.int32()),
            "prompt_index": pa.array(rows.prompt_index.numpy()),
            "sample_index": pa.array(rows.sample_index.numpy()),
            "name": each(lambda row: _writable(self.examples[row].name), text),
            "data_source": each(lambda row: _writable(self.examples[row].data_source), text),
            "prompt": each(lambda row: _writable(in_words(self.examples[row])), text),
            "response": each(lambda row: _writable(self.texts[row]), text),
            "ground_truth": each(lambda row: _writable(str(self.examples[row].ground_truth)), text),
            "answer": of_kept(lambda at: None if (found := answers[at]) is None else _writable(found), text),
            "score": of_kept(scores.__getitem__, pa.float64()),
            "reward_parts": of_kept(lambda at: list(zip(names, parts[at], strict=True)), numbers),
            "reward_extras": of_kept(lambda at: list(self.scored.extras[at].items()), numbers),
            "replaced": each(lambda row: int(rows.prompt_index[row]) in self.replaced, pa.bool_()),
            "failure": each(lambda row: _writable(why[row]) if row in why else None, text),
            "finish_reason": each(lambda row: "length" if rows.truncated[row] else "stop", text),
            "version": pa.array(rows.versions.numpy()),
            "prompt_ids": _lists(rows.tokens, rows, pa.int32(), of_prompt=True),
            "response_ids": _lists(rows.tokens, rows, pa.int32()),
            "loss_mask": _lists(rows.loss_mask, rows, pa.bool_()),
            "sequence_starts": _lists(rows.sequence_starts, rows, pa.bool_()),
            "rollout_logprobs": _lists(rows.rollout_logprobs, rows, floats),
            "sampled_logprobs": _lists(rows.sampled_logprobs, rows, floats),
            "token_versions": _lists(rows.token_versions, rows, pa.int64()),
        }
        where = pa.array([place.get(row) for row in range(len(rows))], pa.int64())
        columns["token_rewards"] = _lists(batch.token_rewards, batch, floats).take(where)
        learned = self.learned if isinstance(self.learned, ActorBatch) else None
        at = {pair: place for place, pair in enumerate(_pairs(learned))} if learned is not None else {}
        where = pa.array([at.get(pair) for pair in _pairs(rows)], pa.int64())
        for name in ("old_logprobs", "advantages"):
            values = None if learned is None else getattr(learned, name)
            columns[name] = _lists(values, rows if learned is None else learned, floats).take(where)
        return pa.table(columns)


def in_words(example: Example) -> str:
    """Return a prompt as text: its message, or each of several behind its role."""
    if len(example.prompt) == 1:
        return example.prompt[0].content
    return "\n".join(f"{message.role}: {message.content}" for message in example.prompt)


def _nulls(parts: Sequence[Sequence[float]]) -> list[list[float | None]]:
    """Return the scores of each row with None, null in files, where a reward does not apply."""
    return [[None if math.isnan(score) else score for score in row] for row in parts]


def _pairs(batch: Sequences) -> list[tuple[int, int]]:
    """Return what tells the rows of a step apart."""
    return list(zip(batch.prompt_index.tolist(), batch.sample_index.tolist(), strict=True))


def _lists(values: Tensor | None, batch: Sequences, kind: pa.DataType, *, of_prompt: bool = False) -> pa.Array:
    """Return a list for each row: of its response, which begins with the first token that the policy sampled.

    Args:
        values: [T]; None for null in each row.
        batch: that they are of.
        kind: type of a value.
        of_prompt: takes the tokens before the response instead.
    """
    import pyarrow as pa

    if values is None:
        return pa.nulls(len(batch), pa.list_(kind))
    # numpy, since torch would wake threads for it that training needs.
    offsets, sampled = batch.offsets.numpy(), np.concatenate(([0], batch.loss_mask.numpy().cumsum()))
    is_response = sampled[1:] > sampled[offsets[:-1]].repeat(np.diff(offsets))
    where = is_response != of_prompt
    ends = np.concatenate(([0], where.cumsum()))[offsets]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values.numpy()[where], kind))


def _writable(text: str) -> str:
    """Return a text without halves of characters, which no file holds."""
    return text.encode("utf-8", "replace").decode("utf-8")


class RolloutFiles:
    """The files of a run, and the thread that writes them."""

    def __init__(
        self,
        folder: Path,
        *,
        max_gib: float,
        first: int,
        journal: Journal,
        num_free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        """Remove the files of steps that are done again.

        Args:
            folder: of the run.
            max_gib: room for all files; 0 for no files.
            first: step of the checkpoint that the run goes on from.
            journal: of the run.
            num_free: bytes that are free on the disk of a folder.
        """
        self._folder, self._max_bytes = folder / "rollouts", max_gib * _GIB
        self._journal, self._num_free = journal, num_free
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock, self._num_waiting = threading.Lock(), 0
        self._told: set[str] = set()
        self._sizes: dict[Path, int] = {}
        for file in self._folder.glob("*"):
            if file.suffix == ".part" or (_NAME.fullmatch(file.name) and step_of(file) > first):
                file.unlink(missing_ok=True)
            elif _NAME.fullmatch(file.name):
                self._sizes[file] = file.stat().st_size
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    def put(self, step: int, rollouts: StepRollouts, kind: Kind = "step") -> None:
        """Have the rollouts of a step written, and return at once."""
        if not self._max_bytes:
            return
        size = rollouts.num_bytes
        with self._lock:
            if has_room := self._num_waiting + size <= _MAX_WAITING or not self._num_waiting:
                self._num_waiting += size
        if not has_room:
            self._tell("slow", f"{kind} {step} has no file: the disk is slower than the steps")
            return

        def write() -> None:
            try:
                self._write(self._folder / f"{kind}_{step:06d}.parquet", lambda: rollouts.table(step))
            finally:
                with self._lock:
                    self._num_waiting -= size

        self._jobs.put(write)

    def flush(self, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until all that was put is written, so that a checkpoint has no step without its rollouts."""
        done = threading.Event()
        self._jobs.put(done.set)
        if not done.wait(timeout_s):
            self._tell("hangs", f"the disk has not taken those of the last steps for {timeout_s:g} s")

    def close(self) -> None:
        """Write what is left, and end the thread."""
        self._jobs.put(None)
        self._thread.join(_PATIENCE_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _write(self, file: Path, make: Callable[[], pa.Table]) -> None:
        import pyarrow.parquet as pq

        part = file.with_suffix(".part")
        try:
            self._folder.mkdir(exist_ok=True)
            pq.write_table(make(), part, compression="zstd", row_group_size=_ROWS_PER_GROUP)
            size = part.stat().st_size
            if not self._make_room(file, size):
                part.unlink()
                return
            sync(part)
            part.replace(file)
        except Exception as error:  # noqa: BLE001 - the next step is written all the same
            part.unlink(missing_ok=True)
            self._tell("failed", f"{explain(file, error)}; the run goes on without it")
            return
        self._sizes[file] = size

    def _make_room(self, file: Path, size: int) -> bool:
        """Thin out older files until one more has room; return whether it has."""
        if self._num_free(self._folder) < _RESERVE:
            self._tell("full", f"{file.name} is left out: less than 1 GiB would be free on its disk")
            return False
        if size > self._max_bytes:
            self._tell("large", f"{file.name} is left out: it alone is larger than tracking.rollouts_gib")
            return False
        used = sum(found for path, found in self._sizes.items() if path != file)
        while used + size > self._max_bytes:
            self._tell("thinned", "older steps are thinned out, since tracking.rollouts_gib is used up")
            steps = [step_of(path) for path in self._sizes]
            step = least_wanted(steps, newest=step_of(file))
            for path in [path for path in self._sizes if step_of(path) == step]:
                path.unlink(missing_ok=True)
                used -= self._sizes.pop(path)
        return True

    def _tell(self, what: str, message: str) -> None:
        """Say it once in each start of a run."""
        if what not in self._told:
            self._told.add(what)
            self._journal.say(f"rollouts: {message}")


def least_wanted(steps: Sequence[int], *, newest: int) -> int:
    """Return the step to remove first: the older, the rounder (in powers of two) a step must be to stay."""
    return min(steps, key=lambda step: ((step & -step or 2**40) / (newest - step + 1), step))


def step_of(file: Path) -> int:
    """Return the step that a file is of."""
    return int(file.stem.rpartition("_")[2])


def rollout_files(run: Path, kind: Kind = "step") -> dict[int, Path]:
    """Return the files of a run by their step, oldest first."""
    files = [file for file in (run / "rollouts").glob(f"{kind}_*.parquet") if _NAME.fullmatch(file.name)]
    return {step_of(file): file for file in sorted(files, key=step_of)}


def read_rollouts(run: Path, step: int | None = None, kind: Kind = "step") -> list[dict[str, Any]]:
    """Return the rollouts of a step, each with all columns by name.

    Args:
        run: folder of the run.
        step: None for the newest.
        kind: those that were trained on, or those of the validation after the step.

    Raises:
        RunFolderError: there are none of that step, or the file is damaged.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = rollout_files(run, kind)
    if not files or step not in (None, *files):
        raise RunFolderError(
            f"{run}: rollouts/ has no {kind} {'' if step is None else step}; it has {_ranges(files) or 'none'} "
            "(tracking.rollouts_gib; older steps are thinned out)"
        )
    file = files[max(files) if step is None else step]
    try:
        rows: list[Mapping[str, Any]] = pq.read_table(file).to_pylist(maps_as_pydicts="strict")
    except (OSError, pa.ArrowException) as error:
        raise RunFolderError(f"{file} cannot be read: {error}") from error
    return [dict(row) for row in rows]


def _ranges(steps: Sequence[int] | Mapping[int, object]) -> str:
    """Write steps as a person would.

    >>> _ranges([1, 2, 3, 8, 10, 11])
    '1-3, 8, 10-11'
    """
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1].append(step)
        else:
            found.append([step])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)
