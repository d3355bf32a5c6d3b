"""What follows on fine-tuning: a reward model and PPO with it, or preferences."""

import json
import random

import pytest
from metrics_file import read_metrics
from tiny_runs import Runs

MODEL = "{hidden_size: 32, num_layers: 1, num_heads: 2, num_key_value_heads: 2, intermediate_size: 64}"
FRAME = "cluster: {runtime: inline, pools: {main: [1]}}\nvalidation: {every_steps: 100}\n"
RATE = "actor: {optimizer: {lr: 1e-2, schedule: constant, warmup_ratio: 0}}\n"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Chain:
    """Runs that begin with what others have trained, on digits that are to be answered with the next one.

    Fine-tuning shows a right and a wrong answer to every prompt alike; what comes after it says which is better.
    """

    def __init__(self, folder, seed):
        self.folder, self.runs, self.seed = folder, Runs(folder / "runs"), seed
        draw = random.Random(seed)
        asked = [str(digit) * draw.randint(1, 3) for digit in range(8) for _ in range(8)]
        answers = [(text, str(int(text[0]) + 1), str(int(text[0]) + 2)) for text in asked]
        shown = [{"prompt": text, "completion": answer} for text, *both in answers for answer in both]
        pairs = [{"prompt": text, "chosen": right, "rejected": wrong} for text, right, wrong in answers]
        rows = {
            "shown": shown,
            "pairs": pairs,
            "prompts": [{"prompt": text, "ground_truth": right} for text, right, _ in answers],
        }
        self.files = {name: write(folder / f"{name}.jsonl", values) for name, values in rows.items()}

    def run(self, recipe, data, num_steps, *keys, model=None):
        """Train, and return the folder of the newest checkpoint and the metrics."""
        start = f"path: {model}" if model else f"create: {MODEL}"
        file = self.folder / f"{recipe}.yaml"
        own = "" if recipe == "ppo" else "data: {num_examples: 32, max_row_tokens: 12}\n"
        file.write_text(f"base: {recipe}\nseed: {self.seed}\nmodel: {{{start}}}\n{FRAME}{RATE}{own}")
        files = [f"data.train={self.files[data]}", f"data.validation={self.files[data]}"]
        names = [f"trainer={{runs_dir: {self.runs.folder}, name: {recipe}, num_steps: {num_steps}, num_epochs: null}}"]
        run = self.runs.run_with(str(file), [*files, *names, *keys])
        return max(run.checkpoints.iterdir()), read_metrics(run.metrics)


def column(records, name):
    return [record[name] for record in records if name in record]


def check(tmp_path, seed):
    """Fine-tune; then PPO by a reward model, and DPO, must both prefer the right answers; -s shows the numbers."""
    chain = Chain(tmp_path, seed)
    tuned, of_tuning = chain.run("sft", "shown", 40)
    losses = column(of_tuning, "validation/loss")
    assert losses[-1] < losses[0] - 1.5
    assert losses[-1] < 0.55, "of two tokens, one of which is a coin: log(2) / 2, and a little"

    scorer, of_pairs = chain.run("reward_model", "pairs", 40, "actor.optimizer.lr=3e-3", model=tuned)
    assert column(of_pairs, "validation/accuracy")[-1] > 0.9

    sampling = "rollout={num_prompts: 16, group_size: 4, max_response_tokens: 2}"
    short = ("actor.optimizer.lr=3e-3", "critic.optimizer.lr=3e-3", "data.max_prompt_tokens=6", "kl=null")
    _, of_ppo = chain.run("ppo", "prompts", 12, f"reward.path={scorer}", sampling, *short, model=tuned)
    scores = column(of_ppo, "reward/mean")
    assert sum(scores[-3:]) / 3 > scores[0] + 0.2, "what the reward model prefers is sampled more often"

    _, of_dpo = chain.run("dpo", "pairs", 12, "actor.optimizer.lr=1e-3", model=tuned)
    accuracy, margin = column(of_dpo, "validation/accuracy"), column(of_dpo, "validation/margin")
    course = {
        "sft": losses,
        "reward_model": column(of_pairs, "validation/accuracy"),
        "ppo": [scores[0], sum(scores[-3:]) / 3],
        "dpo": accuracy,
        "margin": margin,
    }
    print(f"seed {seed}:", {name: f"{values[0]:.2f} -> {values[-1]:.2f}" for name, values in course.items()})
    assert accuracy[-1] > 0.9
    assert margin[-1] > 0.1


@pytest.mark.timeout(120)
def test_a_model_is_fine_tuned_and_then_learns_what_is_preferred(tmp_path):
    check(tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2])
def test_it_does_so_from_other_seeds(tmp_path, seed):
    check(tmp_path, seed)
