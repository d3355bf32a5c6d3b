import json
import random

from rallypoint.data.generators import frozen_lake
from rallypoint.environments.shipped.games import signs


def write(name, rows):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def asked(game, question, answer):
    return {"data_source": game, "prompt": question, "reward_model": {"style": "rule", "ground_truth": answer}}


numbers = [asked("guess", "?", str(number)) for number in [*range(10)] * 40]
write("guess-validation", numbers[:100])
write("guess-train", numbers[100:])

rng = random.Random(0)
lakes = sorted({frozen_lake(rng, 3) for _ in range(4000)})
rng.shuffle(lakes)
write("lake-validation", [asked("lake", lake, lake) for lake in lakes[:64]])
write("lake-train", [asked("lake", lake, lake) for lake in lakes[64:]])

WORDS = [first + middle + last for first in "bps" for middle in "aei" for last in "dnt"]  # bad, pen, sit ...
write("wordle-validation", [asked("wordle", "?", word) for word in WORDS * 5])
write("wordle-train", [asked("wordle", "?", word) for word in WORDS * 20])


def start(word):
    """Return a game in which every other guess, by chance, agrees with all signs so far; the others are any words."""
    messages, possible = [{"role": "user", "content": "?"}], WORDS
    for _ in range(6):
        guess = rng.choice(possible if rng.random() < 0.5 else WORDS)
        said = signs(guess, word)
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": f"{guess} {said}"}]
        possible = [one for one in possible if signs(guess, one) == said]
        if guess == word:
            break
    return {"messages": messages[:-1]}


write("wordle-start", [start(rng.choice(WORDS)) for _ in range(8000)])
