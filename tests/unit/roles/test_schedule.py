"""What was sent to ranks is written down in its order, and sent again in the same one, whatever comes when."""

import asyncio
import json

from rallypoint.generation import Request, SamplingParams
from rallypoint.roles.requests import SliceRequest, SliceResult
from rallypoint.roles.schedule import Recorded, Recorder, Replay, Schedule

SEED = 5


def request(prompt, sample=0):
    return Request(
        tokens=(1,), params=SamplingParams(max_new_tokens=2, seed=SEED), prompt_index=prompt, sample_index=sample
    )


def orders(*prompts):
    return [SliceRequest(new=tuple((number, request(prompt)) for number, prompt in enumerate(prompts)))]


def test_calls_are_written_in_the_order_in_which_they_were_sent_not_in_which_they_ended(tmp_path):
    async def main():
        recorder, sliced = Recorder(tmp_path / "schedule.jsonl", 1, SEED), asyncio.Event()

        async def send(orders):
            await sliced.wait()
            return [SliceResult(num_steps=4)]

        async def load():
            sliced.set()

        sending = asyncio.create_task(recorder.send(orders(0, 1), send))
        await asyncio.sleep(0)
        await recorder.load(2, load)
        assert "load" not in (tmp_path / "schedule.jsonl").read_text(), "a kill leaves no load before its slice"
        await sending
        recorder.take([0])

    asyncio.run(main())
    lines = [json.loads(line) for line in (tmp_path / "schedule.jsonl").read_text().splitlines()]
    assert lines == [{"num_ranks": 1}, {"slice": [[[[0, 0, 0, 1], [0, 1, 0, 1]], 4]]}, {"load": 2}, {"take": [0]}]


def test_a_run_that_goes_on_keeps_what_came_before_its_checkpoint(tmp_path):
    file = tmp_path / "schedule.jsonl"
    before = [{"num_ranks": 1}, {"load": 0}, {"slice": [[[], 1]]}, {"load": 2}]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*before, {"slice": [[[], 9]]}, {"load": 4}]))
    recorder = Recorder(file, 1, SEED)
    recorder.go_on(1, 2)
    recorder.take([7])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [*before, {"resumed": 1}, {"take": [7]}]


def test_requests_and_weights_wait_until_the_schedule_has_them():
    slices = ({"slice": [[[[0, 1, 0, 1]], 3]]}, {"load": 2}, {"slice": [[[[0, 0, 0, 1]], 4]]})

    async def main():
        sent, said = [], []
        replay = Replay(Recorded(1, ({"load": 0}, *slices), ()), SEED, timeout_s=60, say=said.append)
        schedule = Schedule(replay=replay)

        async def send(orders):
            sent.extend((request.prompt_index, one.num_steps) for one in orders for _, request in one.new)
            return [SliceResult() for _ in orders]

        async def load(version):
            sent.append(f"load {version}")

        pending = [asyncio.create_task(schedule.send(orders(0), send))]  # comes too early, and waits
        await asyncio.sleep(0)
        assert sent == []
        await schedule.load(0, lambda: load(0))
        assert await pending[0] == []
        loading = asyncio.create_task(schedule.load(2, lambda: load(2)))
        await schedule.send([SliceRequest(new=((9, request(1)),))], send)
        await loading
        await schedule.send([SliceRequest()], send)
        await schedule.send([SliceRequest(new=((10, request(5)),))], send)
        return sent, said

    sent, said = asyncio.run(main())
    assert sent == ["load 0", (1, 3), "load 2", (0, 4), (5, None)]
    assert said == []
