"""Known troubles of a run, each with its evidence and the key to turn: a reader of its journal and its rollouts.

Owns: which troubles are known. Must not know: how they are shown. What a single step deserves is decided by
`observability/health.yaml`; here it must have lasted. Nothing is stopped because of it.

>>> from rallypoint.journal import RunBegan
>>> began = RunBegan(first=0, config={}, software={}, machine="")
>>> spent = {"time_s/rollout": 8.0, "time_s/learn": 2.0}
>>> steps = [StepDone(step=step, metrics=spent, digests={}, seconds=10.0) for step in range(1, 9)]
>>> found = troubles([Entry(number, number, event) for number, event in enumerate([began, *steps])])
>>> [(one.words, one.evidence) for one in found]
[('rollout takes most of the time', '80% of the time of a step, 8.00 s of 10.0 s')]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rallypoint.errors import RunFolderError
from rallypoint.journal import (
    BatchTaken,
    Entry,
    RoleLost,
    RolesRestarted,
    RolesStarted,
    StepDone,
    read_journal,
)
from rallypoint.journal.state import RunState, fold
from rallypoint.observability.health import Health, Level, health, in_percent, rules
from rallypoint.observability.numbers import counted, duration, finite_mean, number
from rallypoint.observability.spans import TIME_PREFIX, shares_of, spans_of, top_level
from rallypoint.observability.trend import FLAT_STEPS, REWARD, SPREAD, RewardTrend, error_of_means, jump
from rallypoint.run.copies import is_copy
from rallypoint.run.folder import RunFolder
from rallypoint.run.reports import config_of
from rallypoint.run.rollouts import rollout_files, scores_in
from rallypoint.run.waste import account

_LASTS, _NEWEST = 0.2, 5
"""Share of the steps in which a finding must hold, or number of the newest steps in a row."""
_MOST_FILES = 64
"""Files of rollouts that are read: the newest."""
_PHASES = {
    "rollout": "give it more of the machine: ranks in cluster.pools, or rollout.max_staleness (`rally simulate RUN`)",
    "reward": "a faster reward.function, or more processes for it (reward.num_processes)",
    "judge": "raise engine.max_tokens_per_micro_batch, or give the actor's pool more ranks",
    "learn": "raise engine.max_tokens_per_micro_batch, or give the actor's pool more ranks",
    "publish": "set rollout.weights, or place the rollout role beside the actor",
}
"""Phase of a step -> what to do if it takes most of the time."""
_WASTES = {
    "done again": (0.1, "lower checkpoint.every_steps, and see what ended the starts: rally logs RUN --errors"),
    "replaced": (0.3, "easier prompts, or harder ones if most are solved: most groups teach nothing"),
    "given up": (0.3, "lower rollout.over_sampling"),
    "stale": (0.2, "lower rollout.max_staleness, or widen the bounds of correction"),
    "samplers waited": (0.25, "set rollout.over_sampling or rollout.max_staleness, so that no rank waits"),
    "trainer waited": (0.4, "give the rollout role more ranks (`rally simulate RUN` estimates what that gains)"),
}
"""Cause of `rally waste` -> share of the run's seconds above which it is told, and what to do."""
_FOLLOWS = {
    "rollout takes most of the time": "rollout rank",
    "samplers waited": "rollout rank",
    "groups without signal": ("update kl high", "prompts that nobody solves"),
    "rewards all equal": "update kl high",
}
"""Trouble -> how the words of one begin that it follows from, if that began no later."""
_MOVED = ("actor/approx_kl", "actor/grad_norm", "actor/clip_fraction", "actor/entropy", "rollout/response_length")
"""Metrics of which one moves when a reward falls."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is known to go wrong, and did."""

    level: Level
    words: str
    evidence: str
    """The numbers that say so."""
    advice: str
    """Key to turn, or what to look at."""
    first: int | None = None
    """First step of it; None if it belongs to no step."""
    last: int | None = None
    name: str = ""
    """Metric that says so, or how the names of several begin; empty if none does."""
    prompts: tuple[str, ...] = ()
    """Names of prompts with which the evidence ends."""
    follows: str = ""
    """Words of the trouble that it follows from."""

    @property
    def steps(self) -> str:
        """The steps as text; empty if there are none."""
        if self.first is None:
            return ""
        return f"step {self.first}" if self.last in (None, self.first) else f"steps {self.first} to {self.last}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Story:
    """What the checks read."""

    entries: Sequence[Entry]
    state: RunState
    steps: Sequence[StepDone]
    """Those that count, in order."""
    is_over: bool
    """Whether it is known that nobody trains in it any more."""

    def series(self, name: str) -> list[float]:
        """Return a metric of each step; NaN where it is missing."""
        return [step.metrics.get(name, math.nan) for step in self.steps]

    @property
    def width(self) -> int:
        """Steps of a window: a quarter of the run, 20 at most."""
        return min(20, len(self.steps) // 4)

    def range(self, begin: int, end: int) -> tuple[int, int]:
        """Return the numbers of the first and last of some steps."""
        return self.steps[begin].step, self.steps[end - 1].step


def troubles_of(folder: Path) -> list[Trouble]:
    """Return the known troubles of a run, the worst first.

    Raises:
        RunFolderError: the folder has no journal, or it is damaged.
    """
    if not (run := RunFolder(folder)).journal.is_file():
        raise RunFolderError(f"{folder}: expected the folder of a run, with a journal.jsonl")
    return troubles(read_journal(run.journal), run)


def troubles(entries: Iterable[Entry], folder: RunFolder | None = None) -> list[Trouble]:
    """Return those that a journal shows, the worst first.

    Args:
        entries: of the whole journal, oldest first.
        folder: of the run, to look at its rollouts, and whether it goes on; None looks at the journal alone.
    """
    entries = list(entries)
    state = fold(entries)
    is_over = folder is not None and not (folder.is_in_use() or is_copy(folder.path))
    story = _Story(entries, state, [state.steps[step] for step in sorted(state.steps)], is_over)
    of_steps = (_of_health, _of_fall, _of_kl, _of_lengths, _of_ranks, _of_time, _of_waste) if story.steps else ()
    found = [trouble for check in (*of_steps, _of_ends, _of_clock) for trouble in check(story)]
    if folder is not None:
        found += _of_prompts(folder.path)
        found = [dataclasses.replace(one, advice=one.advice.replace("RUN", str(folder.path))) for one in found]
    found = [_after_its_cause(one, found) for one in found]
    return sorted(found, key=lambda one: (one.level != "bad", one.follows != ""))


def _after_its_cause(one: Trouble, found: Iterable[Trouble]) -> Trouble:
    """Return a trouble with the one that it follows from, whose advice is then the one to heed."""
    begins = _FOLLOWS.get(one.words)
    causes = (other for other in found if begins and other.words.startswith(begins))
    cause = next((other for other in causes if (other.first or 0) <= (one.first or math.inf)), None)
    if cause is None:
        return one
    return dataclasses.replace(one, follows=cause.words, advice=f"follows from: {cause.words}")


def _of_health(story: _Story) -> Iterator[Trouble]:
    """Yield the findings of steps that lasted; one that must not happen at all is told of a single step."""
    config, by_name = config_of(story.state.began), defaultdict[str, list[tuple[int, Health]]](list)
    trend = RewardTrend(num_warmup_steps=config.num_warmup_steps if config else 0)
    for place, step in enumerate(story.steps):
        trend.add(step.metrics)
        for item in health({**step.metrics, FLAT_STEPS: trend.num_flat_steps}):
            if item.level != "ok":
                by_name[item.words].append((place, item))
    never = {rule.name for rule in rules() if rule.above is not None and not rule.above[0]}
    for words, found in by_name.items():
        places, name = [place for place, _ in found], found[-1][1].name
        newest = list(range(len(story.steps) - _NEWEST, len(story.steps)))
        lasts = len(found) >= _LASTS * len(story.steps) or places[-_NEWEST:] == newest
        if not (lasts or name in never or not math.isfinite(found[0][1].value)):
            continue
        num_bad = sum(item.level == "bad" for _, item in found)
        worst_place, worst = max(found, key=lambda one: one[1].distance)
        of = f"in {len(found)} of {counted(len(story.steps), 'step')}"
        mean, peak = (in_percent(name, value) for value in (finite_mean([one.value for _, one in found]), worst.value))
        values = f"mean {mean}, worst {peak}" if len(found) > 1 else peak
        said = f"{name}{worst.limit} {of}: {values} (step {story.steps[worst_place].step})"
        first, last = story.steps[places[0]].step, story.steps[places[-1]].step
        level: Level = "bad" if 2 * num_bad >= len(found) else "watch"
        yield Trouble(level, words, said, worst.advice, first, last, name)


def _of_fall(story: _Story) -> Iterator[Trouble]:
    """A reward that was higher, with the metric that moved when it fell."""
    scored = [step for step in story.steps if math.isfinite(step.metrics.get(REWARD, math.nan))]
    story = dataclasses.replace(story, steps=scored)
    rewards, width = story.series(REWARD), story.width
    if width < 3:
        return
    means = [finite_mean(rewards[at : at + width]) for at in range(len(rewards) - width + 1)]
    earlier = means[: len(rewards) - 2 * width + 1]
    drop = max(earlier) - means[-1]
    spread, noise = finite_mean(story.series(SPREAD)), error_of_means(rewards, width)
    if drop <= max(4 * noise, 0.25 * spread if spread > 0 else 0.0):
        return
    best = max(at for at, mean in enumerate(earlier) if mean >= max(earlier) - 0.05 * drop)  # the last before it fell
    half = means[best] - drop / 2
    fell = next(at for at in range(best, len(means)) if means[at] < half)
    moved, name = _moved(story, best)
    kept = max((step for step in story.state.checkpoints if step <= story.steps[best + width - 1].step), default=0)
    again = f"go on: rally train RUN --resume --from-step {kept}" if kept else "begin a new run"
    high = "-".join(map(str, story.range(best, best + width)))
    said = f"{REWARD} {number(means[best])} in steps {high}, {number(means[-1])} in the last {width}{moved}"
    advice = f"lower actor.optimizer.lr, or bound the update (kl.coef, actor.num_epochs), and {again}"
    yield Trouble("bad", "reward fell", said, advice, *story.range(fell, len(rewards)), name)


def _moved(story: _Story, begin: int) -> tuple[str, str]:
    """Name the metric that jumped highest from some step on, in the logarithm, with its means before and after."""
    found = list[tuple[float, str, str]]()
    for name in _MOVED:
        values = [(at, value) for at, value in enumerate(story.series(name)) if at >= begin and 0 < value < math.inf]
        if len(values) < 6:
            continue
        place = jump([math.log(value) for _, value in values])
        before, after = (finite_mean([value for _, value in part]) for part in (values[:place], values[place:]))
        if (size := abs(math.log(after / before))) >= math.log(2):
            amounts = f"{in_percent(name, before)} -> {in_percent(name, after)}"
            found.append((size, f"; {name} {amounts} from step {story.steps[values[place][0]].step} on", name))
    return max(found)[1:] if found else ("", REWARD)


def _of_kl(story: _Story) -> Iterator[Trouble]:
    """A policy that moves away from the reference, and earns nothing by it."""
    width = story.width
    name = next((one for one in ("kl/reference_mean", "actor/reference_kl") if one in story.steps[-1].metrics), None)
    if name is None or width < 3:
        return
    half = len(story.steps) // 2
    kl, rewards = story.series(name), story.series(REWARD)
    before, after = finite_mean(kl[half - width : half]), finite_mean(kl[-width:])
    rise = finite_mean(rewards[-width:]) - finite_mean(rewards[half - width : half])
    enough = max(2 * error_of_means(rewards[half - width :], width), 0.05 * finite_mean(story.series(SPREAD) or [0.0]))
    if not (after > 1.3 * before and after - before > 0.01) or not rise < enough:
        return
    said = f"{name} {number(before)} -> {number(after)}, {REWARD} {rise:+.3g}"
    advice = "raise kl.coef, lower actor.optimizer.lr, or stop: validate, and keep the best (checkpoint.keep_best)"
    yield Trouble("watch", "KL grows, the reward does not", said, advice, *story.range(half - width, len(kl)), name)


def _of_lengths(story: _Story) -> Iterator[Trouble]:
    """Answers that vanish while the reward rises: the reward pays for saying nothing."""
    width = story.width
    lengths, rewards = story.series("rollout/response_length"), story.series(REWARD)
    if width < 3:
        return
    before, after = finite_mean(lengths[:width]), finite_mean(lengths[-width:])
    gained = finite_mean(rewards[-width:]) - finite_mean(rewards[:width])
    if not (after < 0.4 * before and gained > 0):
        return
    at = next(at for at in range(len(lengths)) if lengths[at] < (before + after) / 2)
    said = f"rollout/response_length {number(before)} -> {number(after)} tokens, {REWARD} {gained:+.3g}"
    advice = "does reward.function pay the empty answer? rally show RUN --best 3, and rally check-reward RUN"
    steps = story.range(at, len(lengths))
    yield Trouble("bad", "answers vanish, and earn more", said, advice, *steps, "rollout/response_length")


def _of_time(story: _Story) -> Iterator[Trouble]:
    """A phase that takes most of a step, and validations and checkpoints that take much of the run."""
    first, last = story.range(0, len(story.steps))
    spent = Counter[str]()
    for step in story.steps:
        spent.update(spans_of(step.metrics))
    whole_s = math.fsum(step.seconds for step in story.steps)
    for name, share in shares_of(top_level(spent), whole_s).items():
        if share >= 0.7 and name in _PHASES:
            each = [f"{number(seconds / len(story.steps))} s" for seconds in (spent[name], whole_s)]
            said = f"{share:.0%} of the time of a step, {each[0]} of {each[1]}"
            yield Trouble(
                "watch", f"{name} takes most of the time", said, _PHASES[name], first, last, f"{TIME_PREFIX}{name}"
            )
    between = {
        "validation": (story.state.validations, "validate", "raise validation.every_steps, or shorten data.validation"),
        "saving": (story.state.checkpoints, "checkpoint", "raise checkpoint.every_steps"),
    }
    for words, (events, name, advice) in between.items():
        took_s = math.fsum(event.metrics.get(TIME_PREFIX + name, 0.0) for event in events.values())
        if took_s > 0.3 * (whole_s + took_s):
            said = f"{duration(took_s)} beside {duration(whole_s)} of steps"
            yield Trouble("watch", f"{words} takes long", said, advice, name=f"{TIME_PREFIX}{name}")


def _of_ranks(story: _Story) -> Iterator[Trouble]:
    """A rank that is slower than the others of its role in most steps."""
    busy = defaultdict[str, list[Sequence[float]]](list)
    where: Mapping[str, Sequence[str]] = {}
    for entry in story.entries:
        match entry.event:
            case BatchTaken(busy_s=seconds) if len(seconds) > 1:
                busy["rollout"].append(seconds)
            case RolesStarted(processes=processes) | RolesRestarted(processes=processes):
                where = {**where, **processes}
            case _:
                pass
    first, last = story.range(0, len(story.steps))
    for role, steps in busy.items():
        num_ranks = len(steps[-1])
        same = [step for step in steps if len(step) == num_ranks]
        slowest, times = Counter(max(range(num_ranks), key=step.__getitem__) for step in same).most_common(1)[0]
        mine = finite_mean([step[slowest] for step in same])
        others = finite_mean([value for step in same for rank, value in enumerate(step) if rank != slowest])
        if len(same) < 3 or times < 0.7 * len(same) or mine < 1.3 * others:
            continue
        place = f" (process {where[role][slowest]})" if len(where.get(role, ())) == num_ranks else ""
        said = f"busy {number(mine)} s a step, the others {number(others)} s; slowest in "
        said += f"{times} of {counted(len(same), 'step')}"
        advice = f"look at its machine{place}: heat, other jobs, a slower device; `rally doctor` there"
        yield Trouble("watch", f"{role} rank {slowest} is slow", said, advice, first, last, f"{TIME_PREFIX}{role}")


def _of_waste(story: _Story) -> Iterator[Trouble]:
    found = account(story.entries)
    for waste in found.wastes:
        share, advice = _WASTES.get(waste.cause, (math.inf, ""))
        if waste.seconds > share * found.seconds > 0:
            how_often = f", {counted(waste.num, waste.unit)}" if waste.num else ""
            part = f"{waste.seconds / found.seconds:.0%}"
            said = f"{part}: {duration(waste.seconds)} of {duration(found.seconds)}{how_often}"
            yield Trouble("watch", waste.cause, said, advice, name=TIME_PREFIX)


def _of_ends(story: _Story) -> Iterator[Trouble]:
    """Starts that ended by themselves, and processes that were lost."""
    state = story.state
    over = state.attempts if story.is_over else state.attempts[:-1]
    killed = [one.step for one in over if one.ended is None]
    if killed:
        said = f"{counted(len(killed), 'start')} without an end, after step {', '.join(map(str, killed))}"
        why = "kill -9, out of memory (dmesg), or a time limit of the scheduler? lower checkpoint.every_steps"
        yield Trouble("watch", "killed", said, why)
    lost = [event for event in story.state.losses if isinstance(event, RoleLost)]
    for role, times in Counter(event.role for event in lost).items():
        steps = [event.step for event in lost if event.role == role and event.step is not None]
        why = next(event.why for event in reversed(lost) if event.role == role)
        said = f"{counted(times, 'time')}; the last: {why}"
        advice = "out of memory? lower engine.max_tokens_per_micro_batch or rollout.cache_tokens; rally logs RUN"
        yield Trouble(
            "watch", f"{role} lost a process", said, advice, min(steps, default=None), max(steps, default=None)
        )
    ended = story.state.ended
    if ended is not None and ended.how == "failed":
        yield Trouble("bad", "failed", ended.why.strip().partition("\n")[0], "rally logs RUN --errors has all of it")


def _of_clock(story: _Story) -> Iterator[Trouble]:
    """A clock that was set back while the run wrote."""
    pairs = itertools.pairwise(story.entries)
    back = [(before.time_s - after.time_s, after.number) for before, after in pairs if before.time_s - after.time_s > 1]
    if back:
        said = f"{number(max(back)[0])} s back at line {max(back)[1]} of journal.jsonl"
        yield Trouble("watch", "clock was set back", said, "let chrony or ntpd keep time")


def _of_prompts(folder: Path) -> Iterator[Trouble]:
    """Prompts of several groups that never earned more than the lowest score, while others did."""
    files = dict(list(rollout_files(folder).items())[-_MOST_FILES:])
    best, groups = dict[str, float](), defaultdict[str, set[int]](set)
    lowest = math.inf
    for step, file in files.items():
        try:
            rows = scores_in(file, file.stat().st_mtime)
        except (RunFolderError, OSError):
            yield Trouble("watch", "rollouts damaged", str(file), "remove the file", step)
            continue
        for name, index, score in rows:
            if score is not None and math.isfinite(score):
                best[name] = max(score, best.get(name, -math.inf))
                lowest = min(lowest, score)
                groups[name].add(index)
    known = [name for name in best if len(groups[name]) > 1]
    never = [name for name in known if best[name] <= lowest]
    if len(known) < 4 or not 0.3 * len(known) <= len(never) < len(known):
        return
    more = f" and {len(never) - 3} more" if len(never) > 3 else ""
    said = (
        f"{len(never) / len(known):.0%} of {counted(len(known), 'prompt')} earned {number(lowest)}, the lowest score, "
        f"in all of their {counted(sum(len(groups[name]) for name in never), 'group')} in the last "
        f"{counted(len(files), 'step')} with rollouts: {', '.join(never[:3])}{more}"
    )
    advice = "leave them out of data.train, or set rollout.dynamic_sampling; is their ground truth right?"
    yield Trouble(
        "watch", "prompts that nobody solves", said, advice, name="actor/without_signal", prompts=tuple(never)
    )
