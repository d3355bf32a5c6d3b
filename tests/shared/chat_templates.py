"""Templates that are built as those of published models are, and a tokenizer of characters that has their tokens."""

import re
import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN3 = """\
{%- set last = namespace(asked=-1) -%}
{%- for message in messages -%}
    {%- if message.role == "user" -%}{%- set last.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.role == "assistant" -%}
        {%- set parts = message.content.split("</think>") -%}
        {%- if loop.index0 > last.asked -%}
            {{- "<think>\\n" + (parts[0].replace("<think>", "").strip() if parts[1:] else "") + "\\n</think>\\n\\n" -}}
        {%- endif -%}
        {{- parts[-1].lstrip("\\n") -}}
    {%- else -%}{{- message.content -}}{%- endif -%}
    {{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
"""Reasoning is kept in the answer to the last question alone; a line break follows on the end of a turn."""
LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim + "<|eot_id|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" -}}{%- endif -%}
"""
"""Blanks around a message are cut; two line breaks are one token."""
ZEPHYR = """\
{%- for message in messages -%}
    {{- "<|" + message.role + "|>\\n" + message.content + eos_token + "\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>\\n" -}}{%- endif -%}
"""
"""The names of the roles are no tokens."""
_CHATML = """\
{%- for message in messages %}{{ "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}
"""
_BUILT_LIKE = {
    "qwen2.5": (
        "<|im_start|> <|im_end|>",
        "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
        + _CHATML,
    ),
    "qwen3-2507-thinking": ("<|im_start|> <|im_end|>", _CHATML.replace("assistant\\n", "assistant\\n<think>\\n")),
    "llama3.1": (
        "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>",
        """{{- bos_token }}
{%- if not date_string is defined %}{% if strftime_now is defined %}{% set date_string = strftime_now("%d %b %Y") %}
{%- else %}{% set date_string = "26 Jul 2024" %}{% endif %}{% endif %}
{%- if messages[0].role == "system" %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = "" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- for message in messages %}{% if message.role in ("tool", "ipython") %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
{%- else %}{{ message.content }}{% endif %}{{ "<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim + "<|eot_id|>" }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}""",
    ),
    "llama2": (
        "<s> </s>",
        """{% if messages[0].role == "system" %}{% set loop_messages = messages[1:] %}
{%- set system = messages[0].content %}
{%- else %}{% set loop_messages = messages %}{% set system = false %}{% endif %}{% for message in loop_messages %}
{%- if (message.role == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("Conversation roles must alternate") }}
{%- endif %}{% if loop.index0 == 0 and system != false %}
{%- set content = "<<SYS>>\\n" + system + "\\n<</SYS>>\\n\\n" + message.content %}
{%- else %}{% set content = message.content %}{% endif %}
{%- if message.role == "user" %}{{ bos_token + "[INST] " + content.strip() + " [/INST]" }}
{%- else %}{{ " " + content.strip() + " " + eos_token }}{% endif %}{% endfor %}""",
    ),
    "mistral-v0.3": (
        "<s> [INST] [/INST] [TOOL_RESULTS] [/TOOL_RESULTS] </s>",
        """{%- if messages[0].role == "system" %}{% set system = messages[0].content %}{% set messages = messages[1:] %}
{%- endif %}{{ bos_token }}{% for message in messages %}{% if message.role == "user" %}
{%- if loop.last and system is defined %}{{ "[INST] " + system + "\\n\\n" + message.content + "[/INST]" }}
{%- else %}{{ "[INST] " + message.content + "[/INST]" }}{% endif %}
{%- elif message.role == "tool" %}{{ "[TOOL_RESULTS] " + {"content": message.content} | tojson + "[/TOOL_RESULTS]" }}
{%- else %}{{ " " + message.content | trim + eos_token }}{% endif %}{% endfor %}""",
    ),
    "gemma2": (
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        """{{ bos_token }}{% if messages[0].role == "system" %}
{{- raise_exception("System role not supported") }}{% endif %}
{%- for message in messages %}{% if (message.role == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("Conversation roles must alternate") }}{% endif %}
{%- set role = "model" if message.role == "assistant" else message.role %}
{{- "<start_of_turn>" + role + "\\n" + message.content | trim + "<end_of_turn>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<start_of_turn>model\\n" }}{% endif %}""",
    ),
    "deepseek-r1": (
        "<\uff5cbegin\u2581of\u2581sentence\uff5c> <\uff5cUser\uff5c> <\uff5cAssistant\uff5c> "
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        """{% set ns = namespace(system="") %}{% for message in messages %}{% if message.role == "system" %}
{%- set ns.system = message.content %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}{% for message in messages %}
{%- if message.role == "user" %}{{ "<\uff5cUser\uff5c>" + message.content }}{% endif %}
{%- if message.role == "assistant" %}{% set content = message.content %}
{%- if "</think>" in content %}{% set content = content.split("</think>")[-1] %}{% endif %}
{{- "<\uff5cAssistant\uff5c>" + content + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<\uff5cAssistant\uff5c><think>\\n" }}{% endif %}""",
    ),
    "phi3": (
        "<|endoftext|> <|system|> <|user|> <|assistant|> <|end|>",
        """{% for message in messages %}{{ "<|" + message.role + "|>\\n" + message.content + "<|end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>\\n" }}{% else %}{{ eos_token }}{% endif %}""",
    ),
    "gpt-oss": (
        "<|endoftext|> <|start|> <|channel|> <|message|> <|end|> <|return|>",
        """{{- "<|start|>system<|message|>Current date: " + strftime_now("%Y-%m-%d") + "<|end|>" }}
{%- for message in messages %}
{%- if message.role == "system" %}
{{- "<|start|>developer<|message|># Instructions\\n\\n" + message.content + "<|end|>" }}
{%- elif message.role == "user" %}{{ "<|start|>user<|message|>" + message.content + "<|end|>" }}
{%- elif message.role == "tool" %}
{{- "<|start|>tool<|channel|>commentary<|message|>" + message.content | tojson + "<|end|>" }}
{%- else %}{{ "<|start|>assistant<|channel|>final<|message|>" + message.content }}
{{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}""",
    ),
    "smolvlm": (
        "<|im_start|> <end_of_utterance>",
        """<|im_start|>{% for message in messages %}{{ message.role | capitalize }}
{%- if message.content[0].type == "image" %}{{ ":" }}{% else %}{{ ": " }}{% endif %}{% for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% elif part.type == "image" %}{{ "<image>" }}{% endif %}{% endfor %}
{{- "<end_of_utterance>\\n" }}{% endfor %}{% if add_generation_prompt %}{{ "Assistant:" }}{% endif %}""",
    ),
    "glm4.5": (
        "<sop> <|system|> <|user|> <|observation|> <|assistant|>",
        """<sop>{% for message in messages %}{% if message.role == "user" %}{{ "<|user|>\\n" + message.content }}
{%- elif message.role == "assistant" %}{{ "<|assistant|>" }}{% set content = message.content %}
{%- if "</think>" in content %}{% set content = content.split("</think>")[-1].lstrip("\\n") %}{% endif %}
{{- "\\n<think></think>\\n" + content.strip() }}
{%- elif message.role == "tool" %}{{ "<|observation|>\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- else %}{{ "<|system|>\\n" + message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}""",
    ),
    "command-r": (
        "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|> <|END_OF_TURN_TOKEN|>",
        """{{ bos_token }}{% for message in messages %}{% set content = message.content %}
{%- set role = {"system": "SYSTEM", "user": "USER", "assistant": "CHATBOT", "tool": "SYSTEM"}[message.role] %}
{{- "<|START_OF_TURN_TOKEN|><|" + role + "_TOKEN|>" + content.strip() + "<|END_OF_TURN_TOKEN|>" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>" }}{% endif %}""",
    ),
    "vicuna": (
        "<s> </s>",
        """{% for message in messages %}{% if message.role == "user" %}{{ "USER: " + message.content + " " }}
{%- elif message.role == "assistant" %}{{ "ASSISTANT: " + message.content + eos_token }}
{%- else %}{{ message.content + "\\n\\n" }}{% endif %}{% endfor %}{% if add_generation_prompt %}
{{- "ASSISTANT:" }}{% endif %}""",
    ),
}
"""The special tokens and the template of each; the first token is that of the beginning, the last one the named end."""
PUBLISHED = {name: template for name, (_, template) in _BUILT_LIKE.items()}
BLANK_CUE = """\
{%- for message in messages -%}
    {%- if message.role == "user" -%}{{- "U:" + message.content + "A:CUE" -}}
    {%- else -%}{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}{{- "\\n" -}}{%- endif -%}
{%- endfor -%}
"""
"""The cue stands behind every question, so that it is the same whether an answer is asked for or not."""
SPECIAL = {
    **{template: tuple(special.split()) for special, template in _BUILT_LIKE.values()},
    QWEN3: ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    LLAMA3: ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ZEPHYR: ("<s>", "</s>"),
}
"""Special tokens of each template, the first token of a text in front, and that which ends a turn at the end."""


def make_chat_tokenizer(template: str, *, eos: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the tokens of a template; `eos` is the end of a response, if not the end of a turn."""
    vocabulary = {text: number for number, text in enumerate((*string.printable, "\n\n"))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\n", "\n")]))
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL[template]])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=SPECIAL[template][0], eos_token=eos or SPECIAL[template][-1]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_published_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return one for the text of a published template: whatever looks like a special token there is one."""
    found = re.findall(
        r"<[|\uff5c][^<>\s]{1,40}[|\uff5c]>|</?s>|\[/?[A-Z_]{3,20}\]|</?(?:start|end)_of_(?:turn|utterance)>"
        r"|<\|?turn\|?>|<\|[a-z_]+>|<[a-z_]+\|>",
        template,
    )
    SPECIAL.setdefault(template, tuple(dict.fromkeys(["<|bos|>", *found, "<|eos|>"])))
    return make_chat_tokenizer(template)


def merging_tokenizer(cue, *merges, marked=False, start_blank=False):
    """Return a tokenizer that merges a cue's end with what follows, and may put a blank before a text."""
    pieces = [*string.printable, *("".join(merge) for merge in merges)]
    if start_blank:
        pieces = [piece.replace(" ", "▁") for piece in pieces]
        merges = [tuple(part.replace(" ", "▁") for part in merge) for merge in merges]
    vocabulary = {text: number for number, text in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.decoder = decoders.Fuse()
    if start_blank:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=start_blank, split=False)
        backend.decoder = decoders.Metaspace(prepend_scheme=start_blank)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    template = BLANK_CUE.replace("CUE", cue)
    tokenizer.chat_template = template if marked else re.sub(r"{%- (end)?generation -%}", "", template)
    return tokenizer
