"""Chat templates of eleven families that take tools, built as the published ones are, with how each writes a call."""

from chat_templates import SPECIAL, make_chat_tokenizer

QWEN25 = """\
{%- if messages[0].role == "system" %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = "You are helpful." %}{% endif %}{{- "<|im_start|>system\\n" + system }}
{%- if tools %}{{ "\\n\\n# Tools\\n<tools>" }}{% for tool in tools %}{{ "\\n" + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nCall one as <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>.' }}{% endif %}
{{- "<|im_end|>\\n" }}{% for message in messages %}{% if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|im_start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
{%- else %}{{ "<|im_start|>" + message.role }}{% if message.content %}{{ "\\n" + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{% set call = call.function %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + "}\\n</tool_call>" }}
{%- endfor %}{{ "<|im_end|>\\n" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
QWEN3 = QWEN25.replace(
    '{% if message.content %}{{ "\\n" + message.content }}{% endif %}',
    """{% set content = message.content or "" %}
{%- if message.role == "assistant" and loop.index0 > (messages | map(attribute="role") | list).index("user") %}
{{- "\\n<think>\\n" + (message.reasoning_content or "") + "\\n</think>\\n\\n" }}{% endif %}{{ "\\n" + content }}""",
)
"""An answer has an empty part for reasoning that was never sampled."""
CODER = (
    QWEN25.partition("{%- for call in")[0]
    + """{%- for call in message.tool_calls or [] %}{% set call = call.function %}
{{- "\\n<tool_call>\\n<function=" + call.name + ">" }}{% for name, value in call.arguments | items %}
{{- "\\n<parameter=" + name + ">\\n" + value | string + "\\n</parameter>" }}{% endfor %}
{{- "\\n</function>\\n</tool_call>" }}"""
    + QWEN25[QWEN25.rindex("{%- endfor %}{{") :]
)
LLAMA = """\
{{- bos_token + "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools %}{{ 'Answer with {"name": function, "parameters": {name: value}}.' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{{ "<|eot_id|>" }}
{%- for message in messages %}{% if message.role in ("tool", "ipython") %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content | tojson + "<|eot_id|>" }}
{%- elif message.tool_calls %}{% if message.tool_calls | length != 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{% endif %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + "}<|eot_id|>" }}
{%- else %}{{ "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
{{- message.content | trim + "<|eot_id|>" }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}"""
MISTRAL = """\
{%- if messages[0].role == "system" %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set users = messages | selectattr("role", "equalto", "user") | list %}{{ bos_token }}
{%- for message in messages %}{% if message.role == "user" %}
{%- if tools and message == users[-1] %}
{{- "[AVAILABLE_TOOLS]" + tools | list | tojson + "[/AVAILABLE_TOOLS]" }}{% endif %}
{{- "[INST]" + message.content + "[/INST]" }}
{%- elif message.tool_calls %}{{ "[TOOL_CALLS][" }}{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
{%- endif %}{{ '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + ("" if loop.last else ", ") }}{% endfor %}{{ "]" + eos_token }}
{%- elif message.role == "tool" %}
{{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- "[/TOOL_RESULTS]" }}
{%- elif message.role == "assistant" %}{{ message.content + eos_token }}
{%- else %}{{ raise_exception("Only user, assistant and tool roles are supported!") }}{% endif %}{% endfor %}"""
GLM = """\
{{- "[gMASK]<sop>" }}{% if tools %}{{ "<|system|>\\n# Tools" }}
{%- for tool in tools %}{{ "\\n" + tool | tojson }}{% endfor %}
{{- "\\n<tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>" }}{% endif %}
{%- for message in messages %}{% if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<|observation|>" }}{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- elif message.role == "assistant" %}{{ "<|assistant|>\\n<think></think>" }}
{%- if message.content %}{{ "\\n" + message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ "\\n<tool_call>" + call.function.name }}
{%- for key, value in call.function.arguments | items %}{{ "\\n<arg_key>" + key + "</arg_key>\\n<arg_value>" }}
{{- (value if value is string else value | tojson) + "</arg_value>" }}{% endfor %}{{ "\\n</tool_call>" }}{% endfor %}
{%- else %}{{ "<|" + message.role + "|>\\n" + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}"""
GPT_OSS = """\
{%- set last = namespace(called=none) %}{{ "<|start|>system<|message|>You are helpful.<|end|>" }}
{%- if tools %}{{ "<|start|>developer<|message|>" + tools | list | tojson + "<|end|>" }}{% endif %}
{%- for message in messages %}{% if message.role == "tool" %}{% if last.called is none %}
{{- raise_exception("There was no previous assistant message with a tool call!") }}{% endif %}
{{- "<|start|>functions." + last.called + " to=assistant<|channel|>commentary<|message|>" + message.content | tojson }}
{{- "<|end|>" }}
{%- elif message.tool_calls %}{% set call = message.tool_calls[0].function %}{% set last.called = call.name %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson + "<|call|>" }}
{%- elif message.role == "assistant" %}{{ "<|start|>assistant<|channel|>final<|message|>" + message.content }}
{{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
{%- else %}{{ "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""
GEMMA = """\
{%- macro written(value) %}{% if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean %}{{ "true" if value else "false" }}
{%- elif value is mapping %}{{ "{" }}{% for key, one in value | dictsort %}
{{- ("" if loop.first else ",") + key + ":" }}{{ written(one) }}{% endfor %}{{ "}" }}
{%- elif value is sequence %}{{ "[" }}{% for one in value %}{{ "" if loop.first else "," }}{{ written(one) }}
{%- endfor %}{{ "]" }}{% else %}{{ value }}{% endif %}{% endmacro %}
{{- bos_token }}{% for tool in tools or [] %}{{ "<|tool>" + tool | tojson + "<tool|>" }}{% endfor %}
{%- for message in messages %}{% if message.role == "tool" %}
{{- "<|tool_response>response:" + message.name + "{value:" + message.content + "}<tool_response|>" }}
{%- else %}{% if loop.first or messages[loop.index0 - 1].role != "tool" %}
{{- "<|turn>" + ("model" if message.role == "assistant" else message.role) + "\\n" }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- "<|tool_call>call:" + call.function.name }}{{ written(call.function.arguments) }}{{ "<tool_call|>" }}{% endfor %}
{{- message.content or "" }}{% if not message.tool_calls %}{{ "<turn|>\\n" }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != "tool" %}{{ "<|turn>model\\n" }}{% endif %}"""
DEEPSEEK = """\
{{- bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{% if message.role == "user" %}{{ "<｜User｜>" + message.content }}
{%- elif message.role == "tool" %}{% if messages[loop.index0 - 1].role != "tool" %}
{{- "<｜tool▁outputs▁begin｜>" }}{% endif %}
{{- "<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ "<｜tool▁outputs▁end｜>" }}{% endif %}
{%- elif message.role == "system" %}{{ message.content }}
{%- elif message.tool_calls %}{{ "<｜Assistant｜>" + message.content + "<｜tool▁calls▁begin｜>" }}
{%- for call in message.tool_calls %}{{ "" if loop.first else "\\n" }}
{{- "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" + call.function.name + "\\n```json\\n" + call.function.arguments }}
{{- "\\n```<｜tool▁call▁end｜>" }}{% endfor %}{{ "<｜tool▁calls▁end｜>" + eos_token }}
{%- else %}{% if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ "<｜Assistant｜>" }}{% endif %}
{{- message.content + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != "tool" %}{{ "<｜Assistant｜>" }}{% endif %}"""
DEEPSEEK31 = """\
{{- bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{% if message.role == "user" %}{{ "<｜User｜>" + message.content }}
{%- elif message.role == "tool" %}{{ "<｜tool▁output▁begin｜>" + message.content + "<｜tool▁output▁end｜>" }}
{%- elif message.role == "system" %}{{ message.content }}
{%- else %}{% if messages[loop.index0 - 1].role == "user" %}{{ "<｜Assistant｜></think>" }}{% endif %}
{{- message.content or "" }}{% for call in message.tool_calls or [] %}
{{- "<｜tool▁calls▁begin｜>" if loop.first else "" }}
{{- "<｜tool▁call▁begin｜>" + call.function.name + "<｜tool▁sep｜>" + call.function.arguments + "<｜tool▁call▁end｜>" }}
{{- "<｜tool▁calls▁end｜>" if loop.last else "" }}{% endfor %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role == "user" %}{{ "<｜Assistant｜></think>" }}{% endif %}"""
KIMI = """\
{%- if tools %}{{ "<|im_system|>tool_declare<|im_middle|>" + tools | list | tojson + "<|im_end|>" }}{% endif %}
{%- for message in messages %}{{ "<|im_" + ("system" if message.role == "tool" else message.role) + "|>" }}
{{- message.role + "<|im_middle|>" }}
{%- if message.role == "tool" %}{{ "## Return of " + message.tool_call_id + "\\n" }}{% endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] %}{{ "<|tool_calls_section_begin|>" if loop.first else "" }}
{{- "<|tool_call_begin|>" + call.id + "<|tool_call_argument_begin|>" }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- "<|tool_call_end|>" }}{{ "<|tool_calls_section_end|>" if loop.last else "" }}{% endfor %}
{{- "<|im_end|>" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_assistant|>assistant<|im_middle|>" }}{% endif %}"""

_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "outputs", "output") for end in ("begin", "end")),
    "<｜tool▁sep｜>",
    "<｜end▁of▁sentence｜>",
)
_KIMI = (
    "[BOS]",
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|im_end|>"),
)
_TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FAMILIES = {
    "qwen2.5": (QWEN25, _TURNS, ("<|im_end|>",)),
    "qwen3": (QWEN3, _TURNS, ("<|im_end|>", "<|endoftext|>")),
    "qwen3-coder": (CODER, _TURNS, ("<|im_end|>",)),
    "llama3.1": (
        LLAMA,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
        ("<|eot_id|>", "<|eom_id|>"),
    ),
    "mistral": (
        MISTRAL,
        (
            "<s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[ARGS]",
            "</s>",
        ),
        ("</s>",),
    ),
    "glm4.5": (
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|observation|>", "<|assistant|>", "<|endoftext|>"),
        ("<|observation|>", "<|user|>", "<|endoftext|>"),
    ),
    "gpt-oss": (
        GPT_OSS,
        (
            "<|endoftext|>",
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ),
        ("<|return|>", "<|call|>"),
    ),
    "gemma4": (
        GEMMA,
        (
            "<bos>",
            "<|tool>",
            "<tool|>",
            "<|turn>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
            "<turn|>",
        ),
        ("<turn|>", "<|tool_response>"),
    ),
    "deepseek": (DEEPSEEK, _DEEPSEEK, (_DEEPSEEK[-1],)),
    "deepseek3.1": (DEEPSEEK31, _DEEPSEEK, (_DEEPSEEK[-1],)),
    "kimi-k2": (KIMI, _KIMI, ("<|im_end|>",)),
}
"""Template, special tokens, and those of them that end an answer; the first one ends one without calls."""


def make_tool_tokenizer(family):
    """Return a tokenizer of characters with the template of a family, and the ids that end an answer."""
    template, special, stops = FAMILIES[family]
    SPECIAL.setdefault(template, special)
    tokenizer = make_chat_tokenizer(template, eos=stops[0])
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids(list(stops)))
