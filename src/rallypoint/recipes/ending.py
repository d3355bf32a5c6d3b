"""The beginning and the end of a start in its journal, what is made of the journal meanwhile, and the end of a run.

Owns: what must be done however a run ends, and the summary, made from its folder alone. Must not know: what is read.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from rallypoint import checkpoint
from rallypoint.config import RECIPES, RunConfig, values_of
from rallypoint.config.sections.frame import TrackingConfig
from rallypoint.data import load_tokenizer
from rallypoint.display import save_curve
from rallypoint.display.draw import CurveAsItGoes
from rallypoint.environments.given import is_given
from rallypoint.environments.reward import SHIPPED
from rallypoint.errors import DiskError, RallyError, first_line
from rallypoint.journal import Journal, RunBegan, RunEnded
from rallypoint.observability.tracker_clients import as_in_verl, open_trackers
from rallypoint.observability.trackers import Tracked, Trackers
from rallypoint.page import RunReader, write_report
from rallypoint.prepare.machine import planned_gib
from rallypoint.run import MetricsLog, Summary, why_no_plot
from rallypoint.run.folder import RunFolder, anchored, has_begun
from rallypoint.run.mirror import Mirror
from rallypoint.run.record import software
from rallypoint.run.resume import Beginning

Ending: TypeAlias = Callable[[], Awaitable[None] | None]


class Endings:
    """What is done when a block ends, the last that was added first: all of it, also if some of it raises.

    The first error is raised, that of the block before all others; the others are said.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        """Begin with nothing to do."""
        self._say = say
        self._endings: list[Ending] = []

    def add(self, ending: Ending, *, after: Ending | None = None) -> None:
        """Add an ending; `after` is one that must be done before it."""
        self._endings.insert(len(self._endings) if after is None else self._endings.index(after), ending)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(StopIteration):  # by which the coroutine says that it is done
            self.__aexit__(kind, error, trace).send(None)
            raise AssertionError("an ending that waits needs `async with`")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        first = error
        for ending in reversed(self._endings):
            try:
                if (done := ending()) is not None:
                    await done
            except BaseException as another:  # noqa: BLE001 - the first one is raised when all is done
                if first is None:
                    first = another
                elif isinstance(another, Exception):
                    with contextlib.suppress(RallyError, OSError):
                        self._say(f"and while the run ended: {type(another).__name__}: {another}")
        if first is not None and first is not error:
            raise first


def _text_of(checkpoint_folder: Path, config: RunConfig) -> Callable[[int], str]:
    tokenizer = load_tokenizer(checkpoint_folder, trust_remote_code=config.model.trust_remote_code)
    return lambda token: str(tokenizer.decode([token]))


def draw(folder: RunFolder) -> tuple[Path | None, str]:
    """Draw the learning curve; return its file, or None and the reason: a picture must not end a run."""
    try:
        drawn = save_curve(folder)
        return drawn, "" if drawn else why_no_plot()
    except Exception as error:  # noqa: BLE001 - of whatever draws: the run is done
        return None, f"{type(error).__name__}: {first_line(error)}"


@contextlib.contextmanager
def reported(folder: RunFolder) -> Iterator[None]:
    """Write the page of a run into its folder when the block ends, however it does; what goes wrong ends no run."""
    try:
        yield
    finally:
        if has_begun(folder) and not folder.is_in_use():  # by a process that this one gave way to
            try:
                write_report([RunReader(folder.path)], folder.report)
            except Exception as error:  # noqa: BLE001 - of whatever reads and draws: the run is done
                folder.try_log(f"{folder.report.name} was not written: {type(error).__name__}: {first_line(error)}")


def summarise(folder: RunFolder, config: RunConfig) -> Summary:
    """Draw the learning curve and sum up a run from its folder."""
    curve, why_not = draw(folder)
    found = [folder.checkpoints / checkpoint.checkpoint_name(step) for step in checkpoint.steps(folder.checkpoints)]
    commands = {"chat": f"rally chat {found[-1]}"} if found else {}
    if found and RECIPES[config.recipe].trains == "scores":
        commands = {"score with it": f"reward.path={found[-1]}"}
    validation = folder.data / "validation.parquet"
    functions = [spec for spec in anchored(config).reward.named_functions.values() if not is_given(spec)]
    if found and validation.is_file() and functions and (len(functions) == 1 or SHIPPED.keys() >= set(functions)):
        own = "" if functions[0] in SHIPPED else f" --reward {functions[0]}"
        commands["evaluate"] = f"rally eval {found[-1]} {validation}{own}"
    summary = Summary(
        name=folder.path.name,
        run_dir=folder.path,
        validated=RECIPES[config.recipe].validated,
        curve=curve,
        why_no_curve=why_not,
        checkpoints=found,
        commands=commands,
    )
    return summary.measured(
        folder.journal,
        predicted_memory_gib=planned_gib(config),
        num_warmup_steps=config.num_warmup_steps,
        watched=config.watched,
        text_of=_text_of(found[-1], config) if found else None,
    )


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
def open_readers(
    beginning: Beginning, folder: RunFolder, journal: Journal, mirror: Mirror | None
) -> Iterator[Trackers]:
    """Open what is made of the journal while the run goes on: train.log, metrics.jsonl, picture, trackers, mirror."""
    tracking = beginning.config.tracking or TrackingConfig()
    tracked = Tracked(folder.path, tracking.project, beginning.first, dict(values_of(beginning.config)))
    rename = as_in_verl if tracking.names == "verl" else dict
    with Endings(journal.say) as at_end:
        if mirror is not None:
            mirror.start(beginning.first)
            at_end.add(mirror.close)
            journal.subscribe(mirror.take)
        metrics = MetricsLog(folder.metrics, folder.journal)
        at_end.add(metrics.close)
        curve = CurveAsItGoes(folder.path)
        at_end.add(curve.close)
        trackers = open_trackers(tracking.to, tracked, journal, rename=rename)
        at_end.add(trackers.close)
        journal.subscribe(folder.take, metrics.take, trackers.take, curve.take)
        yield trackers
