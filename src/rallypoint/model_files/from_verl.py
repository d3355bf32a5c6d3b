"""A checkpoint of verl's FSDP, written as the folder that other tools open.

    global_step_40/actor/  model_world_size_8_rank_0.pt ... fsdp_config.json
                           huggingface/  config.json  tokenizer.json ...

Owns: how its ranks' parts make whole tensors. Must not know: what the model is for. Invariant: no code of the
checkpoint runs. Its files are pickles, which are read with `weights_only`: torch's own tensors, and nothing else.
One file of tensors at a time is in memory; the rest stays in the files of the checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeAlias, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rallypoint.disk import explain
from rallypoint.errors import ExportError, ModelError, first_line

_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
_MAX_FILE_BYTES = 5 * 10**9
_EXPECTED = "expected a folder of verl's with model_world_size_N_rank_R.pt of every rank, such as global_step_40/actor"
_State: TypeAlias = Mapping[str, Tensor]


def import_verl(source: Path, to: Path) -> int:
    """Write an ordinary Hugging Face folder; all of it, or nothing. Tensors keep their types.

    Args:
        source: the folder of a role, or the one around it, whose actor is taken.
        to: a folder that is empty or not there yet.

    Returns:
        The number of tensors.

    Raises:
        ModelError: files are missing, are cut in a way that is not known, or hold something else than tensors.
        ExportError: the folder is not empty or cannot be written.
    """
    source = source / "actor" if (source / "actor").is_dir() else source
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ExportError(f"{to} is not an empty folder; name one that is empty or not there yet")
    states = [_read(path) for path in _ranks(source)]
    described = source / "huggingface"
    if not (described / "config.json").is_file():
        raise ModelError(f"{described}: expected the config.json and the tokenizer that verl writes there; found none")
    partial = to.with_name(f".{to.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(described, partial, ignore=_left_out)
        _write(states, partial)
        partial.rename(to)
    except OSError as error:
        raise ExportError(explain(to, error)) from error
    except (IndexError, RuntimeError) as error:
        raise ModelError(f"{source}: not one checkpoint of verl's FSDP: {first_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return len(states[0])


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return what is not copied: weights, code, and links, which may lead anywhere."""
    kinds = ("*.safetensors*", "*.bin*", "*.py")
    return {name for name in names if any(fnmatch(name, kind) for kind in kinds) or (Path(folder) / name).is_symlink()}


def _ranks(source: Path) -> list[Path]:
    """Return the file of each rank, in their order."""
    found = {
        (int(name[1]), int(name[2])): path
        for path in (source.iterdir() if source.is_dir() else ())
        if (name := _FILE.fullmatch(path.name)) is not None
    }
    sizes = {size for size, _ in found}
    if len(sizes) != 1:
        raise ModelError(f"{source}: {_EXPECTED}; found {'none' if not sizes else f'those of {sorted(sizes)} ranks'}")
    (size,) = sizes
    if missing := [str(rank) for rank in range(size) if (size, rank) not in found]:
        raise ModelError(f"{source}: {_EXPECTED}; of {size} ranks, those of rank {', '.join(missing)} are missing")
    return [found[size, rank] for rank in range(size)]


def _read(path: Path) -> _State:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise ModelError(
            f"{path} cannot be read as tensors alone ({first_line(error)}); nothing of it was run. Expected a state "
            "dict of verl's FSDP; an older one can be written anew with verl's own `python -m verl.model_merger`"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(each, Tensor) for each in cast("_State", state).values()):
        raise ModelError(f"{path}: expected a dict of tensors by name; found {type(state).__name__}")
    return cast("_State", state)


def _whole(name: str, states: Sequence[_State]) -> Tensor:
    """Return a tensor of all ranks together.

    Raises:
        ModelError: it is cut in another way than by FSDP.
    """
    first = states[0][name]
    if not isinstance(first, DTensor):
        return first
    mesh, cut = first.device_mesh.mesh, [at for at, one in enumerate(first.placements) if type(one) is Shard]
    if len(cut) > 1 or any(type(one) not in (Shard, Replicate) for one in first.placements):
        raise ModelError(f"{name} is cut as {first.placements}; expected one Shard at most, as FSDP makes it")
    if not cut:
        return first._local_tensor
    placement = first.placements[cut[0]]
    assert isinstance(placement, Shard), "chosen above"
    # One rank of each replica has what the others have, too.
    ranks = mesh.movedim(cut[0], 0).reshape(mesh.shape[cut[0]], -1)[:, 0].tolist()
    parts = [cast("DTensor", states[rank][name])._local_tensor for rank in ranks]
    whole = torch.cat(parts, dim=placement.dim)
    if whole.shape != first.shape:
        raise ModelError(f"{name}: expected the shape {tuple(first.shape)}, found {tuple(whole.shape)} in all ranks")
    return whole


def _write(states: Sequence[_State], folder: Path) -> None:
    names = states[0].keys()
    if adapted := next((name for name in names if name.startswith("base_model.") or ".lora_" in name), None):
        merge = "merge it first with verl's own `python -m verl.model_merger`"
        raise ModelError(f"{adapted}: expected the weights of a whole model; this one has LoRA's adapters; {merge}")
    for rank, state in enumerate(states):
        if state.keys() != names:
            odd = sorted(state.keys() ^ names)[0]
            raise ModelError(f"rank 0 and rank {rank} do not have the same tensors, such as {odd}: not one checkpoint")
    sizes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in states[0].items()}
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=_MAX_FILE_BYTES)
    for file, tensors in plan.filename_to_tensors.items():
        whole = {name: _whole(name, states).contiguous() for name in tensors}
        save_file(whole, folder / file, metadata={"format": "pt"})
        del whole  # before the next file's are put together
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
