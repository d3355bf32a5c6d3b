"""Groups from their admission to the step that takes them: waited for together, and given up together.

Owns: which groups are under way, the error that ends them, and the end of waiting when a run is interrupted. Must not
know: which of them a step takes (`groups.py`), or what a batch is made of.

Consumes: groups, as they are admitted. Produces: their scores. Waits for: the rollout role and the reward function.
Unblocked by: the ends of groups, an error of any of them, `hurry`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from rallypoint.algorithms import Advantage
from rallypoint.environments.grader import Grader
from rallypoint.environments.scoring import ScoredGroup
from rallypoint.observability import span
from rallypoint.sampling.group import AbandonedError, GroupUnderWay
from rallypoint.sampling.mailbox import Mailbox

ResultT = TypeVar("ResultT")


class UnderWay:
    """What is being sampled and scored, by the index of its prompt in the run."""

    def __init__(
        self,
        mailbox: Mailbox,
        grader: Grader,
        *,
        slowest: Callable[[Sequence[GroupUnderWay]], str | None],
        say: Callable[[str], None],
        patience_s: float,
        grace_s: float,
        advantage: Advantage,
    ) -> None:
        """Begin without groups.

        Args:
            mailbox: in front of the role that samples.
            grader: asks the reward function.
            slowest: names a group that is much slower than the others.
            say: given a line for the user.
            patience_s: seconds from one look for such a group to the next.
            grace_s: seconds that the reward function has after an interruption.
            advantage: the estimator, which says what a signal is.
        """
        self.groups: dict[int, GroupUnderWay] = {}
        self.is_complete = asyncio.Event()
        """Set when another group is complete."""
        self._interrupted = asyncio.Event()
        self._mailbox, self._grader = mailbox, grader
        self._slowest, self._say, self._patience_s, self._grace_s = slowest, say, patience_s, grace_s
        self._advantage = advantage
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The error that ended a running group."""

    def add(self, groups: Sequence[GroupUnderWay], *, are_watched: bool) -> None:
        """Take groups in.

        Args:
            groups: that were admitted together.
            are_watched: whether somebody watches at a barrier who has ended, also while no rank samples.
        """
        self.groups |= {group.index: group for group in groups}
        if are_watched:
            for group in groups:
                group.sampled.add_done_callback(self._look)

    def _look(self, _: object) -> None:
        if self._mailbox.is_idle.is_set():  # as while a slow tool is used
            self._mailbox.barrier.look()

    def hurry(self) -> None:
        """From now on give the reward function only a few seconds, because the run is ending."""
        self._interrupted.set()
        self.is_complete.set()  # who waits looks

    async def see_one_complete(self, groups: Sequence[GroupUnderWay]) -> None:
        """Wait until another group is complete."""
        self.is_complete.clear()
        if not self._interrupted.is_set():
            await self.wait(self.is_complete.wait(), groups)
            return
        await self.wait(asyncio.wait({group.sampled for group in groups}), groups)
        await self.grace(asyncio.ensure_future(self.is_complete.wait()), ())

    async def without_signal(self, groups: Sequence[GroupUnderWay]) -> list[int]:
        """Return the indices of those without a signal, once all are scored."""
        async with self.unless_it_fails(groups):
            with span("rollout"):
                await self.wait(asyncio.gather(*(group.sampled for group in groups)), groups)
            with span("reward"):
                scored = await self.scores(groups)
        return [
            group.index for group, found in zip(groups, scored, strict=True) if not found.has_signal(self._advantage)
        ]

    def has_signal(self, index: int) -> bool:
        """Whether there is something to learn from a group that is scored."""
        return self.groups[index].scored.result().has_signal(self._advantage)

    async def scores(self, groups: Sequence[GroupUnderWay]) -> list[ScoredGroup]:
        """Return the reward function's scores of groups that are sampled.

        Raises:
            AbandonedError: it did not say so within some seconds after an interruption.
        """
        scored = asyncio.gather(*(group.scored for group in groups))
        scored.add_done_callback(lambda done: done.cancelled() or done.exception())  # those given up have one, too
        interrupted = asyncio.create_task(self._interrupted.wait())
        await self.wait(asyncio.wait({scored, interrupted}, return_when=asyncio.FIRST_COMPLETED), groups)
        interrupted.cancel()
        if not scored.done():
            await self.grace(scored, groups)
        return scored.result()

    async def grace(self, awaited: asyncio.Future[Any], groups: Sequence[GroupUnderWay]) -> None:
        """Wait some seconds for the reward function.

        Raises:
            AbandonedError: they are over.
        """
        await self.wait(asyncio.wait({awaited}, timeout=self._grace_s), groups)
        if not awaited.done():
            raise AbandonedError(f"the reward function was busy for {self._grace_s:g} s more")

    async def wait(self, awaited: Awaitable[ResultT], groups: Sequence[GroupUnderWay]) -> ResultT:
        """Wait for something, and name what is waited for long; raise what any group raises."""
        task = asyncio.ensure_future(awaited)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # that of the cause is raised
        try:
            while not task.done():
                await asyncio.wait({task, self._failure}, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED)
                if self._failure.done():
                    self._failure.result()
                if not task.done() and (told := self._held_up(groups) or self._slowest(groups)) is not None:
                    self._say(told)
            return task.result()
        finally:
            task.cancel()

    def _held_up(self, groups: Sequence[GroupUnderWay]) -> str | None:
        """Say which groups have episodes that wait for something else than a response; None while a rank samples."""
        left = [group for group in groups if not group.sampled.done()]
        if not left or not self._mailbox.is_idle.is_set():
            return None
        return (
            f"the step waits for {len(left)} of {len(groups)} prompts, of which no response is being sampled: "
            f"{left[0].name}, prompt {left[0].index} of the run, has an episode that waits for something else; give "
            "what it awaits a deadline, with asyncio.timeout"
        )

    def fail(self, error: BaseException) -> None:
        """Raise this error in the caller who waits."""
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # or asyncio says that nobody asked for it

    @contextlib.asynccontextmanager
    async def unless_it_fails(self, groups: Sequence[GroupUnderWay]) -> AsyncIterator[None]:
        """Cancel everything that is running if the block raises."""
        async with contextlib.AsyncExitStack() as if_it_fails:
            if_it_fails.push_async_callback(self.give_up, groups)
            yield
            if_it_fails.pop_all()

    async def give_up(self, groups: Sequence[GroupUnderWay]) -> None:
        """Cancel these and all that is under way; nothing can be scored any more."""
        for cohort in {group.cohort for group in (*groups, *self.groups.values())}:
            cohort.close()
        self._grader.close()  # otherwise threads would go on waiting for its calls
        await self._mailbox.stop()

    async def abort(self, indices: Sequence[int]) -> None:
        """Cancel some groups, and all that is sampled; the others of their cohorts are still scored."""
        for index in indices:
            self.groups.pop(index).close()
        if indices:
            await self._mailbox.stop()
