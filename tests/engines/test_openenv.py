"""A server of OpenEnv's, in the environment that `rally engine install openenv` makes, and our client of it."""

import asyncio
import contextlib
import http.client
import re
import socket
import subprocess

import pytest
from tiny_models import make_tiny_model

import rallypoint as rally
from rallypoint.environments.openenv import OpenEnv, OpenEnvError
from rallypoint.errors import EngineError
from rallypoint.install import Installed, find_engine

SERVER = """
import socket, sys, uvicorn
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
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
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
    """A server of two sessions at once, whose port is taken before it starts, which takes seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, given = listening.getsockname()[1], listening.fileno()
        server = subprocess.Popen([openenv.python, "-c", SERVER, str(given)], pass_fds=[given])
    try:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=200)) as first:
            first.request("GET", "/")
            first.getresponse()
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


def test_a_run_trains_five_steps_on_the_server_and_only_what_was_sampled(url, tmp_path):
    told = []

    async def episode(client, example):
        async with OpenEnv(url) as environment:
            step, said, guesses = await environment.reset(seed=1), await client.chat(max_tokens=3), 1
            while guesses < 3:
                guess = next(iter(re.findall("[0-9]", said["content"])), "0")
                step = await environment.step({"guess": int(guess)})
                told.append(step.observation["text"])
                if step.done:
                    break
                said = await client.chat([{"role": "user", "content": "12"}], max_tokens=3)
                guesses += 1
        return {"reward": step.reward, "guesses": guesses}

    make_tiny_model(tmp_path / "model")
    config = {"cluster.runtime": "inline", "reward.function": None}
    config |= {"data.max_prompt_tokens": 16, "rollout.max_response_tokens": 32}
    run = rally.train(
        "grpo",
        model=tmp_path / "model",
        data=[{"prompt": str(number), "answer": "7"} for number in range(10)],
        episode=episode,
        config=config,
        num_prompts=2,
        group_size=4,
        num_steps=5,
        runs_dir=tmp_path / "runs",
        display=False,
    )
    steps = run.metrics[1:]
    assert len(steps) == 5
    assert all(step["rollout/failed"] == 0 for step in steps)
    assert max(step["actor/ratio_error"] for step in steps if "actor/ratio_error" in step) < 1e-5
    assert {"no"} <= set(told) <= {"yes", "no"}
    rows = [row for step in range(1, 6) for row in run.rollouts(step)]
    assert len(rows) == 40
    assert all(1 <= sum(row["loss_mask"]) <= 9 for row in rows)
    assert any(False in row["loss_mask"] for row in rows), "what was said between two guesses is context"
