"""One rank of `test_loading.py`: loads its part of a model in every way, and writes what that took."""

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from ranks import open_meeting
from torch import Tensor, distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from rallypoint.model_files import load_policy, outline_policy
from rallypoint.parallel import DeviceMesh, held, shard_rows

NUM_RANKS = 2
OURS = {
    "shard2, frozen": ("dp_shard", "bfloat16", True),
    "shard2, masters": ("dp_shard", "bfloat16", False),
    "shard2, float32": ("dp_shard", "float32", False),
    "tp2": ("tp", "bfloat16", False),
    "tp2, float32": ("tp", "float32", False),
}
TORCHS = {"torch, from memory": "cpu", "torch, from the meta device": "meta"}
"""Where the model is before its weights come."""
BY_TORCH = "by torch"
"""File that asks for torch's ways instead of ours."""


def load_torch(folder: str, rank: int, device: str) -> dict[str, Tensor]:
    """Load as torch offers it: rank 0 reads all of it, and each rank is sent its rows."""
    model = outline_policy(folder, dtype="bfloat16").model
    for layer in model.base_model.layers:
        fully_shard(layer)
    fully_shard(model)
    if device != "meta":
        model.to_empty(device=device)
    state = safetensors.torch.load_file(f"{folder}/model.safetensors") if rank == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return {name: held(weight) for name, weight in model.named_parameters()}


def status_mib(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def measure(load: Callable[[str], dict[str, Tensor]], folder: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return what was loaded, its size, and how much more the process held at its peak; in MiB."""
    load(f"{folder}/small")  # what is imported and started only now
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    tensors = load(folder)
    part = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
    return tensors, {"part": part, "beyond": status_mib("VmHWM") - before - part}


def are_rows(tensors: dict[str, Tensor], folder: str, rank: int) -> bool:
    """Whether these are this rank's rows of all weights in the file."""
    with safetensors.safe_open(f"{folder}/model.safetensors", "pt") as file:
        if file.keys() - tensors.keys() or tensors.keys() - file.keys():
            return False
        slices = {name: file.get_slice(name) for name in tensors}
        rows = {name: shard_rows(slices[name].get_shape()[0], rank, NUM_RANKS) for name in tensors}
        return all(torch.equal(tensor.bfloat16(), slices[name][slice(*rows[name])]) for name, tensor in tensors.items())


def main(model_folder: str, folder: Path, rank: int) -> None:
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)  # torch's way wants one
    rendezvous, found = open_meeting(folder), {}
    by_torch = (folder / BY_TORCH).exists()
    for name, (axis, dtype, frozen) in OURS.items() if not by_torch else ():
        mesh = DeviceMesh.connect(rendezvous, name, rank, {axis: NUM_RANKS}, timeout_s=120)

        def load(path, mesh=mesh, dtype=dtype, frozen=frozen):
            return load_policy(path, dtype=dtype, mesh=mesh, frozen=frozen).tensors()

        tensors, found[name] = measure(load, model_folder)
        if axis == "dp_shard":
            found[name]["right"] = are_rows(tensors, model_folder, rank)
        del tensors
    for name, device in TORCHS.items() if by_torch else ():
        tensors, found[name] = measure(lambda path, device=device: load_torch(path, rank, device), model_folder)
        found[name]["right"] = are_rows(tensors, model_folder, rank)
        del tensors
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
