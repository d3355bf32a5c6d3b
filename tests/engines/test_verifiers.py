"""verifiers' own train client, where `rally engine install verifiers` was done, samples the rollouts of a run."""

import json

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from tiny_models import make_tiny_model
from tool_templates import make_tool_tokenizer

import rallypoint as rally
from rallypoint.errors import EngineError
from rallypoint.install import Installed, find_engine

ASKS = """
import asyncio, json, random, sys
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

LOOKUP = {"name": "lookup", "description": "Look up a word.", "parameters": {
    "type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}


async def main(folder, environment):
    while line := await asyncio.to_thread(sys.stdin.readline):
        url, asked = json.loads(line)
        renderer = {"name": "qwen3"} if environment == "glossary" else None  # as one that knows tools has to be named
        client = TrainClient(TrainClientConfig(base_url=url, renderer_model_name=folder, renderer=renderer))
        print(json.dumps({"reward": await globals()[environment](client, asked)}), flush=True)


async def ask(client, messages, tools=()):
    body = {"model": "policy", "messages": messages}
    if tools:
        body["tools"] = [{"type": "function", "function": one} for one in tools]
    answer = await client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=8))
    said = answer.tokens
    print(json.dumps([said.prompt_ids, said.completion_ids, said.completion_logprobs]), flush=True)
    messages.append({"role": "assistant", "content": answer.message.content or ""})
    return messages[-1]["content"]


async def talk(client, asked):
    messages = [{"role": "user", "content": asked}]
    await ask(client, messages)
    await ask(client, [*messages, {"role": "user", "content": "more"}])
    return 0.0


async def poker(client, asked):
    \"\"\"Kuhn's poker: the policy has both seats, each with its conversation; the first one's chips count.\"\"\"
    cards = random.Random(asked).sample(range(3), 2)
    seats = [[{"role": "user", "content": f"{asked}: seat {seat}, card {card}. b is a bet, all else a pass."}]
             for seat, card in enumerate(cards)]
    history = ""
    while history not in ("pp", "bp", "bb", "pbp", "pbb"):
        seat = len(history) % 2
        if len(seats[seat]) > 1 or history:
            seats[seat].append({"role": "user", "content": f"So far: {history}"})
        history += "b" if "b" in await ask(client, seats[seat]) else "p"
    better = 1 if cards[0] > cards[1] else -1
    return float({"pp": better, "bp": 1, "pbp": -1}.get(history, 2 * better))


async def glossary(client, asked):
    \"\"\"A toolset with a lookup: whatever the policy calls is answered, and it answers in turn.\"\"\"
    messages = [{"role": "user", "content": f"{asked}: what is an ulm?"}]
    await ask(client, messages, [LOOKUP])
    call = {"id": "call00001", "type": "function", "function": {"name": "lookup", "arguments": '{"word": "ulm"}'}}
    messages[-1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages.append({"role": "tool", "tool_call_id": "call00001", "content": "A tree, misspelled."})
    return float("t" in await ask(client, messages, [LOOKUP]))


asyncio.run(main(*sys.argv[1:]))
"""
"""Environments of the shape of kuhn-poker and glossary, whose own harness needs a package manager that is not here."""
AGENT = """
import json, os, subprocess

environment = {**os.environ, "PRIME_API_KEY": "x"}
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
other = subprocess.Popen([PYTHON, PROGRAM, MODEL, ENVIRONMENT], env=environment, **pipes)


def run(base_url, api_key, example):
    other.stdin.write(json.dumps([base_url, example.prompt[0].content]) + "\\n")
    calls = []
    while isinstance(call := json.loads(other.stdout.readline()), list):
        calls.append(call)
    with open(CALLS, "a") as file:
        file.writelines(json.dumps(call) + "\\\\n" for call in calls)
    return {"reward": call["reward"] + len(calls[0][1]) / 8, "calls": len(calls)}
"""


EACH = {"actor.num_mini_batches": 2}
"""Two updates a step, so that the ratio is measured in each."""


@pytest.fixture(scope="session")
def verifiers() -> Installed:
    """The environment; without it the test says what makes one."""
    try:
        return find_engine("verifiers")
    except EngineError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("environment", ["talk", "poker", "glossary"])
def test_what_its_train_client_is_told_is_what_is_trained(verifiers, tmp_path, environment):
    tokenizer = make_chat_tokenizer(QWEN3)
    if environment == "glossary":
        tokenizer, stops = make_tool_tokenizer("qwen3")
        tokenizer.add_tokens([f"<{end}{name}>" for name in ("tool_call", "tool_response") for end in ("", "/")])
    make_tiny_model(tmp_path / "model", tokenizer=tokenizer, max_positions=2048)
    if environment == "glossary":
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*stops]}))
    (tmp_path / "asks.py").write_text(ASKS)
    names = {"PYTHON": verifiers.python, "PROGRAM": tmp_path / "asks.py", "MODEL": tmp_path / "model"}
    names |= {"CALLS": tmp_path / "calls.jsonl", "ENVIRONMENT": environment}
    constants = "".join(f"{name} = {str(path)!r}\n" for name, path in names.items())
    (tmp_path / "agent.py").write_text(constants + AGENT.replace("\\\\n", "\\n"))
    run = rally.train(
        "grpo",
        model=tmp_path / "model",
        data=[{"prompt": f"say {number}", "answer": ""} for number in range(5)],
        episode=f"{tmp_path / 'agent.py'}:run",
        config={"cluster.runtime": "inline", "reward.function": None, "rollout.max_response_tokens": 1200, **EACH},
        num_prompts=1,
        group_size=2,
        num_steps=5,
        runs_dir=tmp_path / "runs",
        display=False,
    )
    steps = [step for step in run.metrics if "actor/ratio_error" in step]
    assert len(steps) == 5
    assert max(step["actor/ratio_error"] for step in steps) < 1e-5
    assert max(step["episode/calls"] for step in steps) >= 2
    trained = sorted(token for step in range(1, 6) for row in run.rollouts(step) for token in trained_of(row))
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    told = sorted(pair for _, ids, logprobs in calls for pair in zip(ids, logprobs, strict=True))
    assert len(calls) >= 5 * 4
    assert [token for token, _ in trained] == [token for token, _ in told]
    assert [logprob for _, logprob in trained] == pytest.approx([logprob for _, logprob in told])


def trained_of(row):
    columns = zip(row["response_ids"], row["loss_mask"], row["rollout_logprobs"], strict=True)
    return [(token, logprob) for token, is_trained, logprob in columns if is_trained]
