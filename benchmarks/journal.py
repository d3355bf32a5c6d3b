"""What the journal and a tracker cost: events of a run, appended once more, beside the seconds of its steps.

python benchmarks/journal.py runs/NAME

The second time train.log, metrics.jsonl and TensorBoard (if it is installed) read along, as in a run. What counts is
the processor time of all threads then, since a tracker has one of its own.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rallypoint.extras import is_installed
from rallypoint.journal import Event, Journal, RunBegan, StepDone, read_journal
from rallypoint.observability.tracker_clients import open_trackers
from rallypoint.observability.trackers import Tracked
from rallypoint.run.folder import RunFolder
from rallypoint.run.metrics_log import MetricsLog


def main(run: Path) -> None:
    """Print how many events of each kind a step has, and the share of a step that appending them takes."""
    events = [entry.event for entry in read_journal(run / "journal.jsonl")]
    steps = [event.seconds for event in events if isinstance(event, StepDone)]
    took = list[float]()
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.jsonl") as journal:
        for event in events:
            began = time.perf_counter()
            journal.append(event)
            took.append(time.perf_counter() - began)
        size = journal.path.stat().st_size
    kinds = collections.Counter(type(event).__name__ for event in events)
    print(", ".join(f"{count / len(steps):.2f} {kind}" for kind, count in kinds.items()), "in a step")
    step_s, journal_s = statistics.median(steps), sum(took) / len(steps)
    print(f"{1e6 * statistics.mean(took):.0f} us an append, {size / len(steps):.0f} bytes a step")
    print(f"{1e3 * journal_s:.2f} ms of the {1e3 * step_s:.0f} ms of a step: {journal_s / step_s:.2%}")
    with_readers_s = seconds_with_readers(events) / len(steps)
    print(f"{1e3 * with_readers_s:.2f} ms with the files and a tracker that read it: {with_readers_s / step_s:.2%}")


def seconds_with_readers(events: Sequence[Event]) -> float:
    """Return the processor time of a journal with all that reads it while a run goes on, its imports left out."""
    if is_installed("tensorboard"):
        importlib.import_module("torch.utils.tensorboard")
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        folder.logs.mkdir()
        began = time.process_time()
        with (
            Journal(folder.journal) as journal,
            contextlib.closing(MetricsLog(folder.metrics, folder.journal)) as metrics,
        ):
            names = ["tensorboard"] if is_installed("tensorboard") else []
            config = next(event.config for event in events if isinstance(event, RunBegan))
            trackers = open_trackers(names, Tracked(folder.path, "benchmark", 0, config), journal)
            journal.subscribe(folder.take, metrics.take, trackers.take)
            for event in events:
                journal.append(event)
            trackers.close()  # once all is written
        return time.process_time() - began


if __name__ == "__main__":
    main(Path(sys.argv[1]))
