"""verl's FSDP checkpoints become ordinary folders, and nothing of them is run."""

import os
import pickle
import shutil

import pytest
import torch
import torch.distributed as dist
from fork_server import fork_context
from safetensors.torch import load_file
from tiny_models import make_tiny_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rallypoint.cli.main import app
from rallypoint.errors import ExportError, ModelError


def save_as_verl(rank, folder, store):
    """Be one of three ranks of FSDP, and then of four with two replicas, that write their parts as verl does."""
    weights = load_file(folder / "model" / "model.safetensors")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    meshes = {
        "three": (DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("fsdp",)), [Shard(0)]),
        "replicas": (init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")), [Replicate(), Shard(0)]),
    }
    for name, (mesh, placements) in meshes.items():
        size = mesh.size()
        if rank < size:
            parts = {key: distribute_tensor(value, mesh, placements) for key, value in weights.items()}
            to = folder / name / "actor"
            to.mkdir(parents=True, exist_ok=True)
            torch.save(parts, to / f"model_world_size_{size}_rank_{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    make_tiny_model(folder / "model")
    context = fork_context()
    ranks = [context.Process(target=save_as_verl, args=(rank, folder, folder / "store")) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * 4
    for name in ("three", "replicas"):
        described = folder / name / "actor" / "huggingface"
        shutil.copytree(folder / "model", described, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def imported(source, to):
    return CliRunner().invoke(app, ["import-verl", str(source), str(to)])


@pytest.mark.parametrize("name", ["three", "replicas"])
def test_the_parts_of_all_ranks_become_the_model_that_was_trained(saved, tmp_path, name):
    secret = saved / name / "actor" / "huggingface" / "secret.txt"
    secret.unlink(missing_ok=True)
    secret.symlink_to(__file__)
    found = imported(saved / name, tmp_path / "model")
    assert found.exit_code == 0, found.output
    expected, weights = (load_file(folder / "model" / "model.safetensors") for folder in (saved, tmp_path))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not (tmp_path / "model" / "secret.txt").exists(), "no link is followed"
    assert isinstance(imported(saved / name / "actor", tmp_path / "model").exception, ExportError), "it is not empty"
    assert imported(saved / name / "actor", tmp_path / "again").exit_code == 0


class Runs:
    def __reduce__(self):
        return os.mkdir, (os.environ["PLANTED"],)


@pytest.mark.parametrize("damage", ["code", "missing", "cut off", "no config", "adapters", "other ranks"])
def test_what_is_no_whole_checkpoint_of_tensors_is_refused_and_nothing_is_run(saved, tmp_path, monkeypatch, damage):
    source = shutil.copytree(saved / "three", tmp_path / "source")
    last = source / "actor" / "model_world_size_3_rank_2.pt"
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    match damage:
        case "code":
            torch.save({"weight": Runs()}, last)
            said = "nothing of it was run"
        case "missing":
            last.unlink()
            said = "those of rank 2 are missing"
        case "cut off":
            last.write_bytes(last.read_bytes()[:1000])
            said = "cannot be read as tensors alone"
        case "no config":
            (source / "actor" / "huggingface" / "config.json").unlink()
            said = "expected the config.json"
        case "adapters":
            for path in (source / "actor").glob("*.pt"):
                torch.save({"base_model.model.q_proj.lora_A.default.weight": torch.ones(1)}, path)
            said = "merge it first with verl's own"
        case _:
            last.rename(last.with_name("model_world_size_2_rank_1.pt"))
            said = "those of \\[2, 3\\] ranks"
    found = imported(source, tmp_path / "model")
    assert isinstance(found.exception, ModelError)
    with pytest.raises(ModelError, match=said):
        raise found.exception
    assert not (tmp_path / "planted").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    if damage == "code":
        with pytest.raises(pickle.UnpicklingError):
            torch.load(last, weights_only=True)
