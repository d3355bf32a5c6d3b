"""Published weights in a folder: read by others, refused when anything is wrong with them."""

import json

import pytest
import safetensors.torch
import torch
import xxhash

from rallypoint.config import LoRAConfig
from rallypoint.errors import CheckpointError, WeightsMismatchError
from rallypoint.model_files import load_policy
from rallypoint.weights import published_folder as published


@pytest.fixture(params=["model", "adapter"])
def shard(request, model_folder):
    lora = LoRAConfig(rank=2) if request.param == "adapter" else None
    shard = load_policy(str(model_folder), dtype="bfloat16", lora=lora)
    with torch.no_grad():
        for number, tensor in enumerate(shard.trained().values()):
            tensor.normal_(generator=torch.Generator().manual_seed(number))
    return shard


@pytest.fixture
def other(shard, model_folder):
    """The same model, before any training."""
    return load_policy(str(model_folder), dtype="bfloat16", lora=LoRAConfig(rank=2) if shard.has_adapters else None)


def weights_file(folder):
    return next(folder.glob("*.safetensors"))


def assert_unchanged(shard, before):
    assert all(torch.equal(tensor, before[name]) for name, tensor in shard.trained().items())


def copied(shard):
    return {name: tensor.clone() for name, tensor in shard.trained().items()}


def test_what_was_written_is_read_back_bit_for_bit_and_nothing_else_lies_beside_it(shard, other, tmp_path):
    folder = published.write(shard, tmp_path / "published", 12, base="base")
    assert [path.name for path in (tmp_path / "published").iterdir()] == ["version_000012"]
    published.read(other, folder, 12)
    assert_unchanged(other, shard.trained())


def test_a_program_without_ours_can_read_and_check_it(shard, tmp_path):
    folder = published.write(shard, tmp_path, 3, base="base")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == (1, 3)
    assert manifest["kind"] == ("adapter" if shard.has_adapters else "model")
    found = safetensors.torch.load_file(weights_file(folder))
    assert found.keys() == manifest["tensors"].keys()
    assert len(found) == len(shard.trained())
    for name, tensor in found.items():
        said = manifest["tensors"][name]
        assert (said["file"], said["dtype"], said["shape"]) == (weights_file(folder).name, "BF16", list(tensor.shape))
        assert said["xxh3_64"] == xxhash.xxh3_64_hexdigest(tensor.view(torch.uint8).numpy().tobytes())


def test_a_version_that_is_published_again_replaces_the_one_before(shard, other, tmp_path):
    published.write(other, tmp_path, 1, base="base")
    folder = published.write(shard, tmp_path, 1, base="base")
    published.read(other, folder, 1)
    assert_unchanged(other, shard.trained())


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_flipped_bit_is_refused_by_the_name_of_its_tensor_and_nothing_is_loaded(shard, other, tmp_path, place):
    folder = published.write(shard, tmp_path, 1, base="base")
    file = weights_file(folder)
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int(place * (len(data) - start))] ^= 1
    file.write_bytes(data)
    before = copied(other)
    with pytest.raises(WeightsMismatchError, match=r"version 1 was damaged on its way: \S+ differs from manifest.json"):
        published.read(other, folder, 1)
    assert_unchanged(other, before)


def drop_tensor(folder):
    weights = safetensors.torch.load_file(weights_file(folder))
    weights.pop(next(iter(weights)))
    safetensors.torch.save_file(weights, weights_file(folder))


def cut_off(folder):
    weights_file(folder).write_bytes(weights_file(folder).read_bytes()[:-2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_tensor, "damaged on its way"),
        (cut_off, "damaged on its way.*cut off"),
        (lambda folder: weights_file(folder).unlink(), "damaged on its way"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    ],
)
def test_what_is_incomplete_is_refused_and_nothing_is_loaded(shard, other, tmp_path, damage, message):
    folder = published.write(shard, tmp_path, 1, base="base")
    damage(folder)
    before = copied(other)
    with pytest.raises(WeightsMismatchError, match=message):
        published.read(other, folder, 1)
    assert_unchanged(other, before)


def test_another_version_than_expected_is_refused(shard, other, tmp_path):
    folder = published.write(shard, tmp_path, 1, base="base")
    with pytest.raises(WeightsMismatchError, match="expected weights of version 2, found 1"):
        published.read(other, folder, 2)


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(shard, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        published.write(shard, tmp_path / "file" / "published", 1, base="base")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
