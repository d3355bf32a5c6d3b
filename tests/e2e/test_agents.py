"""Agents of the user's: whole runs whose rollouts are made over HTTP, by the real client of OpenAI, in processes."""

import importlib.util
import itertools

import pytest
from asking_twice import ASKS, ROWS, TWICE, TWICE_PLAINLY, in_process
from tiny_models import make_tiny_model
from tiny_runs import weights_of

import rallypoint as rally
from rallypoint.errors import ConfigError
from rallypoint.run.folder import RunFolder

pytestmark = [
    pytest.mark.lasting_ray,
    pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs openai"),
]

INLINE = {"cluster.runtime": "inline", "data.max_prompt_tokens": 16, "checkpoint.keep": 9, "rollout.exact": True}
INLINE |= {"reward.function": None}

STREAMED = """
from openai import OpenAI


def run(base_url, api_key, example):
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"content": one.content, "role": one.role} for one in example.prompt]
    for _ in range(2):
        events = client.chat.completions.create(model="policy", messages=messages, max_tokens=5, stream=True)
        said = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        messages += [{"content": said, "role": "assistant"}, {"content": "12", "role": "user"}]
    return {"reward": said.count(str(example.ground_truth)) / 4, "asked": 2}
"""


@pytest.fixture
def train(tmp_path):
    """Two small steps in this process, with the text of an agent's file."""
    make_tiny_model(tmp_path / "model")

    def run(agent=TWICE_PLAINLY, recipe="grpo", *, config=None, **more):
        if isinstance(agent, str):
            (tmp_path / "agent.py").write_text(agent)
        usual = {"model": tmp_path / "model", "data": ROWS, "num_prompts": 2, "group_size": 2, "num_steps": 2}
        usual |= {"lr": 1e-3, "max_response_tokens": 24, "runs_dir": tmp_path / "runs", "name": "run", "display": False}
        if agent is not None:
            usual |= {"episode": f"{tmp_path / 'agent.py'}:run"} if isinstance(agent, str) else {"episode": agent}
        return rally.train(recipe, config={**INLINE, **(config or {})}, **(usual | more))

    return run


def sampled(run, step):
    names = ("prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "turns", "metrics", "score")
    return [{name: row[name] for name in names if name in row} for row in run.rollouts(step)]


def test_an_agent_of_openais_client_samples_what_the_same_episode_does_in_this_process(train):
    over_http, streamed = train(TWICE, name="http"), train(STREAMED, name="streamed")
    in_here = train(None, name="here", episode=in_process)
    for step in (1, 2):
        rows = sampled(over_http, step)
        assert len(rows) == 4
        assert rows == sampled(streamed, step) == sampled(in_here, step)
        for row in rows:
            borders = [at for at, pair in enumerate(itertools.pairwise(row["loss_mask"])) if pair == (False, True)]
            assert row["loss_mask"][0]
            assert len(borders) == 1, "what was added between the answers is context"
    assert weights_of(RunFolder(over_http.folder)) == weights_of(RunFolder(in_here.folder))
    assert over_http.metrics[-1]["actor/ratio_error"] < 1e-5
    assert over_http.metrics[-1]["episode/asked"] == 2


def test_a_stopped_run_of_agents_ends_with_the_weights_of_a_whole_one(train):
    every = {"checkpoint.every_steps": 1}
    whole = train(name="whole", config=every)
    stopped = train(name="stopped", config=every, callbacks=lambda step: step.stop())
    assert not stopped.finished
    again = rally.train(stopped, resume=True, display=False)
    assert weights_of(RunFolder(again.folder)) == weights_of(RunFolder(whole.folder))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_agents_that_sample_ahead_begin_as_the_episode_in_process_and_are_repeated_by_their_schedule(train, runtime):
    ahead = {"cluster.pools": {"main": [1], "sampling": [1]}, "rollout.placement.pool": "sampling"}
    ahead |= {"rollout.max_staleness": 1, "checkpoint.every_steps": 1, "cluster.runtime": runtime}
    stopped = train(name="stopped", num_steps=3, config=ahead, callbacks=lambda step: step.stop())
    over_http = rally.train(stopped, resume=True, display=False)
    assert over_http.finished
    assert over_http.metrics[-1]["actor/ratio_error"] < 1e-5
    in_here = train(None, name="here", num_steps=1, episode=in_process, config=ahead)
    assert sampled(over_http, 1) == sampled(in_here, 1), "before weights of the run are published"
    schedule = {"rollout.schedule": f"{over_http.folder}/journal.jsonl"}
    again = train(name="again", num_steps=3, config={**ahead, **schedule})
    assert [sampled(again, step) for step in (1, 2, 3)] == [sampled(over_http, step) for step in (1, 2, 3)]
    assert weights_of(RunFolder(again.folder)) == weights_of(RunFolder(over_http.folder))


def test_on_ray_agents_sample_what_they_do_in_this_process(train):
    here = train(name="here", num_steps=1)
    on_ray = train(name="ray", num_steps=1, config={"cluster.runtime": "ray", "cluster.pools": {"main": [1]}})
    assert sampled(on_ray, 1) == sampled(here, 1)


FAILING = (
    ASKS
    + """
import os, time
from rallypoint.errors import EnvironmentFailedError


def run(base_url, api_key, example):
    place = int(example.name.rpartition(":")[2])
    messages = [{"role": one.role, "content": one.content} for one in example.prompt]
    fate = FATES[place % len(FATES)]
    if fate != "never calls":
        ask(base_url, api_key, messages, max_tokens=5)
    if fate == "dies":
        os._exit(3)
    if fate == "hangs":
        time.sleep(1000)
    if fate == "raises":
        raise LookupError("no such move")
    if fate == "environment":
        raise EnvironmentFailedError("the game is down")
    if fate == "too long":
        while True:
            messages += [ask(base_url, api_key, messages), {"role": "user", "content": "12"}]
    if fate == "no result":
        return object()
    return 1.0
"""
)
FATES = ("well", "never calls", "dies", "hangs", "raises", "environment", "too long", "no result")


def test_agents_that_fail_in_every_way_are_counted_and_leave_the_others_right(train):
    text = FAILING.replace("FATES[", f"{FATES!r}[").replace("len(FATES)", str(len(FATES)))
    config = {"rollout.episode_timeout_s": 3.0, "rollout.max_failed": 1.0, "data.shuffle": False}
    run = train(text, num_prompts=8, num_steps=1, config=config)
    counted = {
        name: run.metrics[-1][f"rollout/failed_{name}"] for name in ("raised", "environment", "overlong", "timeout")
    }
    assert counted == {"raised": 4, "environment": 2, "overlong": 2, "timeout": 2}
    assert run.metrics[-1]["rollout/failed_malformed"] == 4
    assert run.metrics[-1]["reward/num_scored"] == 2
    journal = (run.folder / "journal.jsonl").read_text()
    for reason in (
        "the episode took more than rollout.episode_timeout_s=3 s for itself",
        "the process of the agent ended with status 3, as by os._exit",
        "the agent raised LookupError: no such move",
        "the agent raised EnvironmentFailedError: the game is down",
        "the agent returned object that is not JSON",
        "the agent ended without an answered call: it has to ask the model at base_url at least once",
    ):
        assert reason in journal


AT_IMPORT = """
from openai import OpenAI

client = OpenAI(max_retries=0)


def run(base_url, api_key, example):
    client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "12"}])
"""


def test_a_client_at_module_level_reaches_nobody_with_the_users_key_and_is_told_where_to_be_made(
    train, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "a real one")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(Exception, match="failed"):
        train(AT_IMPORT, name="imported", num_steps=1)
    journal = (tmp_path / "runs" / "imported" / "journal.jsonl").read_text()
    assert "Error code: 401" in journal
    assert "make the client inside the agent's function" in journal


def test_an_agent_may_be_a_function_that_python_gave(train):
    from openai import OpenAI

    def asks(base_url, api_key, example):
        messages = [{"role": one.role, "content": one.content} for one in example.prompt]
        OpenAI(base_url=base_url, api_key=api_key).chat.completions.create(model="policy", messages=messages)
        return 0.5

    run = train(asks, num_steps=1)
    assert run.metrics[-1]["reward/mean"] == 0.5
    assert run.config.rollout.episode == "@asks"


def test_what_is_no_agent_is_refused_before_anything_starts(train, tmp_path):
    with pytest.raises(ConfigError, match=r"expected a function of \(base_url, api_key, example\)"):
        train("def run(base_url):\n    pass\n")
    with pytest.raises(ConfigError, match=r"(?s)rollout.episode=.*No module named 'not_there'"):
        train("import not_there\n\n\ndef run(base_url, api_key, example):\n    pass\n")
