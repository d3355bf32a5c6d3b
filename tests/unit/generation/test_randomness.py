import math

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.generation.sampler import rollout_keys, uniform

BITS = 2**64


def by_hand(seed, prompt, sample, position):
    """Splitmix64 in Python's own integers."""
    golden = 0x9E3779B97F4A7C15

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % BITS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % BITS
        return z ^ (z >> 31)

    key = mix((seed + golden) % BITS)
    key = mix(((key ^ prompt) + golden) % BITS)
    key = mix(((key ^ sample) + golden) % BITS)
    return (mix((key + (position + 1) * golden) % BITS) >> 11) / 2**53


indices = st.integers(0, 2**40)


@given(st.integers(0, 2**63 - 1), indices, indices, st.integers(0, 2**31))
def test_numbers_are_those_of_splitmix64_in_exact_integers(seed, prompt, sample, position):
    number = uniform(rollout_keys(seed, torch.tensor([prompt]), torch.tensor([sample])), position)
    assert number.item() == by_hand(seed, prompt, sample, position)
    assert 0 <= number.item() < 1


@pytest.fixture(scope="module")
def table():
    """[seed, prompt, sample, position], 4 * 40 * 8 * 80 numbers of neighbours."""
    prompts, samples = (index.flatten() for index in torch.meshgrid(torch.arange(40), torch.arange(8), indexing="ij"))
    keys = [rollout_keys(seed, prompts, samples) for seed in range(4)]
    return torch.stack([torch.stack([uniform(key, t) for t in range(80)], -1).view(40, 8, 80) for key in keys])


def test_neighbours_in_every_index_get_different_numbers(table):
    assert len(torch.unique(table)) == table.numel()


def test_numbers_are_spread_evenly(table):
    numbers = table.flatten().sort().values
    count = len(numbers)
    assert abs(numbers.mean() - 0.5) < 4 / math.sqrt(12 * count)
    assert abs(numbers.var() - 1 / 12) < 0.001
    # Kolmogorov-Smirnov at one in a thousand.
    grid = torch.arange(count, dtype=torch.float64)
    distance = torch.maximum(numbers - grid / count, (grid + 1) / count - numbers).max()
    assert distance < 1.95 / math.sqrt(count)


@pytest.mark.parametrize("dim", range(4), ids=["seed", "prompt", "sample", "position"])
def test_neighbours_in_every_index_are_not_correlated(table, dim):
    size = table.shape[dim] - 1
    one, next_one = table.narrow(dim, 0, size).flatten(), table.narrow(dim, 1, size).flatten()
    correlation = torch.corrcoef(torch.stack([one, next_one]))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(len(one))


@pytest.mark.parametrize("bit", range(0, 53, 4))
def test_every_bit_is_set_in_half_of_the_numbers(table, bit):
    bits = ((table.flatten() * 2**53).long() >> bit) & 1
    assert abs(bits.double().mean() - 0.5) < 4 * 0.5 / math.sqrt(len(bits))
