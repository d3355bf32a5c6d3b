"""Guess a number from 0 to 9 in at most five questions; after each the game says whether it is higher or lower."""


async def guess(client, example):
    number = int(example.ground_truth)
    answer = await client.chat(max_tokens=2)  # at first: the messages of the prompt
    for asked in range(1, 6):
        said = answer["content"]
        if said == str(number):
            return {"reward": 1.1 - asked / 10, "questions": asked}
        hint = "?" if not said.isdecimal() else ">" if number > int(said) else "<"
        if asked < 5:
            answer = await client.chat([{"role": "user", "content": hint}], max_tokens=2)
    return {"reward": 0.0, "questions": 6}
