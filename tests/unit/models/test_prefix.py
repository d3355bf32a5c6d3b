"""Tokens that rows share, against comparing row by row; and what a pass says of them, against computing all."""

import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.model_files import load_policy
from rallypoint.models import PackedRows, SharedPrefixes
from rallypoint.models.prefix import pick
from rallypoint.types import offsets_from_lengths

CPU = torch.device("cpu")
ROWS = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=6), st.integers(0, 2)), max_size=8)


def laid_out(rows):
    offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    return offsets, torch.tensor([token for row in rows for token in row], dtype=torch.int64)


@given(ROWS)
def test_a_token_is_shared_exactly_when_all_before_it_equals_the_first_row_of_the_group(drawn):
    rows, groups = [row for row, _ in drawn], [group for _, group in drawn]
    offsets, tokens = laid_out(rows)
    shared = SharedPrefixes.of(offsets, tokens, torch.tensor(groups, dtype=torch.int64))
    standing_for = shared.kept[shared.place].tolist()
    for index, row in enumerate(rows):
        first = groups.index(groups[index])
        for position in range(len(row)):
            alike = row[: position + 1] == rows[first][: position + 1]
            expected = int(offsets[first if alike else index]) + position
            assert standing_for[int(offsets[index]) + position] == expected
    assert shared.kept.tolist() == sorted(set(standing_for))


def rows_of_groups(prompts, responses, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, groups = [], []
    for group, (prompt_length, lengths) in enumerate(zip(prompts, responses, strict=True)):
        prompt = torch.randint(20, (prompt_length,), generator=generator)
        for length in lengths:
            rows.append(torch.cat([prompt, torch.randint(20, (length,), generator=generator)]).tolist())
            groups.append(group)
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [rows[index] for index in order], torch.tensor([groups[index] for index in order])


GROUPS = {
    "several lengths": ([5, 30], [[4, 0, 90, 2], [7, 7, 33]]),
    "one response": ([5], [[4]]),
    "equal rows": ([40, 3], [[0, 0, 0], [0, 1]]),
    "the fused kernel": ([500], [[20, 100, 3]]),
}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("prompts", "responses"), GROUPS.values(), ids=GROUPS.keys())
def test_sharing_changes_neither_states_nor_gradients(make_folder, architecture, prompts, responses):
    model = load_policy(make_folder(architecture), dtype="float32").model.double()
    rows, groups = rows_of_groups(prompts, responses)
    offsets, tokens = laid_out(rows)
    weigh = torch.randn(len(tokens), 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outcomes = []
    for numbers in (groups, torch.arange(len(rows))):
        shared = SharedPrefixes.of(offsets, tokens, numbers)
        packed = PackedRows(offsets, CPU, shared)
        model.zero_grad()
        states = model.base_model(
            input_ids=tokens[shared.kept].unsqueeze(0), position_ids=packed.position_ids, use_cache=False, rows=packed
        ).last_hidden_state.squeeze(0)[shared.place]
        (states * weigh).sum().backward()
        gradients = [weight.grad.clone() for weight in model.base_model.parameters()]
        outcomes.append([states.detach(), *gradients])
    for ours, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_rows_give_the_same_bits_of_gradients(dtype):
    rows, groups = rows_of_groups([40, 20], [[70, 3, 30], [90, 1]])
    offsets, tokens = laid_out(rows)
    shared = SharedPrefixes.of(offsets, tokens, groups)
    gradients = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(len(shared.kept), heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2)]
        states = [tensor.requires_grad_() for tensor in states]
        out = PackedRows(offsets, CPU, shared).attend(0, *states, 0.3)
        gradients.append(torch.autograd.grad(out.square().sum(), states))
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


@pytest.mark.parametrize("places", [[], [2, 0, 2, 2, 4], [4, 4, 4], [0, 1, 2, 3, 4]], ids=str)
def test_rows_that_are_picked_more_than_once_get_the_sum_of_the_gradients(places):
    states = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    at, grad = torch.tensor(places, dtype=torch.int64), torch.randn(len(places), 3, dtype=torch.float64)
    picked = pick(states, at, len(at) + 2)
    assert torch.equal(picked[:-2], states[at])
    assert not picked[-2:].any()
    picked[:-2].backward(grad)
    expected = [grad[at == row].sum(0) for row in range(5)]
    torch.testing.assert_close(states.grad, torch.stack(expected), rtol=1e-12, atol=1e-12)
