"""Two of everything at once, in threads of one process: each has its own functions, recipe and result."""

from concurrent.futures import ThreadPoolExecutor

import torch
from tiny_models import make_tiny_model
from transformers import PreTrainedModel

import rallypoint as rally
from rallypoint.recipes.grpo import GRPO

ROWS = [{"prompt": f"{number:04d}", "answer": str(number)} for number in range(8)]


def reward_of(sign):
    def reward(completion, answer):
        return sign * (1.0 + len(completion))

    return reward


def recipe_of(steps):
    class Mine(GRPO):
        async def train_step(self, step):
            steps.append(step)
            return await GRPO.train_step(self, step)

    return Mine


def at_once(*works):
    with ThreadPoolExecutor(len(works)) as threads:
        return [one.result() for one in [threads.submit(work) for work in works]]


def test_two_runs_two_evaluations_and_two_generations_at_once_are_what_each_is_alone(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    steps = {1: [], -1: []}

    def train(sign):
        return rally.train(
            recipe_of(steps[sign]),
            model=model,
            data=ROWS,
            reward=reward_of(sign),
            config={"cluster.runtime": "inline", "data.max_prompt_tokens": 16},
            num_steps=2 if sign == 1 else 1,
            num_prompts=2,
            group_size=2,
            max_response_tokens=4,
            runs_dir=tmp_path / "runs",
            name=f"of {sign}",
            display=False,
        )

    def evaluate(sign):
        return rally.evaluate(model, ROWS, reward=reward_of(sign), max_response_tokens=4, say=lambda line: None)

    def generate(number):
        return rally.generate(model, f"{number:04d}", max_response_tokens=4)

    alone = [generate(1), generate(2)]
    plus, minus, good, bad, *answers = at_once(
        *(lambda sign=sign: train(sign) for sign in (1, -1)),
        *(lambda sign=sign: evaluate(sign) for sign in (1, -1)),
        *(lambda number=number: generate(number) for number in (1, 2)),
    )
    assert steps == {1: [1, 2], -1: [1]}
    for run, sign in ((plus, 1), (minus, -1)):
        means = [record["reward/mean"] for record in run.metrics if "reward/mean" in record]
        assert means
        assert all(sign * mean >= 1 for mean in means)
    assert good.mean == -bad.mean >= 1
    assert answers == alone
    ties = PreTrainedModel.tie_weights
    loaded = at_once(*(lambda run=run: rally.load_run(run.folder).load()[0].state_dict() for run in (plus, minus)))
    for found, run in zip(loaded, (plus, minus), strict=True):
        assert all(torch.equal(value, run.load()[0].state_dict()[name]) for name, value in found.items())
    assert PreTrainedModel.tie_weights is ties
    assert any(not torch.equal(value, loaded[1][name]) for name, value in loaded[0].items())
