"""Episodes that block the event loop are told where."""

import asyncio
import re
import sys
import threading
from typing import Any, cast

from rallypoint.data import Example
from rallypoint.data.prompt_sets import Prompt
from rallypoint.generation import Output, SamplingParams
from rallypoint.generation.requests import StopChecker
from rallypoint.sampling.client import EpisodeClient, Terms
from rallypoint.sampling.episode_task import BlockingWatch, blocking_frame

EXAMPLE = Example("rows.jsonl:3", data_source="rows", prompt=(), ability="", ground_truth="", extra_info={})


class Mailbox:
    async def sample(self, request, rank, deliver=None):
        zeros = (0.0,)
        return [
            Output(request_id=0, tokens=(1,), logprobs=zeros, sampled_logprobs=zeros, version=0, finish_reason="stop")
        ]


def watched(episode, *, frames=sys._current_frames, settle_s=0.001):
    """Return what is said of an episode."""
    said = []

    async def main():
        watch = BlockingWatch(said.append, frames, patience_s=0.01, settle_s=settle_s)
        terms = Terms(cast("Any", Mailbox()), cast("Any", object()), 12)
        client = EpisodeClient(terms, SamplingParams(max_new_tokens=5), (7, Prompt((5, 6), EXAMPLE)), 1, rank=0)
        await client.rollout(lambda prompt, client: episode(client, said))
        return watch

    asyncio.run(main())
    return said


def spin_until(is_over) -> None:
    """Block without another library's frames on top, as a long computation does."""
    while not is_over():
        pass


async def blocks(client, said):
    await client.sample(client.prompt)
    spin_until(lambda: said)  # only the watch ends it


def test_an_episode_that_blocks_is_told_its_function_and_line_and_what_to_do():
    said = watched(blocks)
    (line,) = said
    assert f"{__file__}:" in line
    assert re.search(r", (spin_until|<lambda>|blocks\.<locals>\.<lambda>) blocked the event loop for", line)
    assert " s so far: " in line
    assert "asyncio.to_thread" in line


def test_it_is_told_how_long_it_took_if_it_ends_soon_and_only_once():
    looked = threading.Event()

    def frames():
        found = sys._current_frames()
        looked.set()
        return found

    async def waits_twice(client, said):
        for _ in range(2):
            looked.clear()
            looked.wait()  # a frame of the standard library on top of ours
            await asyncio.sleep(0)

    said = watched(waits_twice, frames=frames, settle_s=60.0)
    assert len([line for line in said if "waits_twice blocked" in line]) == 1
    assert not any("so far" in line for line in said)


def test_only_an_episodes_own_code_is_named():
    found = []

    def look(_=None):
        frame = blocking_frame(sys._getframe())
        found.append(frame and frame.f_code.co_name)
        return ""

    def of_ours():
        params = SamplingParams(max_new_tokens=5, stop_strings=("x",))
        StopChecker(params, look).ends([1])  # a file of ours that no episode is called from calls it

    async def main():
        look()
        of_ours()

    look()
    asyncio.run(main())
    assert found[:2] == [None, "look"]
    assert set(found[2:]) == {None}
