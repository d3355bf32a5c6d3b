"""Weights in MXFP4, in which the hub has the experts of gpt-oss, read as ordinary numbers.

Owns: what the bytes mean, and reading a rectangle of such a weight. Must not know: models. Only reading: weights are
trained, and saved, in ordinary types.

The format is that of the OCP Microscaling Formats Specification 1.0. A number has 4 bits (E2M1): a sign, two bits of
exponent, one of mantissa. 32 numbers have a scale in common, a byte b that means 2**(b - 127) (E8M0; 255 is NaN). The
numbers of X matrices of I inputs and O outputs, [X, I, O] in memory, lie in two tensors, output by output:

    NAME_blocks     [X, O, I / 32, 16] bytes, two numbers each, the first one in the lower half
    NAME_scales     [X, O, I / 32] bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rallypoint.errors import ModelError
from rallypoint.model_files.reader import Read, TensorEntry, TensorFiles
from rallypoint.models.part import Part

METHOD = "mxfp4"
"""`quant_method` of config.json."""
_GROUP = 32
"""Numbers with a common scale."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAN = 255


def packed_names(name: str) -> tuple[str, str]:
    """Return the names of the two tensors that a weight in MXFP4 consists of."""
    return f"{name}_blocks", f"{name}_scales"


def find_packed(path: str, entries: Mapping[str, TensorEntry], name: str, part: Part, into: Tensor) -> Read | None:
    """Return how a part of a weight is read, if files have it in MXFP4.

    Raises:
        ModelError: its tensors have other types or shapes; the path is named.
    """
    blocks, scales = packed_names(name)
    if blocks not in entries or scales not in entries:
        return None
    shape = part.shape
    groups = shape[0], shape[-1], shape[1] // _GROUP
    for tensor, expected in ((blocks, (*groups, _GROUP // 2)), (scales, groups)):
        entry = entries[tensor]
        if len(shape) != 3 or shape[1] % _GROUP or (entry.dtype, entry.shape) != (torch.uint8, expected):
            raise ModelError(
                f"{path}: {tensor} is {list(entry.shape)} of {entry.dtype}, expected {list(expected)} of torch.uint8: "
                f"{name} in MXFP4, {list(shape)}, with a scale for {_GROUP} inputs; give the config.json and the "
                "safetensors files that were saved together"
            )
    return Read(name, part, into)


def read_packed(files: TensorFiles, reads: Iterable[Read]) -> None:
    """Read rectangles, matrix by matrix: a process needs memory for one more in float32.

    Raises:
        ModelError: the disk fails, or a file has become shorter.
    """
    for read in reads:
        names = packed_names(read.name)
        _, first, begin = read.part.starts
        num, num_inputs, num_outputs = read.part.sizes
        start, stop = first // _GROUP, -(-(first + num_inputs) // _GROUP)
        for number in range(num if read.part.num_elements else 0):
            pieces: list[Read] = []
            for name in names:
                whole = Part.whole(files.entries[name].shape).narrow(0, read.part.starts[0] + number, 1)
                part = whole.narrow(1, begin, num_outputs).narrow(2, start, stop - start)
                pieces.append(Read(name, part, torch.empty(part.sizes, dtype=torch.uint8)))
            files.read(pieces)
            # Half as much is turned around in half precision.
            found = unpacked(*(piece.into[0] for piece in pieces)).to(read.into.dtype)
            read.into[number].copy_(found.narrow(1, first - start * _GROUP, num_inputs).t())


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of blocks in float32: [..., G, 16] and [..., G] uint8 -> [..., 32 * G].

    >>> blocks = torch.zeros(1, 16, dtype=torch.uint8)
    >>> blocks[0, :2] = torch.tensor([0x71, 0xF2])
    >>> unpacked(blocks, torch.tensor([128], dtype=torch.uint8))[:5].tolist()
    [1.0, 12.0, 2.0, -12.0, 0.0]
    """
    values = torch.tensor((*_POSITIVE, *(-value for value in _POSITIVE)))
    pairs = torch.stack([values.repeat(len(values)), values.repeat_interleave(len(values))], 1)
    # Both numbers of a byte are moved as one of 64 bits: seven times as fast.
    found = pairs.view(torch.int64).view(-1).index_select(0, blocks.flatten().int()).view(torch.float32)
    powers = torch.ldexp(torch.ones(_NAN), torch.arange(_NAN) - 127)
    powers = torch.cat([powers, torch.full((1,), torch.nan)])
    return found.view(*scales.shape, _GROUP).mul_(powers[scales.int()].unsqueeze(-1)).flatten(-2)
