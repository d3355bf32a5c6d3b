import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rallypoint.types import (
    ActorBatch,
    JudgedBatch,
    PerToken,
    Prompts,
    RolloutBatch,
    ScoredBatch,
    Sequences,
    ValuedBatch,
    offsets_from_lengths,
)
from rallypoint.types.carrier import Carrier

KINDS = (Prompts, Sequences, RolloutBatch, ScoredBatch, JudgedBatch, ValuedBatch, ActorBatch, PerToken)


def make(kind, lengths, *, reference=True):
    """A carrier of any kind, with numbers that occur once."""
    offsets = offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64))
    fields = {}
    for number, field in enumerate(f for f in dataclasses.fields(kind) if "axis" in f.metadata):
        size = int(offsets[-1]) if field.metadata["axis"] == "T" else len(lengths)
        values = torch.arange(size) + 1000 * number
        if field.name in ("loss_mask", "truncated", "sequence_starts"):
            values = values % 3 == 1
        elif field.name not in ("tokens", "prompt_index", "sample_index", "versions"):
            values = values.float()
        fields[field.name] = None if field.name == "reference_logprobs" and not reference else values
    return kind(offsets=offsets, **fields)


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    for field in dataclasses.fields(expected):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if not isinstance(other, torch.Tensor):
            assert one == other
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one, other), field.name


carriers = st.builds(make, st.sampled_from(KINDS), st.lists(st.integers(0, 5), max_size=8), reference=st.booleans())


@given(carriers, st.integers(1, 12))
def test_joining_the_parts_of_a_split_gives_the_carrier_back(carrier, num_parts):
    parts = carrier.split(num_parts)
    assert len(parts) == num_parts
    assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1
    assert_same(type(carrier).join(parts), carrier)


@given(carriers, st.data())
def test_picked_rows_hold_the_tokens_that_they_held_before(carrier, data):
    picked = data.draw(st.lists(st.integers(0, len(carrier) - 1), max_size=10) if len(carrier) else st.just([]))
    rows = carrier.rows(picked)
    assert rows.lengths.tolist() == [int(carrier.lengths[row]) for row in picked]
    for field in dataclasses.fields(carrier):
        values = getattr(carrier, field.name)
        if field.name == "offsets" or not isinstance(values, torch.Tensor):
            continue
        per_token = field.metadata["axis"] == "T"
        bounds = [(carrier.offsets[row], carrier.offsets[row + 1]) if per_token else (row, row + 1) for row in picked]
        expected = [number for start, stop in bounds for number in values[start:stop].tolist()]
        assert getattr(rows, field.name).tolist() == expected


@given(carriers, st.randoms())
def test_a_permutation_and_its_inverse_cancel(carrier, random):
    order = list(range(len(carrier)))
    random.shuffle(order)
    back = sorted(range(len(order)), key=lambda row: order[row])
    assert_same(carrier.rows(order).rows(back), carrier)


@given(carriers)
def test_a_carrier_survives_pickling_with_its_types_and_its_gaps(carrier):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert_same(pickle.loads(pickle.dumps(carrier, protocol=protocol)), carrier)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@given(carriers)
def test_out_of_band_buffers_are_taken_over_read_only_and_without_a_copy(carrier):
    buffers = []
    data = pickle.dumps(carrier, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    addresses = [np.frombuffer(raw, dtype=np.uint8).ctypes.data for raw in frozen]
    arrived = pickle.loads(data, buffers=frozen)
    assert_same(arrived, carrier)
    assert arrived.offsets.data_ptr() in addresses
    # What is received can be cut, joined and sent on without being written to.
    assert_same(pickle.loads(pickle.dumps(type(carrier).join(arrived.split(3)))), carrier)


def test_a_part_is_sent_without_the_storage_behind_it():
    whole = make(Sequences, [1000] * 100)
    view = dataclasses.replace(
        whole.rows([0]),
        tokens=whole.tokens[:1000],
        prompt_index=whole.prompt_index[:1],
        loss_mask=whole.loss_mask[:1000],
    )
    assert len(pickle.dumps(view)) < 20_000


def test_a_strided_field_arrives_as_it_was():
    tokens = torch.arange(10)[::2]
    prompts = Prompts(offsets=torch.tensor([0, 5]), tokens=tokens, prompt_index=torch.tensor([3]))
    buffers = []
    data = pickle.dumps(prompts, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 3  # it travels out of band, as the other fields do
    assert pickle.loads(data, buffers=buffers).tokens.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", torch.zeros(4), r"Sequences\.tokens: expected shape \[5\] \(T\), found \[4\]"),
        ("tokens", torch.zeros(5, 1), r"Sequences\.tokens: expected shape \[5\] \(T\), found \[5, 1\]"),
        ("loss_mask", torch.tensor(True), r"Sequences\.loss_mask: expected shape \[5\] \(T\), found \[\]"),
        ("prompt_index", torch.zeros(3), r"Sequences\.prompt_index: expected shape \[2\] \(B\), found \[3\]"),
    ],
)
def test_a_field_of_the_wrong_shape_is_named(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make(Sequences, [3, 2]), **{field: value})


@pytest.mark.parametrize("offsets", [[], [1, 5], [0, 5, 3, 5], [[0, 5]]])
def test_offsets_that_do_not_begin_at_0_or_that_go_back_are_refused(offsets):
    with pytest.raises(ValueError, match=r"PerToken\.offsets"):
        PerToken(offsets=torch.tensor(offsets, dtype=torch.int64), values=torch.zeros(5))


def test_carriers_cannot_be_modified():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(Prompts, [1]).tokens = torch.zeros(1)


def test_picking_rows_leaves_the_original_as_it_was():
    batch = make(Sequences, [2, 3])
    batch.rows([1, 0]).tokens.zero_()
    assert_same(batch, make(Sequences, [2, 3]))


def test_parts_join_when_some_ranks_had_no_rows_and_a_field_is_absent():
    batch = make(JudgedBatch, [2], reference=False)
    assert JudgedBatch.join(batch.split(3)).reference_logprobs is None


def test_a_field_that_only_some_parts_have_is_refused():
    with pytest.raises(ValueError, match="reference_logprobs"):
        JudgedBatch.join([make(JudgedBatch, [2]), make(JudgedBatch, [3], reference=False)])


def test_a_carrier_is_widened_stage_by_stage_and_narrowed_again():
    rollouts = make(RolloutBatch, [2, 3])
    zeros = torch.zeros(5)
    valued = rollouts.scored(zeros).judged(old_logprobs=zeros, reference_logprobs=None).valued(zeros)
    assert isinstance(valued, ValuedBatch)
    assert_same(valued.bare(), rollouts.widen(Sequences))
    assert valued.widen(RolloutBatch).truncated is rollouts.truncated


def test_scores_are_the_sums_of_each_row_also_of_an_empty_one():
    batch = make(RolloutBatch, [2, 0, 1]).scored(torch.tensor([0.5, 1.0, -2.0]))
    assert batch.scores.tolist() == [1.5, 0.0, -2.0]


def test_a_response_is_what_the_policy_sampled():
    batch = dataclasses.replace(make(Sequences, [3, 2]), loss_mask=torch.tensor([False, True, True, False, True]))
    assert [batch.response(row).tolist() for row in range(2)] == [[1, 2], [4]]


def test_rows_of_a_carrier_without_rows_are_none():
    empty = make(Carrier, [])
    assert len(empty) == empty.num_tokens == len(empty.row_of_token) == 0


@given(carriers, st.integers(0, 3))
def test_padding_puts_zeros_behind_every_row_and_changes_nothing_else(carrier, more):
    length = max([0, *carrier.lengths.tolist()]) + more
    padded = carrier.padded(length)
    assert padded.lengths.tolist() == [length] * len(carrier)
    for field in dataclasses.fields(carrier):
        values, wider = getattr(carrier, field.name), getattr(padded, field.name)
        if values is None or field.metadata.get("axis") != "T":
            assert field.name == "offsets" or wider is values
            continue
        own = torch.arange(length).repeat(len(carrier)) < carrier.lengths.repeat_interleave(length)
        assert torch.equal(wider[own], values)
        assert not wider[~own].any()


def test_a_row_cannot_be_padded_to_less_than_its_length():
    with pytest.raises(ValueError, match="4 tokens cannot be padded to 3"):
        make(Prompts, [2, 4]).padded(3)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_sequences_of_rows_are_taken_apart_and_every_token_stays_where_it_is(lengths, data):
    batch = make(RolloutBatch, lengths)
    cut = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch.num_tokens, max_size=batch.num_tokens)))
    cut[batch.offsets[:-1]] = False
    batch = dataclasses.replace(batch, sequence_starts=cut)
    apart = batch.by_sequence()
    assert apart.sequence_starts is None
    assert apart.offsets.tolist() == sorted([*batch.offsets.tolist(), *cut.nonzero().flatten().tolist()])
    assert torch.equal(apart.sample_index[apart.row_of_token], batch.sample_index[batch.row_of_token])
    assert torch.equal(apart.tokens, batch.tokens)
    assert torch.equal(torch.bincount(apart.sample_index % 1000, minlength=len(batch)), batch.num_sequences)
    last = batch.last_sequences()
    assert torch.equal(last.sample_index, batch.sample_index)
    assert torch.equal(last.tokens[last.offsets[1:] - 1], batch.tokens[batch.offsets[1:] - 1])


def test_a_part_without_further_sequences_joins_one_with_some_in_any_order():
    plain = dataclasses.replace(make(Sequences, [2, 1]), sequence_starts=None)
    cut = dataclasses.replace(plain, sequence_starts=torch.tensor([False, True, False]))
    assert Sequences.join([plain, cut]).sequence_starts.tolist() == [False] * 4 + [True, False]
    assert Sequences.join([cut, plain]).sequence_starts.tolist() == [False, True] + [False] * 4
    assert Sequences.join([plain, plain]).sequence_starts is None
    assert plain.by_sequence() is plain
