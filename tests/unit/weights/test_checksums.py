"""Sums that tell weights apart: the same on every device, and what they cannot miss."""

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.weights.checksums import digested, sums


def by_hand(data):
    """One word after the other, in Python's whole numbers."""
    raw = data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    size = next(size for size in (4, 2, 1) if not len(raw) % size)
    words = [int.from_bytes(raw[at : at + size], "little", signed=size > 1) for at in range(0, len(raw), size)]
    found = sum(words), sum(place * word for place, word in enumerate(words, 1))
    return [(number + 2**63) % 2**64 - 2**63 for number in found]


def drawn(num_bytes):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 4, 64, 4095, 4096, 4097, 4098, 4100, 8192, 40_004])
def test_sums_are_those_by_hand_for_every_length(num_bytes):
    assert sums(drawn(num_bytes)).tolist() == by_hand(drawn(num_bytes))


def test_sums_wrap_around_as_by_hand_and_take_every_type_and_layout():
    most = torch.full((300_000,), -(2**31), dtype=torch.int32)
    assert sums(most).tolist() == by_hand(most)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        turned = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(dtype).T
        assert sums(turned).tolist() == by_hand(turned)
    assert sums(torch.tensor(1.5)).tolist() == by_hand(torch.tensor([1.5]))


@given(st.sampled_from([7, 64, 4096, 9000]), st.data())
def test_any_change_of_two_words_and_any_swap_is_seen(num_bytes, data):
    before = drawn(num_bytes)
    after = before.clone()
    size = next(size for size in (4, 2, 1) if not num_bytes % size)
    words = after.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[size])
    place = st.integers(0, len(words) - 1)
    one, other = data.draw(place), data.draw(place)
    if data.draw(st.booleans()):
        words[[one, other]] = words[[other, one]]
    else:
        most = 2 ** (8 * size)
        for at in (one, other):
            changed = (int(words[at]) + data.draw(st.integers(1, most - 1))) % most
            words[at] = changed - most * (size > 1 and changed >= most // 2)
    assert torch.equal(before, after) == torch.equal(sums(before), sums(after))


def test_a_flipped_bit_changes_sums_wherever_it_is():
    before = drawn(5000)
    base = sums(before).tolist()
    for bit in range(0, 40_000, 7):
        before[bit // 8] ^= 1 << bit % 8
        assert sums(before).tolist() != base
        before[bit // 8] ^= 1 << bit % 8


def test_tensors_that_have_changed_places_have_another_digest():
    one, other = torch.randn(2, 30, 40, generator=torch.Generator().manual_seed(0)).unbind(0)
    assert digested({"a": one, "b": other}) != digested({"a": other, "b": one})
