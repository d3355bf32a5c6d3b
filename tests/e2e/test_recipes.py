"""The twins of recipes for real models: the same files, with a tiny model and tiny data under the names of the hub."""

import json
from pathlib import Path

import pytest
from metrics_file import read_metrics
from tiny_models import make_tiny_model
from tiny_runs import Runs

from rallypoint.environments.sandbox import open_sandbox
from rallypoint.errors import SandboxError

MODELS = ("Qwen2.5-0.5B-Instruct", "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-30B-A3B")
MIXTURES = ("Qwen3-30B-A3B",)
TINY = (
    "cluster={device: cpu, runtime: inline, pools: {main: [1]}}",
    "data.max_prompt_tokens=8",
    "rollout.num_prompts=4",
    "rollout.group_size=4",
    "rollout.max_response_tokens=3",
    "actor.num_mini_batches=2",
    "validation={every_steps: 2, max_prompts: 4}",
    "trainer.num_steps=2",
)
"""Sizes and machine alone: model, data, columns, reward and algorithm are the recipe's."""
LUCKY = ("reward.overlong.buffer_tokens=1", "rollout.max_response_tokens=1", "rollout.group_size=16")
"""An answer of one token of twenty is right now and then, so that groups of different scores are found."""
TOOLS = ("model.tokenizer.chat_template=tools.jinja", "rollout.episode.system=null", "rollout.max_response_tokens=8")
"""A template with a place for tools, and prompts of digits alone."""
OF_RECIPE = {
    "gsm8k-grpo": (),
    "gsm8k-ppo": ("critic.num_mini_batches=2",),
    "hybrid-grpo": (),
    "math-dapo": LUCKY,
    "math-lora": LUCKY,
    "math-opd": (),
    "moe-grpo": (
        *LUCKY,
        "cluster.pools={main: [2], rollout: [1]}",
        "actor.mesh.ep=2",
        "model.lora=null",
        "actor.router_aux_loss_coef=0.01",
    ),
    "code": ("actor.num_mini_batches=1", "reward.num_processes=1"),
    "tool-math": (*LUCKY, *TOOLS),
    "search": TOOLS,
    "games": (
        "data={train: lakes.jsonl, validation: lakes.jsonl, template: null}",
        "model.tokenizer.chat_template=tools.jinja",
        "rollout.max_response_tokens=40",
    ),
}


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models and data sets as they are laid out on the hub, with digits for texts."""
    folder = tmp_path_factory.mktemp("hub")
    texts = [str(number) for number in range(12)]
    tests = json.dumps({"inputs": [""], "outputs": [""]})  # any program that runs and is silent passes, such as 12
    sets = {
        "openai/gsm8k/main/train": [{"question": one, "answer": f"so #### {one[0]}"} for one in texts],
        "openai/gsm8k/main/test": [{"question": one, "answer": f"so #### {one[0]}"} for one in texts],
        "open-r1/DAPO-Math-17k-Processed/all/train": [
            {
                "prompt": "not this column",
                "source_prompt": [{"role": "user", "content": one}],
                "reward_model": {"ground_truth": one[0]},
            }
            for one in texts
        ],
        "HuggingFaceH4/aime_2024/train": [{"problem": one, "answer": one} for one in texts],
        "HuggingFaceH4/MATH-500/test": [{"problem": one, "answer": one} for one in texts],
        "PeterJinGo/nq_hotpotqa_train/train": [{"question": one, "golden_answers": [one, "7"]} for one in texts],
        "PeterJinGo/nq_hotpotqa_train/test": [{"question": one, "golden_answers": [one, "7"]} for one in texts],
        "agentica-org/DeepCoder-Preview-Dataset/taco/train": [{"problem": one, "tests": tests} for one in texts],
    }
    for name, rows in sets.items():
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed, name in enumerate(MODELS):
        (folder / "Qwen").mkdir(exist_ok=True)
        family = "qwen3_moe" if name in MIXTURES else "qwen3"
        make_tiny_model(folder / "Qwen" / name, architecture=family, seed=seed, initializer_range=0.05)
    make_tiny_model(folder / "Qwen" / "Qwen3.5-9B", architecture="qwen3_5_text", initializer_range=0.05)
    (folder / "tools.jinja").write_text(TEMPLATE)
    lakes = [{"prompt": one, "ground_truth": "P./.G"} for one in texts]
    (folder / "lakes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lakes))
    (folder / "wiki-18.jsonl").write_text(json.dumps({"id": "0", "contents": '"1"\n1 2 3'}) + "\n")
    return folder


@pytest.fixture
def hub(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that has all of it."""
    for one in made.iterdir():
        (tmp_path / one.name).symlink_to(one)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("recipe", OF_RECIPE)
def test_the_twin_of_a_recipe_trains_and_is_validated(recipe: str, hub: Path):
    if recipe in ("code", "tool-math"):
        try:
            open_sandbox()
        except SandboxError as error:
            pytest.skip(f"no sandbox here: {error}")
    run = Runs(hub).run_with(recipe, [*TINY, *OF_RECIPE[recipe]])
    rows = list(read_metrics(run.metrics))
    assert [row["step"] for row in rows if "actor/loss" in row] == [1, 2]
    validated = [] if recipe == "code" else [0, 2]
    assert [row["step"] for row in rows if "validation/score" in row] == validated
    assert (run.path / "checkpoints" / "step_000002").is_dir()
