"""Write the folder `model`, a tiny Qwen3 with random weights whose tokens are pieces of programs, and train.jsonl.

A prompt names an operation; the right answer is a program with a function f that does it, such as
`f = lambda a, b: a + b`. A row has tests, and nothing of the model's is run outside of the sandbox.
"""

import json

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TESTS = {
    "add": {"inputs": [[2, 0], [2, 3], [4, 1], [5, 5]], "outputs": [2, 5, 5, 10]},
    "sub": {"inputs": [[2, 0], [5, 5], [3, 1], [4, 2]], "outputs": [2, 0, 2, 2]},
    "mul": {"inputs": [[3, 1], [1, 4], [2, 3], [5, 2]], "outputs": [3, 4, 6, 10]},
    "mod": {"inputs": [[2, 3], [7, 3], [8, 4], [9, 5]], "outputs": [2, 1, 0, 4]},
}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "mod": "%"}
with open("train.jsonl", "w") as file:
    for name, tests in TESTS.items():
        truth = {**tests, "fn_name": "f"}
        solution = f"f = lambda a, b: a {SIGNS[name]} b"
        row = {"prompt": name, "ground_truth": truth, "extra_info": {"solution": solution}}
        file.write(json.dumps(row) + "\n")

pieces = ["<eos>", "<unk>", *TESTS, "f=lambda a,b:a", "+b", "-b", "*b", "%b"]
backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(pieces)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"f=lambda a,b:a|[-+*%]b|\w+|<\w+>"), "isolated")
backend.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=len(tokenizer),
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    intermediate_size=96,
    max_position_embeddings=64,
    initializer_range=0.1,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
Qwen3ForCausalLM(config).save_pretrained("model")
tokenizer.save_pretrained("model")
