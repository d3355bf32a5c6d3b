"""Write a tiny Qwen3 with random weights to `model`, and the data of all four runs, all made here."""

import json
import random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# Some 20 characters of a call are one token each time, so that rows are short.
TOOLS = {"calculator": "expression", "python": "code", "search": "query"}
CALLS = {tool: f'<tool_call>{{"name": "{tool}", "arguments": {{"{name}": "' for tool, name in TOOLS.items()}
END = '"}}</tool_call>'
WORDS = ["<answer>", "</answer>", "[1] ", END, *CALLS.values()]
ROLES = ["<eos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>"]
vocabulary = [*ROLES, *(f"<{tool}>" for tool in TOOLS), *WORDS, *"0123456789*?\n :abdeiklmnors"]

backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(vocabulary)}, unk_token="<unk>"))
escaped = "|".join(word.replace("[", r"\[").replace("{", r"\{").replace("}", r"\}") for word in WORDS)
backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{escaped}|<[a-z]+>|\n|."), "isolated")
backend.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")
tokenizer.chat_template = (
    "{% if tools %}<system>{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}<eos>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=128,
    initializer_range=0.1,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
)
model = Qwen3ForCausalLM(config)
model.save_pretrained("model")
tokenizer.save_pretrained("model")
print(f"model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")

rng = random.Random(0)


def write(name, rows):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def asked(question, answer):
    return {"data_source": "tools", "prompt": question, "reward_model": {"style": "rule", "ground_truth": answer}}


def person():
    return "".join(rng.choice("abdeiklmnors") for _ in range(3))


sums = [(f"{a}*{b}", str(a * b)) for a in range(11, 100) for b in range(11, 100)]
rng.shuffle(sums)
rooms = {person(): str(rng.randrange(100, 1000)) for _ in range(1600)}
people = list(rooms)
write("passages", [{"title": name, "text": f"{name}: {room}"} for name, room in rooms.items()])
write("sums-validation", [asked(*one) for one in sums[:256]])
write("sums-train", [asked(*one) for one in sums[256:4352]])
write("rooms-validation", [asked(f"{name}?", rooms[name]) for name in people[:256]])
write("rooms-train", [asked(f"{name}?", rooms[name]) for name in people[256:]])


def start(tool, question, said, answer):
    """Return a conversation that calls a tool, or, as often, one that answers at once."""
    system, user = {"role": "system", "content": f"<{tool}>"}, {"role": "user", "content": question}
    answer = {"role": "assistant", "content": answer}
    call = {"role": "assistant", "content": CALLS[tool] + question.rstrip("?") + END}
    called = [call, {"role": "tool", "content": said}] if rng.random() < 0.5 else []
    return {"messages": [system, user, *called, answer]}


rows = []
for question, answer in sums[4352:]:
    rows.append(start("calculator", question, answer, answer))
    rows.append(start("python", question, answer, answer))
    name, room = person(), str(rng.randrange(100, 1000))  # other rooms than those of the passages
    rows.append(start("search", f"{name}?", f"[1] {name}\n{name}: {room}", f"<answer>{room}</answer>"))
rng.shuffle(rows)
write("start", rows)
print(f"{len(rows):,} conversations for the start")
