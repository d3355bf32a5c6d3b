"""Does drills: a tiny run is broken, goes on, and must end with the weights of a twin that nobody touched.

Owns: how a drill is done and judged. Must not know: how a run recovers, or how a verdict is shown. Equal means: weights
and optimizer states of the last checkpoint, bit for bit. A run that samples ahead is compared with the run that repeats
its journal, any other with its twin, which is made once, in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from rallypoint import checkpoint
from rallypoint.as_found import variables
from rallypoint.display import Silent
from rallypoint.errors import RallyError, RunFolderError, first_line
from rallypoint.failpoints import NOTED, VARIABLE
from rallypoint.journal import RoleLost, RolesRestarted, RolesStarted, read_journal
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.drills import (
    BACK_WITHIN_S,
    DAMAGES,
    HANGS_S,
    REWARD,
    REWARDS,
    RUNS,
    SIGNALS,
    TINY,
    Drill,
)
from rallypoint.recipes.interruption import Observer
from rallypoint.recipes.loop import train
from rallypoint.roles.placement import module_of
from rallypoint.run.comparison import compare_runs
from rallypoint.run.folder import RunFolder, create_run, open_run

_LIMIT_S, _POLL_S = 300.0, 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class DrillOutcome:
    """How a drill went."""

    drill: Drill
    noticed_s: float | None
    """Seconds from the failure until it was noticed; None if it only took time."""
    back_s: float | None
    """Seconds from then until the run was at work again, by itself or by `--resume`."""
    went_on: str
    """How it went on: `by itself`, `--resume`."""
    problem: str = ""
    """Why it failed; empty if the weights are equal."""

    @property
    def late(self) -> str:
        """What took longer than is promised: until an error ended the run, or it went on by itself."""
        noticed_s, back_s = self.noticed_s or 0.0, self.back_s or 0.0
        if self.drill.how == "raise":
            back_s = 0.0
        most_s = self.drill.noticed_within_s
        late = [f"noticed after more than {most_s:g} s"] * (noticed_s > most_s)
        late += [f"back after more than {BACK_WITHIN_S:g} s"] * (back_s > BACK_WITHIN_S)
        return " and ".join(late) if self.drill.num_lost or self.drill.how == "raise" else ""


def _train(run: RunFolder, overrides: Sequence[str], *, resume: bool) -> str:
    """Train to the end, or go on; return why it ended before, empty if it did not."""
    stopped = Observer()
    stopped.owns_process = False
    try:
        if resume:
            found = train(load_checked(str(run.path), ()), open_run(run.path), Silent(), resume=True, observer=stopped)
        else:
            loaded = load_checked("digits", overrides)
            found = train(loaded, create_run(loaded), Silent(), resume=False, observer=stopped)
    except (RallyError, OSError, KeyboardInterrupt) as error:
        return first_line(error) or type(error).__name__
    return "" if found else "it was asked to stop"


def _be_driver(run: RunFolder, overrides: Sequence[str], resume: bool, fails: str, log: Path) -> None:
    nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    os.environ[VARIABLE] = fails
    if why := _train(run, overrides, resume=resume):
        print(why, flush=True)
    os._exit(bool(why))


class _Child:
    """A driver in a process of its own, forked from one that has imported what it needs."""

    def __init__(self, run: RunFolder, overrides: Sequence[str], *, resume: bool, fails: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._log = run.path.with_suffix(f".{time.monotonic_ns()}.log")
        given = (run, overrides, resume, fails, self._log)
        self.process = context.Process(target=_be_driver, args=given, daemon=True)
        self.process.start()

    def wait(self, limit_s: float = _LIMIT_S) -> str:
        """Return why it ended before all steps were done; empty if it did not."""
        self.process.join(limit_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            return f"it did not end within {limit_s:g} s"
        said = self._log.read_text().strip().splitlines() or [f"status {self.process.exitcode}"]
        return said[-1] if self.process.exitcode else ""


@contextlib.contextmanager
def _failing(fails: str) -> Iterator[None]:
    """Have the runs of this process fail; a run that does not end within the limit is interrupted."""
    give_back = variables([VARIABLE])
    os.environ[VARIABLE] = fails
    timers = [threading.Timer(_LIMIT_S + more, signal.raise_signal, [signal.SIGINT]) for more in (0, 10)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        give_back()


class Drills:
    """Does drills, one after another, below a folder."""

    def __init__(self, folder: Path) -> None:
        """Begin without twins."""
        self.folder = folder
        self._twins: dict[str, RunFolder] = {}
        self._num = 0

    @contextlib.contextmanager
    def on_one_ray(self, drills: Sequence[Drill]) -> Iterator[Self]:
        """Share one local Ray, if some of these drills need it."""
        with contextlib.ExitStack() as stack:
            if any(drill.on_ray and not drill.in_child for drill in drills):
                from rallypoint.cluster.ray_cluster import RayCluster  # which not everybody has

                roles = tuple(map(module_of, ("actor", "reward")))
                keep = RayCluster.keep(log_folder=self.folder, object_store_gib=0.5, say=print, imported=roles)
                stack.enter_context(keep)
            yield self

    def do(self, drill: Drill) -> DrillOutcome:
        """Do a drill."""
        twin = None if drill.run == "ahead" else self._twin(drill.run)
        self._num += 1
        run = RunFolder(self.folder / f"{self._num:03}")
        runtime = "ray" if drill.on_ray else "inline"
        overrides = self._overrides(drill.run, run, f"cluster.runtime={runtime}", how=REWARDS.get(drill.deed, "raises"))
        if drill.how == "hang":
            overrides.append(f"cluster.call_timeout_s={HANGS_S:g}")
        at_s, why, problem = self._first(drill, run, overrides)
        return self._judged(drill, run, twin, at_s, why, problem)

    def _first(self, drill: Drill, run: RunFolder, overrides: Sequence[str]) -> tuple[float, str, str]:
        """Run until the failure ends it; return when the failure was, the run's error, and what was wrong with that."""
        at_s, problem = 0.0, ""
        if drill.in_child:
            child = _Child(run, overrides, resume=False, fails=drill.fails)
            if drill.deed in SIGNALS:
                kind, deed = SIGNALS[drill.deed]
                _wait_for(child, run, kind)
                at_s = time.time()
                problem = deed(child.process.pid or 0, run)
            elif drill.how == "stop":
                _wait_for(child, run, "", run.path / NOTED)
                time.sleep(1)
                os.kill(child.process.pid or 0, signal.SIGCONT)
            why = child.wait()
        else:
            with _failing(drill.fails):
                why = _train(run, overrides, resume=False)
        if drill.deed in DAMAGES:
            damage = DAMAGES[drill.deed](run)
            expected = next(damage)
            said = _train(run, (), resume=True)
            if expected not in said or bool(expected) != bool(said):
                problem = f"expected a refusal with {expected!r}, found {said or 'none'}"
            next(damage, None)
        return at_s, why, problem

    def _judged(
        self, drill: Drill, run: RunFolder, twin: RunFolder | None, at_s: float, why: str, problem: str
    ) -> DrillOutcome:
        noted = run.path / NOTED
        if drill.fails:
            at_s = float(noted.read_text().split()[0]) if noted.is_file() else 0.0
            problem = problem or ("" if at_s else f"the failpoint never fired; {why or 'the run is done'}")
        ended_s, resumed = time.time(), why
        for _ in range(2):
            if resumed:
                with _failing(drill.fails):
                    resumed = _train(run, (), resume=True)
        if problem or resumed:
            return DrillOutcome(drill, None, None, "", problem or f"it does not go on: {resumed}")
        entries = list(read_journal(run.journal))
        lost = [(entry.time_s, entry.event.why) for entry in entries if isinstance(entry.event, RoleLost)]
        back = [entry.event.seconds for entry in entries if isinstance(entry.event, RolesRestarted)]
        started = [
            entry.time_s for entry in entries if isinstance(entry.event, RolesStarted) and entry.time_s > ended_s
        ]
        went_on = "--resume" if why else "by itself"
        noticed_s = lost[0][0] - at_s if lost else ended_s - at_s if why and at_s else None
        back_s = sum(back) if back else started[0] - ended_s if why and started else None
        if drill.alone and why:
            problem = f"it did not go on by itself: {why}"
        elif drill.alone and len(lost) != drill.num_lost:
            problem = f"expected {drill.num_lost} losses, found {[why for _, why in lost]}"
        else:
            problem = self._unlike(run, twin)
        return DrillOutcome(drill, noticed_s, back_s, went_on, problem)

    def _unlike(self, run: RunFolder, twin: RunFolder | None) -> str:
        """Say where a run parts from its twin, or from the run that repeats its journal; empty if it does not."""
        try:
            return _difference(run, twin or self._repeated(run))
        except RallyError as error:
            return first_line(error)

    def _twin(self, name: str) -> RunFolder:
        if name not in self._twins:
            self._twins[name] = self._untouched(name, f"twin-{name}")
        return self._twins[name]

    def _repeated(self, run: RunFolder) -> RunFolder:
        """Repeat a run that sampled ahead from its journal."""
        return self._untouched("ahead", f"{run.path.name}-again", f"rollout.schedule={run.journal}")

    def _untouched(self, run: str, name: str, *more: str) -> RunFolder:
        folder = RunFolder(self.folder / name)
        if why := _train(folder, self._overrides(run, folder, "cluster.runtime=inline", *more), resume=False):
            raise RunFolderError(f"{folder.path}: the untouched run of {run!r} did not end: {why}")
        return folder

    def _overrides(self, name: str, run: RunFolder, *more: str, how: str = "raises") -> list[str]:
        reward = self.folder / "reward.py"
        if name == "reward":
            self.folder.mkdir(parents=True, exist_ok=True)
            reward.write_text(REWARD)
            more = (*more, f"reward.function={reward}:{how}")
        return [*TINY, *RUNS[name], f"trainer.runs_dir={run.path.parent}", f"trainer.name={run.path.name}", *more]


def _wait_for(child: _Child, run: RunFolder, kind: str, file: Path | None = None) -> None:
    """Wait until a run has an event, or a file is there; or until the run has ended."""
    mark = f'"kind": "{kind}"'.encode()
    while child.process.is_alive():
        if file.is_file() if file is not None else run.journal.is_file() and mark in run.journal.read_bytes():
            return
        time.sleep(_POLL_S)


def _difference(run: RunFolder, twin: RunFolder) -> str:
    """Say where a run and its twin part; empty if the weights are equal."""
    if _weights_of(run) == _weights_of(twin):
        return ""
    first = compare_runs(run.path, twin.path).first
    return "its weights differ" if first is None else f"it differs from step {first.step} on: {first.what}"


def _weights_of(run: RunFolder) -> dict[str, str]:
    newest = run.checkpoints / checkpoint.checkpoint_name(checkpoint.newest_whole(run.checkpoints))
    files = sorted(newest.rglob("*.safetensors"))
    return {str(file.relative_to(newest)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
