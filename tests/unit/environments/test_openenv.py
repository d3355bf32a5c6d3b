"""The client of OpenEnv's WebSocket, against a small server that speaks as theirs does; and theirs, where it is."""

import asyncio
import contextlib
import json
import pickle

import pytest

from rallypoint.environments.openenv import OpenEnv, OpenEnvError, StepResult
from rallypoint.errors import EnvironmentFailedError

pytest.importorskip("websockets")


@contextlib.asynccontextmanager
async def served(capacity=1):
    """An environment in which 7 is guessed; yields its address, and how many sessions there were at most."""
    from websockets.asyncio.server import serve

    counts = {"now": 0, "most": 0, "refused": 0}

    async def session(connection):
        counts["now"] += 1
        try:
            if counts["now"] > capacity:
                counts["refused"] += 1
                await tell(connection, "error", {"message": "full", "code": "CAPACITY_REACHED"})
                return
            counts["most"] = max(counts["most"], counts["now"])
            async for raw in connection:
                await answer(connection, json.loads(raw))
        finally:
            counts["now"] -= 1

    async def answer(connection, asked):
        if asked["type"] == "reset":
            observation = {"text": "guess", "seed": asked["data"].get("seed")}
            return await tell(connection, "observation", {"observation": observation, "reward": None, "done": False})
        guess = asked["data"].get("guess")
        if guess == "crash":
            return await connection.close()
        if not isinstance(guess, int):
            return await tell(connection, "error", {"message": "guess: not a number", "code": "VALIDATION_ERROR"})
        if guess == 13:
            return await connection.wait_closed()  # it hangs for as long as somebody waits
        is_right = guess == 7
        data = {"observation": {"text": "yes" if is_right else "no"}, "reward": float(is_right), "done": is_right}
        return await tell(connection, "observation", data)

    async with serve(session, "127.0.0.1", 0) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}/ws", counts


async def tell(connection, kind, data):
    await connection.send(json.dumps({"type": kind, "data": data}))


def test_an_episode_goes_from_a_reset_to_its_reward():
    async def play():
        async with served() as (url, _), OpenEnv(url) as environment:
            first = await environment.reset(seed=5)
            assert first == StepResult({"text": "guess", "seed": 5}, None, done=False)
            assert await environment.step({"guess": 3}) == StepResult({"text": "no"}, 0.0, done=False)
            return await environment.step({"guess": 7})

    assert asyncio.run(play()) == StepResult({"text": "yes"}, 1.0, done=True)


def test_a_full_server_is_waited_for_and_never_has_more_than_it_takes():
    async def play(url):
        async with OpenEnv(url) as environment:
            await environment.reset()
            await asyncio.sleep(0.05)
            return (await environment.step({"guess": 7})).reward

    async def all_of_them():
        async with served(capacity=2) as (url, counts):
            return await asyncio.gather(*(play(url) for _ in range(6))), counts

    rewards, counts = asyncio.run(all_of_them())
    assert rewards == [1.0] * 6
    assert counts["most"] == 2
    assert counts["refused"] > 0


def test_what_an_environment_refuses_names_whose_fault_it_is_and_the_episode_may_go_on():
    async def play():
        async with served() as (url, _), OpenEnv(url) as environment:
            await environment.reset()
            with pytest.raises(OpenEnvError, match="VALIDATION_ERROR: guess: not a number") as refused:
                await environment.step({"guess": "seven"})
            return refused.value, await environment.step({"guess": 7})

    error, step = asyncio.run(play())
    assert isinstance(error, EnvironmentFailedError)
    assert error.code == "VALIDATION_ERROR"
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, str(again)) == (error.code, str(error))
    assert step.done


@pytest.mark.parametrize(("guess", "error"), [("crash", ConnectionError), (13, TimeoutError)])
def test_an_environment_that_breaks_or_hangs_is_an_os_error(guess, error):
    async def play():
        async with served() as (url, _), OpenEnv(url, timeout_s=0.5) as environment:
            await environment.reset()
            await environment.step({"guess": guess})

    with pytest.raises(error):
        asyncio.run(play())


def test_a_server_that_is_not_there_is_an_os_error():
    async def play():
        async with OpenEnv("ws://127.0.0.1:9/ws") as environment:
            await environment.reset()

    with pytest.raises(OSError, match="Connect"):
        asyncio.run(play())
