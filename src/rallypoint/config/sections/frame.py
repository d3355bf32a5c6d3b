"""The frame around the training step: checkpoints, checks, length, names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from rallypoint.config.fields import Section, Texts, key


class CheckpointConfig(Section):
    """State that a run can be resumed from."""

    every_steps: int | None = key(
        None,
        at_least=1,
        unit="steps",
        help="Also after the last step and when interrupted; null: a tenth of the run, but from 5 to 20 steps.",
    )
    every_s: float | None = key(
        None,
        hidden=True,
        above=0,
        unit="s",
        help="Also when a step ends so long after the newest checkpoint; null: by steps only.",
    )
    keep: int = key(2, at_least=1, help="Older checkpoints are removed.")
    keep_every: int | None = key(
        None,
        hidden=True,
        at_least=1,
        unit="steps",
        help="Also save each of these steps (100: 100, 200, ...), and never remove it.",
    )
    keep_best: bool = key(
        False, help="Save after each validation that is better than all before it, and never remove the best."
    )
    snapshots: bool = key(
        True, help="Keep the state after every step, or as often as costs at most 3 %, for lost processes."
    )


class CheckConfig(Section):
    """Bounds of the checks that every run makes of itself."""

    ratio_tolerance: float | None = key(
        None,
        above=0,
        help="Bound of |ratio - 1| in the first update: of a token (null: 0.01), in bfloat16 of the mean (0.1).",
    )
    rollout_gap: float = key(
        0.5,
        above=0,
        unit="nats",
        help="Largest mean |rollout_ - old_logprobs| of a step; with max_staleness see docs/async.md.",
    )


class TrackingConfig(Section):
    """What is sent to trackers, and kept in addition to metrics. A list alone is `to`: tracking=[tensorboard,wandb]."""

    to: Texts = key((), help="Any of tensorboard, wandb, mlflow, trackio, swanlab.")
    names: Literal["rallypoint", "verl"] = key("rallypoint", help="Names of the metrics there: ours, or those of verl.")
    project: str = key("rallypoint", help="Project or experiment there; the name of the run is that of its folder.")
    rollouts_gib: float = key(
        2.0,
        at_least=0,
        unit="GiB",
        help="Room for rollouts/, all steps together; beyond it old steps are thinned out; 0: none.",
    )


_HERE = "runs"


class TrainerConfig(Section):
    """The frame around the training step."""

    num_steps: int = key(100, at_least=1, unit="steps", help="Training steps of the whole run.")
    num_epochs: float | None = key(
        None,
        above=0,
        at_most=10_000,
        unit="passes over the data",
        help="Sets num_steps: the last step on files takes what is left, prompts that make no whole step are left out.",
    )
    runs_dir: str = key(
        _HERE, help="Folder in which the run gets its own folder; a URL such as s3://BUCKET/runs mirrors it there."
    )
    name: str | None = key(None, help="Name of the run's folder; null: recipe name and time.")
    profile: str | None = key(
        None, hidden=True, help="Steps that torch's profiler records into profile/, first and last, such as 3:5."
    )
    grace_s: float | None = key(
        None,
        hidden=True,
        above=0,
        unit="s",
        help="Seconds from SIGTERM to the end: a step that takes too long is given up; null: it is finished.",
    )

    @property
    def local_dir(self) -> Path:
        """Folder on this machine in which the run gets its own: `runs_dir`, or `runs` if that is a URL."""
        return Path(_HERE if "://" in self.runs_dir else self.runs_dir).expanduser()

    @property
    def profiled(self) -> range:
        """The steps to record, as `profile` names them; empty for none, or if it names none."""
        found = re.fullmatch(r"(\d+):(\d+)", self.profile or "")
        return range(int(found[1]), int(found[2]) + 1) if found else range(0)
