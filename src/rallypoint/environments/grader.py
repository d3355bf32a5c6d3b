"""Whom a run asks for scores: functions in this process, in its threads or in processes; several become one score.

Owns: which function runs where, and what one score is made of several. Must not know: batches, tensors. It needs the
standard library only, so that a config can be checked with it before torch is there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, get_args

from rallypoint.environments.child import GRACE_S
from rallypoint.environments.deadline import BoundedThread, DaemonThreads
from rallypoint.environments.futures import dealt, joined
from rallypoint.environments.given import GIVEN, how_to_give, is_given
from rallypoint.environments.outcome import (
    DeadlineError,
    Failure,
    Outcome,
    RewardCall,
    Scores,
    call_reward,
    raised,
    timed_out,
    too_large,
)
from rallypoint.environments.pool import Busy, Pool, units
from rallypoint.environments.reward import RewardFunction, Scope, Wants, load_reward, no_function, wants_of
from rallypoint.environments.worker import ResultLoop, Work
from rallypoint.errors import RewardError

if TYPE_CHECKING:
    from rallypoint.config import RewardConfig, RolloutConfig
    from rallypoint.config.sections.material import RewardFunctionConfig


class Grader(Protocol):
    """Asks a reward function about many responses."""

    @property
    def wants(self) -> Wants:
        """What the function is called with; known once it was loaded."""
        ...

    @property
    def num_at_once(self) -> int:
        """Calls that may be under way at once; others wait for one of them."""
        ...

    def load(self) -> None:
        """Find the function, before anything is asked; a second time is none.

        Raises:
            RewardError: there is none of its name, it cannot be imported, or it does not take what it is given.
        """
        ...

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[Outcome]]:
        """Ask about responses; after `load`, from any thread. Returns at once where the function may take long.

        Args:
            calls: those of whole groups; all of a step where `wants.scope` is "batch".

        Returns:
            What will become of each. It raises RewardError where the user's file could not be imported a second time.
        """
        ...

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """Name the calls that take long; return how long nothing need be said.

        Args:
            warn: given a sentence for every `warn_after_s` that one call takes.
            warn_after_s: seconds that a call may take without a word.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class Inline:
    """A function that ships with the package, called in this process, one response after another.

    It takes microseconds, and nothing of it needs to be contained: a process would cost more than it does.
    """

    num_at_once = sys.maxsize
    """See `Grader.num_at_once`: it makes no call wait."""

    def __init__(self, function: RewardFunction) -> None:
        self.wants = wants_of(function)
        self._function = function

    def load(self) -> None:
        """It is there."""

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[Outcome]]:
        """Call the function, and return what became of it."""
        done: list[Future[Outcome]] = []
        for unit in units(calls, self.wants):
            for outcome in call_reward(self._function, [_copied(call) for call in unit], self.wants):
                done.append(Future())
                done[-1].set_result(outcome)
        return done

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """Nothing takes long."""
        del warn
        return warn_after_s

    def close(self) -> None:
        """Nothing was started."""


def _copied(call: RewardCall) -> RewardCall:
    """Return a call whose function cannot change the data set."""
    ground_truth, extra_info = copy.deepcopy((call.ground_truth, call.extra_info))
    return dataclasses.replace(call, ground_truth=ground_truth, extra_info=extra_info)


class Waiting:
    """A function in threads of this process: one that only waits for a network, or that no process can be sent.

    A call that hangs is left behind at its deadline: its thread goes on, and what it returns is thrown away. Nobody
    waits for the threads at the end.
    """

    def __init__(self, function: RewardFunction, num_threads: int, timeout_s: float = math.inf) -> None:
        """Remember the function.

        Args:
            function: to be called.
            num_threads: calls at once.
            timeout_s: of one call; infinite where the function keeps a deadline itself.
        """
        self.wants, self.num_at_once = wants_of(function), num_threads
        self._new = functools.partial(_Bounded, function, self.wants, timeout_s)
        self._threads, self._own = DaemonThreads(num_threads, "reward"), threading.local()
        self._bounded: list[_Bounded] = []
        self._busy: dict[int, Busy] = {}

    def load(self) -> None:
        """It is there."""

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[Outcome]]:
        """See `Grader.submit`; a call waits for a thread that is free."""
        cut = units(calls, self.wants)
        asked = [(self._threads.submit(functools.partial(self._ask, unit)), len(unit)) for unit in cut]
        return [outcome for answer, num in asked for outcome in dealt(answer, num)]

    def _ask(self, calls: Sequence[RewardCall]) -> Sequence[Outcome]:
        """Call the function, with a thread for its deadline that is this one's own."""
        if not hasattr(self._own, "call"):
            self._own.call = self._new()
            self._bounded.append(self._own.call)
        self._busy[threading.get_ident()] = Busy(calls[0].name)
        try:
            return self._own.call([*map(_copied, calls)])
        finally:
            del self._busy[threading.get_ident()]

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """See `Grader.complain`."""
        busy = list(self._busy.values())
        return min((each.complain(warn, warn_after_s) for each in busy), default=warn_after_s)

    def close(self) -> None:
        """Cancel the calls that wait, and let the threads end with those under way."""
        self._threads.close()
        for one in self._bounded:
            one.close()


class _Bounded:
    """A function in a thread of its own, and in another one after a call that took too long."""

    def __init__(self, function: RewardFunction, wants: Wants, timeout_s: float) -> None:
        self._function, self._wants, self._timeout_s = function, wants, timeout_s
        self._thread: BoundedThread | None = None
        self._wait = ResultLoop(timeout_s)

    def __call__(self, calls: Sequence[RewardCall]) -> list[Outcome]:
        if self._thread is None:
            self._thread, self._wait = BoundedThread(), ResultLoop(self._timeout_s)
        ask = functools.partial(call_reward, self._function, calls, self._wants, self._wait)
        try:
            done = self._thread.do(ask, self._timeout_s + GRACE_S)
        except DeadlineError as error:
            self._thread = None
            return [timed_out(self._timeout_s, error.where)] * len(calls)
        if (error := done.exception()) is not None:  # SystemExit, KeyboardInterrupt: it is this rollout's
            return [raised(error)] * len(calls)
        return done.result()

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            self._thread.leave()


class Several:
    """Several functions that are asked about every response. Its score is their weighed sum, token by token.

    One that does not apply to a response has no part in its score. A response that one of them fails on, or to which
    none applies, has no score.
    """

    def __init__(self, graders: Mapping[str, Grader], weights: Mapping[str, float]) -> None:
        """Ask graders by their names, each with a weight."""
        self._graders, self._weights = graders, weights

    @property
    def wants(self) -> Wants:
        """What any of them is called with; those of a group wait for the step if another needs all of it."""
        all_wants = [grader.wants for grader in self._graders.values()]
        scopes: tuple[Scope, ...] = get_args(Scope)
        widest = max(scopes.index(wants.scope) for wants in all_wants)
        return Wants(scopes[widest], tuple({name: None for wants in all_wants for name in wants.more}))

    @property
    def num_at_once(self) -> int:
        """See `Grader.num_at_once`."""
        return min(grader.num_at_once for grader in self._graders.values())

    def load(self) -> None:
        """See `Grader.load`."""
        for grader in self._graders.values():
            grader.load()

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[Outcome]]:
        """See `Grader.submit`."""
        asked = [grader.submit(calls) for grader in self._graders.values()]
        return [joined(of_one, self._weighed) for of_one in zip(*asked, strict=True)]

    def _weighed(self, outcomes: Sequence[Outcome]) -> Outcome:
        named = dict(zip(self._graders, outcomes, strict=True))
        for name, outcome in named.items():
            if isinstance(outcome, Failure) and outcome.kind != "not_applicable":
                return dataclasses.replace(outcome, reason=f"{name}: {outcome.reason}")
        found = {name: outcome for name, outcome in named.items() if isinstance(outcome, Scores)}
        if not found:
            return Failure("not_applicable", f"no reward function applies: {', '.join(named)} returned None")
        weighed = [[self._weights[name] * score for score in each.token_scores] for name, each in found.items()]
        scores = tuple(map(math.fsum, zip(*weighed, strict=True)))
        if problem := too_large(scores):
            return Failure("malformed", f"the weighed sum of the rewards {problem}")
        return Scores(
            scores,
            {f"{name}/{extra}": number for name, each in found.items() for extra, number in each.extras.items()},
            {name: math.fsum(found[name].token_scores) if name in found else math.nan for name in named},
            "\n".join(each.feedback for each in found.values() if each.feedback),
            next((each.answer for each in found.values() if each.answer is not None), None),
        )

    def complain(self, warn: Callable[[str], None], warn_after_s: float) -> float:
        """See `Grader.complain`."""
        return min(grader.complain(warn, warn_after_s) for grader in self._graders.values())

    def close(self) -> None:
        """End what was started."""
        with contextlib.ExitStack() as all_of_them:
            for grader in self._graders.values():
                all_of_them.callback(grader.close)


def open_grader(settings: RewardConfig, log: Path | None = None) -> Grader:
    """Return what asks the reward functions of a run; without one every score is 0.

    Args:
        settings: the functions, how many processes may run each, and their limits.
        log: receives what they print; None for standard error.
    """
    functions = settings.all_functions
    graders = {one.name: _open(one, settings, log) for one in functions}
    if not functions:
        return Inline(no_function)
    if settings.functions:
        return Several(graders, {one.name: one.weight for one in functions})
    return graders[functions[0].name]


def _open(one: RewardFunctionConfig, settings: RewardConfig, log: Path | None) -> Grader:
    if one.function == "digits":
        return Inline(load_reward(one.function, one.parameters))
    if one.function == "judge":
        return _open_judge(one, settings.timeout_s)
    given = GIVEN.get(one.function)
    if is_given(one.function) and given is None:
        raise RewardError(how_to_give(one.function))
    if given is not None and given.code is None:
        return Waiting(functools.partial(given.function, **one.parameters), 1, settings.timeout_s)
    code = given.code if given else None
    work = Work(one.function, one.parameters, settings.timeout_s, settings.max_calls, settings.max_memory_gib, code)
    return Pool(work, num_processes=settings.num_processes, log=log)


def _open_judge(one: RewardFunctionConfig, timeout_s: float) -> Grader:
    attempt_s = one.parameters.get("timeout_s")
    if attempt_s is not None and attempt_s > timeout_s:
        raise RewardError(
            f"the judge's timeout_s={attempt_s:g}, of one attempt, is more than reward.timeout_s={timeout_s:g}, of all "
            f"attempts together; set reward.timeout_s={attempt_s:g} or more"
        )
    function = load_reward(one.function, {"deadline_s": timeout_s, **one.parameters})
    return Waiting(function, one.parameters.get("concurrency", 16))


_PARTS_OF_STEPS = (
    ("rollout.window", "set rollout.window=1"),
    ("rollout.over_sampling", "leave out rollout.over_sampling"),
    ("rollout.dynamic_sampling", "leave out rollout.dynamic_sampling, or set it to 0"),
)
"""Keys with which the prompts that are sampled and scored together are not those of a step; and what to do."""


def scope_problem(wants: Wants, rollout: RolloutConfig) -> str | None:
    """Say why a function of a whole step would be given something else; None if it would not."""
    values = (rollout.window, rollout.over_sampling, rollout.dynamic_sampling)
    is_parted = (rollout.window > 1, rollout.over_sampling is not None, bool(rollout.dynamic_sampling))
    for (name, remedy), value, is_one in zip(_PARTS_OF_STEPS, values, is_parted, strict=True):
        if wants.scope == "batch" and is_one:
            return (
                "a reward function that names the argument `groups` is called once with all responses of a step, but "
                f"with {name}={value} the prompts that are scored together are not those of a step; {remedy}, or score "
                "each prompt's responses by themselves: without `groups` the function is called once for each prompt"
            )
    return None


def probe_rewards(settings: RewardConfig, rollout: RolloutConfig) -> str | None:
    """Say why a reward function cannot be used; None if all can. Each is imported in a process of its own.

    Nothing that a user's file does at its import can harm this process: it may raise, hang or exit.
    """
    once = settings.model_copy(update={"num_processes": 1})
    try:
        with contextlib.closing(open_grader(once, Path(os.devnull))) as grader:
            grader.load()
            return scope_problem(grader.wants, rollout)
    except RewardError as error:
        return str(error)
