"""An agent as people write them with OpenAI's client. Nothing in it knows that a run trains the model it calls."""

import json

from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Multiply two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def run(base_url, api_key, example):
    messages = [{"role": one.role, "content": one.content} for one in example.prompt]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(4):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            said = answer.choices[0].message
            if not said.tool_calls:
                return float(said.content == example.ground_truth)
            messages.append(said)
            for call in said.tool_calls:
                first, _, second = json.loads(call.function.arguments).get("expression", "").partition("*")
                known = first.isdecimal() and second.isdecimal()
                result = str(int(first) * int(second)) if known else "?"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
