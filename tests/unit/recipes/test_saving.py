"""When a checkpoint is saved, what a step waits for, and what is left if the rest of it fails."""

import asyncio
import math
import shutil
import types

import pytest

from rallypoint import checkpoint
from rallypoint.data import make_digits_tokenizer
from rallypoint.errors import CheckpointError
from rallypoint.journal import CheckpointSaved, Journal, Said, read_journal
from rallypoint.recipes.saving import Saver
from rallypoint.run.folder import RunFolder
from rallypoint.sampling.kept import KeptGroups


class Recipe:
    """One whose roles write a file."""

    state = {"version": 0}  # noqa: RUF012 - nobody changes it

    def __init__(self):
        self.saved = []

    async def save(self, folder):
        self.saved.append(folder)
        (folder / "model.safetensors").write_bytes(bytes(1000))


class Record:
    def write(self, folder):
        (folder / "training" / "run.json").write_text("{}")


class Background:
    """Does what it is given once it may; `num_waiting` wait for that."""

    def __init__(self):
        self.may, self.num_waiting = asyncio.Event(), 0

    async def __call__(self, act):
        self.num_waiting += 1
        await self.may.wait()
        self.num_waiting -= 1
        act()


@pytest.fixture
def saver(tmp_path):
    """Return a function that makes a saver."""

    def make(background=None, every_s=None, keep_every=None, keep_best=False, between_losses_s=math.inf):
        run = RunFolder(tmp_path)
        settings = {"keep": 2, "keep_best": keep_best, "snapshots": True, "every_s": every_s, "keep_every": keep_every}
        config = types.SimpleNamespace(
            checkpoint=types.SimpleNamespace(**settings),
            checkpoint_every_steps=2,
            cluster=types.SimpleNamespace(runtime="ray"),
        )
        material = types.SimpleNamespace(tokenizer=make_digits_tokenizer())
        placement = types.SimpleNamespace(supervisor=types.SimpleNamespace(between_losses_s=between_losses_s))
        setup = types.SimpleNamespace(
            journal=Journal(run.journal), config=config, material=material, placement=placement, kept=KeptGroups()
        )
        files = types.SimpleNamespace(flush=lambda: None)
        kwargs = {} if background is None else {"in_background": background}
        return Saver(setup, Recipe(), Record(), run, files, **kwargs)

    return make


def journalled(saver):
    return [e.event.step for e in read_journal(saver.folder.journal) if isinstance(e.event, CheckpointSaved)]


def test_a_step_waits_for_the_ranks_writing_and_not_for_the_disk(saver):
    async def run():
        background = Background()
        one = saver(background)
        await one.save(2)
        await asyncio.sleep(0)
        assert background.num_waiting == 1, "the rest is under way, and training goes on"
        assert (one.saved, checkpoint.visible(one.folder.checkpoints), journalled(one)) == (0, [], [])
        background.may.set()
        await one.finish()
        assert (one.saved, checkpoint.steps(one.folder.checkpoints), journalled(one)) == (2, [2], [2])
        checkpoint.verify(one.folder.checkpoints / "step_000002")

    asyncio.run(run())


def test_the_next_one_waits_for_the_one_before_and_both_are_whole(saver):
    async def run():
        background = Background()
        one = saver(background)
        await one.save(2)
        next_one = asyncio.create_task(one.save(4))
        await asyncio.sleep(0.05)
        assert len(one.recipe.saved) == 1
        background.may.set()
        await next_one
        await one.finish()
        assert (checkpoint.steps(one.folder.checkpoints), journalled(one)) == ([2, 4], [2, 4])

    asyncio.run(run())


def test_what_fails_behind_is_raised_at_the_next_save_and_nothing_partial_is_visible(saver):
    async def run():
        one = saver()
        await one.save(2)
        await one.finish()
        one.in_background = failing
        await one.save(6)
        with pytest.raises(CheckpointError, match="No space left"):
            await one.save(8)
        assert (one.saved, journalled(one)) == (2, [2])
        assert checkpoint.steps(one.folder.checkpoints) == [2]
        one.in_background = asyncio.to_thread
        await one.save(8)
        await one.finish()
        assert checkpoint.steps(one.folder.checkpoints) == [2, 8]

    asyncio.run(run())


async def failing(_act):
    raise CheckpointError("step_000006 cannot be written: No space left on device")


def said(saver):
    return [e.event.text for e in read_journal(saver.folder.journal) if isinstance(e.event, Said)]


def test_what_cannot_be_saved_is_tried_again_after_each_step_and_said_once_a_minute(saver):
    async def run():
        one, interrupted = saver(), asyncio.Event()
        times = [0.0]
        one.clock = one._outage.clock = lambda: times[0]
        tried = []

        async def full(folder):
            tried.append(folder.name)
            raise CheckpointError("model.safetensors cannot be written: No space left on device")

        one.recipe.save, saves = full, one.recipe.save
        for step in (1, 2, 3, 4):
            times[0] += 25
            await one.after(step, is_last=False, interrupted=interrupted)
        assert tried == [f".step_00000{step}.partial" for step in (2, 3, 4)]
        again = "training goes on, and each step tries again"
        assert [text for text in said(one) if again in text] == [
            f"model.safetensors cannot be written: No space left on device; {again}"
        ]
        one.recipe.save = saves
        times[0] += 25
        await one.after(5, is_last=False, interrupted=interrupted)
        await one.finish()
        assert (one.saved, said(one)[-1]) == (5, "the checkpoint of step 5 is saved")
        one.recipe.save = full
        for step in range(6, 10):
            await one.after(step, is_last=False, interrupted=interrupted)
        with pytest.raises(CheckpointError, match="No space left"):  # three intervals of two steps
            await one.after(10, is_last=False, interrupted=interrupted)

    asyncio.run(run())


def test_a_run_that_can_save_nothing_more_leaves_its_newest_snapshot_as_a_checkpoint(saver):
    async def run():
        one, interrupted = saver(), asyncio.Event()
        await one.after(1, is_last=False, interrupted=interrupted)
        assert checkpoint.steps(one.folder.snapshots) == [1]
        one.recipe.save = failing
        interrupted.set()
        with pytest.raises(CheckpointError, match="No space left"):
            await one.after(2, is_last=True, interrupted=interrupted)
        assert (one.saved, journalled(one)) == (1, [1])
        checkpoint.verify(one.folder.checkpoints / "step_000001")
        assert (one.folder.checkpoints / "step_000001" / "training" / "run.json").is_file(), "it can be resumed from"

    asyncio.run(run())


def test_no_checkpoint_is_newer_than_its_journal(saver):
    async def run():
        one = saver()
        moved = one.folder.journal.rename(one.folder.path / "elsewhere")
        await one.after(2, is_last=False, interrupted=asyncio.Event())
        await one.finish()
        assert checkpoint.visible(one.folder.checkpoints) == []
        moved.rename(one.folder.journal)
        await one.after(3, is_last=False, interrupted=asyncio.Event())
        await one.finish()
        assert checkpoint.steps(one.folder.checkpoints) == [3]
        assert "journal.jsonl cannot be written: No such file" in said(one)[0]

    asyncio.run(run())


def test_each_n_th_step_is_saved_and_stays_beside_the_newest(saver):
    async def run():
        one = saver(keep_every=5)
        for step in range(1, 13):
            await one.after(step, is_last=False, interrupted=asyncio.Event())
            await one.finish()
        assert journalled(one) == [2, 4, 5, 6, 8, 10, 12]
        assert checkpoint.steps(one.folder.checkpoints) == [5, 10, 12], "two of the newest, and 5"

    asyncio.run(run())


def test_a_checkpoint_is_also_due_by_time(saver):
    async def run():
        one, now = saver(every_s=60), [0.0]
        one.clock, one._saved_at = lambda: now[0], 0.0
        for step, seconds in ((1, 30), (3, 61), (5, 90), (7, 125)):
            now[0] = seconds
            await one.after(step, is_last=False, interrupted=asyncio.Event())
            await one.finish()
        assert journalled(one) == [3, 7]

    asyncio.run(run())


def test_a_snapshot_goes_when_a_checkpoint_of_its_step_or_a_later_one_is_whole(saver):
    async def run():
        one = saver()
        for step in (1, 3):
            with checkpoint.writing(one.folder.snapshots, step, durable=False):
                pass
        await one.save(2)
        await one.finish()
        assert checkpoint.steps(one.folder.snapshots) == [3], "a step that was done while the checkpoint was flushed"

    asyncio.run(run())


@pytest.mark.parametrize(("step_s", "snapshot_s", "num"), [(10.0, 4.0, 29), (10.0, 0.2, 400)])
def test_snapshots_take_three_percent_of_the_time_at_most(saver, step_s, snapshot_s, num):
    class Slow(Recipe):
        async def save(self, folder):
            await super().save(folder)
            now[0] += snapshot_s

    async def run():
        one.setup.config.checkpoint_every_steps = 10**9
        for step in range(1, 401):
            now[0] += step_s
            await one.after(step, is_last=False, interrupted=asyncio.Event())

    now, one = [0.0], saver()
    one.clock, one.recipe = lambda: now[0], Slow()
    one._since = one._saved_at = 0.0
    asyncio.run(run())
    assert len(one.recipe.saved) == num
    assert snapshot_s * (num - 1) <= 0.03 * now[0], "of all but the first, whose time was not known"


def test_while_a_checkpoint_is_owed_each_step_leaves_a_snapshot(saver):
    async def run():
        one, interrupted = saver(), asyncio.Event()
        one.folder.checkpoints.touch()  # where a folder should be
        for step in (1, 2, 3):
            one._snapshot_took_s = 0.0
            await one.after(step, is_last=False, interrupted=interrupted)
            assert checkpoint.steps(one.folder.snapshots) == [step]
        assert one.saved == 0

    asyncio.run(run())


def test_a_checkpoint_that_is_due_by_time_or_owed_is_written_once_and_the_next_step_does_not_wait_for_it(saver):
    async def run():
        background, now = Background(), [0.0]
        one = saver(every_s=60)
        one.clock, one._saved_at, one._since = lambda: now[0], 0.0, 1e9  # no snapshots
        one.recipe.save, saves = failing, one.recipe.save
        await one.after(2, is_last=False, interrupted=asyncio.Event())
        one.recipe.save, one.in_background, now[0] = saves, background, 61
        for step in (3, 5, 7):  # owed, then by time
            await one.after(step, is_last=False, interrupted=asyncio.Event())
            await asyncio.sleep(0)
        assert [folder.name for folder in one.recipe.saved] == [".step_000003.partial"]
        background.may.set()
        await one.finish()
        assert journalled(one) == [3]

    asyncio.run(run())


def test_what_fails_behind_is_owed_again(saver):
    async def run():
        one = saver()
        one.in_background = failing
        await one.after(2, is_last=False, interrupted=asyncio.Event())
        await asyncio.sleep(0)
        one.in_background = asyncio.to_thread
        await one.after(3, is_last=False, interrupted=asyncio.Event())
        await one.finish()
        assert journalled(one) == [3]

    asyncio.run(run())


def test_the_best_checkpoint_so_far_stays_until_a_better_one_is_whole(saver):
    async def run():
        one = saver(keep_best=True)
        for step, score in ((2, 0.5), (4, 0.2), (6, 0.1), (8, 0.9), (10, 0.3), (12, 0.4)):
            one.validated(step, {"validation/score": score})
            if step == 8:
                one.in_background = failing
            await one.save(step)
            if step == 8:
                with pytest.raises(CheckpointError):
                    await one.finish()
                one.in_background = asyncio.to_thread
                assert checkpoint.steps(one.folder.checkpoints) == [2, 4, 6]
            await one.finish()
        assert checkpoint.steps(one.folder.checkpoints) == [2, 10, 12], "that of step 8 was never whole"
        one.validated(14, {"validation/score": 0.9})
        await one.save(14)
        await one.finish()
        assert checkpoint.steps(one.folder.checkpoints) == [12, 14]

    asyncio.run(run())


def test_a_checkpoint_that_vanishes_before_it_is_noted_ends_no_run(saver):
    async def run():
        one = saver()

        async def gone(act):
            await asyncio.to_thread(act)
            if one.folder.checkpoints.is_dir():
                shutil.rmtree(one.folder.checkpoints)

        one.in_background = gone
        await one.after(2, is_last=False, interrupted=asyncio.Event())
        while not one._finishing.done():
            await asyncio.sleep(0)
        one.in_background = asyncio.to_thread
        await one.after(3, is_last=False, interrupted=asyncio.Event())
        await one.finish()
        assert journalled(one) == [3]
        assert "step_000002 cannot be written: No such file" in said(one)[0]

    asyncio.run(run())


def test_what_a_snapshot_takes_is_kept_of_a_grace_period_before_the_first_checkpoint_and_one_that_fails_is_said_once(
    saver,
):
    async def run():
        one, now = saver(), iter(range(0, 10_000, 3))
        one.clock = one._no_snapshot.clock = lambda: float(next(now))
        one._since = -1e9
        await one.after(1, is_last=False, interrupted=asyncio.Event())
        assert one.took_s == 3.0
        one.recipe.save = failing
        for step in (3, 5, 7):
            one._since = -1e9
            await one._snapshot(step)
        assert [text for text in said(one) if "goes back further" in text] == [
            "step_000006 cannot be written: No space left on device; a run that loses a process goes back further"
        ]

    asyncio.run(run())


@pytest.mark.parametrize(("between_losses_s", "taken"), [(math.inf, [34]), (50.0, [10, 20, 30])])
def test_the_next_snapshot_waits_until_it_costs_little_of_the_time_or_less_than_losses_do(
    saver, between_losses_s, taken
):
    """One takes a second, 3 % of 33.3 s. With a loss each 50 s, one each sqrt(2 x 1 s x 50 s) = 10 s loses least."""

    async def main():
        one, now, found = saver(between_losses_s=between_losses_s), [0.0], []
        one.clock, one._since, one._snapshot_took_s = lambda: now[0], 0.0, 1.0
        for step in range(1, 40):
            now[0], before = float(step), one._since
            await one._snapshot(step)
            if one._since != before:
                found.append(step)
                one._snapshot_took_s = 1.0
        return found

    assert asyncio.run(main()) == taken
