"""verifiers' own train client, where `rally engine install verifiers` was done, samples the rollouts of a run."""

import json

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from tiny_models import make_tiny_model

import rallypoint as rally
from rallypoint.errors import EngineError
from rallypoint.install import Installed, find_engine

ASKS = """
import asyncio, json, sys
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(folder):
    while line := await asyncio.to_thread(sys.stdin.readline):
        url, asked = json.loads(line)
        await ask(TrainClient(TrainClientConfig(base_url=url, renderer_model_name=folder)), asked)
        print("null", flush=True)


async def ask(client, asked):
    messages = [{"role": "user", "content": asked}]
    for _ in range(2):
        body = {"model": "policy", "messages": messages}
        answer = await client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=8))
        said = answer.tokens
        print(json.dumps([said.prompt_ids, said.completion_ids, said.completion_logprobs]))
        said = answer.message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]


asyncio.run(main(*sys.argv[1:]))
"""
AGENT = """
import json, os, subprocess

environment = {**os.environ, "PRIME_API_KEY": "x"}
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
other = subprocess.Popen([PYTHON, PROGRAM, MODEL], env=environment, **pipes)


def run(base_url, api_key, example):
    other.stdin.write(json.dumps([base_url, example.prompt[0].content]) + "\\n")
    calls = []
    while (call := json.loads(other.stdout.readline())) is not None:
        calls.append(call)
    with open(CALLS, "a") as file:
        file.writelines(json.dumps(call) + "\\\\n" for call in calls)
    return {"reward": len(calls[0][1]) / 8, "calls": len(calls)}
"""


@pytest.fixture(scope="session")
def verifiers() -> Installed:
    """The environment; without it the test says what makes one."""
    try:
        return find_engine("verifiers")
    except EngineError as error:
        pytest.skip(str(error))


def test_what_its_train_client_is_told_is_what_is_trained(verifiers, tmp_path):
    make_tiny_model(tmp_path / "model", tokenizer=make_chat_tokenizer(QWEN3), max_positions=1024)
    (tmp_path / "asks.py").write_text(ASKS)
    names = {"PYTHON": verifiers.python, "PROGRAM": tmp_path / "asks.py", "MODEL": tmp_path / "model"}
    names["CALLS"] = tmp_path / "calls.jsonl"
    constants = "".join(f"{name} = {str(path)!r}\n" for name, path in names.items())
    (tmp_path / "agent.py").write_text(constants + AGENT.replace("\\\\n", "\\n"))
    run = rally.train(
        "grpo",
        model=tmp_path / "model",
        data=[{"prompt": f"say {number}", "answer": ""} for number in range(5)],
        episode=f"{tmp_path / 'agent.py'}:run",
        config={"cluster.runtime": "inline", "reward.function": None, "rollout.max_response_tokens": 128},
        num_prompts=1,
        group_size=2,
        num_steps=5,
        runs_dir=tmp_path / "runs",
        display=False,
    )
    assert run.metrics[-1]["episode/calls"] == 2
    assert max(step["actor/ratio_error"] for step in run.metrics if "actor/ratio_error" in step) < 1e-5
    trained = sorted(token for step in range(1, 6) for row in run.rollouts(step) for token in trained_of(row))
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    told = sorted(pair for _, ids, logprobs in calls for pair in zip(ids, logprobs, strict=True))
    assert len(calls) == 5 * 4
    assert [token for token, _ in trained] == [token for token, _ in told]
    assert [logprob for _, logprob in trained] == pytest.approx([logprob for _, logprob in told])


def trained_of(row):
    columns = zip(row["response_ids"], row["loss_mask"], row["rollout_logprobs"], strict=True)
    return [(token, logprob) for token, is_trained, logprob in columns if is_trained]
