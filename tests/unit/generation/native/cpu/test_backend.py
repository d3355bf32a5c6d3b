"""What is computed without Python, beside the same functions in Python."""

import copy

import pytest
import torch

from rallypoint.cpu.script import without_python
from rallypoint.generation import SamplingParams
from rallypoint.generation.native.block_manager import AttentionMetadata, BlockManager
from rallypoint.generation.native.cpu.backend import CPUBackend
from rallypoint.generation.native.cpu.bags import decode
from rallypoint.generation.native.decoder import PlainDecoder
from rallypoint.generation.native.kv_cache import KVCache
from rallypoint.generation.sampler import SamplingMetadata, sample


def make_cache(backend):
    shapes = backend.decoder.probe()
    backend.prepare(shapes)
    return KVCache(20, shapes, 4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_step_of_decoding_has_the_same_bits_with_and_without_python(make_policy, architecture, dtype):
    model = copy.deepcopy(make_policy(architecture, 2)).to(dtype)
    backend, network = CPUBackend(model), PlainDecoder(model).network
    found = []
    for way in (decode, without_python(decode, torch.device("cpu"))):
        cache, manager = make_cache(backend), BlockManager(20, 4)
        rows = [[manager.allocate() for _ in range(length)] for length in (1, 3, 2)]
        cache.zero(manager.take_new())
        queries = [(token, 4 * len(blocks) - 2, blocks) for token, blocks in enumerate(rows, 3)]
        (layout,) = backend.attention(cache, AttentionMetadata.of(queries, 4), num_steps=2)
        states = [way(network, layout.bags)]
        layout.advance(torch.tensor([7, 8, 9]))
        states.append(way(network, layout.bags))
        blocks = [block.index for row in rows for block in row]
        found.append([*states, cache.keys[:, blocks], cache.values[:, blocks]])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_steps", [1, 3, 4])
@torch.no_grad()
def test_tokens_that_are_drawn_ahead_are_those_that_are_drawn_one_by_one(make_policy, num_steps, dtype):
    """The layout lasts for four steps, in which the first row goes on in its second block; bfloat16 has filler."""
    model = copy.deepcopy(make_policy()).to(dtype)
    backend = CPUBackend(model)
    sampling = SamplingMetadata.of([SamplingParams(max_new_tokens=9)] * 3, torch.device("cpu"))
    numbers = torch.rand(num_steps, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(num_steps))
    found = []
    for at_once in (1, num_steps):
        cache, manager = make_cache(backend), BlockManager(20, 4)
        rows = [[manager.allocate() for _ in range(length)] for length in (2, 4, 3)]
        cache.zero(manager.take_new())
        queries = [(token, 4 * len(blocks) - 7, blocks) for token, blocks in enumerate(rows, 3)]
        (layout,) = backend.attention(cache, AttentionMetadata.of(queries, 4), num_steps=4)
        sampled = [one for part in numbers.split(at_once) for one in backend.decode_steps([layout], sampling, part)]
        assert layout.has_next is (num_steps < 3)
        found.append([*map(torch.stack, zip(*sampled, strict=True))])
    assert all(map(torch.equal, *found))
    assert found[0][0].shape == (num_steps, 3)


@pytest.mark.parametrize(
    "kinds",
    [
        [{}],
        [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 5}],
        [{"top_p": 0.8}, {"min_p": 0.1, "temperature": 1.3}],
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [20, 600])
def test_rows_are_drawn_one_by_one_as_they_are_together(kinds, vocabulary):
    """A scripted function is compiled for the kinds that it has seen, so every kind must go through it in any order."""
    params = [SamplingParams(max_new_tokens=5, **kind) for kind in kinds]
    logits, numbers = torch.randn(len(kinds), vocabulary).mul_(3), torch.rand(len(kinds), dtype=torch.float64)
    together = sample(logits, SamplingMetadata.of(params, logits.device), numbers)
    for row, one in enumerate(params):
        at = slice(row, row + 1)
        alone = sample(logits[at], SamplingMetadata.of([one], logits.device), numbers[at])
        assert all(torch.equal(a, b[at]) for a, b in zip(alone, together, strict=True))


def test_a_function_is_read_once_and_stays_python_on_accelerators():
    cpu = torch.device("cpu")
    assert without_python(decode, cpu) is without_python(decode, cpu)
    assert without_python(decode, torch.device("cuda")) is decode


def test_there_are_no_more_parts_than_rows(make_policy):
    model = copy.deepcopy(make_policy())
    model.config.hidden_size = 100_000
    backend = CPUBackend(model)
    make_cache(backend)
    assert [backend.parts(num_rows, 8) for num_rows in (3, 8, 9)] == [(3, None), (8, None), (8, None)]
