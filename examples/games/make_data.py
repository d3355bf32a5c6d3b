import json
import random

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


def lake(rng):
    """Return a lake that can be crossed, as lines of fields."""
    while True:
        places = [(y, x) for y in range(3) for x in range(3)]
        rng.shuffle(places)
        player, goal, *holes = places[: 2 + rng.choice((1, 2))]
        reached, edge = {player}, [player]
        while edge:
            y, x = edge.pop()
            for place in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if place in places and place not in holes and place not in reached:
                    reached.add(place)
                    edge.append(place)
        if goal in reached:
            signs = {player: "P", goal: "G"} | dict.fromkeys(holes, "O")
            return "/".join("".join(signs.get((y, x), ".") for x in range(3)) for y in range(3))


rng = random.Random(0)
lakes = sorted({lake(rng) for _ in range(4000)})
rng.shuffle(lakes)
for name, part in {"train": lakes[64:], "validation": lakes[:64]}.items():
    with open(f"lake-{name}.jsonl", "w") as file:
        for shown in part:
            row = {
                "data_source": "lake",
                "prompt": [{"role": "user", "content": shown}],
                "ability": "games",
                "reward_model": {"style": "rule", "ground_truth": "G"},
                "extra_info": {},
            }
            file.write(json.dumps(row) + "\n")
