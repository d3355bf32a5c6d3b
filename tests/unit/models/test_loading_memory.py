"""What a process needs to load its part of a model, beyond that part: a few buffers, whatever the model's size."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from rallypoint.models import save_model
from rallypoint.models.shard import allocate, build
from rallypoint.parallel import DeviceMesh

MODEL_MIB = 97
BOUND_MIB = 32
"""Less than half of the model: a rank that reads all of it on the way needs more."""

ONE_RANK = """
import ctypes, dataclasses, pathlib, sys
from rallypoint.models import load_policy
from rallypoint.parallel import DeviceMesh, Solo

def status(what):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024

@dataclasses.dataclass
class Lone(Solo):
    rank: int
    size: int

folder, dtype, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
mesh = dataclasses.replace(DeviceMesh.solo(), tp=Lone(rank, size))
load_policy(folder + "/small", dtype=dtype)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
tensors = load_policy(folder, dtype=dtype, mesh=mesh).tensors().values()
part = sum(tensor.nbytes for tensor in tensors) / 2**20
print(part, status("VmHWM") - before - part)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bfloat16, and a small one for what is imported only when a model is loaded."""
    path = tmp_path_factory.mktemp("model")
    for where, num_layers in ((path, 12), (path / "small", 1)):
        sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
        LlamaConfig(**sizes, num_hidden_layers=num_layers).save_pretrained(where)
        config = AutoConfig.from_pretrained(where)
        shard = build(
            config, AutoModelForCausalLM, dtype=torch.bfloat16, mesh=DeviceMesh.solo(), trust_remote_code=False
        )
        allocate(shard, torch.device("cpu"))
        for tensor in shard.tensors().values():
            tensor.normal_(std=0.02)
        save_model(shard, where)
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rank_of_two_needs_little_more_than_its_half(folder, dtype):
    command = [sys.executable, "-c", ONE_RANK, str(folder), dtype, "1", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    part_mib, beyond_mib = map(float, done.stdout.split())
    assert part_mib == pytest.approx(MODEL_MIB / 2 * (1 if dtype == "bfloat16" else 2), rel=0.05)
    assert beyond_mib < BOUND_MIB
