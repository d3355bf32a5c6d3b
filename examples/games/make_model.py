"""Write two tiny Qwen3 with random weights and a tokenizer of single characters, to the folders `model` and `speller`.

Stand-ins for a model of your own, as in ../own_model; the chat template ends every message.
"""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def write(folder, characters):
    vocabulary = ["<eos>", "<unk>", "<user>", "<assistant>", *characters]
    backend = Tokenizer(models.WordLevel({token: at for at, token in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[a-z]+>|."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
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
        max_position_embeddings=256,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


write("model", "0123456789<>?.udlrPGO/")
write("speller", "abcdefghijklmnopqrstuvwxyz3 +?-")
