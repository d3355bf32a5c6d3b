"""When a run goes on by itself after it has lost a process, and when it ends."""

import asyncio
import contextlib
import types

import pytest

from rallypoint import checkpoint
from rallypoint.cluster.capacity import Node
from rallypoint.config import load_config
from rallypoint.errors import DivergedError, NoPlaceError, WorkerDiedError
from rallypoint.journal import Journal, PoolShrunk, RoleLost, RunBegan, Said, read_journal
from rallypoint.recipes.steps import Starts
from rallypoint.run.folder import RunFolder
from rallypoint.run.resume import Beginning


def died(call="train", *, is_final=False):
    error = WorkerDiedError("actor", 0, call, "it was killed")
    error.is_final = is_final
    return error


class Played(Starts):
    """Starts and steps that end as they are told to: with an error, or with whether all is done."""

    def tell(self, *ends, is_ending=False):
        self.ends, self.is_ending, self.begun, self.rescued = list(ends), is_ending, [], 0

    async def _begin(self, supervisor, saved):
        self.begun.append(saved and saved.name)
        if isinstance(self.ends[0], str):  # at the start
            raise died(self.ends.pop(0))
        if isinstance(self.ends[0], NoPlaceError):
            raise self.ends.pop(0)

        async def take(first):
            end = self.ends.pop(0)
            if isinstance(end, Exception):
                raise end
            return end

        async def rescue():
            self.rescued += 1

        return types.SimpleNamespace(take=take, is_ending=self.is_ending, saver=types.SimpleNamespace(rescue=rescue))

    async def _end(self):
        pass


@pytest.fixture
def roles(tmp_path):
    """Return a function that makes them."""
    with contextlib.ExitStack() as stack:

        def make(*ends, is_ending=False, overrides=()):
            run = RunFolder(tmp_path)
            journal = stack.enter_context(Journal(run.journal))
            played = Played(Beginning(0, load_config("digits", overrides).config), run, journal, *[None] * 13)
            played.tell(*ends, is_ending=is_ending)
            return played

        yield make


def events(roles, kind):
    return [entry.event for entry in read_journal(roles.folder.journal) if isinstance(entry.event, kind)]


def test_a_process_that_is_lost_at_the_very_first_start_is_started_again(roles):
    played = roles("its start", "its start", True)
    assert asyncio.run(played.run())
    assert len(events(played, RoleLost)) == len(events(played, RunBegan)) == 2
    assert played.begun == [None] * 3


def test_one_that_dies_at_every_start_ends_the_run_and_another_try_is_not_advised(roles):
    with pytest.raises(WorkerDiedError) as raised:
        asyncio.run(roles(*["its start"] * 3).run())
    assert raised.value.is_final


def test_a_loss_that_would_come_again_ends_the_run_at_once(roles):
    played = roles(died(is_final=True))
    with pytest.raises(WorkerDiedError):
        asyncio.run(played.run())
    assert not events(played, RoleLost)


def test_a_loss_after_somebody_asked_for_the_end_saves_what_there_is_and_is_no_failure(roles):
    played = roles(died(), is_ending=True)
    assert not asyncio.run(played.run())
    assert played.rescued == 1
    assert "what is not saved is repeated by --resume" in events(played, Said)[-1].text


def test_a_restart_says_which_damaged_checkpoint_it_passes_over(roles, tmp_path):
    for step in (2, 4):
        with checkpoint.writing(RunFolder(tmp_path).checkpoints, step) as folder:
            (folder / "model.safetensors").write_bytes(bytes(100))
    (RunFolder(tmp_path).checkpoints / "step_000004" / "model.safetensors").write_bytes(bytes(99))
    played = roles(died(), True)
    assert asyncio.run(played.run())
    assert played.begun == [None, "step_000002"]
    assert [one.first for one in events(played, RunBegan)] == [2]
    assert any(
        "step_000004/model.safetensors: expected 100 bytes, found 99" in one.text and one.text.endswith("passed over")
        for one in events(played, Said)
    )


def test_steps_that_are_not_finite_go_back_before_them_once_and_end_the_run_the_second_time(roles, tmp_path):
    folder = RunFolder(tmp_path)
    for where, step in ((folder.checkpoints, 2), (folder.checkpoints, 4), (folder.snapshots, 5)):
        with checkpoint.writing(where, step):
            pass
    again = DivergedError("step 6: a loss was not finite, for the 3rd time in a row: lower its lr", 3)
    played = roles(DivergedError("step 6: a loss was not finite, for the 3rd time in a row: lower its lr", 3), again)
    with pytest.raises(DivergedError) as raised:
        asyncio.run(played.run())
    assert raised.value is again
    assert played.begun == [None, "step_000002"]
    assert checkpoint.visible(folder.checkpoints) == [2], "later ones hold what was skipped"
    assert (folder.checkpoints / "step_000004.aside").is_dir()
    assert not folder.snapshots.exists()
    said = [one.text for one in events(played, Said)]
    assert said == [
        "step 6: a loss was not finite, for the 3rd time in a row; the run goes back to the newest checkpoint up to "
        "step 3, once: what follows from data and weights alone comes again, and ends it then"
    ]


NO_PLACE = NoPlaceError("gave up after cluster.placement_timeout_s=9: waiting for a place for pool 'side'\nmissing ...")
TWO_POOLS = ("cluster.pools={main: [1], side: [1, 1]}", "rollout.placement.pool=side")


def played_on(roles, nodes, *ends):
    async def there():
        return nodes

    played = roles(*ends, overrides=TWO_POOLS)
    played.runtime = types.SimpleNamespace(nodes=there)
    return played


def test_a_run_whose_nodes_do_not_come_back_goes_on_with_fewer_processes_and_the_journal_says_so(roles):
    played = played_on(roles, [Node("a", {"CPU": 2.0})], died(), NO_PLACE, True)
    assert asyncio.run(played.run())
    assert events(played, PoolShrunk) == [PoolShrunk(pool="side", was=[1, 1], now=[1])]
    layouts = [one.config["cluster.pools"]["side"] for one in events(played, RunBegan)]
    assert [list(layout) for layout in layouts] == [[1, 1], [1]]
    last = events(played, Said)[-1].text
    assert last == (
        "gave up after cluster.placement_timeout_s=9: waiting for a place for pool 'side'; pool 'side' goes on with "
        "[1] of [1, 1] processes"
    )


def test_a_run_that_never_had_a_place_or_cannot_do_with_less_says_that_it_has_none(roles):
    for nodes, ends in (([Node("a", {"CPU": 2.0})], (NO_PLACE,)), ([Node("a", {"CPU": 1.0})], (died(), NO_PLACE))):
        played = played_on(roles, nodes, *ends)
        with pytest.raises(NoPlaceError):
            asyncio.run(played.run())
        assert not events(played, PoolShrunk)
