"""Templates that are built as those of published models are, and a tokenizer of characters that has their tokens."""

import string

from tokenizers import AddedToken, Tokenizer, decoders, models
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
SPECIAL = {
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
