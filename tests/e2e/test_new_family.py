"""A family that nobody has thought of is one file: with it, a run loads, cuts, trains, samples and saves its models."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import rallypoint

FAMILY = """
# Seed-OSS: a Llama with biases.
seed_oss:
  blocks: {self_attn: [attention], mlp: [gated_mlp]}
  norms: {SeedOssRMSNorm: {}}
  attentions: {SeedOssAttention: null}
  mlps: [SeedOssMLP]
  is_plain: true
"""
PROGRAM = """
import dataclasses, sys
from pathlib import Path

import torch
from transformers import SeedOssConfig, SeedOssForCausalLM

from rallypoint.data import make_digits_tokenizer, save_tokenizer
from rallypoint.generation.native.decoder import PlainDecoder
from rallypoint.model_files import load_policy
from rallypoint.display import Silent
from rallypoint.recipes.loop import train
from rallypoint.prepare.preflight import load_checked
from rallypoint.run.folder import create_run

folder = Path(sys.argv[1])
tokenizer = make_digits_tokenizer()
sizes = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=24
)
config = SeedOssConfig(
    vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id,
    pad_token_id=None, max_position_embeddings=64, attention_bias=True, **sizes,
)
SeedOssForCausalLM(config).save_pretrained(folder / "model")
save_tokenizer(tokenizer, folder / "model")

model = load_policy(str(folder / "model"), dtype="float32").model
assert PlainDecoder.fits(model)
kinds = {type(module).__name__ for module in model.modules()}
assert kinds >= {"RMSNorm", "SeedOssAttentionOnRows", "GatedMLP"}, kinds

loaded = load_checked("digits", [
    "model.create=null",
    f"model.path={folder / 'model'}", f"trainer.runs_dir={folder}", "trainer.name=run", "trainer.num_steps=1",
    "cluster.runtime=inline", "cluster.pools={main: [2]}",
    "actor.mesh.tp=2", "critic.mesh.tp=2", "reference.mesh.tp=2",
    "data.generate={num_digits: 3, num_train_prompts: 16, num_validation_prompts: 4}",
    "rollout={num_prompts: 4, group_size: 2, max_response_tokens: 4}",
    "actor.num_mini_batches=1", "critic.num_mini_batches=1",
])
run = create_run(loaded)
assert train(loaded, run, Silent(), resume=False)
trained = SeedOssForCausalLM.from_pretrained(max(run.checkpoints.iterdir())).state_dict()
assert any(not torch.equal(weight, trained[name]) for name, weight in model.state_dict().items())
"""


def test_a_file_in_the_folder_of_families_is_all_that_a_new_one_needs(tmp_path: Path):
    """The sources are copied, so that a file can be added to them."""
    copied = tmp_path / "src" / "rallypoint"
    shutil.copytree(Path(rallypoint.__file__).parent, copied)
    (copied / "families" / "seed_oss.yaml").write_text(FAMILY)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
