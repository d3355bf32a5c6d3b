"""A recorded step computed again: by the run's own recipe, from the checkpoint before it and recorded rollouts.

Owns: the folder in which that happens, which is a run of its own and is removed, and what it is compared with. Must not
know: which algorithm it is, or how differences are shown. Nothing is sampled, and the folder of the run stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rallypoint import checkpoint
from rallypoint.config import LoadedConfig
from rallypoint.display import Silent
from rallypoint.errors import ConfigError, RunFolderError
from rallypoint.journal import Journal, StepDone, WeightsLoaded, read_journal
from rallypoint.prepare.preflight import load_named
from rallypoint.recipes.interruption import Observer
from rallypoint.recipes.loop import train
from rallypoint.run.comparison import Comparison, compare_runs
from rallypoint.run.folder import RunFolder, launched, write_config
from rallypoint.run.rollouts import read_rollouts, rollout_files
from rallypoint.sampling.recorded import Recorded

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """A step as it was computed again."""

    done: StepDone
    rows: Sequence[Row]
    """Its rollouts by the columns of docs/tracking.md; empty if it trains on files."""
    logprobs: Sequence[Sequence[float]]
    """Logprobs of the response of each row, by the weights after the step."""
    comparison: Comparison
    """With the run, of this step and of those since the checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """A step of a run, to be computed again."""

    run: RunFolder
    step: int
    first: int
    """Step of the newest checkpoint before it; 0 for the initial weights."""
    has_weights: bool
    """Whether there is a checkpoint of the step, so that its weights can be compared."""

    @classmethod
    def of(cls, path: Path, step: int) -> Replay:
        """Find what a step is computed from.

        Raises:
            RunFolderError: the run has not done the step, or the rollouts of a step since the checkpoint are missing.
        """
        run, state = RunFolder(path.absolute()), RunFolder(path).state()
        if step not in state.steps:
            raise RunFolderError(f"{path}: expected a step that it has done, 1 to {state.step}; found --step {step}")
        first = max((one for one in checkpoint.steps(run.checkpoints) if one < step), default=0)
        samples = "rollout/num_tokens" in state.steps[step].metrics
        kept = rollout_files(run.path)
        if samples and (missing := [one for one in range(first + 1, step + 1) if one not in kept]):
            raise RunFolderError(
                f"{path}: step {step} is computed from the checkpoint of step {first} and the rollouts since, but "
                f"rollouts/ has none of step {missing[0]}; a larger tracking.rollouts_gib keeps them, and a larger "
                "checkpoint.keep leaves less to compute"
            )
        has_weights = step in state.checkpoints and step in checkpoint.steps(run.checkpoints)
        return cls(run, step, first, has_weights)

    def compute(self, changes: Sequence[str] = (), *, is_rescored: bool = False) -> Computed:
        """Compute it.

        Args:
            changes: keys and values that are to be different.
            is_rescored: whether the reward functions score its rollouts anew.

        Raises:
            ConfigError, ResumeError: with these changes it would not be a step of the run.
        """
        versions = [e.event.version for e in read_journal(self.run.journal) if isinstance(e.event, WeightsLoaded)]
        recorded = Recorded(self.run.path, versions, is_rescored)
        loaded = self._loaded(changes)
        if is_rescored and (loaded.config.reward.all_models or loaded.config.rollout.episode is not None):
            raise ConfigError(
                ("--set reward...: expected reward functions alone; models and episodes score as they go",)
            )
        with self._folder(loaded) as folder:
            train(loaded, folder, Silent(), resume=self.first > 0, observer=_Until(self.step), recorded=recorded)
            rows = read_rollouts(folder.path, self.step) if rollout_files(folder.path) else []
            if (done := folder.state().steps.get(self.step)) is None:
                raise KeyboardInterrupt  # the step was given up
            logprobs, at = list[list[float]](), 0
            if (values := recorded.logprobs.get(self.step)) is not None:
                for row in rows:
                    begin, end = at + len(row["prompt_ids"]), at + len(row["prompt_ids"]) + len(row["response_ids"])
                    logprobs.append(values[begin:end].tolist())
                    at = end
            return Computed(done, rows, logprobs, compare_runs(self.run.path, folder.path))

    def _loaded(self, changes: Sequence[str]) -> LoadedConfig:
        """Return the config of the run with the changes, and without what is not for a step that is done again."""
        config = load_named(str(self.run.path), changes).config
        own = [
            f"validation.every_steps={config.trainer.num_steps}",
            f"checkpoint={{every_steps: {config.trainer.num_steps}, keep: 1000000, snapshots: false}}",
            "tracking={to: [], rollouts_gib: 1000000}",
            *(["rollout.serve=null"] if config.rollout.serve is not None else []),
            *(["rollout.schedule=null"] if config.rollout.schedule is not None else []),
        ]
        return load_named(str(self.run.path), [*changes, *own])

    @contextlib.contextmanager
    def _folder(self, loaded: LoadedConfig) -> Iterator[RunFolder]:
        """Make the folder of a run that stands where this one stood before the step; it is removed at the end."""
        name = f".{self.run.path.name}.{os.getpid()}.partial"  # what a kill leaves is cleared up by the next run
        folder = RunFolder(self.run.path.with_name(name))
        try:
            folder.logs.mkdir(parents=True)
            folder.checkpoints.mkdir()
            for made in ("model", "data"):
                if (there := self.run.path / made).exists():
                    (folder.path / made).symlink_to(there)
            if self.first:
                kept = checkpoint.checkpoint_name(self.first)
                (folder.checkpoints / kept).symlink_to(self.run.checkpoints / kept)
            write_config(folder, loaded.config)
            with Journal(folder.journal) as journal:
                journal.append(launched(loaded))
            yield folder
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)


class _Until(Observer):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._step = step

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """See `Observer.after_step`."""
        del metrics
        return step == self._step
