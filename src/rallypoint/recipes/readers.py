"""A start of a run in its journal, and what is made of the journal while it goes on.

Owns: that a start has a beginning and an end there, and the readers besides the display. Must not know: what is read.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator

from rallypoint.config import TrackingConfig, values_of
from rallypoint.display.draw import CurveAsItGoes
from rallypoint.errors import DiskError
from rallypoint.journal import Journal, RunBegan, RunEnded
from rallypoint.observability.tracker_clients import open_trackers
from rallypoint.observability.trackers import Tracked, Trackers
from rallypoint.observability.verl_names import as_in_verl
from rallypoint.recipes.ending import Endings
from rallypoint.run import MetricsLog
from rallypoint.run.folder import RunFolder
from rallypoint.run.record import software
from rallypoint.run.resume import Beginning


def began_of(beginning: Beginning, folder: RunFolder) -> RunBegan:
    """Return the event that begins a start."""
    return RunBegan(
        first=beginning.first,
        config=dict(values_of(beginning.config)),
        software=software(),
        machine=f"{platform.platform()} {platform.processor()}".rstrip(),
        folder=str(folder.path),
    )


@contextlib.contextmanager
def recorded_end(journal: Journal) -> Iterator[None]:
    """Record how a start has ended if the block raises."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(DiskError):  # which may be the very error
            journal.append(RunEnded(how="failed", why=str(error) or type(error).__name__))
        raise


@contextlib.contextmanager
def open_readers(beginning: Beginning, folder: RunFolder, journal: Journal) -> Iterator[Trackers]:
    """Open what is made of the journal while the run goes on: train.log, metrics.jsonl, the picture, trackers."""
    tracking = beginning.config.tracking or TrackingConfig()
    tracked = Tracked(folder.path, tracking.project, beginning.first, dict(values_of(beginning.config)))
    rename = as_in_verl if tracking.names == "verl" else dict
    with Endings(journal.say) as at_end:
        metrics = MetricsLog(folder.metrics)
        at_end.add(metrics.close)
        curve = CurveAsItGoes(folder.path)
        at_end.add(curve.close)
        trackers = open_trackers(tracking.to, tracked, journal, rename=rename)
        at_end.add(trackers.close)
        journal.subscribe(folder.take, metrics.take, trackers.take, curve.take)
        yield trackers
