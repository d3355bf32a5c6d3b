"""Resuming from a checkpoint: which one, and whether the config still describes the same run.

A resumed run is compared with the record of the checkpoint that it continues from (`record.py`):

- refused: changes after which the weights so far would be those of another run;
- accepted and reported, weights differ from now on: everything on no list, such as a learning rate;
- accepted and reported, weights are equal up to rounding: changes of who computes what. With over-sampling, or
  sampling ahead, weights differ, since that decides which rollouts end first, or how old they are;
- accepted: changes that no bit of the weights depends on. `resume.yaml` has these lists, by key or section.

Without a checkpoint, everything may change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import yaml

from rallypoint import checkpoint
from rallypoint.config import RunConfig, shown
from rallypoint.errors import CheckpointError, ResumeError, UnusableCheckpointError
from rallypoint.journal import CheckpointSaved
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import Inputs, Record, made_inputs

_RULES: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("resume.yaml").read_text(encoding="utf-8"))
_SAME: dict[str, str] = _RULES["refused"]
"""Key, or section -> why it cannot change in the middle of a run."""
_ROUNDING, _FREE = tuple[str, ...](_RULES["rounding"]), tuple[str, ...](_RULES["free"])


def step_to_go_on_from(folder: RunFolder, from_step: int | None) -> int:
    """Return the step of the checkpoint to resume from, verified; 0 to begin at step 1.

    Args:
        folder: of the run.
        from_step: an older checkpoint than the newest, 0 for the very beginning; None for the newest.

    Raises:
        UnusableCheckpointError: it is damaged, or there is none of that step; nothing was changed.
    """
    there = checkpoint.visible(folder.checkpoints)
    if from_step is not None and from_step not in (0, *there):
        raise UnusableCheckpointError(
            f"{folder.checkpoints} has no checkpoint of step {from_step}; there are those of "
            f"{', '.join(map(str, there)) or 'none'}"
        )
    step = max(there, default=0) if from_step is None else from_step
    try:
        if step:
            checkpoint.verify(folder.checkpoints / checkpoint.checkpoint_name(step))
    except CheckpointError as error:
        whole = checkpoint.newest_whole(folder.checkpoints)
        way = f"that of step {whole} is whole" if whole else "no other is whole, and 0 begins at step 1"
        raise UnusableCheckpointError(
            f"{error}; give it back what it had, or go on from another: {way}: "
            f"rally train {folder.path} --resume --from-step {whole}"
        ) from error
    return step


def compare(old: Record, new: Record, config: RunConfig, step: int) -> list[str]:
    """Return the accepted changes since a checkpoint, a line for each kind of change.

    Args:
        old: the record of the checkpoint.
        new: the record that the run would continue with.
        config: that of `new`.
        step: of the checkpoint.

    Raises:
        ResumeError: a change would make it another run; all of them are listed, with what to do.
    """
    changes = [*_changed_keys(old.config, new.config, both=old.inputs.keys() & new.inputs.keys())]
    changes += _changed_files(old.inputs, new.inputs)
    refused = [f"{text}: {_SAME[rule]}" for key, text in changes if (rule := _rule(key)) in _SAME]
    if config.trainer.num_steps < step:
        refused.append(f"trainer.num_steps={config.trainer.num_steps}: {step} steps are done already")
    if refused:
        raise ResumeError(step, tuple(refused))
    kinds: dict[str, list[str]] = {"": [], ", equal up to rounding": [], ", the weights are others from here on": []}
    free, rounding, others = kinds.values()
    for key, text in changes:
        rule = _rule(key)
        if key == "trainer.num_steps" and _has_schedule(config):
            others.append(f"{text}, which the learning rate follows")
        elif rule in _ROUNDING and config.rollout.over_sampling is not None:
            others.append(f"{text}, which may decide whose rollouts end first")
        elif rule in _ROUNDING and config.rollout.max_staleness:
            others.append(text)
        else:
            (free if rule in _FREE else rounding if rule in _ROUNDING else others).append(text)
    versions = {name: (old.software.get(name), new.software.get(name)) for name in {**old.software, **new.software}}
    computed = others if config.rollout.max_staleness else rounding
    computed += [f"{name} {now} (was {before})" for name, (before, now) in versions.items() if before != now]
    if others and config.rollout.max_staleness:
        others.append(f"as after any resume with rollout.max_staleness={config.rollout.max_staleness}")
    return [f"changed since step {step}{kind}: {'; '.join(texts)}" for kind, texts in kinds.items() if texts]


def is_free(key: str) -> bool:
    """Whether no bit of the weights depends on a key."""
    return _rule(key) in _FREE


def _rule(key: str) -> str | None:
    """Return the longest entry of the lists that a key belongs to."""
    entries = (entry for entry in (*_SAME, *_ROUNDING, *_FREE) if f"{key}.".startswith(f"{entry}."))
    return max(entries, key=len, default=None)


def _changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], *, both: Set[str], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the keys whose values differ, with both values; files that both have are compared by content instead."""
    for name in dict.fromkeys((*new, *old)):
        key, before, after = f"{prefix}{name}", old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _changed_keys(before, after, both=both, prefix=f"{key}.")
        elif (_besides_paths(before) != _besides_paths(after)) if key in both else before != after:
            was = f"was {shown(before)}" if name in old else "no key then"
            yield key, f"{key}={shown(after)} ({was})"


def _besides_paths(value: object) -> object:
    """Return what else is said of files, of those of which something is.

    >>> _besides_paths(["a.jsonl", {"path": "b.jsonl", "weight": 3.0}])
    [{'weight': 3.0}]
    """
    match value:
        case list() | tuple():
            return [found for one in cast("Sequence[object]", value) if (found := _besides_paths(one))]
        case Mapping():
            return {name: one for name, one in cast("Mapping[str, object]", value).items() if name != "path"}
        case _:
            return []


def _changed_files(old: Inputs, new: Inputs) -> Iterator[tuple[str, str]]:
    for key in sorted(old.keys() & new.keys()):
        before, after = old[key], new[key]
        names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if names:
            listed = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            yield key, f"{key}: {listed} {'differs' if len(names) == 1 else 'differ'}"


def _has_schedule(config: RunConfig) -> bool:
    """Whether the learning rate of a step follows from the number of steps."""
    optimizers = [learner.optimizer for learner in config.learners.values()]
    return any(optimizer.schedule != "constant" or optimizer.warmup_ratio for optimizer in optimizers)


def _adopted(folder: RunFolder) -> CheckpointSaved | None:
    """Make the snapshot of a run that was killed a checkpoint, if it is newer and the journal has its step."""
    step = checkpoint.newest_whole(folder.snapshots)
    if step <= max(checkpoint.visible(folder.checkpoints), default=0) or step > folder.state().step:
        return None
    name = checkpoint.checkpoint_name(step)
    checkpoint.adopt(folder.snapshots / name, folder.checkpoints)
    return CheckpointSaved(step=step, weights=checkpoint.digested(folder.checkpoints / name), metrics={})


@dataclasses.dataclass(frozen=True, slots=True)
class Beginning:
    """The step that a start continues from, and what decides its weights."""

    first: int
    """Step of the checkpoint that it continues from; 0 for none."""
    config: RunConfig
    was: Record | None = None
    """The record of that checkpoint."""
    now: Record | None = None
    """The record that was compared with it."""
    notes: tuple[str, ...] = ()
    """Notes for the user: changes, or that there is no checkpoint."""
    adopted: CheckpointSaved | None = None
    """Event of that checkpoint, if it was a snapshot until now."""

    @classmethod
    def resumed(cls, folder: RunFolder, config: RunConfig, from_step: int | None) -> Beginning:
        """Do what `compared` does, after a save that was killed has been put right; its snapshot becomes a checkpoint.

        Checkpoints later than `from_step` are set aside, once the comparison has passed.

        Raises:
            CheckpointError, ResumeError: see `compared`.
        """
        checkpoint.recover(folder.checkpoints)
        adopted = _adopted(folder) if from_step is None else None
        found = cls.compared(folder, config, from_step)
        aside = [] if from_step is None else checkpoint.set_aside(folder.checkpoints, found.first)
        names = ", ".join(path.name for path in aside)
        more = (f"going on from step {found.first}; set aside: {names}",) if aside else ()
        return dataclasses.replace(found, notes=(*more, *found.notes), adopted=adopted)

    @classmethod
    def compared(cls, folder: RunFolder, config: RunConfig, from_step: int | None) -> Beginning:
        """Choose the checkpoint of a run to continue from, and compare the config with it; the folder stays as it is.

        Raises:
            CheckpointError: see `step_to_go_on_from`.
            ResumeError: a change would make it another run.
        """
        first = step_to_go_on_from(folder, from_step)
        was, now, notes = None, None, list[str]()
        if first:
            was = Record.read(folder.checkpoints / checkpoint.checkpoint_name(first))
            now = Record.of(config, folder)
            notes += compare(was, now, config, first)
        if not first:
            notes.append("no checkpoint to go on from: the run begins at step 1, and steps done before are done again")
        return cls(first, config, was, now, tuple(notes))

    def record(self, folder: RunFolder) -> Record:
        """Return the record of this start, after everything has been made or read.

        Raises:
            ResumeError: the model or data that the run made for itself is not what its checkpoint was trained with.
        """
        if self.was is None or self.now is None:
            return Record.of(self.config, folder)
        record = dataclasses.replace(self.now, inputs=self.now.inputs | made_inputs(folder))
        compare(self.was, record, self.config, self.first)
        return record
