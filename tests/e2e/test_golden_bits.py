"""The bits of the digits recipes are those that are stored here: nothing changes the weights of a run by accident.

    PYTHONPATH=tests/shared python tests/e2e/test_golden_bits.py     # store the weights of this machine anew

The same seed gives the same weights on the same machine with the same packages, from one version of rallypoint to the
next. A change that moves the stored values is a change for users: say so in CHANGELOG.md, and why.

Other processors and other versions of torch round otherwise, so values are stored by machine. Elsewhere these tests are
skipped. Where the values have changed, the command drops those of other machines, which are then wrong as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors import safe_open
from tiny_runs import Runs

STORED = Path(__file__).with_name("golden_bits.json")
RECIPES = ("digits", "digits-grpo")
QUICK = (
    "cluster={runtime: inline, pools: {main: [1]}, num_cpus_per_process: 1}",
    "data.generate={num_train_prompts: 32, num_validation_prompts: 4}",
    "rollout.num_prompts=16",
    "trainer.num_steps=2",
)
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")
CHOOSES_KERNELS = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
)
VECTORS = ("avx", "amx", "fma", "sse", "sve", "asimd", "bf16", "i8mm")

Machine: TypeAlias = dict[str, str]
"""What the bits depend on besides the code."""


def this_machine() -> Machine:
    """Describe packages and processor: torch, MKL and oneDNN choose kernels by its model, vectors and caches."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines() if sys.platform == "linux" else []
    core = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = core.get("flags", core.get("Features", "")).split()
    return {
        **{name: version(name) for name in PACKAGES},
        "capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": str(torch.backends.mkldnn.is_available()),
        "processor": platform.machine(),
        **{name: core.get(name, "") for name in ("model name", "cpu family", "model", "cache size")},
        "vectors": " ".join(sorted(flag for flag in flags if flag.startswith(VECTORS))),
        "chosen by": " ".join(f"{name}={os.environ[name]}" for name in CHOOSES_KERNELS if name in os.environ),
    }


def weights_after_two_steps(recipe: str, folder: Path) -> dict[str, str]:
    """Return the digest of each model: of its tensors' names, types, shapes and bytes."""
    run = Runs(folder).run_with(recipe, [*QUICK, f"trainer.runs_dir={folder}", "trainer.name=golden"])
    newest = max(run.checkpoints.iterdir())
    digests: dict[str, str] = {}
    for path in sorted(newest.rglob("model.safetensors")):
        digest = hashlib.sha256()
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        digests[str(path.relative_to(newest))] = digest.hexdigest()
    return digests


def stored_for(machine: Machine) -> dict[str, dict[str, str]]:
    entries = json.loads(STORED.read_text())
    for entry in entries:
        if entry["machine"] == machine:
            return entry["weights"]
    different = min(
        ([name for name in machine if entry["machine"].get(name) != machine[name]] for entry in entries), key=len
    )
    pytest.skip(f"no weights are stored for this machine: others differ at least in {', '.join(different)}")


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_give_the_bits_that_they_always_gave(recipe: str, tmp_path: Path):
    expected = stored_for(this_machine())[recipe]
    assert weights_after_two_steps(recipe, tmp_path) == expected, (
        "the same seed gives other weights than before: if that is meant, say so in CHANGELOG.md and run "
        "PYTHONPATH=tests/shared python tests/e2e/test_golden_bits.py"
    )


def store() -> None:
    """Store the weights of this machine; those of others stay if these are as before."""
    machine, weights = this_machine(), {}
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder:
            weights[recipe] = weights_after_two_steps(recipe, Path(folder))
    entries = json.loads(STORED.read_text()) if STORED.exists() else []
    before = next((entry["weights"] for entry in entries if entry["machine"] == machine), weights)
    others = [entry for entry in entries if entry["machine"] != machine] if before == weights else []
    STORED.write_text(json.dumps([*others, {"machine": machine, "weights": weights}], indent=2) + "\n")


if __name__ == "__main__":
    store()
