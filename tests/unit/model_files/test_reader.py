import json
import os
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from rallypoint.errors import ModelError
from rallypoint.model_files.reader import CHUNK_BYTES, LONG_ROW_BYTES, TYPES, Read, TensorFiles
from rallypoint.models.part import Part


def in_file(path, **tensors):
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def read(path, name, part, dtype):
    into = torch.empty(part.sizes, dtype=dtype)
    with TensorFiles([path]) as files:
        files.read([Read(name, part, into)])
    return into


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def described(dtype="F32", shape=(2,), data_offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(data_offsets)}


@given(data=st.data(), dtype=st.sampled_from(list(TYPES.values())))
def test_any_rectangle_of_any_type_is_read_as_indexing_gives_it(tmp_path_factory, data, dtype):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.randint(0, 2, shape).to(dtype)
    part = Part.whole(shape)
    for dim, extent in enumerate(shape):
        start = data.draw(st.integers(0, extent))
        part = part.narrow(dim, start, data.draw(st.integers(0, extent - start)))
    path = in_file(tmp_path_factory.getbasetemp() / "any", before=torch.ones(3), it=tensor, last=torch.ones(5))
    assert torch.equal(read(path, "it", part, dtype), tensor[part.within(Part.whole(shape))])


LONG = LONG_ROW_BYTES // 4 + 3
MANY = CHUNK_BYTES // 4 * 2 + 5
LARGE = {
    "all of it": ([7, MANY // 7], lambda whole: whole),
    "rows": ([7, MANY // 7], lambda whole: whole.rows(2, 5)),
    "columns of long rows": ([9, LONG], lambda whole: whole.narrow(1, 11, LONG // 2)),
    "columns of many short rows": ([MANY // 12, 12], lambda whole: whole.cut(1, 1, 3)),
    "columns of a row longer than a chunk": ([2, MANY], lambda whole: whole.narrow(1, 5, MANY - 7)),
    "the middle of three dimensions": ([3, 8, LONG], lambda whole: whole.cut(1, 1, 4).rows(1, 3)),
    "the last of three dimensions": ([40, 9, 700], lambda whole: whole.cut(2, 2, 4)),
    "one row, a part of it": ([5, MANY // 5], lambda whole: whole.rows(3, 4).narrow(1, 2, 1000)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "cut"), LARGE.values(), ids=LARGE.keys())
def test_rectangles_of_many_chunks_are_read_and_converted(tmp_path, shape, cut, dtype):
    tensor = torch.randn(shape)
    part = cut(Part.whole(shape))
    expected = tensor[part.within(Part.whole(shape))].to(dtype)
    assert torch.equal(read(in_file(tmp_path / "file", it=tensor), "it", part, dtype), expected)


def test_a_destination_may_be_a_part_of_a_larger_tensor(tmp_path):
    tensor = torch.randn(6, 10)
    into = torch.zeros(6, 25)
    with TensorFiles([in_file(tmp_path / "file", it=tensor)]) as files:
        files.read([Read("it", Part.whole([6, 10]), into[:, 5:15])])
    assert torch.equal(into[:, 5:15], tensor)
    assert into.count_nonzero() == tensor.numel()


def test_a_tensor_may_be_read_as_one_of_more_dimensions(tmp_path):
    tensor = torch.randn(6, 10)
    path = in_file(tmp_path / "file", it=tensor)
    assert torch.equal(read(path, "it", Part.whole([1, 6, 10]).narrow(1, 2, 3), torch.float32)[0], tensor[2:5])


def test_tensors_of_several_files_are_read_together(tmp_path):
    paths = [in_file(tmp_path / str(number), **{f"t{number}": torch.full([9], float(number))}) for number in range(5)]
    into = [torch.empty(9) for _ in paths]
    with TensorFiles(paths) as files:
        assert set(files.entries) == {f"t{number}" for number in range(5)}
        files.read(Read(f"t{number}", Part.whole([9]), tensor) for number, tensor in enumerate(into))
    assert [float(tensor.mean()) for tensor in into] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [0, 5, 8, 30, 200, 1_000])
def test_a_file_that_was_cut_off_is_refused_with_the_sizes(tmp_path, size):
    path = in_file(tmp_path / "file.safetensors", it=torch.randn(300), other=torch.randn(5))
    os.truncate(path, size)
    with pytest.raises(ModelError, match=rf"file\.safetensors: expected .*found (a file of )?{size}.*again"):
        TensorFiles([path])


def test_a_file_that_became_shorter_while_it_was_open_is_refused(tmp_path):
    path = in_file(tmp_path / "file.safetensors", it=torch.randn(300))
    with TensorFiles([path]) as files:
        os.truncate(path, 400)
        with pytest.raises(ModelError, match=r"file\.safetensors: it cannot be read: the file has become shorter"):
            files.read([Read("it", Part.whole([300]), torch.empty(300))])


BROKEN = {
    "not JSON": (b'{"it": ', "header is damaged"),
    "not text": (b"\xff\xfe\x00", "header is damaged"),
    "a list": ([1, 2], "header is damaged"),
    "nested without end": (b"[" * 100_000, "header is damaged"),
    "a tensor that is a number": ({"it": 5}, "header is damaged"),
    "without a shape": ({"it": {"dtype": "F32", "data_offsets": [0, 8]}}, "header is damaged .*shape"),
    "a type unknown": ({"it": described("F4")}, r"it is of type 'F4'; known are F64, F32.* use the original ones"),
    "a negative size": ({"it": described(shape=(-2,))}, r"expected a list of numbers, found \[-2\]"),
    "a size that is true": ({"it": described(shape=(True,))}, "expected a list of numbers"),
    "fewer bytes than the shape": ({"it": described(shape=(3,))}, r"it: 8 bytes for \[3\] of torch.float32"),
    "an overlap": ({"it": described(), "on": described(data_offsets=(4, 12))}, "on begins at 4 instead of 8"),
    "a gap": ({"it": described(), "on": described(data_offsets=(16, 24))}, "on begins at 16 instead of 8"),
    "a name twice": (b'{"it": {}, "it": {}}', "a name stands there twice"),
    "beyond the end": ({"it": described(shape=(9,), data_offsets=(0, 36))}, "expected .* bytes, as its header says"),
    "bytes that belong to nothing": ({"it": described(shape=(1,), data_offsets=(0, 4))}, "something was added"),
}


@pytest.mark.parametrize(("header", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_header_is_refused_with_what_is_wrong_in_it(tmp_path, header, message):
    path = write(tmp_path / "broken.safetensors", header, bytes(8))
    with pytest.raises(ModelError, match=rf"(?s)broken\.safetensors: .*{message}"):
        TensorFiles([path])


def test_files_that_are_missing_or_no_files_are_refused(tmp_path):
    with pytest.raises(ModelError, match="nowhere: cannot be read: No such file"):
        TensorFiles([tmp_path / "nowhere"])
    with pytest.raises(ModelError, match="folder or a device"):
        TensorFiles([tmp_path])


def test_a_name_in_two_files_is_refused(tmp_path):
    paths = [in_file(tmp_path / name, it=torch.ones(1)) for name in "ab"]
    with pytest.raises(ModelError, match=r"it is in two files, .*a and .*b"):
        TensorFiles(paths)


def test_no_file_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with TensorFiles([in_file(tmp_path / "file", it=torch.ones(1))]):
        pass
    with pytest.raises(ModelError):
        TensorFiles([tmp_path / "file", tmp_path / "nowhere"])
    assert len(os.listdir("/proc/self/fd")) == before
