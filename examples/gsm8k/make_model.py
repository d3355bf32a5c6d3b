"""Write a tiny Qwen3 with random weights to the folder `model`, with a tokenizer that has a token for every byte.

A stand-in for `Qwen/Qwen3-0.6B` that runs anywhere: it can read every question, and will never answer one.
"""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
backend.decoder = decoders.ByteLevel()
backend.add_special_tokens(["<eos>", "<user>", "<assistant>"])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
tokenizer.chat_template = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=len(tokenizer),
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=96,
    max_position_embeddings=2048,
    initializer_range=0.1,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
Qwen3ForCausalLM(config).save_pretrained("model")
tokenizer.save_pretrained("model")
