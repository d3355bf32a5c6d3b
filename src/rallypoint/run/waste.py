"""Seconds and tokens of a run that bought nothing, by cause: a reader of its journal.

Owns: what counts as waste. Must not know: how it is shown.

Seconds of tokens are their share of the seconds in which the ranks that sample were busy for that step. A step that a
resume did again counts once, as work done again, whatever else was wasted in it. Training packs rows end to end, so
there is no padding to count. The journal has no tokens of groups that were cancelled before they were scored.

>>> began = RunBegan(first=0, config={}, software={}, machine="")
>>> done = StepDone(step=1, metrics={"rollout/num_tokens": 80.0}, digests={}, seconds=2.0)
>>> events = [began, done, began, done, RunEnded(how="finished")]
>>> found = account(Entry(number, number, event) for number, event in enumerate(events))
>>> found.tokens, found.wastes[0]
(160, Waste(cause='done again', num=1, unit='step', tokens=80, seconds=2.0))
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rallypoint.journal import (
    BatchTaken,
    CheckpointSaved,
    Entry,
    GroupDropped,
    GroupScored,
    Resumed,
    RolesStarted,
    RolloutFailed,
    RunBegan,
    RunEnded,
    StepDone,
    Validated,
)
from rallypoint.observability.spans import START, TIME_PREFIX, spans_of, top_level

NO_SIGNAL = "no signal"
"""Why a group was dropped whose scores are all equal."""
_WAITS = ("samplers waited", "trainer waited")


@dataclasses.dataclass(frozen=True, slots=True)
class Waste:
    """What a cause has cost."""

    cause: str
    num: int
    """How often it happened; 0 if it is not counted."""
    unit: str
    tokens: int
    """Tokens that were sampled for nothing."""
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Account:
    """What a run has cost, and what of it was for nothing."""

    seconds: float
    """Seconds at work, of all starts."""
    tokens: int
    """Tokens sampled, of all starts; tokens trained where nothing is sampled."""
    wastes: Sequence[Waste]

    @property
    def tokens_wasted(self) -> int:
        """Tokens of all causes."""
        return sum(waste.tokens for waste in self.wastes)

    @property
    def seconds_wasted(self) -> float:
        """Seconds of all causes; those in which samplers and trainer both waited count once."""
        waits = [waste.seconds for waste in self.wastes if waste.cause in _WAITS]
        others = sum(waste.seconds for waste in self.wastes if waste.cause not in _WAITS)
        return others + max(waits, default=0.0)


@dataclasses.dataclass(slots=True)
class _Start:
    """What a start of the run did."""

    began: RunBegan
    began_s: float
    ended_s: float
    """Time of its newest event."""
    done_s: float
    """Time of the newest event of a step that it has done."""
    start_s: float = 0.0
    steps: dict[int, StepDone] = dataclasses.field(default_factory=dict[int, StepDone])
    takes: dict[int, BatchTaken] = dataclasses.field(default_factory=dict[int, BatchTaken])
    between: list[tuple[int, float]] = dataclasses.field(default_factory=list[tuple[int, float]])
    """Steps and seconds of validations and checkpoints."""
    groups: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    """Tokens of each prompt that is scored, and in no batch yet."""
    scored: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    """Tokens of each prompt that is scored."""
    kept: Sequence[int] = ()
    """Prompts whose groups it took over from the start before."""
    costs: dict[tuple[str, int], list[int]] = dataclasses.field(
        default_factory=lambda: defaultdict[tuple[str, int], list[int]](list)
    )
    """Cause and step -> tokens of each group or rollout."""

    @property
    def step(self) -> int:
        """Step whose batch is being sampled."""
        return max(self.takes, default=self.began.first) + 1

    def take(self, entry: Entry) -> None:
        """Add an event."""
        self.ended_s = entry.time_s
        match entry.event:
            case RolesStarted(metrics=metrics):
                self.start_s, self.done_s = metrics.get(TIME_PREFIX + START, 0.0), entry.time_s
            case GroupScored(validation=None, prompt=prompt, turns=turns):
                self.groups[prompt] = sum(length for *_, spans, _ in turns for _, length in spans)
                self.scored[prompt] = self.groups[prompt]
            case Resumed(kept=kept):
                self.kept = kept
            case GroupDropped(prompt=prompt, why=why):
                cause = "replaced" if why == NO_SIGNAL else "given up"
                self.costs[cause, self.step].append(self.groups.pop(prompt, 0))
            case RolloutFailed(validation=None, num_tokens=num_tokens):
                self.costs["failed", self.step].append(num_tokens)
            case BatchTaken(step=step, prompts=prompts) as taken:
                self.takes[step] = taken
                for prompt in prompts:
                    self.groups.pop(prompt, None)
            case StepDone(step=step) as done:
                self.steps[step], self.done_s = done, entry.time_s
            case Validated(step=step, metrics=metrics) | CheckpointSaved(step=step, metrics=metrics):
                self.between.append((step, sum(top_level(spans_of(metrics)).values())))
                self.done_s = entry.time_s
            case _:
                pass

    def sampled(self, step: int) -> int:
        """Return the tokens of a step that is done."""
        metrics = self.steps[step].metrics
        tokens = int(metrics.get("rollout/num_tokens", metrics.get("actor/num_tokens", 0)))
        return tokens + sum(self.costs.get(("failed", step), ()))

    def busy_s(self, step: int) -> tuple[float, float, float]:
        """Return the seconds of a step's sampling: a rank was busy, it waited, and the trainer waited.

        Where nothing is sampled ahead, samplers and trainer take turns: only the time of the step's batch counts.
        """
        taken = self.takes.get(step)
        if taken is None or not taken.busy_s:
            return 0.0, 0.0, 0.0
        mean, waited = math.fsum(taken.busy_s) / len(taken.busy_s), taken.taken_s - taken.asked_s
        if not self.began.config.get("rollout.max_staleness"):
            return min(mean, waited), max(0.0, waited - mean), 0.0
        before = self.takes.get(step - 1)
        whole = taken.taken_s - (taken.asked_s if before is None else before.taken_s)
        return min(mean, whole), max(0.0, whole - mean), waited

    def wastes(self, last: int) -> Iterator[Waste]:
        """Yield what was wasted in its steps up to `last`, which no later start has done again."""
        for step in [step for step in self.steps if step <= last]:
            metrics, (busy, *waits) = self.steps[step].metrics, self.busy_s(step)
            each_s = busy / max(1, self.sampled(step))
            for cause, unit in (("replaced", "group"), ("given up", "group"), ("failed", "rollout")):
                costs = self.costs.get((cause, step), ())
                num, tokens = len(costs), sum(costs)
                if cause == "failed":
                    num += int(metrics.get("reward/failed", 0))
                    tokens += int(metrics.get("rollout/unscored_tokens", 0))
                yield Waste(cause, num, unit, tokens, tokens * each_s)
            num_epochs = int(str(self.began.config.get("actor.num_epochs", 1)))
            for cause, trained in (("without signal", _unlearned(metrics)), ("stale", _stale(metrics))):
                tokens = round(trained / num_epochs)
                yield Waste(cause, 0, "", tokens, tokens * each_s)
            for cause, seconds in zip(_WAITS, waits, strict=True):
                yield Waste(cause, 0, "", 0, seconds)

    @property
    def unfinished(self) -> int:
        """Tokens of scored groups that no step which is done was trained on."""
        begun = [prompt for step, taken in self.takes.items() if step not in self.steps for prompt in taken.prompts]
        return sum(self.groups.values()) + sum(self.scored.get(prompt, 0) for prompt in begun)

    def taken_over(self, kept: Sequence[int]) -> int:
        """Return the tokens of its groups that a later start has taken over."""
        return sum(self.scored.get(prompt, 0) for prompt in kept)

    def done_again(self, last: int, kept: Sequence[int]) -> Waste:
        """Return what was done after step `last`, and will be done again, without the groups that are kept."""
        steps = [step for step in self.steps if step > last]
        tokens = sum(map(self.sampled, steps)) + self.unfinished - self.taken_over(kept)
        seconds = sum(self.steps[step].seconds for step in steps) + self.ended_s - self.done_s
        return Waste("done again", len(steps), "step", tokens, seconds + sum(s for at, s in self.between if at > last))


def account(entries: Iterable[Entry]) -> Account:
    """Return what a run has cost and wasted.

    Args:
        entries: of its whole journal, oldest first.
    """
    starts = _starts(entries)
    found, tokens = dict[str, Waste](), 0
    for place, start in enumerate(starts):
        later = [other.began.first for other in starts[place + 1 :]]
        last = min(later, default=max(start.steps, default=0))
        kept = starts[place + 1].kept if later else ()
        tokens += sum(map(start.sampled, start.steps)) + (start.unfinished if later else 0)
        tokens -= start.taken_over(kept)
        wastes = [*start.wastes(last), *([start.done_again(last, kept)] if later else [])]
        if place:
            wastes.append(Waste("started again", 1, "start", 0, start.start_s))
        for waste in wastes:
            found[waste.cause] = _sum(found.get(waste.cause), waste)
    wastes = [waste for waste in found.values() if waste.num or waste.tokens or waste.seconds > 0]
    seconds = sum(start.ended_s - start.began_s for start in starts)
    return Account(seconds, tokens, tuple(sorted(wastes, key=lambda waste: -waste.seconds)))


def sampled_again(entries: Iterable[Entry]) -> int:
    """Return the tokens of finished groups that the start before the newest has, and the newest has not taken over.

    Args:
        entries: of a whole journal, oldest first.
    """
    *_, before, newest = [None, None, *_starts(entries)]
    return 0 if before is None or newest is None else before.done_again(newest.began.first, newest.kept).tokens


def _starts(entries: Iterable[Entry]) -> list[_Start]:
    starts = list[_Start]()
    for entry in entries:
        if isinstance(entry.event, RunBegan):
            starts.append(_Start(entry.event, entry.time_s, entry.time_s, entry.time_s))
        elif starts:
            if isinstance(entry.event, RunEnded):
                starts[-1].done_s = entry.time_s  # it ended in order: nothing was under way
            starts[-1].take(entry)
    return starts


def _sum(a: Waste | None, b: Waste) -> Waste:
    if a is None:
        return b
    return dataclasses.replace(b, num=a.num + b.num, tokens=a.tokens + b.tokens, seconds=a.seconds + b.seconds)


def _unlearned(metrics: Mapping[str, float]) -> float:
    """Return the tokens of rows whose advantages are all 0, over all epochs."""
    return metrics.get("actor/num_tokens_without_signal", 0.0)


def _stale(metrics: Mapping[str, float]) -> float:
    """Return the tokens that corrections gave a weight of 0, over all epochs."""
    computed = metrics.get("actor/num_tokens", 0.0)
    if "actor/skipped_fraction" in metrics:
        computed -= _unlearned(metrics)
    share = metrics.get("actor/correction_dropped", 0.0)
    return share * computed if math.isfinite(share) else 0.0
