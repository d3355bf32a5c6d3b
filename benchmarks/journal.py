"""What the journal, a tracker, the page and the report cost: events of a run, appended once more, beside its steps.

python benchmarks/journal.py runs/NAME

The second time train.log, metrics.jsonl and TensorBoard (if it is installed) read along, as in a run. What counts is
the processor time of all threads then, since a tracker has one of its own. The third time somebody has the page open:
after each step it asks for all that it shows, as often as it lets itself (`SHARE` in page.js), and looks for news
meanwhile. Together with the report at the end that must stay below 2 % of the time of the steps.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import re
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
from rallypoint.page import RunReader, write_report
from rallypoint.page.answers import STATIC, answer_or_why, to_json
from rallypoint.page.app import news_of
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
    page_s, report_s = seconds_of_page(run, events, step_s)
    print(f"{1e3 * page_s:.2f} ms of a page that is open: {page_s / step_s:.2%}")
    print(f"{1e3 * report_s / len(steps):.2f} ms of the report ({report_s:.1f} s): {report_s / sum(steps):.2%}")
    whole = with_readers_s / step_s + page_s / step_s + report_s / sum(steps)
    print(f"together {whole:.2%} of a step")


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


_SHARE, _MOST_WAIT_MS = (
    int(re.findall(rf"^const {name} = (\d+);", (STATIC / "page.js").read_text(), re.MULTILINE)[0])
    for name in ("SHARE", "MOST_WAIT_MS")
)
_SHOWN = ("summary", "series", "values", "health", "troubles", "spread", "time", "timeline", "broke", "rollouts")
_LOOKS_S = 0.5


def seconds_of_page(run: Path, events: Sequence[Event], step_s: float) -> tuple[float, float]:
    """Return the processor time of a page in the mean of a step, and of the report at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / run.name
        folder.mkdir()
        for part in ("rollouts", "model", "checkpoints"):
            (folder / part).symlink_to((run / part).absolute())
        took = list[float]()
        with Journal(folder / "journal.jsonl") as journal:
            reader = RunReader(folder)
            for event in events:
                journal.append(event)
                if isinstance(event, StepDone):
                    began = time.process_time()
                    for panel in _SHOWN:
                        to_json(answer_or_why([reader], panel, {"step": str(event.step)}))
                    took.append(time.process_time() - began)
        began = time.process_time()
        for _ in range(100):
            news_of(reader)
        look_s = (time.process_time() - began) / 100
        began = time.process_time()
        write_report([RunReader(folder)], folder / "report.html")
        report_s = time.process_time() - began
    each_s = statistics.mean(took)
    between_s = each_s + min(_MOST_WAIT_MS / 1e3, _SHARE * each_s)
    return each_s * min(1.0, step_s / between_s) + look_s * step_s / _LOOKS_S, report_s


if __name__ == "__main__":
    main(Path(sys.argv[1]))
