import json
import random

from rallypoint.data.generators import frozen_lake

with open("guess-train.jsonl", "w") as train, open("guess-validation.jsonl", "w") as validation:
    for at, number in enumerate([*range(10)] * 40):
        row = {
            "data_source": "guess",
            "prompt": [{"role": "user", "content": "?"}],
            "ability": "games",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {},
        }
        (validation if at < 100 else train).write(json.dumps(row) + "\n")


rng = random.Random(0)
lakes = sorted({frozen_lake(rng, 3) for _ in range(4000)})
rng.shuffle(lakes)
for name, part in {"train": lakes[64:], "validation": lakes[:64]}.items():
    with open(f"lake-{name}.jsonl", "w") as file:
        for shown in part:
            row = {
                "data_source": "lake",
                "prompt": [{"role": "user", "content": shown}],
                "ability": "games",
                "reward_model": {"style": "rule", "ground_truth": shown},
                "extra_info": {},
            }
            file.write(json.dumps(row) + "\n")
