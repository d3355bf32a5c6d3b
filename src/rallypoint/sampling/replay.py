"""Records and replays what a run that samples ahead did, in its order.

Owns: the lines of `schedule.jsonl`; `run/recorded_schedule.py` reads it and says whose it is. Must not know: what is
sampled, or what for. Invariant: an engine's outputs follow from its calls alone, so a rank that gets the same requests
between the same steps, and new weights there, samples the same tokens, to the bit. So a line says what was sent to a
rank, or to all of them, in the order in which it was sent:

    {"num_ranks": 2, "config": {...}}            the first line
    {"load": 0}                                  all ranks: weights of version 0
    {"rank": 1, "slice": [[[0, 0, 0, 4]], 31]}   rank 1: begin samples 0 to 3 of prompt 0, then take 31 steps
    {"take": [0, 2]}                             a step was trained on these prompts; with a window only
    {"resumed": 20, "done": {...}, ...}          the run was killed, and went on after step 20

The first number of a request is the distance of its seed from that of the run, which says its turn.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.config import RunConfig
from rallypoint.disk import naming
from rallypoint.errors import ScheduleError
from rallypoint.generation import Request
from rallypoint.roles.rank_engine import SliceRequest, SliceResult
from rallypoint.run.recorded_schedule import SCHEDULE, Origin, RecordedSchedule, listed
from rallypoint.sampling.groups import PromptsDone

Name: TypeAlias = tuple[int, int, int]
"""Distance of a request's seed from that of the run, its prompt, and its sample."""
Send: TypeAlias = Callable[[SliceRequest], Awaitable[SliceResult]]
"""Has a rank do what it is asked."""

PATIENCE_S = 30.0
"""Seconds of waiting for what a schedule has next, after which a line says so; and again after as many."""


def name_of(request: Request, seed: int) -> Name:
    """Return what a request is called in a schedule of a run with that seed."""
    return request.params.seed - seed, request.prompt_index, request.sample_index


def pack(names: Sequence[Name]) -> list[list[int]]:
    """Write successive samples of a prompt as one: the first of them, and their number.

    >>> pack([(0, 7, 0), (0, 7, 1), (0, 8, 0)])
    [[0, 7, 0, 2], [0, 8, 0, 1]]
    """
    packed: list[list[int]] = []
    for turn, prompt, sample in names:
        if packed and packed[-1][:2] == [turn, prompt] and packed[-1][2] + packed[-1][3] == sample:
            packed[-1][3] += 1
        else:
            packed.append([turn, prompt, sample, 1])
    return packed


def unpack(packed: Sequence[Sequence[int]]) -> list[Name]:
    """Return the names that `pack` was given.

    >>> unpack([[0, 7, 0, 2], [0, 8, 0, 1]])
    [(0, 7, 0), (0, 7, 1), (0, 8, 0)]
    """
    return [(turn, prompt, first + more) for turn, prompt, first, number in packed for more in range(number)]


class Recorder:
    """Writes the schedule of a run, in the order in which calls were sent."""

    def __init__(self, path: Path, origin: Origin, seed: int, say: Callable[[str], None] = lambda _: None) -> None:
        """Begin a file, over that of a run that is begun anew.

        Args:
            path: of the file.
            origin: of the run.
            seed: of the run.
            say: told when a run goes on in a way that cannot be repeated.
        """
        self._path, self._origin, self._seed, self._say = path, origin, seed, say
        self._entries: collections.deque[dict[str, Any]] = collections.deque([origin.line])
        self._mode = "w"

    def go_on(self, step: int, version: int, done: PromptsDone) -> None:
        """Continue the file of a run that goes on after a step, where its weights of that version had been loaded.

        What was sampled after that is sampled again.
        """
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        loads = [number for number, line in enumerate(lines) if line == json.dumps({"load": version})]
        kept = lines[: loads[-1] + 1] if loads else []
        self._entries = collections.deque([{"resumed": step, "done": dataclasses.asdict(done), **self._origin.line}])
        with naming(self._path):
            self._path.write_text("".join(f"{line}\n" for line in kept))
        self._mode = "a"
        if why := self._why_not_again([json.loads(line) for line in kept]):
            self._say(f"rollout.schedule cannot repeat this run, as it {why}")

    def _why_not_again(self, lines: Sequence[dict[str, Any]]) -> str | None:
        """Return why no one run can do what these lines say and then go on as this one; None if it can."""
        if not lines or "resumed" in lines[0]:
            return f"has no {SCHEDULE} from its start: it sampled nothing ahead there"
        found = [
            each for line in lines if "num_ranks" in line for each in self._origin.differences(Origin.read(line), "was")
        ]
        return f"goes on with {listed(list(dict.fromkeys(found)))}" if found else None

    async def send(self, rank: int, asked: SliceRequest, send: Send) -> SliceResult:
        """Send what a rank is asked and write down what became of it."""
        entry: dict[str, Any] = {"rank": rank}
        self._entries.append(entry)
        with contextlib.ExitStack() as if_it_fails:
            if_it_fails.callback(self._drop, entry)  # those who waited for it are given up
            done = await send(asked)
            if_it_fails.pop_all()
        if asked.new or done.num_steps:
            entry["slice"] = [pack([name_of(request, self._seed) for _, request in asked.new]), done.num_steps]
        else:
            self._drop(entry)
        self._flush()
        return done

    def _drop(self, entry: dict[str, Any]) -> None:
        """Take an unfinished entry out; others may look like it."""
        self._entries = collections.deque(one for one in self._entries if one is not entry)

    async def load(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Load weights and write it down."""
        entry: dict[str, Any] = {}
        self._entries.append(entry)
        await load()
        entry["load"] = version
        self._flush()

    def take(self, indices: Sequence[int]) -> None:
        """Write down which prompts a step is trained on."""
        self._entries.append({"take": list(indices)})
        self._flush()

    def _flush(self) -> None:
        """Write the entries up to the first unfinished one."""
        done: list[str] = []
        while self._entries and self._entries[0].keys() - {"rank"}:
            done.append(json.dumps(self._entries.popleft()) + "\n")
        with naming(self._path), self._path.open(self._mode, encoding="utf-8") as file:
            file.write("".join(done))
        self._mode = "a"


class Replay:
    """Sends ranks what a schedule says, as soon as it is there; when the schedule ends, whatever there is."""

    def __init__(
        self,
        recorded: RecordedSchedule,
        seed: int,
        *,
        timeout_s: float,
        patience_s: float = PATIENCE_S,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Begin at the first line.

        Args:
            recorded: what to repeat.
            seed: of this run.
            timeout_s: how long to wait for a request or for weights that the schedule has next.
            patience_s: seconds from one line about what is waited for to the next.
            say: told what is waited for, and when the schedule is at its end.
        """
        self._events = collections.deque(recorded.events)
        self._takes = collections.deque(recorded.takes)
        self._seed, self._timeout_s, self._patience_s, self._say = seed, timeout_s, patience_s, say
        self._arrived: list[dict[Name, tuple[int, Request]]] = [{} for _ in range(recorded.num_ranks)]
        self._cancelled: list[list[int]] = [[] for _ in range(recorded.num_ranks)]
        self._has_changed = asyncio.Event()

    def wake(self) -> None:
        """Look again: a request has come."""
        self._has_changed.set()

    async def send(self, rank: int, asked: SliceRequest, send: Send) -> SliceResult:
        """Take requests in, and send those of a rank's next slice once all are there; no outputs while some are not."""
        self._arrived[rank] |= {name_of(request, self._seed): (number, request) for number, request in asked.new}
        self._cancelled[rank] += asked.cancelled
        names, num_steps = list(self._arrived[rank]), None
        if not self._is_free:
            event = self._next_of(rank)
            packed, num_steps = event["slice"] if event is not None else ([], None)
            names = unpack(packed)
            missing = [name for name in names if name not in self._arrived[rank]]
            if event is None or missing:
                await self._change(f"prompt {missing[0][1]} sample {missing[0][2]}" if missing else self._awaited)
                return SliceResult()
            self._events.remove(event)
        new = tuple(self._arrived[rank].pop(name) for name in names)
        cancelled = tuple(self._cancelled[rank])
        done = await send(dataclasses.replace(asked, new=new, cancelled=cancelled, num_steps=num_steps))
        self._cancelled[rank].clear()
        self._has_changed.set()
        return done

    def _next_of(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's next slice; None if all ranks get new weights before, or it has none any more."""
        slices = itertools.takewhile(lambda event: "slice" in event, self._events)
        return next((event for event in slices if event["rank"] == rank), None)

    @property
    def _awaited(self) -> str:
        """What a rank waits for that has no slice next."""
        return "new weights" if "load" in self._events[0] else f"a slice of rank {self._events[0]['rank']}"

    async def load(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Load weights when the schedule says so."""
        while not self._is_free and "load" not in self._events[0]:
            await self._change("requests that end before")
        if not self._is_free and self._events[0]["load"] != version:
            raise ScheduleError(
                f"rollout.schedule has weights of version {self._events[0]['load']} next, but version {version} is "
                "published: it is not the schedule of a run with this config"
            )
        await load()
        if not self._is_free:
            self._events.popleft()
            if not self._events:
                self._say("rollout.schedule ends here; from now on rollouts are sampled as they come")
        self._has_changed.set()

    @property
    def next_take(self) -> tuple[int, ...] | None:
        """The prompts of the next step; None if the schedule does not say."""
        return self._takes[0] if self._takes else None

    def taken(self) -> None:
        """Take note that a step is trained on the next prompts."""
        if self._takes:
            self._takes.popleft()

    def resumes_after(self, step: int) -> bool:
        """Whether the run went on from a checkpoint of this step: what was under way is sampled again."""
        return bool(self._events) and self._events[0].get("resumed") == step

    def resume(self) -> PromptsDone:
        """Go on there, and return the prompts that were done.

        The first that happened was that the weights of the checkpoint were loaded; here they are.
        """
        done = self._events.popleft()["done"]
        if self._events and "load" in self._events[0]:
            self._events.popleft()
        for each in (*self._arrived, *self._cancelled):
            each.clear()
        return PromptsDone(done["num_taken"], done["oldest"], tuple(done["ahead"]))

    @property
    def _is_free(self) -> bool:
        return not self._events or "resumed" in self._events[0]

    async def _change(self, awaited: str) -> None:
        """Wait until something has come or ended.

        Raises:
            ScheduleError: nothing has, for too long.
        """
        self._has_changed.clear()
        waited_s = 0.0
        while waited_s < self._timeout_s:
            pause_s = min(self._patience_s, self._timeout_s - waited_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._has_changed.wait()
                return
            waited_s += pause_s
            if waited_s < self._timeout_s:
                self._say(
                    f"rollout.schedule has {awaited} next, which has not come for {waited_s:.0f} s; after "
                    f"{self._timeout_s:g} s the run ends"
                )
        raise ScheduleError(
            f"rollout.schedule has {awaited} next, which did not come in {self._timeout_s:g} s: it is not the "
            "schedule of a run with this config"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """How calls get to the ranks: at once, written down, or as an earlier run's were."""

    recorder: Recorder | None = None
    replay: Replay | None = None

    @classmethod
    def of(cls, config: RunConfig, folder: Path, num_ranks: int, say: Callable[[str], None]) -> Schedule:
        """Return that of a run; one that samples and trains in turns needs none.

        Args:
            config: of the run.
            folder: of the run.
            num_ranks: that sample.
            say: given a line for the user.

        Raises:
            ScheduleError: rollout.schedule cannot be read, or is of another run.
        """
        if not config.rollout.max_staleness:
            return cls()
        recorder = Recorder(folder / SCHEDULE, Origin.of(config, num_ranks), config.seed, say)
        if config.rollout.schedule is None:
            return cls(recorder)
        recorded = RecordedSchedule.read(Path(config.rollout.schedule))
        recorded.check(config.rollout.schedule, config, num_ranks)
        return cls(recorder, Replay(recorded, config.seed, timeout_s=config.cluster.call_timeout_s, say=say))

    async def send(self, rank: int, asked: SliceRequest, send: Send) -> SliceResult:
        """Have a rank do what it is asked."""

        async def record(asked: SliceRequest) -> SliceResult:
            return await (send(asked) if self.recorder is None else self.recorder.send(rank, asked, send))

        return await (record(asked) if self.replay is None else self.replay.send(rank, asked, record))

    async def load(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Have every rank load weights."""

        async def record() -> None:
            await (load() if self.recorder is None else self.recorder.load(version, load))

        await (record() if self.replay is None else self.replay.load(version, record))

    def next_take(self) -> tuple[int, ...] | None:
        """Return the prompts of the next step, if it is known."""
        return None if self.replay is None else self.replay.next_take

    def taken(self, indices: Sequence[int]) -> None:
        """Take note of the prompts of a step."""
        if self.replay is not None:
            self.replay.taken()
        if self.recorder is not None:
            self.recorder.take(indices)

    def wake(self) -> None:
        """Take note that a request has come."""
        if self.replay is not None:
            self.replay.wake()

    def go_on(self, step: int, version: int, done: PromptsDone) -> None:
        """Take note that the run goes on after a step, with weights of that version and those prompts done.

        Raises:
            ScheduleError: it repeats a schedule, whose rollouts of the next steps were begun with older weights.
        """
        if self.replay is not None:
            raise ScheduleError(
                f"rollout.schedule cannot continue after step {step}: rollouts of the next steps were begun "
                "with weights that are gone; start over with --resume --from-step 0, or set rollout.schedule=null"
            )
        if self.recorder is not None:
            self.recorder.go_on(step, version, done)
