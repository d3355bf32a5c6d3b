"""What vLLM's processes load of ours, in a process without our packages; vLLM itself is a stand-in here."""

import json
import shutil
import subprocess
import sys

import pytest

from rallypoint.generation.vllm.server import INSIDE

from .conftest import load

STAND_INS = """
import sys, types

def module(name, **names):
    sys.modules[name] = made = types.ModuleType(name)
    made.__dict__.update(names)

class LogitsProcessor: pass
class MoveDirectionality: SWAP = "swap"
module("vllm", SamplingParams=object)
module("vllm.config", VllmConfig=object)
module("vllm.lora"); module("vllm.lora.request", LoRARequest=lambda *args, **kwargs: [args, kwargs])
module("vllm.v1"); module("vllm.v1.sample")
module("vllm.v1.sample.logits_processor", BatchUpdate=object, LogitsProcessor=LogitsProcessor,
       MoveDirectionality=MoveDirectionality)
module("vllm.v1.worker"); module("vllm.v1.worker.gpu"); module("vllm.v1.worker.gpu.sample")
module("vllm.v1.worker.gpu.sample.logits_processor")
module("vllm.v1.worker.gpu.sample.logits_processor.interface", LogitsContext=object, LogitsProcessor=LogitsProcessor,
       LogitsProcRequestState=object)

sys.path.insert(0, sys.argv[1])
import rallypoint_vllm
"""

LOAD = """
import json

class Worker(rallypoint_vllm.Loading):
    held = None

    def reload_weights(self, weights_iterator):
        if "fails" in folder:
            raise ValueError("it does not fit")
        self.held = {name: float(tensor.float().sum()) for name, tensor in weights_iterator}

    def add_lora(self, request):
        self.held = request

for folder in sys.argv[2:]:
    worker = Worker()
    print(json.dumps([worker.rallypoint_load(folder), worker.held]))
"""


def python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", STAND_INS + code, str(INSIDE), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_logits_processor_follows_the_batch_and_needs_nothing_but_torch_of_our_packages():
    code = """
import torch
drawn = rallypoint_vllm.DrawnOnCpu(None, torch.device("cpu"), False)
asked = {"params": {"max_new_tokens": 3, "stop_tokens": []}, "prompt_index": 0, "sample_index": 0}
asked["num_prompt_tokens"] = 1
class Params: extra_args = {"rallypoint": asked}
class Update: removed, added, moved = [], [(0, Params, [1], [])], []
drawn.update_state(None)
drawn.update_state(Update)
print(int(drawn.apply(torch.zeros(1, 9)).isfinite().sum()), drawn.is_argmax_invariant())

import numpy
class States: device, all_token_ids = torch.device("cpu"), None
class Context: idx_mapping_np, seq_lens_upper_bound_np = numpy.array([5, 2]), numpy.array([4, 1])
second = rallypoint_vllm.Drawn(None, States)
print(second.add_request(2, Params), second.add_request(5, types.SimpleNamespace(extra_args=None)))
print(second.apply(torch.zeros(2, 9), Context).isfinite().sum(1).tolist())
print([name for name in ("transformers", "pydantic", "ray", "pyarrow", "tokenizers") if name in sys.modules])
"""
    assert python(code).splitlines() == ["1 False", "True False", "[9, 1]", "[]"]


@pytest.fixture
def published(make_engine):
    return load(make_engine(), 6)


def damage(folder, how):
    manifest, file = folder / "manifest.json", folder / "model.safetensors"
    content = json.loads(manifest.read_text())
    if how == "bit":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "missing":
        content["tensors"]["c"] = content["tensors"]["a"]
    elif how == "shape":
        content["tensors"]["a"]["shape"] = [3, 2]
    manifest.write_text(json.dumps(content))
    if how.startswith("no "):
        (manifest if how == "no manifest" else file).unlink()


def test_a_worker_takes_over_a_folder_whole_or_not_at_all(published, tmp_path):
    kinds = ["whole", "bit", "missing", "shape", "no manifest", "no file", "fails"]
    folders = {kind: tmp_path / kind for kind in kinds}
    for kind, folder in folders.items():
        shutil.copytree(published, folder)
        damage(folder, kind)
    said = [json.loads(line) for line in python(LOAD, *map(str, folders.values())).splitlines()]
    answers = dict(zip(kinds, said, strict=True))
    assert answers.pop("whole") == [{"version": 6, "error": None}, {"a": 15.0, "b": 4.0}]
    assert "it does not fit" in answers["fails"][0]["error"]
    assert "differs from its manifest in b" in answers["bit"][0]["error"]
    for kind, (answer, held) in answers.items():
        assert held is None
        assert answer["version"] is None
        assert str(folders[kind]) in answer["error"]


def test_an_adapter_takes_the_place_of_the_one_before(published):
    manifest = json.loads((published / "manifest.json").read_text())
    (published / "manifest.json").write_text(json.dumps({**manifest, "kind": "adapter"}))
    answer, held = json.loads(python(LOAD, str(published)))
    assert answer == {"version": 6, "error": None}
    assert held == [["rallypoint", 1, str(published)], {"load_inplace": True}]
