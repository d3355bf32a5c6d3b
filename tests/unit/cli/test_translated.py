"""`rally config --from-verl` and `--from-trl`: what they print, and that it is the config of a run."""

from pathlib import Path

import pytest
from tiny_models import make_tiny_model

from rallypoint.config import RunConfig

VERL = """
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator={algorithm} \\
    data.train_files="['data/gsm8k/train.parquet', 'data/math/train.parquet']" \\
    data.val_files=data/gsm8k/test.parquet \\
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=256 \\
    data.filter_overlong_prompts=True data.truncation=error \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \\
    {more} \\
    trainer.logger='["console","wandb"]' trainer.val_before_train=False trainer.n_gpus_per_node=1 trainer.nnodes=1 \\
    trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=15 $@
"""
OF_GRPO = (
    "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.rollout.n=5"
)
OF_PPO = "critic.optim.lr=1e-5 critic.model.path=Qwen/Qwen2.5-0.5B-Instruct algorithm.kl_ctrl.kl_coef=0.001"
TRL = """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/{data}
output_dir: out
learning_rate: 1e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
gradient_checkpointing: true
num_train_epochs: 1
logging_steps: 10
save_steps: 100
report_to: none
"""
SCRIPT = """
from datasets import load_dataset
from trl import {kind}Config, {kind}Trainer

def main():
    config = {kind}Config(output_dir="out", learning_rate=1e-6, per_device_train_batch_size=8, {more})
    data = load_dataset("trl-lib/own", split="train")
    {kind}Trainer(model="Qwen/Qwen2.5-0.5B", args=config, train_dataset=data, {rewards}).train()

if __name__ == "__main__":
    main()
"""
THEIRS = {
    "grpo.py": SCRIPT.format(kind="GRPO", more="num_generations=4", rewards="reward_funcs=[accuracy_reward]"),
    "dpo.py": SCRIPT.format(kind="DPO", more="max_length=512, beta=0.2", rewards="peft_config=LoraConfig(r=8)"),
    "grpo.sh": VERL.format(algorithm="grpo", more=OF_GRPO),
    "ppo.sh": VERL.format(algorithm="gae", more=OF_PPO),
    "grpo.yaml": TRL.format(data="DeepMath-103K") + "num_generations: 8\nmax_completion_length: 256\nuse_vllm: true",
    "sft.yaml": TRL.format(data="Capybara") + "trainer: SFTTrainer\npacking: true\nmax_length: 512\nuse_peft: true",
    "dpo.yaml": TRL.format(data="ultrafeedback_binarized") + "trainer: DPOTrainer\nmax_length: 512\nbeta: 0.2",
}
ROWS = {
    "sft": '{"prompt": "1+1=", "completion": "2"}',
    "dpo": '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}',
}
HERE = ["model.path=model", "data.train=rows.jsonl", "cluster.device=cpu"]
SAMPLED = ["reward.function=rewards.py:compute_score", "rollout.engine=native", "tracking=null"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_tiny_model(tmp_path / "model", max_positions=1024)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "rewards.py").write_text("def compute_score(solution_str, **others): return 0.0\n")
    for name, text in THEIRS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def translated(command, name: str) -> str:
    result = command("config", "--from-trl" if name.endswith((".yaml", ".py")) else "--from-verl", name)
    assert result.exit_code == 0, result.exception
    return result.stdout


@pytest.mark.parametrize("name", THEIRS)
def test_a_translated_config_is_that_of_a_run(command, here, name):
    recipe = name.partition(".")[0]
    (here / "ours.yaml").write_text(translated(command, name))
    (here / "rows.jsonl").write_text(ROWS.get(recipe, '{"prompt": "1+1=", "ground_truth": "2"}') + "\n")
    overrides = [*HERE, *(SAMPLED if recipe not in ROWS else [])]
    overrides += ["data.validation=rows.jsonl"] if name.endswith(".sh") else []
    overrides += ["critic.path=model"] if recipe == "ppo" else []
    result = command("train", "ours.yaml", *overrides, "--dry-run")
    assert result.exit_code == 0, result.exception
    assert "Nothing was started" in result.stdout


def test_what_is_printed_fits_a_terminal_and_begins_with_what_is_left_to_do(command, here):
    lines = translated(command, "grpo.sh").splitlines()
    assert lines[:4] == [
        "# 26 of 26 keys are known.",
        "# Still to be set:",
        "#   reward.function: file.py:name, which scores a response",
        "base: grpo",
    ]
    assert max(map(len, lines)) <= 80
    sections = [line.rstrip(":") for line in lines if line.endswith(":") and line[0] not in "# "]
    assert sections == sorted(sections, key=list(RunConfig.model_fields).index)
    place = lines.index("#   see engine.max_tokens_per_micro_batch; micro-batches are cut by tokens,")
    assert lines[place + 1] == "#   never by rows:"
    assert lines[place + 2] == "#     actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"


def test_a_run_of_trl_is_on_an_accelerator_which_is_named_here(command, here):
    lines = translated(command, "grpo.yaml").splitlines()
    assert lines[1] == "# Still to be set:"
    assert lines[3] == "#   cluster.device: an accelerator; it is cpu unless it is set"


def test_what_is_not_computed_as_theirs_is_said_first(command, here):
    lines = translated(command, "sft.yaml").splitlines()
    assert lines[1] == "# Not computed as theirs:"
    assert lines.index("# Still to be set:") < lines.index("base: sft")
    (here / "dpo.sh").write_text("python trl/scripts/dpo.py --beta 0.2 --loss_type robust --no_such_key 1\n")
    first = command("config", "--from-trl", "dpo.sh").stdout.partition("base: dpo")[0]
    assert "#   see preference.name" in first
    assert "# Without a counterpart:\n#   no_such_key=1\n" in first
