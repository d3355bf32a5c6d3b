"""Episodes that are plain functions may block: each rollout has a process, which ends at its deadline."""

import asyncio
import signal
import tempfile
import time
from pathlib import Path

import pytest
from tiny_models import make_tiny_model
from tiny_runs import weights_of

import rallypoint as rally
from rallypoint.data.tokenizer import make_digits_tokenizer
from rallypoint.recipes.blocking import PlainEpisodes
from rallypoint.run.folder import RunFolder

ROWS = [{"prompt": f"{i % 10}{i * 7 % 10}", "answer": str(i % 10)} for i in range(16)]
INLINE = {"cluster.runtime": "inline", "data.max_prompt_tokens": 16, "checkpoint.keep": 9, "rollout.exact": True}
INLINE |= {"reward.function": None}

PLAIN = """
import time

from rallypoint.environments.tools import Tools


def add(a: float) -> float:
    "Add one."
    return a + 1


def episode(client, example):
    first = client.sample(client.prompt, max_tokens=4)
    time.sleep(0.05)
    text = client.tokenizer.decode(first.response)
    last = client.sample(client.tokenizer.encode("12", add_special_tokens=False), max_tokens=4, temperature=0.5)
    assert (first.prompt, last.version) == (client.prompt, first.version)
    return {"reward": [0.0, len(set(last.response)) / 4], "letters": len(text)}


async def twin(client, example):
    first = await client.sample(client.prompt, max_tokens=4)
    text = client.tokenizer.decode(first.response)
    last = await client.sample(client.tokenizer.encode("12", add_special_tokens=False), max_tokens=4, temperature=0.5)
    return {"reward": [0.0, len(set(last.response)) / 4], "letters": len(text)}


def chats(client, example):
    client.chat(max_tokens=4)
    said = client.chat([{"role": "user", "content": "12"}], max_tokens=4)
    return float(len(said["content"]))


async def chats_twin(client, example):
    await client.chat(max_tokens=4)
    said = await client.chat([{"role": "user", "content": "12"}], max_tokens=4)
    return float(len(said["content"]))
"""


@pytest.fixture
def train(tmp_path):
    """Two small steps in this process; `episode` names a function of PLAIN, or of another text."""
    make_tiny_model(tmp_path / "model")

    def run(episode, text=PLAIN, *, config=None, **more):
        (tmp_path / "episodes.py").write_text(text)
        usual = {"model": tmp_path / "model", "data": ROWS, "num_prompts": 2, "group_size": 2, "num_steps": 2}
        usual |= {"lr": 1e-3, "max_response_tokens": 24, "runs_dir": tmp_path / "runs", "name": str(episode)}
        named = f"{tmp_path / 'episodes.py'}:{episode}" if isinstance(episode, str) else episode
        return rally.train("grpo", config={**INLINE, **(config or {})}, episode=named, display=False, **(usual | more))

    return run


@pytest.mark.parametrize(("plain", "twin"), [("episode", "twin"), ("chats", "chats_twin")])
def test_a_plain_episode_samples_what_its_async_twin_does_in_this_process(train, plain, twin):
    names = ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "sampled_logprobs", "turns", "metrics")
    names += ("score", "token_rewards")
    one, other = train(plain), train(twin)
    for step in (1, 2):
        rows = one.rollouts(step)
        assert len(rows) == 4
        assert [len(row["turns"]) for row in rows] == [2] * 4
        for row, its_twin in zip(rows, other.rollouts(step), strict=True):
            assert {name: row[name] for name in names} == {name: its_twin[name] for name in names}
    assert weights_of(RunFolder(one.folder)) == weights_of(RunFolder(other.folder))


FATES = ("well", "never calls", "dies", "hangs", "raises", "environment", "too long", "no result")
FAILING = f"""
import os, time
from rallypoint.errors import EnvironmentFailedError


def episode(client, example):
    place = int(example.name.rpartition(":")[2])
    fate = {FATES!r}[place % len({FATES!r})]
    if fate != "never calls":
        client.sample(client.prompt, max_tokens=5)
    if fate == "dies":
        os._exit(3)
    while fate == "hangs":
        pass
    if fate == "raises":
        raise LookupError("no such move")
    if fate == "environment":
        raise EnvironmentFailedError("the game is down")
    while fate == "too long":
        client.sample([6, 7])
    if fate == "no result":
        return object()
    return 1.0
"""


RAISING = """
def episode(client, example):
    client.chat()
    if example.ground_truth == "raises":
        raise LookupError("no such move")
    return 0.5
"""


def test_plain_episodes_that_fail_in_every_way_are_counted_and_leave_the_others_right(train):
    config = {"rollout.episode_timeout_s": 3.0, "rollout.max_failed": 1.0, "data.shuffle": False}
    run = train("episode", FAILING, num_prompts=8, num_steps=1, config=config)
    counted = {
        name: run.metrics[-1][f"rollout/failed_{name}"]
        for name in ("raised", "environment", "overlong", "timeout", "malformed")
    }
    assert counted == {"raised": 4, "environment": 2, "overlong": 2, "timeout": 2, "malformed": 4}
    assert run.metrics[-1]["reward/num_scored"] == 2
    journal = (run.folder / "journal.jsonl").read_text()
    for reason in (
        "the episode took more than rollout.episode_timeout_s=3 s for itself",
        "the process of the episode ended with status 3, as by os._exit",
        "the episode raised LookupError: no such move",
        "the episode raised EnvironmentFailedError: the game is down",
        "the episode returned object that is not JSON",
        "the episode ended without a response",
    ):
        assert reason in journal
    rows = [{**row, "answer": "raises"} for row in ROWS[:2]] + ROWS[:1]
    raising = run.folder.parents[1] / "raising.py"
    raising.write_text(RAISING)
    found = rally.evaluate(run, rows, episode=f"{raising}:episode", max_response_tokens=3)
    assert (found.mean, len(found.failed)) == (0.5, 2)
    assert f'File "{raising}", line 5, in episode' in found.failed[0].traceback


def test_a_plain_function_that_python_gave_is_sent_to_its_processes(train):
    prize = 0.75

    def asks(client, example):
        client.chat(max_tokens=3)
        return prize

    run = train(asks, num_steps=1)
    assert run.metrics[-1]["reward/mean"] == 0.75
    assert run.config.rollout.episode == "@asks"


HANGING = """
import time
from pathlib import Path


def episode(client, example):
    client.sample(client.prompt)
    Path("begun").touch()
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass
"""


def test_a_run_ends_in_seconds_while_its_plain_episodes_hang(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("episodes.py").write_text(HANGING)
    inline = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
    named = f"rollout.episode={tmp_path}/episodes.py:episode"
    process = runs.start("train", "digits", *runs.overrides("hanging", named, *inline))
    deadline = time.monotonic() + 120
    while not Path("begun").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 130, printed
    assert "episodes were busy for 5 s more" in printed


def test_episodes_find_their_socket_where_the_folder_of_temporary_files_has_a_long_name(tmp_path, monkeypatch):
    (folder := tmp_path / ("long" * 30)).mkdir()
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def opened():
        episodes = PlainEpisodes(f"{tmp_path / 'plain.py'}:episode", make_digits_tokenizer())
        await episodes.open()  # a name of more than some hundred bytes is refused here
        await episodes.close()

    asyncio.run(opened())
