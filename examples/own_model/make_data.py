"""Write train.jsonl and validation.jsonl: words of three letters, to be answered reversed. No word is in both."""

import itertools
import json
import random

words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=3)]
random.Random(0).shuffle(words)
for name, part in {"train": words[64:], "validation": words[:64]}.items():
    with open(f"{name}.jsonl", "w") as file:
        for word in part:
            row = {
                "data_source": "reverse",
                "prompt": [{"role": "user", "content": word}],
                "ability": "letters",
                "reward_model": {"style": "rule", "ground_truth": word[::-1]},
                "extra_info": {"split": name},
            }
            file.write(json.dumps(row) + "\n")
