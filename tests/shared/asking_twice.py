"""One agent and the same episode in this process: what they are told is the same, wherever it is sampled."""

ROWS = [{"prompt": f"{i % 10}{i * 7 % 10}", "answer": str(i % 10)} for i in range(16)]
TWICE = """
from openai import AsyncOpenAI


async def run(base_url, api_key, example):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": one.role, "content": one.content} for one in example.prompt]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=5)
            said = answer.choices[0].message
            messages += [said, {"role": "user", "content": "12"}]
    return {"reward": (said.content or "").count(str(example.ground_truth)) / 4, "asked": 2}
"""


ASKS = """
import json
from urllib.request import Request, urlopen


def ask(base_url, api_key, messages, **more):
    head = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    with urlopen(Request(f"{base_url}/chat/completions", body, head)) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
"""A client in a few lines: that of OpenAI takes each process of agents a second to import."""
TWICE_PLAINLY = (
    ASKS
    + """

def run(base_url, api_key, example):
    messages = [{"role": one.role, "content": one.content} for one in example.prompt]
    for _ in range(2):
        said = ask(base_url, api_key, messages, max_tokens=5)
        messages += [said, {"role": "user", "content": "12"}]
    return {"reward": (said["content"] or "").count(str(example.ground_truth)) / 4, "asked": 2}
"""
)


async def in_process(client, example):
    """The same, without HTTP."""
    await client.chat(max_tokens=5)
    said = await client.chat([{"role": "user", "content": "12"}], max_tokens=5)
    return {"reward": said["content"].count(str(example.ground_truth)) / 4, "asked": 2}
