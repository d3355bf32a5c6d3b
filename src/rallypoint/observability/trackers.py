"""Trackers that are fed what metrics.jsonl gets: TensorBoard, Weights & Biases, MLflow.

Owns: what each client is called with, and that none of them can slow or stop a run. Must not know: what a metric means.

Consumes: lines of metrics, in their order. Produces: calls of each client, on a thread of its own. Waits for: lines.
Unblocked by: `log`, `close`. A client that raises is told once and asked no more; one that hangs is left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any, Protocol, TypeAlias

from rallypoint.errors import first_line, how_to_install

MODULES: dict[str, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""The package of each, which is also the name of its extra."""
_MAX_WAITING = 10_000
"""Lines that may wait for a client: days of steps, if it hangs."""
_CLOSE_S = 20.0
"""Seconds that clients are given at the end of a run to write or send what they have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tracked:
    """The run that a tracker is told of."""

    folder: Path
    """Of the run; its name is the run's."""
    project: str
    first_step: int
    """Steps up to it were told by an earlier start."""
    config: Mapping[str, object]
    """Every key, dotted."""


class Tracker(Protocol):
    """One client, opened. It may raise anything, at any time."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the metrics of a step, or some of them."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


Open: TypeAlias = Callable[[Tracked], Tracker]


def find_tracker_problem(name: str) -> str | None:
    """Say what is wrong with the name of a tracker, or how to install its package; None if it can be opened."""
    if name not in MODULES:
        return f"is no tracker that is known; expected any of {', '.join(MODULES)}"
    if importlib.util.find_spec(MODULES[name]) is not None:
        return None
    return f"needs the package {MODULES[name]}; {how_to_install(name)}"


class Trackers:
    """All trackers of a run."""

    def __init__(
        self, opens: Mapping[str, Open], run: Tracked, say: Callable[[str], None], *, close_s: float = _CLOSE_S
    ) -> None:
        """Open each on a thread of its own.

        Args:
            opens: what opens each, by name.
            run: what it is told first.
            say: called with a line when one has failed, from its thread.
            close_s: seconds that all of them together are waited for at the end.
        """
        self._close_s = close_s
        self._feeds = [_Feed(name, open_it, run, say) for name, open_it in opens.items()]

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass metrics on, and return at once."""
        for feed in self._feeds:
            feed.put(step, scalars)

    def close(self) -> None:
        """Let each write what it has, and wait for that, but not for long."""
        ended = [feed.end() for feed in self._feeds]
        give_up = threading.Event()
        timer = threading.Timer(self._close_s, give_up.set)
        timer.daemon = True
        timer.start()
        for thread in ended:
            while thread.is_alive() and not give_up.is_set():
                thread.join(0.05)
        timer.cancel()


class _Feed:
    """The thread of one tracker, and the lines that wait for it."""

    def __init__(self, name: str, open_it: Open, run: Tracked, say: Callable[[str], None]) -> None:
        self._name, self._open, self._run, self._say = name, open_it, run, say
        self._lines: Queue[tuple[int, Mapping[str, float]] | None] = Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, scalars: Mapping[str, float]) -> None:
        with contextlib.suppress(Full):  # it hangs; its lines are in metrics.jsonl
            self._lines.put_nowait((step, dict(scalars)))

    def end(self) -> threading.Thread:
        with contextlib.suppress(Full):
            self._lines.put_nowait(None)
        return self._thread

    def _work(self) -> None:
        try:
            tracker = self._open(self._run)
            while (line := self._lines.get()) is not None:
                tracker.log(*line)
            tracker.close()
        except Exception as error:  # noqa: BLE001 - clients of networks raise anything; the run goes on without it
            self._say(
                f"tracking with {self._name} has ended: {type(error).__name__}: {first_line(error)}; the run goes on, "
                "and metrics.jsonl has everything"
            )
            self._empty()

    def _empty(self) -> None:
        """Take lines that nobody wants, so that none wait."""
        with contextlib.suppress(Empty):
            while True:
                self._lines.get_nowait()


class TensorBoard:
    """Event files in the run's folder, below `tensorboard/`."""

    def __init__(self, run: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step + 1)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in run.config.items()), 0)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of wandb, which a resumed run goes on with; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, run: Tracked, client: Any = None) -> None:
        client = client or importlib.import_module("wandb")
        self._run = client.init(
            project=run.project,
            name=run.folder.name,
            id=kept_id(run, "wandb", lambda: f"{run.folder.name}-{os.urandom(4).hex()}"),
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`; lines of a step become one."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI; a resumed run goes on with it."""

    def __init__(self, run: Tracked, client: Any = None) -> None:
        self._client = client or importlib.import_module("mlflow").MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)

        def begin() -> str:
            return str(self._client.create_run(experiment, run_name=run.folder.name).info.run_id)

        self._id = kept_id(run, "mlflow", begin)
        if run.first_step == 0:
            for key, value in run.config.items():
                self._client.log_param(self._id, key, str(value)[:500])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`; a value that is not finite is left out, since stores differ in what they do with it."""
        for name, value in scalars.items():
            if math.isfinite(value):
                self._client.log_metric(self._id, name, float(value), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._id)


def kept_id(run: Tracked, tracker: str, begin: Callable[[], str]) -> str:
    """Return the id that a tracker knows the run by: that of its first start, which its folder keeps."""
    file = run.folder / f"{tracker}.id"
    if run.first_step and file.is_file():
        return file.read_text(encoding="utf-8").strip()
    found = begin()
    file.write_text(found + "\n", encoding="utf-8")
    return found


OPENS: dict[str, Open] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def open_trackers(names: Sequence[str], run: Tracked, say: Callable[[str], None]) -> Trackers:
    """Return the trackers of these names."""
    return Trackers({name: OPENS[name] for name in names}, run, say)
