"""verifiers' own train client, where `rally engine install verifiers` was done, samples the rollouts of a run."""

import json
import subprocess

import pytest
from chat_templates import QWEN3, make_chat_tokenizer
from tiny_models import edit_weights, make_tiny_model
from tokenizers import AddedToken
from tool_templates import make_tool_tokenizer

import rallypoint as rally
from rallypoint.environments import pool
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
"""Environments of the shape of kuhn-poker and glossary, whose own harness needs a package manager."""
PLAYS = """
import asyncio, itertools, json, sys
from verifiers.v1.clients import ModelContext, TrainClientConfig
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

SEATS = {"kuhn-poker": ("player0", "player1"), "glossary": ("agent",)}


async def main(folder, name):
    seat = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    env = load_environment(resolve_env_config({"taskset": {"id": name}, **dict.fromkeys(SEATS[name], seat)}))
    async with env.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            url, asked = json.loads(line)
            task = next(itertools.islice(env.taskset.load(), int(asked.split()[-1]), None))
            client = TrainClientConfig(base_url=url, renderer_model_name=folder, renderer={"name": "qwen3"})
            context = ModelContext("policy", client, SamplingConfig(max_tokens=8))
            (slot,) = env.slots(task)
            episode = await env.run_slot(slot, context)
            assert episode.ok, (episode.errors, [trace.errors for trace in episode.traces])
            for node in (node for trace in episode.traces for node in trace.nodes if node.sampled):
                ids = [token for token, is_sampled in zip(node.token_ids, node.mask) if is_sampled]
                print(json.dumps([[], ids, node.logprobs]), flush=True)
            answered = [node for trace in episode.traces for node in trace.nodes if node.message.role == "tool"]
            said = {"reward": episode.traces[0].reward, "answers_of_tools": len(answered)}
            print(json.dumps(said), flush=True)


asyncio.run(main(*sys.argv[1:]))
"""
"""What `vf-eval` does with the packages themselves, whose rollouts come from the run."""
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
    return {**call, "reward": call["reward"] + len(calls[0][1]) / 8, "calls": len(calls)}
"""


@pytest.fixture(scope="session")
def verifiers() -> Installed:
    """The environment; without it the test says what makes one."""
    try:
        return find_engine("verifiers")
    except EngineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def packages(verifiers) -> Installed:
    """The same with environments of verifiers' repository, and with uv, by which their harness gets its packages."""
    needs = "import glossary.servers.facts, kuhn_poker, uv"
    if subprocess.run([verifiers.python, "-c", needs], capture_output=True, check=False).returncode:
        folders = "environments/kuhn_poker and environments/glossary of github.com/PrimeIntellect-ai/verifiers"
        pytest.skip(f"kuhn-poker is not installed: {verifiers.python} -m pip install uv, and from {folders}")
    return verifiers


def with_tools():
    """Return a tokenizer that verifiers' renderer of Qwen3 takes."""
    tokenizer, stops = make_tool_tokenizer("qwen3")
    tokenizer.add_tokens([f"<{end}{name}>" for name in ("tool_call", "tool_response") for end in ("", "/")])
    return tokenizer, stops


# In poker each of two seats talks for several turns, as one does in `talk`.
@pytest.mark.parametrize("environment", [pytest.param("talk", marks=pytest.mark.slow), "poker", "glossary"])
def test_what_its_train_client_is_told_is_what_is_trained(verifiers, tmp_path, monkeypatch, environment):
    tokenizer, stops = with_tools() if environment == "glossary" else (make_chat_tokenizer(QWEN3), ())
    make_tiny_model(tmp_path / "model", tokenizer=tokenizer, max_positions=2048)
    train_five_steps(verifiers, tmp_path, monkeypatch, ASKS, environment, stops, rows=1200)


@pytest.mark.timeout(600)
def test_kuhn_poker_is_trained(packages, tmp_path, monkeypatch):
    tokenizer, stops = with_tools()
    tokenizer.add_tokens([f"[{move}]" for move in ("check", "bet", "fold", "call") * 2])
    make_tiny_model(tmp_path / "model", tokenizer=tokenizer, max_positions=8192)
    train_five_steps(packages, tmp_path, monkeypatch, PLAYS, "kuhn-poker", stops, rows=6000)


@pytest.mark.timeout(600)
def test_glossary_is_trained_with_answers_of_its_server(packages, tmp_path, monkeypatch):
    tokenizer, stops = with_tools()
    names = ("Ada Lovelace", "Alan Turing", "Dennis Ritchie")
    asked = [f"\n{json.dumps({'name': 'mcp__facts__lookup', 'arguments': {'name': name}})}\n" for name in names]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in asked])
    make_tiny_model(tmp_path / "model", tokenizer=tokenizer, max_positions=8192, hidden_size=64)
    begin, end, stop, cue = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>", "<|im_end|>", "\n"])
    calls = tokenizer.convert_tokens_to_ids(asked)
    follow = {cue: [begin], begin: calls, end: [stop]} | {call: [end] for call in calls}
    edit_weights(tmp_path / "model", lambda weights: let_follow(weights, follow))
    run = train_five_steps(packages, tmp_path, monkeypatch, PLAYS, "glossary", stops, rows=6000)
    assert max(step.get("episode/answers_of_tools", 0) for step in run.metrics) >= 1


def let_follow(weights, follow):
    """Make each token likely behind another, whatever else was said."""
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    for token, others in follow.items():
        seen = weights["model.embed_tokens.weight"][token]
        for other in others:
            weights["lm_head.weight"][other] += 0.2 * seen / seen.square().mean().sqrt()


def train_five_steps(verifiers, tmp_path, monkeypatch, program, environment, stops, rows):
    """Train a model on rollouts of verifiers' client, and check that it trained on what the client was told."""
    if stops:
        (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [*stops]}))
    (tmp_path / "asks.py").write_text(program)
    names = {"PYTHON": verifiers.python, "PROGRAM": tmp_path / "asks.py", "MODEL": tmp_path / "model"}
    names |= {"CALLS": tmp_path / "calls.jsonl", "ENVIRONMENT": environment}
    constants = "".join(f"{name} = {str(path)!r}\n" for name, path in names.items())
    (tmp_path / "agent.py").write_text(constants + AGENT.replace("\\\\n", "\\n"))
    monkeypatch.setattr(pool, "_automatic", lambda: pool.Width(1, 1))  # a second process would import verifiers, too
    run = rally.train(
        "grpo",
        model=tmp_path / "model",
        data=[{"prompt": f"say {number}", "answer": ""} for number in range(5)],
        episode=f"{tmp_path / 'agent.py'}:run",
        config={
            "cluster.runtime": "inline",
            "reward.function": None,
            "rollout.max_response_tokens": rows,
            "engine.max_tokens_per_micro_batch": 16_384,
            "actor.num_mini_batches": 2,  # so that the ratio is measured in each step
        },
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
    return run


def trained_of(row):
    columns = zip(row["response_ids"], row["loss_mask"], row["rollout_logprobs"], strict=True)
    return [(token, logprob) for token, is_trained, logprob in columns if is_trained]
