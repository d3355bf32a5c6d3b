"""A config of the tests' own, and files beside it."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from base_config import BASE

from rallypoint.journal import Journal, RunBegan, WeightsLoaded

REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0

def two_arguments(data_source, text):
    return 0.0
"""
SIZES = '"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8, "vocab_size": 9'
LINEAR = (
    '"layer_types": ["linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4, '
    '"linear_key_head_dim": 2, "linear_value_head_dim": 2, "linear_conv_kernel_dim": 4'
)
EXPERTS = '"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 4'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with base.yaml in it."""
    (tmp_path / "base.yaml").write_text(BASE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def files(good_and_bad: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with base.yaml and good and bad files of a user; tests share it, and leave it as it is."""
    monkeypatch.chdir(good_and_bad)
    return good_and_bad


@pytest.fixture(scope="module")
def good_and_bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See `files`."""
    here = tmp_path_factory.mktemp("files")
    (here / "base.yaml").write_text(BASE)
    good = '{"prompt": "1+2", "ground_truth": "3"}\n'
    texts = {
        "good.jsonl": good,
        "good.csv": "a,b\n",
        "zero.jsonl": "",
        "zero.parquet": "",
        "blank.jsonl": "\n  \n",
        "torn.parquet": "PAR1 and no more",
        "rewards.py": REWARDS,
        "torn.py": "def compute_score(:\n",
        "model/config.json": '{"model_type": "llama", "max_position_embeddings": 32}',
        "model/model.safetensors": "",
        "adapter/adapter_config.json": "{}",
        "adapter/adapter_model.safetensors": "",
        "of_cohere/adapter_config.json": '{"r": 8, "base_model_name_or_path": "cohere"}',
        "of_cohere/adapter_model.safetensors": "",
        "of_experts/adapter_config.json": '{"r": 8, "target_parameters": ["mlp.experts.down_proj"]}',
        "of_experts/adapter_model.safetensors": "",
        "cohere/config.json": f'{{"model_type": "cohere", {SIZES}}}',
        "cohere/model.safetensors": "",
        "mixture/config.json": f'{{"model_type": "qwen3_moe", {SIZES}, {EXPERTS}}}',
        "mixture/model.safetensors": "",
        "hybrid/config.json": f'{{"model_type": "qwen3_5_text", {SIZES}, {LINEAR}}}',
        "hybrid/model.safetensors": "",
        "no_weights/config.json": '{"model_type": "llama"}',
        "no_config/model.safetensors": "",
        "tuned/config.yaml": "",
        "tuned/checkpoints/step_000010/config.json": "{}",
        "tuned/checkpoints/step_000020/config.json": "{}",
        "adapted/config.yaml": "",
        "adapted/checkpoints/step_000020/adapter_config.json": "{}",
        "begun/config.yaml": "",
        "no_type/config.json": "{}",
        "no_type/model.safetensors": "",
        "torn/config.json": "{",
        "torn/model.safetensors": "",
        "twice.yaml": "base: base\nseed: 1\nactor: {num_epochs: 1, num_epochs: 2}\nseed: 2\n",
        "broken.yaml": "recipe: ppo\nrollout: [1\n",
        "empty.yaml": "# nothing\n",
        "list.yaml": "- recipe\n",
        "loop.yaml": "base: loop2.yaml\n",
        "loop2.yaml": "base: sub/../loop.yaml\n",
        "sub/.keep": "",
        "lost.yaml": "seed: 1\nbase: bse.yaml\n",
        "number.yaml": "base: 3\n",
        "aliases.yaml": "a0: &a0 [1]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40)),
        "itself.yaml": "base: base.yaml\nactor: &a\n  optimizer: *a\n",
        "deep.yaml": "seed: " + "[" * 3000,
        "keys.yaml": "base: base.yaml\n[a, b]: 3\n",
        "out.yaml": "base: base.yaml\nactor:\n  # everything below is commented out\n",
        "no_pools.yaml": "recipe: ppo\nreward: {function: digits}\nmodel: {create: {}}\ndata: {generate: {}}\n"
        "cluster: {pools: {}}\n",
        "nothing.yaml": "recipe: grpo\n",
    }
    for name, text in texts.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    with Journal(here / "schedule.jsonl") as journal:
        began = RunBegan(first=0, config={"seed": 7}, software={}, machine="")
        journal.append(began, WeightsLoaded(version=0, num_ranks=1))
    (here / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), here / "no_rows.parquet")
    return here
