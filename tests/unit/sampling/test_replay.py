"""What was sent to ranks is written down in its order, and sent again in the same one, whatever comes when."""

import asyncio
import dataclasses
import re

import pytest
from heard import heard

from rallypoint.config import load_config, values_of
from rallypoint.errors import GenerationError, ScheduleError, WorkerDiedError
from rallypoint.generation import Request, SamplingParams
from rallypoint.journal import (
    BatchTaken,
    Journal,
    Resumed,
    RunBegan,
    Said,
    SliceSent,
    WeightsLoaded,
    read_journal,
)
from rallypoint.roles.rank_engine import SliceRequest, SliceResult
from rallypoint.run.folder import anchored
from rallypoint.run.recorded_schedule import Origin, RecordedSchedule
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.replay import Recorder, Schedule, ScheduleReplay

SEED = 5
ORIGIN = Origin(1, {"seed": SEED, "rollout.num_prompts": 8})
DONE = {"num_taken": 8, "oldest": 7, "ahead": [8]}


BEGAN = RunBegan(first=0, config=ORIGIN.config, software={}, machine="")
AGAIN = dataclasses.replace(BEGAN, first=1)


def resumed(step, version=2, kept=()):
    return Resumed(step=step, version=version, done=DONE, kept=[*kept])


def load(version, num_ranks=1):
    return WeightsLoaded(version=version, num_ranks=num_ranks)


def part(rank, prompt, num_steps):
    return SliceSent(rank=rank, new=[[0, prompt, 0, 1]], num_steps=num_steps)


def taken(*prompts):
    return BatchTaken(step=1, prompts=list(prompts), asked_s=0, taken_s=0, loaded_s=0, busy_s=[])


def events_of(file):
    return [entry.event for entry in read_journal(file)]


def write(file, *events):
    file.unlink(missing_ok=True)
    with Journal(file) as journal:
        journal.append(*events)
    return file


def request(prompt, sample=0):
    return Request(
        tokens=(1,), params=SamplingParams(max_new_tokens=2, seed=SEED), prompt_index=prompt, sample_index=sample
    )


def orders(*prompts):
    return SliceRequest(new=tuple((number, request(prompt)) for number, prompt in enumerate(prompts)))


def test_calls_are_written_in_the_order_in_which_they_were_sent_not_in_which_they_ended(tmp_path):
    file = tmp_path / "journal.jsonl"

    async def main():
        recorder, sliced = Recorder(Journal(file), ORIGIN, SEED), asyncio.Event()

        async def send(orders):
            await sliced.wait()
            return SliceResult(num_steps=4)

        async def arrive():
            sliced.set()

        sending = asyncio.create_task(recorder.send(0, orders(0, 1), send))
        await asyncio.sleep(0)
        await recorder.load(2, arrive)
        assert events_of(file) == [], "a kill leaves no load before its slice"
        await sending

    asyncio.run(main())
    assert events_of(file) == [SliceSent(rank=0, new=[[0, 0, 0, 1], [0, 1, 0, 1]], num_steps=4), load(2)]


def test_calls_that_fail_or_do_nothing_are_not_written_and_hold_up_no_other(tmp_path):
    file = tmp_path / "journal.jsonl"

    async def main():
        recorder, sliced = Recorder(Journal(file), ORIGIN, SEED), asyncio.Event()

        async def fail(asked):
            await sliced.wait()
            raise GenerationError("gone")

        async def send(asked):
            return SliceResult()

        failing = asyncio.create_task(recorder.send(0, orders(0), fail))
        await asyncio.sleep(0)
        await recorder.send(1, SliceRequest(cancelled=(3,)), send)
        await recorder.send(1, orders(4), send)
        assert events_of(file) == [part(1, 4, 0)], "what is kept of it must be known before it is"
        sliced.set()
        await asyncio.wait([failing])

    asyncio.run(main())
    assert events_of(file) == [part(1, 4, 0)]


def test_what_a_run_did_after_the_checkpoint_that_it_went_on_from_counts_no_more_but_is_still_there(tmp_path):
    said, before = [], [BEGAN, load(0), part(0, 1, 1), taken(3), load(2)]
    file = write(tmp_path / "journal.jsonl", *before, part(0, 2, 9), load(4), AGAIN)
    with Journal(file) as journal:
        journal.subscribe(lambda entry: said.append(entry.event))
        Recorder(journal, ORIGIN, SEED).go_on(1, 2, PromptsDone(8, 7, (8,)), [])
        journal.append(load(2), part(0, 5, 3), load(4))
    assert said[0] == dataclasses.replace(resumed(1), done={**DONE, "ahead": (8,)})
    assert not [event for event in said if isinstance(event, Said)]
    found = RecordedSchedule.read(file)
    assert found.events == (load(0), part(0, 1, 1), load(2), resumed(1), load(2), part(0, 5, 3), load(4))
    assert [origin.after_step for origin in found.origins] == [None, 1]
    assert found.takes == ()
    with_window = dataclasses.replace(BEGAN, config={"rollout.window": 2})
    assert RecordedSchedule.read(write(file, with_window, *before[1:])).takes == ((3,),)
    assert RecordedSchedule.read(write(file, *before, BEGAN, load(0))).events == (load(0),)
    assert part(0, 2, 9) not in found.events


def test_a_schedule_is_cut_at_the_load_of_the_checkpoint_also_where_weights_of_several_steps_have_one_version(tmp_path):
    """As while a critic warms up."""

    def take(step):
        return dataclasses.replace(taken(step), step=step)

    done = [BEGAN, load(0), part(0, 1, 1), take(1), load(0), part(0, 2, 2)]
    lost = [take(2), load(0), part(0, 3, 3), take(3), load(0)]
    again = [AGAIN, resumed(1, version=0), load(0), part(0, 4, 4), take(2), load(0)]
    file = write(tmp_path / "journal.jsonl", *done, *lost, *again)
    kept = (load(0), part(0, 1, 1), load(0), resumed(1, version=0), load(0), part(0, 4, 4), load(0))
    assert RecordedSchedule.read(file).events == kept


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ((), "it has not sampled ahead from its start"),
        ((AGAIN, resumed(1), load(2)), "it has not sampled ahead from its start"),
        ((BEGAN, load(2, num_ranks=2)), r"goes on with 1 ranks of rollout \(was 2\)"),
        (
            (dataclasses.replace(BEGAN, config={"seed": SEED, "rollout.num_prompts": 4}), load(2)),
            r"goes on with rollout.num_prompts=8 \(was 4\)",
        ),
    ],
)
def test_a_run_that_goes_on_in_a_way_that_no_run_can_repeat_says_so(tmp_path, before, why):
    said, file = [], write(tmp_path / "journal.jsonl", *before, AGAIN)
    with Journal(file) as journal:
        journal.subscribe(lambda entry: said.append(entry.event))
        Recorder(journal, ORIGIN, SEED).go_on(1, 2, PromptsDone(8, 7, (8,)), [])
        journal.append(load(2))
    (message,) = (event for event in said if isinstance(event, Said))
    assert re.search(why, message.text)
    with pytest.raises(ScheduleError):
        RecordedSchedule.read(file).check(str(file), load_config("digits").config)


def test_a_schedule_of_another_run_or_without_its_beginning_is_refused_with_what_differs(tmp_path):
    config = load_config("digits").config
    began = RunBegan(first=0, config=dict(values_of(anchored(config))), software={}, machine="")
    again = dataclasses.replace(began, first=3)
    file = write(tmp_path / "journal.jsonl", began, load(0, 2), load(2, 2), again, resumed(3), load(2, 2))
    RecordedSchedule.read(file).check("s", config, 2)
    RecordedSchedule.read(file).check("s", config)
    with pytest.raises(ScheduleError, match=r"'s' is of a run with 2 ranks of rollout \(here 3\); expected the same"):
        RecordedSchedule.read(file).check("s", config, 3)
    other = config.model_copy(update={"seed": config.seed + 1})
    with pytest.raises(ScheduleError, match=rf"is of a run with seed={config.seed} \(here {other.seed}\)"):
        RecordedSchedule.read(file).check("s", other, 2)
    write(file, began, load(2, 2), again, resumed(3), load(2, 4))
    with pytest.raises(ScheduleError, match=r"of a run that went on after step 3 with 4 ranks of rollout \(here 2\)"):
        RecordedSchedule.read(file).check("s", config, 2)
    for events in ((again, resumed(3), load(2)), (began,), ()):
        with pytest.raises(ScheduleError, match="does not begin with the start of a run"):
            RecordedSchedule.read(write(file, *events))
    for text in ("nonsense", "3", '{"num_ranks": 2}'):
        file.write_text(f"{text}\n")
        with pytest.raises(ScheduleError, match="cannot be read"):
            RecordedSchedule.read(file)
    with pytest.raises(ScheduleError, match=r"cannot be read .no such file.; expected journal.jsonl of a run"):
        RecordedSchedule.read(tmp_path / "nowhere")


def test_what_a_schedule_waits_for_is_said_again_and_again_before_it_is_given_up():
    said = []

    async def main():
        journal = heard(said.append)
        recorded = RecordedSchedule((ORIGIN,), (part(0, 7, 3),))
        replay = ScheduleReplay(recorded, SEED, journal=journal, timeout_s=0.05, patience_s=0.02)
        with pytest.raises(ScheduleError, match=r"has prompt 7 sample 0 next, which did not come in 0\.05 s"):
            await replay.send(0, SliceRequest(), None)

    asyncio.run(main())
    assert (
        said
        == ["rollout.schedule has prompt 7 sample 0 next, which has not come for 0 s; after 0.05 s the run ends"] * 2
    )


def test_weights_that_wait_for_the_slices_of_a_rank_that_is_lost_end_with_its_error_not_with_one_of_the_schedule():
    async def main():
        events = (load(0, 2), part(0, 1, 3), part(0, 2, 3), part(1, 3, 3), load(2, 2))
        recorded = RecordedSchedule((Origin(2, {}),), events)
        schedule = Schedule(replay=ScheduleReplay(recorded, SEED, journal=heard(print), timeout_s=600))
        begun, loaded = asyncio.Event(), []

        async def advance(rank, asked):
            await begun.wait()
            raise WorkerDiedError("rollout", rank, "advance", "it was killed")

        async def arrive():
            loaded.append(None)

        await schedule.load(0, arrive)
        sampling = asyncio.create_task(schedule.send(advance, 0, orders(1, 2)))
        loading = asyncio.create_task(schedule.load(2, arrive))
        waiting = asyncio.create_task(schedule.send(advance, 1, orders(4)))
        await asyncio.sleep(0)
        begun.set()
        for call in (sampling, loading, waiting):
            with pytest.raises(WorkerDiedError, match="rollout rank 0 died during advance"):
                await asyncio.wait_for(call, 20)
        assert len(loaded) == 1

    asyncio.run(main())


def test_requests_and_weights_wait_until_the_schedule_has_them():
    events = (load(0, 2), part(0, 1, 3), part(1, 2, 5), load(2, 2), part(0, 0, 4))

    async def main():
        sent, said = [], []
        journal = heard(said.append)
        replay = ScheduleReplay(RecordedSchedule((Origin(2, {}),), events), SEED, journal=journal, timeout_s=60)
        schedule = Schedule(replay=replay)

        async def advance(_, asked):
            sent.extend((request.prompt_index, asked.num_steps) for _, request in asked.new)
            return SliceResult()

        async def arrive(version):
            sent.append(f"load {version}")

        async def call(rank, *prompts):
            await schedule.send(advance, rank, orders(*prompts))

        early = asyncio.create_task(call(0, 0))  # comes too early, and waits
        await asyncio.sleep(0)
        assert sent == []
        await schedule.load(0, lambda: arrive(0))
        await early
        assert sent == ["load 0"]
        loading = asyncio.create_task(schedule.load(2, lambda: arrive(2)))
        await call(0, 1)
        waiting = asyncio.create_task(call(0))  # rank 0 has nothing before the weights, which rank 1 holds up
        await asyncio.sleep(0)
        assert sent == ["load 0", (1, 3)]
        await call(1, 2)
        await asyncio.gather(loading, waiting)
        await call(0)
        await call(1, 5)
        return sent, said

    sent, said = asyncio.run(main())
    assert sent == ["load 0", (1, 3), (2, 5), "load 2", (0, 4), (5, None)]
    assert said == []
