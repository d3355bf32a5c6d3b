"""What the journal costs: events of a run, appended once more, beside the seconds of its steps.

python benchmarks/journal.py runs/NAME
"""

from __future__ import annotations

import collections
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rallypoint.journal import Journal, StepDone, read_journal


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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
