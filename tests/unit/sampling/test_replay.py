"""What was sent to ranks is written down in its order, and sent again in the same one, whatever comes when."""

import asyncio
import json
import re

import pytest

from rallypoint.config import load_config
from rallypoint.errors import ScheduleError
from rallypoint.generation import Request, SamplingParams
from rallypoint.roles.rank_engine import SliceRequest, SliceResult
from rallypoint.run.recorded_schedule import Origin, RecordedSchedule
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.replay import Recorder, Replay, Schedule

SEED = 5
ORIGIN = Origin(1, {"seed": SEED, "rollout.num_prompts": 8})
DONE = {"num_taken": 8, "oldest": 7, "ahead": [8]}


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file, *lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def request(prompt, sample=0):
    return Request(
        tokens=(1,), params=SamplingParams(max_new_tokens=2, seed=SEED), prompt_index=prompt, sample_index=sample
    )


def orders(*prompts):
    return SliceRequest(new=tuple((number, request(prompt)) for number, prompt in enumerate(prompts)))


def test_calls_are_written_in_the_order_in_which_they_were_sent_not_in_which_they_ended(tmp_path):
    async def main():
        recorder, sliced = Recorder(tmp_path / "schedule.jsonl", ORIGIN, SEED), asyncio.Event()

        async def send(orders):
            await sliced.wait()
            return SliceResult(num_steps=4)

        async def load():
            sliced.set()

        sending = asyncio.create_task(recorder.send(0, orders(0, 1), send))
        await asyncio.sleep(0)
        await recorder.load(2, load)
        assert "load" not in (tmp_path / "schedule.jsonl").read_text(), "a kill leaves no load before its slice"
        await sending
        recorder.take([0])

    asyncio.run(main())
    first, *lines = lines_of(tmp_path / "schedule.jsonl")
    assert first == {"num_ranks": 1, "config": {"seed": SEED, "rollout.num_prompts": 8}}
    assert lines == [{"rank": 0, "slice": [[[0, 0, 0, 1], [0, 1, 0, 1]], 4]}, {"load": 2}, {"take": [0]}]


def test_a_run_that_goes_on_keeps_what_came_before_its_checkpoint(tmp_path):
    said, before = [], [ORIGIN.line, {"load": 0}, {"rank": 0, "slice": [[], 1]}, {"load": 2}]
    file = write(tmp_path / "schedule.jsonl", *before, {"rank": 0, "slice": [[], 9]}, {"load": 4})
    recorder = Recorder(file, ORIGIN, SEED, said.append)
    recorder.go_on(1, 2, PromptsDone(8, 7, (8,)))
    recorder.take([7])
    assert lines_of(file) == [*before, {"resumed": 1, "done": DONE, **ORIGIN.line}, {"take": [7]}]
    assert not said


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ((), "it has no schedule.jsonl from its start"),
        (({"resumed": 1, "done": DONE, **ORIGIN.line}, {"load": 2}), "it has no schedule.jsonl from its start"),
        (({**ORIGIN.line, "num_ranks": 2}, {"load": 2}), r"goes on with 1 ranks of rollout \(was 2\)"),
        (
            ({"num_ranks": 1, "config": {"seed": SEED, "rollout.num_prompts": 4}}, {"load": 2}),
            r"goes on with rollout.num_prompts=8 \(was 4\)",
        ),
    ],
)
def test_a_run_that_goes_on_in_a_way_that_no_run_can_repeat_says_so(tmp_path, before, why):
    said, file = [], write(tmp_path / "schedule.jsonl", *before)
    recorder = Recorder(file, ORIGIN, SEED, said.append)
    recorder.go_on(1, 2, PromptsDone(8, 7, (8,)))
    recorder.take([7])
    assert len(said) == 1
    assert re.search(why, said[0])
    with pytest.raises(ScheduleError):
        RecordedSchedule.read(file).check(str(file), load_config("digits").config)


def test_a_schedule_of_another_run_or_without_its_beginning_is_refused_with_what_differs(tmp_path):
    config = load_config("digits").config
    origin = Origin.of(config, 2)
    file = write(tmp_path / "schedule.jsonl", origin.line, {"load": 0}, {"resumed": 3, "done": DONE, **origin.line})
    RecordedSchedule.read(file).check("s", config, 2)
    RecordedSchedule.read(file).check("s", config)
    with pytest.raises(ScheduleError, match=r"'s' is of a run with 2 ranks of rollout \(here 3\); expected the same"):
        RecordedSchedule.read(file).check("s", config, 3)
    other = config.model_copy(update={"seed": config.seed + 1})
    with pytest.raises(ScheduleError, match=rf"is of a run with seed={config.seed} \(here {other.seed}\)"):
        RecordedSchedule.read(file).check("s", other, 2)
    write(file, origin.line, {"resumed": 3, "done": DONE, **origin.line, "num_ranks": 4})
    with pytest.raises(ScheduleError, match=r"of a run that went on after step 3 with 4 ranks of rollout \(here 2\)"):
        RecordedSchedule.read(file).check("s", config, 2)
    write(file, {"resumed": 3, "done": DONE, **origin.line})
    with pytest.raises(ScheduleError, match="begins after step 3, where its run was resumed: nothing was recorded"):
        RecordedSchedule.read(file)
    for text in ("nonsense", "", "3", '{"num_ranks": 2}'):
        file.write_text(text)
        with pytest.raises(ScheduleError, match="cannot be read"):
            RecordedSchedule.read(file)
    with pytest.raises(ScheduleError, match=r"cannot be read .no such file.; expected schedule.jsonl of a run"):
        RecordedSchedule.read(tmp_path / "nowhere")


def test_what_a_schedule_waits_for_is_said_again_and_again_before_it_is_given_up():
    said = []

    async def main():
        recorded = RecordedSchedule((ORIGIN,), ({"rank": 0, "slice": [[[0, 7, 0, 1]], 3]},))
        replay = Replay(recorded, SEED, timeout_s=0.05, patience_s=0.02, say=said.append)
        with pytest.raises(ScheduleError, match=r"has prompt 7 sample 0 next, which did not come in 0\.05 s"):
            await replay.send(0, SliceRequest(), None)

    asyncio.run(main())
    assert (
        said
        == ["rollout.schedule has prompt 7 sample 0 next, which has not come for 0 s; after 0.05 s the run ends"] * 2
    )


def part(rank, prompt, num_steps):
    return {"rank": rank, "slice": [[[0, prompt, 0, 1]], num_steps]}


def test_requests_and_weights_wait_until_the_schedule_has_them():
    events = ({"load": 0}, part(0, 1, 3), part(1, 2, 5), {"load": 2}, part(0, 0, 4))

    async def main():
        sent, said = [], []
        replay = Replay(RecordedSchedule((Origin(2, {}),), events), SEED, timeout_s=60, say=said.append)
        schedule = Schedule(replay=replay)

        async def send(asked):
            sent.extend((request.prompt_index, asked.num_steps) for _, request in asked.new)
            return SliceResult()

        async def load(version):
            sent.append(f"load {version}")

        async def call(rank, *prompts):
            await schedule.send(rank, orders(*prompts), send)

        early = asyncio.create_task(call(0, 0))  # comes too early, and waits
        await asyncio.sleep(0)
        assert sent == []
        await schedule.load(0, lambda: load(0))
        await early
        assert sent == ["load 0"]
        loading = asyncio.create_task(schedule.load(2, lambda: load(2)))
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


def test_a_slice_in_which_a_rank_was_told_and_did_nothing_is_not_written(tmp_path):
    async def main():
        recorder = Recorder(tmp_path / "schedule.jsonl", ORIGIN, SEED)

        async def send(asked):
            return SliceResult()

        await recorder.send(0, SliceRequest(cancelled=(3,)), send)
        recorder.take([0])

    asyncio.run(main())
    assert lines_of(tmp_path / "schedule.jsonl")[1:] == [{"take": [0]}]
