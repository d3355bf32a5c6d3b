"""Records and replays what a run that samples ahead did, in its order.

Owns: the events `SliceSent`, `WeightsLoaded` and `Resumed`; `run/recorded_schedule.py` reads them and says whose they
are. Must not know: what is sampled, or what for. Invariant: an engine's outputs follow from its calls alone, so a rank
that gets the same requests between the same steps, and new weights there, samples the same tokens, to the bit. So an
event says what was sent to a rank, or to all of them, in the order in which it was sent:

    WeightsLoaded(version=0, ...)                               all ranks: weights of version 0
    SliceSent(rank=1, new=[[0, 0, 0, 4]], num_steps=31)         rank 1: begin samples 0 to 3 of prompt 0, take 31 steps

The first number of a request is the distance of its seed from that of the run, which says its turn.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from rallypoint.config import RunConfig
from rallypoint.errors import RallyError, ScheduleError
from rallypoint.generation import Request
from rallypoint.journal import (
    Event,
    Journal,
    Resumed,
    RolloutFailed,
    SliceSent,
    WeightsLoaded,
    WeightsPublished,
    read_journal,
)
from rallypoint.roles.rank_engine import SliceRequest, SliceResult
from rallypoint.run.recorded_schedule import FailureName, Origin, RecordedSchedule
from rallypoint.run.waste import sampled_again
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.kept import GoneOn

Name: TypeAlias = tuple[int, int, int]
"""Distance of a request's seed from that of the run, its prompt, and its sample."""
Send: TypeAlias = Callable[[SliceRequest], Awaitable[SliceResult]]
"""Has a rank do what it is asked."""
Advance: TypeAlias = Callable[[int, SliceRequest], Awaitable[SliceResult]]
"""Has any rank do what it is asked."""
Load: TypeAlias = Callable[[], Awaitable[str | None]]
"""Has all ranks load weights, and returns their digest; None if they sample from the actor's own tensors."""

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
    """Writes what the ranks were sent into the run's journal, in the order in which it was sent."""

    def __init__(self, journal: Journal, origin: Origin, seed: int, *, is_ahead: bool = True) -> None:
        """Begin without anything under way.

        Args:
            journal: of the run.
            origin: of the run.
            seed: of the run.
            is_ahead: whether slices are written; what samples and trains in turns is repeated without them.
        """
        self._journal, self._origin, self._seed, self.is_ahead = journal, origin, seed, is_ahead
        self._sent: list[tuple[bool, list[Event]]] = []
        """Calls that are to be written, in their order, and whether each is a load; empty until it has returned."""
        self._published = ""
        """Digest of the newest weights."""

    def go_on(self, step: int, version: int, done: PromptsDone, kept: Sequence[int]) -> GoneOn:
        """Go on after a step; what was sampled since is sampled again, but for the groups that were kept.

        None is kept of a run that goes on with another config.
        """
        resumed = Resumed(step=step, version=version, done=dataclasses.asdict(done), kept=kept)
        loads = list[int]()
        if self.is_ahead:
            try:
                before = RecordedSchedule.read(self._journal.path, resumed)
                loads, why = before.loads, before.why_not_with(self._origin)
            except ScheduleError:
                why = "has not sampled ahead from its start"
            if why:
                resumed = dataclasses.replace(resumed, kept=())
                self._journal.say(f"rollout.schedule cannot repeat this run, as it {why}")
        self._journal.append(resumed)
        if num := sampled_again(read_journal(self._journal.path)):
            self._journal.say(f"{num:,} tokens of groups that were finished after step {step} are sampled again")
        return GoneOn(resumed.kept, loads[:-1])

    async def send(self, rank: int, asked: SliceRequest, send: Send) -> SliceResult:
        """Send what a rank is asked and write down what became of it."""
        async with self._writing(is_load=False) as written:
            done = await send(asked)
            if asked.new or done.num_steps:
                new = pack([name_of(request, self._seed) for _, request in asked.new])
                written.append(SliceSent(rank=rank, new=new, num_steps=done.num_steps))
        return done

    def announce(self, version: int, digest: str) -> None:
        """Write down that weights are published, with their digest."""
        self._published = digest
        self._journal.append(WeightsPublished(version=version, digest=digest))

    async def load(self, version: int, load: Load) -> None:
        """Load weights and write it down."""
        async with self._writing(is_load=True) as written:
            digest = self._published if (loaded := await load()) is None else loaded
            written.append(WeightsLoaded(version=version, num_ranks=self._origin.num_ranks, digest=digest))

    @contextlib.asynccontextmanager
    async def _writing(self, *, is_load: bool) -> AsyncIterator[list[Event]]:
        """Write what the block puts into the list, before its caller goes on, unless weights are being loaded.

        A load is written after all that was sent before it, and before all that was sent after it.
        """
        written: list[Event] = []
        self._sent.append((is_load, written))
        try:
            yield written
        finally:
            # What has failed leaves no line, and neither does what has nothing to write.
            found, self._sent = [one for one in self._sent if one[1] or one[1] is not written], []
            for of_load, events in found:
                if not events or any(before for before, _ in self._sent) or (of_load and self._sent):
                    self._sent.append((of_load, events))
                else:
                    self._journal.append(*events)


class ScheduleReplay:
    """Sends ranks what a schedule says, as soon as it is there; when the schedule ends, whatever there is."""

    def __init__(
        self,
        recorded: RecordedSchedule,
        seed: int,
        *,
        journal: Journal,
        timeout_s: float,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Begin at the first line.

        Args:
            recorded: what to repeat.
            seed: of this run.
            journal: told what is waited for, and when the schedule is at its end.
            timeout_s: how long to wait for a request or for weights that the schedule has next.
            patience_s: seconds from one line about what is waited for to the next.
        """
        self._events = collections.deque(recorded.events)
        self._takes = collections.deque(recorded.takes)
        self._failed = collections.deque(recorded.failed)
        self._seed, self._timeout_s, self._patience_s, self._journal = seed, timeout_s, patience_s, journal
        self._arrived: list[dict[Name, tuple[int, Request]]] = [{} for _ in range(recorded.num_ranks)]
        self._cancelled: list[list[int]] = [[] for _ in range(recorded.num_ranks)]
        self._has_changed = asyncio.Event()
        self._problem: RallyError | None = None
        """Why a rank will not take the slices that others wait for."""

    def wake(self) -> None:
        """Look again: a request has come."""
        self._has_changed.set()

    async def send(self, rank: int, asked: SliceRequest, send: Send) -> SliceResult:
        """Take requests in, and send those of a rank's next slice once all are there; no outputs while some are not."""
        self._arrived[rank] |= {name_of(request, self._seed): (number, request) for number, request in asked.new}
        self._cancelled[rank] += asked.cancelled
        names, num_steps = list(self._arrived[rank]), None
        if not self.is_free:
            event = self._next_of(rank)
            names, num_steps = ([], None) if event is None else (unpack(event.new), event.num_steps)
            missing = [name for name in names if name not in self._arrived[rank]]
            if event is None or missing:
                await self._change(f"prompt {missing[0][1]} sample {missing[0][2]}" if missing else self._awaited)
                return SliceResult()
            self._events.remove(event)
        new = tuple(self._arrived[rank].pop(name) for name in names)
        cancelled = tuple(self._cancelled[rank])
        try:
            done = await send(dataclasses.replace(asked, new=new, cancelled=cancelled, num_steps=num_steps))
        except RallyError as error:
            self._problem = error
            self._has_changed.set()
            raise
        self._cancelled[rank].clear()
        self._has_changed.set()
        return done

    def _next_of(self, rank: int) -> SliceSent | None:
        """Return a rank's next slice; None if all ranks get new weights before, or it has none any more."""
        for event in self._events:
            if not isinstance(event, SliceSent):
                return None
            if event.rank == rank:
                return event
        return None

    @property
    def _awaited(self) -> str:
        """What a rank waits for that has no slice next."""
        first = self._events[0]
        return f"a slice of rank {first.rank}" if isinstance(first, SliceSent) else "new weights"

    async def load(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        """Load weights when the schedule says so."""
        while not self.is_free and isinstance(self._events[0], SliceSent):
            await self._change("requests that end before")
        expected = None if self.is_free else self._events[0]
        if expected is not None and not isinstance(expected, SliceSent) and expected.version != version:
            raise ScheduleError(
                f"rollout.schedule has weights of version {expected.version} next, but version {version} is "
                "published: it is not the schedule of a run with this config"
            )
        await load()
        if not self.is_free:
            self._events.popleft()
            if not self._events:
                self._journal.say("rollout.schedule ends here; from now on rollouts are sampled as they come")
        self._has_changed.set()

    @property
    def next_take(self) -> tuple[int, ...] | None:
        """The prompts of the next step; None if the schedule does not say."""
        return self._takes[0] if self._takes else None

    def taken(self) -> None:
        """Record that a step is trained on the next prompts."""
        if self._takes:
            self._takes.popleft()

    async def resumed_after(self, step: int) -> Resumed | None:
        """Return how the run went on from a checkpoint of this step, once all is sent that was sent before; or None."""
        ahead = next((one for one in self._events if not isinstance(one, SliceSent)), None)
        if not isinstance(ahead, Resumed) or ahead.step != step:
            return None
        while self._events[0] is not ahead:
            await self._change("requests that end before")
        return ahead

    def resume(self) -> None:
        """Go on there.

        The first that happened was that the weights of the checkpoint were loaded; here they are.
        """
        resumed = self._events.popleft()
        assert isinstance(resumed, Resumed), "see resumed_after"
        self._failed.popleft()
        if self._events and isinstance(self._events[0], WeightsLoaded):
            self._events.popleft()
        for each in (*self._arrived, *self._cancelled):
            each.clear()

    def failure_of(self, name: FailureName) -> RolloutFailed | None:
        """Return how a rollout failed; None if it did not."""
        return None if self.is_free else self._failed[0].get(name)

    @property
    def is_free(self) -> bool:
        """Whether nothing of it is left that this start is to repeat."""
        return not self._events or isinstance(self._events[0], Resumed)

    async def _change(self, awaited: str) -> None:
        """Wait until something has come or ended.

        Raises:
            RallyError: a rank has failed in a slice, such as a process that was lost.
            ScheduleError: nothing has come, for too long.
        """
        self._has_changed.clear()
        waited_s = 0.0
        while self._problem is None and waited_s < self._timeout_s:
            pause_s = min(self._patience_s, self._timeout_s - waited_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._has_changed.wait()
                break
            waited_s += pause_s
            if waited_s < self._timeout_s:
                self._journal.say(
                    f"rollout.schedule has {awaited} next, which has not come for {waited_s:.0f} s; after "
                    f"{self._timeout_s:g} s the run ends"
                )
        if self._problem is not None:
            raise self._problem
        if waited_s >= self._timeout_s:
            raise ScheduleError(
                f"rollout.schedule has {awaited} next, which did not come in {self._timeout_s:g} s: it is not the "
                "schedule of a run with this config"
            )


class Schedule:
    """Which calls of ranks are written down, and in which order an earlier run's are repeated."""

    def __init__(self, recorder: Recorder | None = None, replay: ScheduleReplay | None = None) -> None:
        self.recorder, self.replay = recorder, replay
        self.has_slices = replay is not None or (recorder is not None and recorder.is_ahead)
        """Whether slices are sent by it; those of a run that samples and trains in turns are sent as they come."""

    @classmethod
    def of(cls, config: RunConfig, journal: Journal, num_ranks: int) -> Schedule:
        """Return that of a run.

        Args:
            config: of the run.
            journal: of the run.
            num_ranks: that sample.

        Raises:
            ScheduleError: rollout.schedule cannot be read, or is of another run.
        """
        is_ahead = config.rollout.max_staleness > 0
        recorder = Recorder(journal, Origin.of(config, num_ranks), config.seed, is_ahead=is_ahead)
        if config.rollout.schedule is None or not is_ahead:
            return cls(recorder)
        recorded = RecordedSchedule.read(Path(config.rollout.schedule))
        recorded.check(config.rollout.schedule, config, num_ranks)
        return cls(
            recorder, ScheduleReplay(recorded, config.seed, journal=journal, timeout_s=config.cluster.call_timeout_s)
        )

    async def send(self, advance: Advance, rank: int, asked: SliceRequest) -> SliceResult:
        """Have a rank do what it is asked, in a run that `has_slices`."""

        async def record(asked: SliceRequest) -> SliceResult:
            send = functools.partial(advance, rank)
            return await (send(asked) if self.recorder is None else self.recorder.send(rank, asked, send))

        return await (record(asked) if self.replay is None else self.replay.send(rank, asked, record))

    def announce(self, version: int, digest: str) -> None:
        """Record that weights are published."""
        if self.recorder is not None:
            self.recorder.announce(version, digest)

    async def load(self, version: int, load: Load) -> None:
        """Have every rank load weights."""

        async def record() -> None:
            await (load() if self.recorder is None else self.recorder.load(version, load))

        await (record() if self.replay is None else self.replay.load(version, record))

    def go_on(self, step: int, version: int, done: PromptsDone, kept: Sequence[int]) -> GoneOn:
        """Record that the run goes on after a step, with weights of that version and those prompts done or kept.

        Raises:
            ScheduleError: it repeats a schedule, whose rollouts of the next steps were begun with older weights.
        """
        if self.replay is not None:
            raise ScheduleError(
                f"rollout.schedule cannot continue after step {step}: rollouts of the next steps were begun "
                "with weights that are gone; start over with --resume --from-step 0, or set rollout.schedule=null"
            )
        return GoneOn(kept) if self.recorder is None else self.recorder.go_on(step, version, done, kept)
