"""When a checkpoint is saved, what a step waits for, and what is left if the rest of it fails."""

import asyncio
import types

import pytest

from rallypoint import checkpoint
from rallypoint.data import make_digits_tokenizer
from rallypoint.errors import CheckpointError
from rallypoint.journal import CheckpointSaved, Journal, read_journal
from rallypoint.recipes.saving import Saver
from rallypoint.run.folder import RunFolder


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

    def make(background=None):
        run = RunFolder(tmp_path)
        settings = {"keep": 2, "keep_best": False, "snapshots": True}
        config = types.SimpleNamespace(checkpoint=types.SimpleNamespace(**settings))
        material = types.SimpleNamespace(tokenizer=make_digits_tokenizer())
        setup = types.SimpleNamespace(journal=Journal(run.journal), config=config, material=material)
        files = types.SimpleNamespace(flush=lambda: None)
        kwargs = {} if background is None else {"in_background": background}
        return Saver(setup, Recipe(), Record(), run, files, **kwargs)

    return make


def journalled(saver):
    return [e.event.step for e in read_journal(saver.folder.journal) if isinstance(e.event, CheckpointSaved)]


def test_a_step_waits_for_the_ranks_writing_and_not_for_digests_and_the_disk(saver):
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

    async def failing(act):
        raise CheckpointError("step_000006 cannot be written: No space left on device")

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
