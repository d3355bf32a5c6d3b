"""Packed rows against transformers' own attention on each row alone, in float64.

Its eager attention rounds every softmax to float32, so it is compared more loosely than its sdpa.
"""

import contextlib
import functools

import pytest
import torch
from accelerator_forms import accelerator_forms
from grids import paired
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from rallypoint.model_files import load_policy
from rallypoint.models import PackedRows, lm_head
from rallypoint.models.attention import attend_rows
from rallypoint.models.norm import replace_norms
from rallypoint.models.products import Limits
from rallypoint.types import offsets_from_lengths

CPU = torch.device("cpu")
FAMILIES = [("llama", 2), ("llama", 4), ("llama", 1), ("qwen3", 2), ("qwen3", 4)]
LENGTHS = {
    "one row": [5],
    "one token": [1],
    "equal rows": [6, 6, 6],
    "one class": [5, 8, 7],
    "many classes": [1, 33, 2, 64, 3, 1, 100, 5, 65],
    "rows without tokens": [0, 4, 0, 9, 0],
    "the longest for two products": [512, 300, 3],
    "the fused kernel": [513, 600, 2],
}


def rows_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(20, (length,), generator=generator) for length in lengths]


def packed_logits(model, rows):
    packed = PackedRows(offsets_from_lengths(torch.tensor([len(row) for row in rows])), CPU)
    output = model.base_model(
        input_ids=torch.cat(rows).unsqueeze(0), position_ids=packed.position_ids, use_cache=False, rows=packed
    )
    return lm_head(model)(output.last_hidden_state.squeeze(0))


TOLERANCES = {"eager": 1e-5, "sdpa": 1e-9}


@functools.cache
def ours_and_theirs(folder, attention):
    """Load both once for all tests, which change no weight; gradients are none."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float64).eval()
    replace_norms(theirs)  # its own round to float32
    return load_policy(folder, dtype="float32").model.to(torch.float64), theirs


@pytest.mark.parametrize(("attention", "family", "lengths"), paired(TOLERANCES, FAMILIES, LENGTHS))
def test_packed_rows_give_the_logits_of_each_row_alone(make_folder, attention, family, lengths):
    architecture, kv_heads = family
    ours, theirs = ours_and_theirs(make_folder(architecture, num_key_value_heads=kv_heads), attention)
    rows = rows_of(LENGTHS[lengths])
    with torch.no_grad():
        expected = torch.cat([theirs(row.unsqueeze(0)).logits.squeeze(0) for row in rows if len(row)])
        error = (packed_logits(ours, rows) - expected).abs().max()
    assert error <= TOLERANCES[attention] * expected.abs().max()


@pytest.mark.parametrize("lengths", [[1, 33, 2, 7, 16], [600, 3, 513]], ids=["short", "fused"])
@pytest.mark.parametrize(("architecture", "kv_heads"), FAMILIES[:1] + FAMILIES[3:])
@pytest.mark.parametrize("attention", TOLERANCES)
def test_gradients_of_packed_rows_are_the_sum_of_those_of_each_row(
    make_folder, attention, architecture, kv_heads, lengths
):
    ours, theirs = ours_and_theirs(make_folder(architecture, num_key_value_heads=kv_heads), attention)
    ours.zero_grad()
    theirs.zero_grad()
    rows = rows_of(lengths)
    weigh = torch.randn(sum(lengths), 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (packed_logits(ours, rows) * weigh).sum().backward()
    for row, weights in zip(rows, weigh.split(lengths), strict=True):
        (theirs(row.unsqueeze(0)).logits.squeeze(0) * weights).sum().backward()
    expected = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        error = (weight.grad - expected[name]).abs().max()
        assert error <= TOLERANCES[attention] * expected[name].abs().max(), name


@pytest.mark.parametrize("lengths", [[4, 6, 5, 40], [520, 600]], ids=["short", "fused"])
def test_changing_one_row_changes_no_bit_of_any_other(make_folder, lengths):
    model = load_policy(make_folder(), dtype="float32").model
    rows = rows_of(lengths)
    with torch.no_grad():
        before = packed_logits(model, rows).split(lengths)
        for changed in range(len(rows)):
            others = [(row + 1) % 20 if index == changed else row for index, row in enumerate(rows)]
            after = packed_logits(model, others).split(lengths)
            same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert same == [index != changed for index in range(len(rows))]


def test_a_later_token_changes_no_bit_of_an_earlier_one(make_folder):
    model = load_policy(make_folder(), dtype="float32").model
    first, second = rows_of([9, 5])
    changed = first.clone()
    changed[6] = (changed[6] + 1) % 20
    with torch.no_grad():
        before, after = packed_logits(model, [first, second]), packed_logits(model, [changed, second])
    assert torch.equal(before[:6], after[:6])
    assert not torch.equal(before[6], after[6])


def test_nan_in_one_row_stays_in_that_row(make_folder):
    model = load_policy(make_folder(), dtype="float32").model
    lengths = [3, 4, 17]
    packed = PackedRows(offsets_from_lengths(torch.tensor(lengths)), CPU)
    embeddings = model.get_input_embeddings()(torch.cat(rows_of(lengths))).detach().clone()
    embeddings[3] = float("nan")
    with torch.no_grad():
        states = model.base_model(
            inputs_embeds=embeddings.unsqueeze(0), position_ids=packed.position_ids, use_cache=False, rows=packed
        ).last_hidden_state.squeeze(0)
    assert [part.isnan().any().item() for part in states.split(lengths)] == [False, True, False]


def test_what_stands_behind_the_last_row_sees_nothing_and_is_not_seen():
    offsets, generator = offsets_from_lengths(torch.tensor([3, 40, 9])), torch.Generator().manual_seed(0)
    states = [torch.randn(57, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    packed = PackedRows(offsets, CPU, num_filler=5)
    out = packed.attend(0, *states, 0.3)
    alone = PackedRows(offsets, CPU).attend(0, *(part[:52] for part in states), 0.3)
    assert torch.equal(out[:52], alone)
    assert not out[52:].any()
    assert packed.position_ids.shape == (1, 57)
    gradients, wanted = (torch.autograd.grad(part.square().sum(), states) for part in (out, alone))
    for gradient, expected in zip(gradients, wanted, strict=True):
        assert torch.equal(gradient, expected)
        assert not gradient[52:].any()


def test_positions_start_again_with_each_row():
    assert PackedRows(torch.tensor([0, 3, 3, 5]), CPU).position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_what_packed_attention_would_leave_out_is_refused():
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="does not support position_bias yet"):
        attend_rows(torch.nn.Identity(), states, states, states, None, 1.0, rows=None, position_bias=4)


def test_a_mask_or_dropout_is_refused():
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="neither a mask nor dropout"):
        attend_rows(torch.nn.Identity(), states, states, states, None, 1.0, 0.1, rows=None)


@pytest.mark.parametrize("share", [1, 3])
@pytest.mark.parametrize("lengths", [[150] * 2, [64, 65, 128, 129, 1], [7, 5]], ids=["even", "block borders", "short"])
def test_blocks_of_queries_give_torch_s_own_attention_and_gradients(lengths, share):
    generator = torch.Generator().manual_seed(0)
    rows = PackedRows(offsets_from_lengths(torch.tensor(lengths)), CPU)
    states = [
        torch.randn(sum(lengths), heads, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (2 * share, 2, 2)
    ]
    weigh = torch.randn(sum(lengths), 2 * share, 8, generator=generator, dtype=torch.float64)
    ours = rows.attend(0, *states, 0.3)
    theirs = torch.cat(
        [
            scaled_dot_product_attention(
                *(part.transpose(0, 1) for part in parts), is_causal=True, scale=0.3, enable_gqa=share > 1
            ).transpose(0, 1)
            for parts in zip(*(tensor.split(lengths) for tensor in states), strict=True)
        ]
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    gradients = [torch.autograd.grad((out * weigh).sum(), states) for out in (ours, theirs)]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_gradients_of_nan_in_one_row_stay_in_that_row():
    lengths = [3, 70, 80]
    states = [torch.randn(153, 2, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    for tensor in states:
        tensor[3 + 69] = float("nan")
        tensor.requires_grad_()
    PackedRows(offsets_from_lengths(torch.tensor(lengths)), CPU).attend(0, *states, 1.0).sum().backward()
    for tensor in states:
        assert [part.isnan().any().item() for part in tensor.grad.split(lengths)] == [False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_rows_give_the_same_bits_of_gradients(dtype):
    lengths = [90, 3, 140, 64]
    gradients = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        states = [torch.randn(sum(lengths), heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2)]
        states = [tensor.requires_grad_() for tensor in states]
        out = PackedRows(offsets_from_lengths(torch.tensor(lengths)), CPU).attend(0, *states, 0.3)
        gradients.append(torch.autograd.grad(out.square().sum(), states))
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


def plain_attention(query, key, value, scaling, limits):
    """Return the attention of one row, [T, H, D], from all of its scores at once."""
    share = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(share, 1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
    if limits.softcap is not None:
        scores = limits.softcap * (scores / limits.softcap).tanh()
    distance = torch.arange(len(query)).unsqueeze(1) - torch.arange(len(query))
    seen = (distance >= 0) & (distance < (limits.window or len(query)))
    scores = scores.masked_fill(~seen, float("-inf"))
    if limits.sinks is not None:  # one more key, whose value is zero
        scores = torch.cat([scores, limits.sinks.view(-1, 1, 1).expand(-1, len(query), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


FORMS = {"CPU": contextlib.nullcontext, "accelerator": accelerator_forms}
LIMITED = {"even": [150] * 2, "borders": [64, 65, 129, 1], "long": [560, 70, 7]}


@pytest.mark.parametrize(
    ("lengths", "window", "limit", "forms"),
    paired(LIMITED, [None, 1, 7, 65, 530], ["none", "softcap", "sinks"], FORMS),
)
def test_windows_capped_scores_and_sinks_give_what_all_scores_at_once_give(lengths, window, limit, forms):
    lengths, softcap, has_sinks = LIMITED[lengths], 1.5 if limit == "softcap" else None, limit == "sinks"
    generator = torch.Generator().manual_seed(0)
    sinks = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_() if has_sinks else None
    limits = Limits(window, softcap, sinks)
    states = [
        torch.randn(sum(lengths), heads, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    weigh = torch.randn(sum(lengths), 4, 4, generator=generator, dtype=torch.float64)
    with FORMS[forms]():
        ours = PackedRows(offsets_from_lengths(torch.tensor(lengths)), CPU).attend(0, *states, 0.9, limits)
    rows = zip(*(tensor.split(lengths) for tensor in states), strict=True)
    plain = torch.cat([plain_attention(*row, 0.9, limits) for row in rows])
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    leaves = [*states, sinks] if has_sinks else states
    gradients = [torch.autograd.grad((out * weigh).sum(), leaves) for out in (ours, plain)]
    for mine, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
