"""One call of a tool as models of several families write it, in six spellings each."""

import json
import re

from rallypoint.data.tool_formats import deepseek, gemma, harmony, kimi, llama, mistral, tagged, types_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "string"},
                    "far": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "all": {"type": "array"},
                },
            },
        },
    }
]
TYPES = types_of(TOOLS)
WANTED = {"where": 'the "end" ü\n{}', "far": 1000.0, "all": [1, {"a": False}]}
SPELLINGS = {
    "as the template": lambda value: json.dumps(value, ensure_ascii=False),
    "compact": lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    "indented": lambda value: json.dumps(value, ensure_ascii=False, indent=2),
    "escaped": json.dumps,
    "in another order": lambda value: json.dumps(dict(reversed(value.items())), ensure_ascii=False),
    "with an exponent": lambda value: json.dumps(value).replace("1000.0", "1e3"),
}


def in_json(key="arguments"):
    return lambda spelled: spelled({"name": "look", key: WANTED})


def bare(text):
    return text[text.index(":") + 1 : text.rindex("}")].strip() if text.startswith("{") else text


def apart(opening, middle, closing):
    """Return what writes each argument by itself; text has no quotes there."""

    def write(spelled):
        values = json.loads(spelled(WANTED)).items()
        texts = ((key, value if isinstance(value, str) else spelled({"": value})) for key, value in values)
        return "".join(f"{opening}{key}{middle}{bare(text)}{closing}" for key, text in texts)

    return write


def in_gemmas_quotes(text):
    """Return JSON as Gemma 4 has it: keys without quotes, and texts as they are between quotes of its own."""
    return re.sub(
        r'"(?:[^"\\]|\\.)*"(\s*:)?',
        lambda one: json.loads(one[0][: -len(one[1])]) + one[1] if one[1] else f'<|"|>{json.loads(one[0])}<|"|>',
        text,
    )


WRITTEN = {
    "hermes": (tagged, lambda s: f"Well. <tool_call>\n{in_json()(s)}\n</tool_call>"),
    "qwen3-coder": (
        tagged,
        lambda s: (
            "Well. <tool_call>\n<function=look>\n"
            + apart("<parameter=", ">\n", "\n</parameter>\n")(s)
            + "</function>\n</tool_call>"
        ),
    ),
    "glm4.5": (
        tagged,
        lambda s: (
            "Well. <tool_call>look\n"
            + apart("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")(s)
            + "</tool_call>"
        ),
    ),
    "llama": (llama, in_json("parameters")),
    "mistral": (mistral, lambda s: f"Well. [TOOL_CALLS][{in_json()(s)}]"),
    "devstral": (mistral, lambda s: f"Well. [TOOL_CALLS]look[ARGS]{s(WANTED)}"),
    "gpt-oss": (
        harmony,
        lambda s: (
            "<|channel|>commentary<|message|>Well. <|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.look <|constrain|>json<|message|>{s(WANTED)}<|call|>"
        ),
    ),
    "gemma4": (gemma, lambda s: f"Well. <|tool_call>call:look{in_gemmas_quotes(s(WANTED))}<tool_call|>"),
    "deepseek": (
        deepseek,
        lambda s: (
            "Well. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
            f"```json\n{s(WANTED)}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek3.1": (
        deepseek,
        lambda s: (
            f"Well. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{s(WANTED)}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "kimi-k2": (
        kimi,
        lambda s: (
            "Well. <|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
            f"{s(WANTED)}<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
}
