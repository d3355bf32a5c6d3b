"""A scheduler's notice, and what is done in the time that it leaves."""

import asyncio
import types

import pytest

from rallypoint.errors import WorkerDiedError
from rallypoint.journal import Journal, Said, read_journal
from rallypoint.recipes.interruption import Observer
from rallypoint.recipes.steps import RemainingSteps


class Saver:
    """Notes what it is asked for."""

    took_s, best = 0.0, (0, 0.0)

    def __init__(self):
        self.asked = []

    async def after(self, step, *, is_last, interrupted):
        del interrupted
        self.asked.append(f"after {step}, the last one" if is_last else f"after {step}")

    async def save_last(self, step, _interrupted):
        self.asked.append(f"all of {step}")

    async def rescue(self):
        self.asked.append("the snapshot")


class Slow(RemainingSteps):
    """Steps of which the third hears of SIGTERM; it, or its validation, takes `seconds`."""

    async def _step(self, step):
        if step == 3:
            self.setup.interrupted.set()
            self._promise("SIGTERM")
            await self.setup.work(step)

    async def _validate(self, step):
        await self.setup.validation(step)


@pytest.fixture
def ended(tmp_path):
    """Return a function that runs steps and returns what was saved and said."""

    async def nothing(_step):
        pass

    def run(grace_s, work=nothing, validation=nothing):
        with Journal(tmp_path / "journal.jsonl") as journal:
            trainer = types.SimpleNamespace(num_steps=5, grace_s=grace_s)
            config = types.SimpleNamespace(trainer=trainer, validation=types.SimpleNamespace(every_steps=3))
            setup = types.SimpleNamespace(config=config, journal=journal, work=work, validation=validation)
            saver, recipe = Saver(), types.SimpleNamespace(hurry=lambda: None)
            steps = Slow(setup, recipe, saver, None, None, Observer(), 0.0)

            async def go():
                setup.interrupted = asyncio.Event()
                return await steps._steps(0, setup.interrupted)

            done = asyncio.run(go())
        said = [e.event.text for e in read_journal(tmp_path / "journal.jsonl") if isinstance(e.event, Said)]
        return done, saver.asked, " | ".join(said)

    return run


async def too_long(_step):
    await asyncio.sleep(600)


def test_a_step_that_ends_within_the_grace_period_is_saved(ended):
    done, asked, said = ended(60.0)
    assert (done, asked) == (False, ["after 1", "after 2", "after 3, the last one", "all of 3"])
    assert "what takes longer than 54 s is given up" in said


def test_a_step_that_takes_longer_is_given_up_and_the_snapshot_before_it_is_saved(ended):
    done, asked, said = ended(0.05, too_long)
    assert (done, asked) == (False, ["after 1", "after 2", "the snapshot"])
    assert said.endswith("step 3 is given up, and repeated by --resume: trainer.grace_s is over")


def test_a_call_that_ends_with_an_error_because_it_was_given_up_is_no_error_of_the_run(ended):
    async def died(step):
        try:
            await too_long(step)
        finally:
            raise WorkerDiedError("actor", 0, "update", "it was given up")

    assert ended(0.05, died)[:2] == (False, ["after 1", "after 2", "the snapshot"])


def test_a_validation_that_takes_longer_is_left_out_and_its_step_is_saved(ended):
    _, asked, said = ended(0.05, validation=too_long)
    assert asked == ["after 1", "after 2", "after 3, the last one", "all of 3"]
    assert "the validation after step 3 is left out: trainer.grace_s is over" in said


def test_without_a_grace_period_a_step_takes_its_time_and_errors_are_raised(ended):
    async def some_time(_step):
        await asyncio.sleep(0.1)

    assert ended(None, some_time)[1] == ["after 1", "after 2", "after 3, the last one", "all of 3"]

    async def timed_out(_step):
        raise TimeoutError("of somebody else")

    with pytest.raises(TimeoutError, match="somebody else"):
        ended(60.0, timed_out)
