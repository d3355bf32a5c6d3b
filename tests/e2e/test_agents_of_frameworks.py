"""Agents of frameworks from the package index, unchanged, with a tool: what they were told is what is trained."""

import json

import pytest
from tiny_models import make_tiny_model
from tokenizers import AddedToken
from tool_templates import make_tool_tokenizer

import rallypoint as rally

CHAT = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel as Model
from pydantic_ai.providers.openai import OpenAIProvider as Provider


def model_of(base_url, api_key):
    return Model("policy", provider=Provider(base_url=base_url, api_key=api_key))
"""
RESPONSES = CHAT.replace("OpenAIChatModel", "OpenAIResponsesModel")
MESSAGES = """
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel as Model
from pydantic_ai.providers.anthropic import AnthropicProvider as Provider


def model_of(base_url, api_key):
    return Model("policy", provider=Provider(base_url=base_url.removesuffix("/v1"), api_key=api_key))
"""
PYDANTIC_AI = """
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.usage import UsageLimits

num_looks = 0


async def run(base_url, api_key, example):
    global num_looks
    num_looks = 0
    agent = Agent(model_of(base_url, api_key), system_prompt="Look.", model_settings={"max_tokens": 2})

    @agent.tool_plain
    def look(place: int) -> str:
        "Look at a place."
        global num_looks
        num_looks += 1
        return f"nothing at {place}"

    try:
        await agent.run(example.prompt[0].content, usage_limits=UsageLimits(request_limit=3))
    except UsageLimitExceeded:
        pass
    return {"reward": num_looks / 3, "looks": num_looks}
"""
SMOLAGENTS = """
from smolagents import OpenAIModel, ToolCallingAgent, tool

num_looks = 0


@tool
def look(place: int) -> str:
    \"\"\"Look at a place.

    Args:
        place: which one.
    \"\"\"
    global num_looks
    num_looks += 1
    return f"nothing at {place}"


def run(base_url, api_key, example):
    global num_looks
    num_looks = 0
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, tool_choice="auto", max_tokens=2)
    ToolCallingAgent(tools=[look], model=model, max_steps=2, verbosity_level=0).run(example.prompt[0].content)
    return {"reward": num_looks / 3, "looks": num_looks}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model, half of whose tokens are whole calls of a tool."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer, _ = make_tool_tokenizer("qwen2.5")
    call = {"name": "look", "arguments": {"place": 0}}
    calls = [json.dumps({**call, "arguments": {"place": place}}) for place in range(100)]
    texts = [f"<tool_call>\n{one}\n</tool_call>" for one in calls]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in texts])
    return make_tiny_model(folder, tokenizer=tokenizer, max_positions=16_384)


@pytest.fixture
def train(model, tmp_path):
    def run(agent, name):
        (tmp_path / f"{name}.py").write_text(agent)
        return rally.train(
            "grpo",
            model=model,
            data=[{"prompt": f"Look {number}.", "answer": ""} for number in range(4)],
            episode=f"{tmp_path / name}.py:run",
            config={
                "cluster.runtime": "inline",
                "reward.function": None,
                "rollout.exact": True,
                "rollout.max_response_tokens": 12_000,
                "engine.max_tokens_per_micro_batch": 32_768,
            },
            num_prompts=1,
            group_size=2,
            num_steps=1,
            runs_dir=tmp_path / "runs",
            name=name,
            display=False,
        )

    return run


def trained_of(run):
    rows = [zip(row["response_ids"], row["rollout_logprobs"], row["loss_mask"], strict=True) for row in run.rollouts(1)]
    return [[(token, logprob) for token, logprob, is_trained in row if is_trained] for row in rows]


def test_pydantic_ai_trains_the_same_over_chat_responses_and_messages(train):
    runs = [train(model + PYDANTIC_AI, name) for name, model in (("c", CHAT), ("r", RESPONSES), ("m", MESSAGES))]
    assert runs[0].metrics[-1]["episode/looks"] > 0
    assert runs[0].metrics[-1]["rollout/failed"] == 0
    assert all(0 < len(row) <= 6 for row in trained_of(runs[0]))
    assert trained_of(runs[0]) == trained_of(runs[1]) == trained_of(runs[2])
    assert runs[0].metrics[-1]["actor/ratio_error"] < 1e-5


def test_smolagents_trains(train):
    run = train(SMOLAGENTS, "s")
    assert run.metrics[-1]["episode/looks"] > 0
    assert all(len(row) > 0 for row in trained_of(run))
    assert run.metrics[-1]["actor/ratio_error"] < 1e-5
