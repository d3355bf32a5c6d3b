"""Models written tensor by tensor, and put together again from the parts of several ranks."""

import dataclasses
import functools
import itertools
import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash
from full_disks import files_end_at
from tiny_families import make_family_model, stack_experts
from transformers import AutoModelForCausalLM

from rallypoint import checkpoint
from rallypoint.errors import CheckpointError
from rallypoint.families import MIXTURES
from rallypoint.model_files import Writing, load_policy, own_names, save_model, save_tensors
from rallypoint.model_files.pieces import stored_tensors
from rallypoint.models import Part
from rallypoint.parallel import DeviceMesh

SOLO = DeviceMesh.solo()


@pytest.fixture(params=MIXTURES)
def mixture(request, tmp_path):
    """A folder of a small mixture of experts as its family is published: experts apart, in most, or in one tensor."""
    folder = Path(make_family_model(tmp_path / "mixture", request.param))
    if MIXTURES[request.param].stacks_experts:
        stack_experts(folder)
    return folder


def assert_same_folder(one, other):
    """Same files, same tensors under the same names and types, same configs to the letter."""
    for name in ("config.json", "generation_config.json"):
        assert (one / name).read_text() == (other / name).read_text()
    left, right = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (one, other))
    assert set(left) == set(right)
    assert all(left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left)


def test_tensors_of_all_types_are_read_back_by_the_library_of_the_format(tmp_path):
    dtypes = (torch.bool, torch.bfloat16, torch.float64, torch.int64, torch.float32, torch.int8)
    tensors = {str(dtype): torch.randint(0, 2, (3, 5)).to(dtype) for dtype in dtypes}
    tensors |= {"a number": torch.tensor(3.5), "nothing": torch.empty(0, 4), "turned": torch.randn(4, 6).T}
    parts = {name: Part.whole(tensor.shape) for name, tensor in tensors.items()}
    save_tensors(tmp_path / "file", tensors, parts, SOLO)
    read = safetensors.torch.load_file(tmp_path / "file")
    assert {name: tensor.dtype for name, tensor in read.items()} == {n: t.dtype for n, t in tensors.items()}
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.items())


@pytest.mark.parametrize("tie_embeddings", [False, True], ids=["untied", "tied"])
def test_a_folder_is_what_transformers_writes(make_folder, tmp_path, tie_embeddings):
    source = make_folder(tie_embeddings=tie_embeddings)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "theirs")
    save_model(load_policy(source, dtype="float32"), tmp_path / "ours")
    assert_same_folder(tmp_path / "ours", tmp_path / "theirs")


def test_experts_are_joined_when_they_are_read_and_come_apart_when_they_are_written(mixture, tmp_path):
    shard = load_policy(str(mixture), dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(mixture)
    for name, weight in theirs.named_parameters():
        ours = stored_tensors(own_names(shard.model), name, shard.model.get_parameter(name))
        assert torch.equal(ours[name], weight), name
    save_model(shard, tmp_path / "ours")
    assert_same_folder(tmp_path / "ours", mixture)


def test_a_model_of_several_files_has_an_index_and_opens_in_transformers(make_folder, tmp_path):
    shard = load_policy(make_folder(), dtype="float32")
    save_model(shard, tmp_path / "ours", max_file_bytes=6_000)
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, 6)]
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in shard.model.parameters())
    for file in files:
        held = safetensors.torch.load_file(file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 6_000
        assert {name for name, where in index["weight_map"].items() if where == file.name} == set(held)
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours"),
        load_policy(str(tmp_path / "ours"), dtype="float32").model,
    ):
        assert all(torch.equal(again.get_parameter(name), weight) for name, weight in shard.model.named_parameters())


MESHES = [{"tp": 2}, {"dp_shard": 3}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"cp": 2, "tp": 2}]


class Counting:
    """The ranks of a mesh, with the bytes of all that one of them gives to the others."""

    def __init__(self, ranks):
        self.ranks, self.rank, self.size, self.num_bytes = ranks, ranks.rank, ranks.size, 0

    def all_gather(self, tensor, sizes):
        """Count what is sent."""
        self.num_bytes += tensor.nbytes
        return self.ranks.all_gather(tensor, sizes)

    def exchange(self, parts, sizes):
        """Count what is sent."""
        self.num_bytes += sum(part.nbytes for part in parts)
        return self.ranks.exchange(parts, sizes)


def make_whole(factor=1):
    """Some tensors of odd sizes, that many times as wide."""
    return {
        "by rows": torch.randn(14, 7 * factor),
        "by columns": torch.randn(7, 10 * factor).bfloat16(),
        "fewer rows than ranks": torch.randn(1, 5 * factor).double(),
        "whole": torch.randn(5 * factor),
        "step": torch.tensor(7.0),
        "nothing": torch.empty(0, 3),
    }


def cut(name, shape, mesh):
    """Return what a rank holds, as tensor parallelism and FSDP2 cut it."""
    part = Part.whole(shape)
    if name in ("step", "whole", "nothing"):
        return part
    if name != "fewer rows than ranks":
        part = part.cut(name == "by columns", mesh.tp.rank, mesh.tp.size)
    rows = -(-part.sizes[0] // mesh.shard.size)
    first, last = (min(part.sizes[0], place * rows) for place in (mesh.shard.rank, mesh.shard.rank + 1))
    return part.rows(first, last)


def save_cut(path, whole, mesh, how=None):
    """Write a rank's parts of tensors; return the bytes that it sent."""
    counting = Counting(mesh.everyone)
    parts = {name: cut(name, tensor.shape, mesh) for name, tensor in whole.items()}
    held = {name: whole[name][part.within(Part.whole(part.shape))] for name, part in parts.items()}
    save_tensors(path, held, parts, dataclasses.replace(mesh, everyone=counting), how=how)
    assert path.is_file(), "it is there for all ranks"
    return counting.num_bytes


@pytest.mark.parametrize("seen", [False, True], ids=["own parts", "whole on rank 0"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_write_the_file_that_one_would_byte_for_byte(on_mesh, tmp_path, sizes, seen):
    whole, told = make_whole(), defaultdict(bytes)

    def see(name, data):
        told[name] += bytes(data)

    save_cut(tmp_path / "of one", whole, SOLO)
    on_mesh(lambda mesh: save_cut(tmp_path / "file", whole, mesh, Writing(seen=see) if seen else None), **sizes)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "of one").read_bytes()
    read = safetensors.torch.load_file(tmp_path / "file")
    assert all(torch.equal(read.pop(name), tensor) for name, tensor in whole.items())
    assert not read
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "of one"]
    if seen:
        for name, tensor in whole.items():
            assert told[name] == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), name


READ = list[str]()
"""Files that were opened for reading, while it is wanted."""


@pytest.fixture
def opened_to_read():
    def note(event, details):
        if watched and event == "open" and isinstance(details[0], str) and (details[2] or 0) & 3 == os.O_RDONLY:
            READ.append(Path(details[0]).name)

    watched = [True]
    READ.clear()
    sys.addaudithook(note)  # which stays, and then does nothing
    yield READ
    watched.clear()


@pytest.mark.parametrize("sizes", [{}, *MESHES], ids=str)
def test_digests_are_taken_while_ranks_write_and_any_changed_byte_is_found(on_mesh, tmp_path, sizes, opened_to_read):
    how, save = Writing(is_listed=True), functools.partial(save_cut, whole=make_whole(3))
    with checkpoint.writing(tmp_path, 1, durable=False) as folder:
        if sizes:
            on_mesh(lambda mesh: save(folder / "file", mesh=mesh, how=how), **sizes)
        else:
            save(folder / "file", mesh=SOLO, how=how)
        (folder / "state.json").write_text("{}")
    assert "file" not in opened_to_read, "no byte of it is read back"
    assert "state.json" in opened_to_read
    saved = tmp_path / "step_000001"
    assert sorted(path.name for path in saved.iterdir()) == ["file", "manifest.json", "state.json"]
    content = (saved / "file").read_bytes()
    listed = json.loads((saved / "manifest.json").read_text())["files"]["file"]["parts"]
    of_file = [
        b"".join(content[start + at * stride :][:length] for at in range(count))
        for start, length, stride, count, _ in listed
    ]
    assert [xxhash.xxh3_128_hexdigest(each) for each in of_file] == [part[-1] for part in listed]
    assert sum(map(len, of_file)) == len(content)
    checkpoint.verify(saved)
    for place in {*range(0, len(content), 11), len(content) - 1}:
        (saved / "file").write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(CheckpointError, match="file: its content has changed"):
            checkpoint.verify(saved)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_wait_for_one_copy_of_their_bytes_to_the_memory_of_the_system_and_for_no_disk(
    on_mesh, tmp_path, monkeypatch, sizes
):
    whole, copied, pwrite = make_whole(3), list[int](), os.pwrite

    def count(descriptor, data, start):
        copied.append(len(data))
        return pwrite(descriptor, data, start)

    monkeypatch.setattr(os, "pwrite", count)
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("a rank waits for the disk"))
    how = Writing(durable=False, is_listed=True, is_summed=True)
    on_mesh(lambda mesh: save_cut(tmp_path / "file", whole, mesh, how), **sizes)
    assert sum(copied) == sum(tensor.nbytes for tensor in whole.values())


def test_parts_whose_runs_are_not_equally_far_apart_are_cut_until_they_are():
    part = Part((3, 4, 5, 2), (0, 1, 1, 0), (3, 2, 3, 1))
    assert [run for each in part.evenly() for run in each.runs()] == list(part.runs())
    for each in part.evenly():
        firsts = [first for first, _ in each.runs()]
        assert len({after - before for before, after in itertools.pairwise(firsts)}) == 1


@pytest.mark.parametrize("block", [1, 7, 64])
def test_parts_are_compared_in_blocks_of_any_size(on_mesh, tmp_path, monkeypatch, block):
    with checkpoint.writing(tmp_path, 1, durable=False) as folder:
        on_mesh(lambda mesh: save_cut(folder / "file", make_whole(), mesh, Writing(is_listed=True)), dp_shard=2, tp=2)
    monkeypatch.setattr(checkpoint, "_BLOCK_BYTES", block)
    checkpoint.verify(tmp_path / "step_000001")
    content = bytearray((tmp_path / "step_000001" / "file").read_bytes())
    content[-3] ^= 1
    (tmp_path / "step_000001" / "file").write_bytes(content)
    with pytest.raises(CheckpointError):
        checkpoint.verify(tmp_path / "step_000001")


def digest_of(folder, step, save):
    """Return the digest of the weights that are saved as a file of a new checkpoint."""
    with checkpoint.writing(folder, step, durable=False) as partial:
        save(partial / "model.safetensors")
    return checkpoint.digested(folder / checkpoint.checkpoint_name(step))


SUMMED = Writing(is_listed=True, is_summed=True)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equal_weights_have_an_equal_digest_on_every_mesh(on_mesh, tmp_path, sizes):
    whole = make_whole(3)
    of_one = digest_of(tmp_path, 1, lambda file: save_cut(file, whole, SOLO, SUMMED))
    cut = digest_of(tmp_path, 2, lambda file: on_mesh(lambda mesh: save_cut(file, whole, mesh, SUMMED), **sizes))
    assert cut == of_one


def test_weights_that_differ_in_a_bit_or_a_place_have_another_digest(tmp_path, monkeypatch):
    whole, steps = make_whole(), itertools.count(1)

    def digest(**changed):
        return digest_of(tmp_path, next(steps), lambda file: save_cut(file, whole | changed, SOLO, SUMMED))

    def flipped(name, place, bit):
        other = whole[name].clone()
        other.reshape(-1).view(torch.uint8)[place] ^= 1 << bit
        return {name: other}

    changes = [
        flipped(name, place, bit)
        for name, tensor in whole.items()
        for place, bit in ((0, 0), (tensor.nbytes // 2, 3), (tensor.nbytes - 1, 7))
        if tensor.nbytes
    ]
    changes += [{"by rows": whole["by rows"].flip(0)}, {"by rows": whole["by rows"].reshape(7, 14)}]
    found = [digest(), *(digest(**change) for change in changes)]
    assert len({*found}) == len(found) == 18
    assert digest() == found[0]
    monkeypatch.setattr("rallypoint.model_files.writer.CHUNK_BYTES", 64)
    assert digest() == found[0], "pieces of any size"


def test_checkpoints_without_sums_have_the_digest_of_their_parts(tmp_path):
    of_parts = digest_of(tmp_path, 1, lambda file: save_cut(file, make_whole(), SOLO, Writing(is_listed=True)))
    assert len(of_parts) == 16
    checkpoint.verify(tmp_path / "step_000001")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_no_tensor_travels_to_be_written(on_mesh, tmp_path, sizes):
    small, large = (
        on_mesh(functools.partial(save_cut, tmp_path / "file", make_whole(factor)), **sizes) for factor in (1, 1000)
    )
    assert small == large
    assert max(small) < 500  # where the parts lie: two numbers for each dimension; and how each step ended


def test_a_tensor_of_several_pieces_that_does_not_lie_end_to_end_is_written_as_it_reads(tmp_path):
    values = torch.randn(3, 1_200_001)[:, 1:]
    save_tensors(tmp_path / "file", {"cut": values}, {"cut": Part.whole(values.shape)}, SOLO)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "file")["cut"], values)


@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_two_ranks_load_their_parts_of_a_model_and_write_the_folder_that_one_would(on_mesh, mixture, tmp_path, axis):
    whole = load_policy(str(mixture), dtype="float32").tensors()

    def save(file, mesh=SOLO):
        save_model(load_policy(str(mixture), dtype="float32", mesh=mesh), file.parent, how=SUMMED)

    of_two = digest_of(tmp_path / "saved", 2, lambda file: on_mesh(functools.partial(save, file), **{axis: 2}))
    assert of_two == digest_of(tmp_path / "saved", 1, save)

    def load_and_save(mesh):
        shard = load_policy(str(mixture), dtype="float32", mesh=mesh)
        for name, part in shard.parts.items():
            expected = whole[name][part.within(Part.whole(part.shape))]
            assert torch.equal(shard.tensors()[name], expected), name
        save_model(shard, tmp_path / "ours")
        return sum(part.num_elements for name, part in shard.parts.items() if is_cut(name))

    def is_cut(name):
        return axis == "tp" or ".experts." in name

    num_held = on_mesh(load_and_save, **{axis: 2})
    everything = sum(tensor.numel() for name, tensor in whole.items() if is_cut(name))
    assert max(num_held) <= (0.6 if axis == "tp" else 0.5) * everything
    assert_same_folder(tmp_path / "ours", mixture)


def test_a_first_rank_that_cannot_write_is_an_error_of_all(on_mesh, mixture, tmp_path):
    (tmp_path / "file").touch()

    def save(mesh):
        with pytest.raises(CheckpointError) as caught:
            save_model(load_policy(str(mixture), dtype="float32", mesh=mesh), tmp_path / "file" / "folder")
        return str(caught.value)

    said = on_mesh(save, tp=2)
    assert len(set(said)) == 1
    assert "folder cannot be written: Not a directory" in said[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_disk_that_is_full_for_one_rank_is_an_error_of_all_and_nothing_partial_stays(on_mesh, tmp_path):
    whole, folders = make_whole(), [tmp_path / "disk", tmp_path / "full"]
    folders[1].mkdir()
    (folders[1] / ".file.partial").symlink_to("/dev/full")

    def save(mesh):
        folder = folders[mesh.rank == mesh.everyone.size - 1]
        with pytest.raises(CheckpointError) as caught:
            save_cut(folder / "file", whole, mesh)
        return str(caught.value)

    said = on_mesh(save, dp_shard=3)
    needed = sum(tensor.nbytes for tensor in whole.values())
    for text in said:
        assert f"file cannot be written: No space left on device (it needs {needed} B, " in text
        assert "are free); make room on its disk; nothing partial is left" in text
    assert list(folders[0].iterdir()) == []


def test_a_full_disk_is_said_and_nothing_partial_stays(tmp_path):
    tensors = {name: torch.zeros(10_000) for name in "abc"}
    parts = {name: Part.whole([10_000]) for name in "abc"}
    said = "state.safetensors cannot be written: File too large.*; nothing partial is left"
    with pytest.raises(CheckpointError, match=said), files_end_at(50_000):
        save_tensors(tmp_path / "state.safetensors", tensors, parts, SOLO)
    assert list(tmp_path.iterdir()) == []
