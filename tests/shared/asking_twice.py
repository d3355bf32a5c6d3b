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


async def in_process(client, example):
    """The same, without HTTP."""
    await client.chat(max_tokens=5)
    said = await client.chat([{"role": "user", "content": "12"}], max_tokens=5)
    return {"reward": said["content"].count(str(example.ground_truth)) / 4, "asked": 2}
