"""A server of OpenEnv's, in the environment that `rally engine install openenv` makes, and our client of it."""

import asyncio
import socket
import subprocess
import time

import pytest

from rallypoint.environments.openenv import OpenEnv, OpenEnvError
from rallypoint.errors import EngineError
from rallypoint.install import Installed, find_engine

SERVER = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Told(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        return Told(text="guess", done=False)

    def step(self, action, timeout_s=None, **more):
        is_right = action.guess == 7
        return Told(text="yes" if is_right else "no", done=is_right, reward=float(is_right))

    @property
    def state(self):
        return State()


app = create_fastapi_app(Guessing, Guess, Told, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture(scope="session")
def openenv() -> Installed:
    """The environment; without it the test says what makes one."""
    pytest.importorskip("websockets")
    try:
        return find_engine("openenv")
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture
def url(openenv):
    """A server of two sessions at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([openenv.python, "-c", SERVER, str(port)])
    try:
        while True:
            assert server.poll() is None
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{port}/ws"
    finally:
        server.kill()
        server.wait()


def test_six_episodes_at_once_play_on_a_server_of_two_sessions(url):
    async def play():
        async with OpenEnv(url) as environment:
            first = await environment.reset(seed=1)
            assert first.observation["text"] == "guess"
            assert (await environment.step({"guess": 3})).reward == 0.0
            with pytest.raises(OpenEnvError, match="VALIDATION_ERROR"):
                await environment.step({"guess": "seven"})
            return await environment.step({"guess": 7})

    async def all_of_them():
        return await asyncio.gather(*(play() for _ in range(6)))

    assert [(step.reward, step.done) for step in asyncio.run(all_of_them())] == [(1.0, True)] * 6
