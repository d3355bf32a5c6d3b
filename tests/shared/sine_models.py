"""Tiny models whose weights are sines, so that another program makes the same ones without a file."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from rallypoint.data import make_digits_tokenizer

MARKED = """\
{%- for message in messages -%}
    {{- "<" + message.role + ">" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
    {%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant>" -}}{%- endif -%}
"""
"""The template of the digits tokenizer, with the assistant's turns marked."""


def make_sine_model(folder: Path, *, scores: bool = False) -> tuple[str, PreTrainedTokenizerFast]:
    """Write a policy, or with `scores` a reward model, and its tokenizer; return the folder and the tokenizer."""
    tokenizer = make_digits_tokenizer()
    tokenizer.chat_template = MARKED
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    model = (LlamaForSequenceClassification if scores else LlamaForCausalLM)(config)
    with torch.no_grad():
        for place, (name, weight) in enumerate(sorted(model.named_parameters())):
            waves = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * (1.7 + 0.3 * place) + place)
            weight.copy_(1.0 + 0.1 * waves.view_as(weight) if "norm" in name else 0.3 * waves.view_as(weight))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder), tokenizer
