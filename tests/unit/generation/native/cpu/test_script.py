"""What is computed without Python, beside the same functions in Python."""

import copy

import pytest
import torch

from rallypoint.generation import Rules, SamplingParams, sample
from rallypoint.generation.native.block_tables import Queries
from rallypoint.generation.native.decoder import PlainDecoder
from rallypoint.generation.native.kv_cache import CacheRoom
from rallypoint.generation.native.model_runner import Passes
from rallypoint.generation.native.plain import decode
from rallypoint.generation.script import without_python


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_step_of_decoding_has_the_same_bits_with_and_without_python(make_policy, architecture, dtype):
    model = copy.deepcopy(make_policy(architecture, 2)).to(dtype)
    passes, network = Passes(model, is_exact=False), PlainDecoder(model).network
    found = []
    for way in (decode, without_python(decode, torch.device("cpu"))):
        pool = passes.make_pool(CacheRoom.of(80), 4)
        rows = [[pool.private() for _ in range(length)] for length in (1, 3, 2)]
        pool.clean()
        queries = [(token, 4 * len(blocks) - 2, blocks) for token, blocks in enumerate(rows, 3)]
        (layout,) = passes.lay_out(pool, Queries.of(queries, 4), num_steps=2)
        states = [way(network, layout.bags)]
        layout.advance(torch.tensor([7, 8, 9]))
        states.append(way(network, layout.bags))
        blocks = [block.index for row in rows for block in row]
        found.append([*states, pool.keys[:, blocks], pool.values[:, blocks]])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_steps", [1, 3, 4])
@torch.no_grad()
def test_tokens_that_are_drawn_ahead_are_those_that_are_drawn_one_by_one(make_policy, num_steps, dtype):
    """The layout lasts for four steps, in which the first row goes on in its second block; bfloat16 has filler."""
    model = copy.deepcopy(make_policy()).to(dtype)
    passes, rules = Passes(model, is_exact=False), Rules.of([SamplingParams(max_new_tokens=9)] * 3, torch.device("cpu"))
    numbers = torch.rand(num_steps, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(num_steps))
    found = []
    for at_once in (1, num_steps):
        pool = passes.make_pool(CacheRoom.of(80), 4)
        rows = [[pool.private() for _ in range(length)] for length in (2, 4, 3)]
        pool.clean()
        queries = [(token, 4 * len(blocks) - 7, blocks) for token, blocks in enumerate(rows, 3)]
        (layout,) = passes.lay_out(pool, Queries.of(queries, 4), num_steps=4)
        draws = [draw for part in numbers.split(at_once) for draw in passes.draw_ahead([layout], rules, part)]
        assert layout.has_moves is (num_steps < 3)
        found.append([*map(torch.stack, zip(*draws, strict=True))])
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
    together = sample(logits, Rules.of(params, logits.device), numbers)
    for row, one in enumerate(params):
        at = slice(row, row + 1)
        alone = sample(logits[at], Rules.of([one], logits.device), numbers[at])
        assert all(torch.equal(a, b[at]) for a, b in zip(alone, together, strict=True))


def test_a_function_is_read_once_and_stays_python_on_accelerators():
    cpu = torch.device("cpu")
    assert without_python(decode, cpu) is without_python(decode, cpu)
    assert without_python(decode, torch.device("cuda")) is decode


def test_there_are_no_more_parts_than_rows(make_policy):
    model = copy.deepcopy(make_policy())
    model.config.hidden_size = 100_000
    passes = Passes(model, is_exact=False)
    passes.make_pool(CacheRoom.of(8), 4)
    assert [passes.parts(num_rows, 8) for num_rows in (3, 8, 9)] == [(3, None), (8, None), (8, None)]
