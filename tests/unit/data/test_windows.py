"""Prompts that are read as a run needs them: their order, where a run goes on, and how many are in memory."""

import json
import weakref
from typing import Any, ClassVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from rallypoint.data import (
    Conversations,
    EncodedPrompts,
    RowStream,
    StreamedPrompts,
    StreamedRows,
    encode_rows,
    load_conversations,
    make_digits_tokenizer,
)
from rallypoint.data.files import Problems
from rallypoint.data.windows import Windows
from rallypoint.errors import DataError


class Item:
    """What a row was made into; counted while it is in memory."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    def __init__(self, text):
        self.text = text
        Item.alive.add(self)


class Numbers:
    """Rows 0 to n, without a file; remembers where it was read from."""

    def __init__(self, num):
        self.num, self.starts, self.num_counts = num, [], 0

    def read(self, start, problems):
        self.starts.append(start)
        yield from range(start, self.num)

    def count(self):
        self.num_counts += 1
        return self.num


def windows_of(num, each, *, keep=lambda row: True, **options):
    rows = Numbers(num)

    def encode(examples):
        return [Item(row) for row in examples if keep(row)]

    return rows, Windows(cast(Any, rows), encode, num_rows=each, **{"seed": 0, **options})


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 100), st.booleans(), st.sampled_from([1, 3]))
def test_the_item_of_a_number_is_the_same_whatever_was_asked_before(num, each, start, keeps_all, every):
    options = {"keep": (lambda row: True) if keeps_all else (lambda row: row % every == 0), "keeps_all": keeps_all}
    _, whole = windows_of(num, each, **options)
    expected = [whole[number].text for number in range(start + 5)]
    _, resumed = windows_of(num, each, **options)
    assert [resumed[number].text for number in range(start, start + 5)] == expected[start:]
    assert [resumed[number].text for number in range(start + 5)] == expected, "and after going back"


@given(st.integers(1, 40), st.integers(1, 12))
def test_every_row_comes_once_an_epoch_at_most_a_window_from_its_place(num, each):
    _, windows = windows_of(num, each)
    for epoch in range(2):
        found = [windows[epoch * num + place].text for place in range(num)]
        assert sorted(found) == list(range(num))
        assert all(abs(row - place) < each for place, row in enumerate(found))


def test_epochs_seeds_and_parts_have_orders_of_their_own():
    orders = [[windows[n].text for n in range(40)] for _, windows in (windows_of(20, 20, seed=s) for s in (0, 1))]
    orders += [[windows[n].text for n in range(40)] for _, windows in [windows_of(20, 20, part=1)]]
    assert len({tuple(half) for order in orders for half in (order[:20], order[20:])}) == 6
    _, kept = windows_of(20, 7, shuffle=False)
    assert [kept[n].text for n in range(40)] == [*range(20)] * 2


def test_two_windows_are_in_memory_whatever_the_number_of_rows_and_nothing_is_counted_or_read_twice():
    rows, windows = windows_of(10_000, 50)
    most = 0
    for number in range(10_050):
        windows[number]
        most = max(most, windows.num_held, len(Item.alive))
    assert most <= 3 * 50, "two windows, and the one that is being made"
    assert windows.num_held == 100
    assert (rows.starts, rows.num_counts) == ([0, 0], 0), "once an epoch"


def test_a_run_that_is_resumed_reads_its_own_window_alone_where_no_row_can_be_left_out():
    rows, windows = windows_of(10_000, 50, keeps_all=True)
    assert windows[12_345].text in range(2_300, 2_350)
    assert rows.starts == [2_300]
    rows, windows = windows_of(10_000, 50)
    windows[2_345]
    assert rows.starts == [0]


@pytest.mark.parametrize("num", [0, 9])
def test_data_of_which_nothing_is_left_are_an_error(num):
    with pytest.raises(DataError, match="nothing is left of the data"):
        windows_of(num, 2, keep=lambda row: False)[1][0]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


ROWS = [{"prompt": f"{n}+1?", "ground_truth": f"{n + 1}"} for n in range(10)]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow"])
def test_every_format_is_read_from_any_row_and_counted(tmp_path, kind):
    path, table = tmp_path / f"a.{kind}", pa.Table.from_pylist(ROWS)
    match kind:
        case "jsonl":
            path.write_text("\n" + lines(ROWS).replace("\n", "\n\n"))
        case "csv":
            path.write_text("prompt,ground_truth\n" + "\n".join(f"{r['prompt']},{r['ground_truth']}\n" for r in ROWS))
        case "parquet":
            pq.write_table(table, path, row_group_size=3)
        case _:
            with pa.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=3)
    rows = RowStream.of_prompts([path, path])
    whole = list(rows.read(0, Problems()))
    assert [one.ground_truth for one in whole] == [row["ground_truth"] for row in ROWS] * 2
    assert rows.count() == 20
    for start in (1, 4, 9, 10, 17, 20):
        assert list(rows.read(start, Problems())) == whole[start:]


def encoded(examples):
    return EncodedPrompts(tuple((len(one.prompt[0].content),) for one in examples), tuple(examples), (), ())


def streamed(parts, **options):
    given = {"num_rows": 8, "seed": 0, "shuffle": True, **options}
    return StreamedPrompts([RowStream.of_prompts([part]) for part in parts], encoded, lambda _: None, **given)


def test_a_bad_row_is_named_when_its_window_is_read_and_not_before(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines([*ROWS, {"prompt": None, "ground_truth": "1"}]))
    prompts = streamed([tmp_path / "a.jsonl"])
    assert {prompts[n][1].name for n in range(8)} == {f"a.jsonl:{n}" for n in range(1, 9)}
    with pytest.raises(DataError, match=r"a\.jsonl, line 11, column prompt: expected a list of messages or text"):
        prompts[8]


def test_a_mixture_of_streams_keeps_its_shares_and_goes_on_from_a_number(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(lines(ROWS))
    options = {"weights": (3.0, 1.0), "keeps_all": True}
    prompts = streamed([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], **options)
    found = [prompts[n][1].name for n in range(100)]
    assert sum(name.startswith("a") for name in found) == 75
    assert sum(one.num_held for one in prompts.windows) <= 8
    assert (prompts.sources, len(prompts)) == (["a", "b"], 20)
    again = streamed([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], **options)
    assert [again[n][1].name for n in range(60, 100)] == found[60:]


TALKS = [{"prompt": f"{n}", "completion": f"{n}" * (1 + n % 3)} for n in range(10, 20)]


def streamed_rows(path, kind="conversations", *, num_rows=8, most=99, on_too_long="error", tell=lambda _: None):
    tokenizer = make_digits_tokenizer()

    def encode(read):
        limits = {"max_row_tokens": most, "on_too_long": on_too_long, "may_be_empty": True}
        return encode_rows(tokenizer, Conversations.of(read), stop_tokens=[tokenizer.eos_token_id], **limits)

    options = {"num_rows": num_rows, "seed": 0, "shuffle": True, "keeps_all": on_too_long == "error"}
    return StreamedRows(RowStream.of_conversations([path], kind), encode, tell, **options)


@pytest.mark.parametrize("kind", ["conversations", "pairs"])
def test_streamed_examples_are_those_of_the_file_once_an_epoch_and_go_on_from_a_number(tmp_path, kind):
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "0"} for row in TALKS]
    (tmp_path / "a.jsonl").write_text(lines(TALKS if kind == "conversations" else pairs))
    rows = streamed_rows(tmp_path / "a.jsonl", kind)
    tokenizer = make_digits_tokenizer()
    whole = encode_rows(
        tokenizer,
        load_conversations([tmp_path / "a.jsonl"], kind),
        stop_tokens=[tokenizer.eos_token_id],
        max_row_tokens=99,
    )
    wanted = {one.name: one for one in map(whole.__getitem__, range(len(whole)))}
    found = [rows[number] for number in range(25)]
    assert {one.name for one in found[:10]} == {one.name for one in found[10:20]} == set(wanted)
    for one in found:
        for own, other in zip(one.rows, wanted[one.name].rows, strict=True):
            assert [part.tolist() for part in own] == [part.tolist() for part in other]
    assert (len(rows), len(found[0].rows)) == (10, 1 if kind == "conversations" else 2)
    assert rows.windows.num_held <= 8
    again = streamed_rows(tmp_path / "a.jsonl", kind)
    assert [again[number].name for number in range(17, 25)] == [one.name for one in found[17:]]


def test_bad_and_long_examples_of_a_stream_are_named_when_they_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines([*TALKS, {"prompt": "1", "completion": None}]))
    rows = streamed_rows(tmp_path / "a.jsonl")
    assert rows[7].name in {f"a.jsonl:{n}" for n in range(5, 9)}
    with pytest.raises(DataError, match=r"a\.jsonl, line 11: column 'completion' is missing"):
        rows[8]
    (tmp_path / "a.jsonl").write_text(lines(TALKS))
    with pytest.raises(DataError, match=r"a\.jsonl:2: the row has 11 tokens, but data.max_row_tokens is 10"):
        streamed_rows(tmp_path / "a.jsonl", most=10)
    told = []
    rows = streamed_rows(tmp_path / "a.jsonl", most=10, on_too_long="drop", tell=told.append)
    assert {rows[number].name for number in range(7)} == {f"a.jsonl:{n}" for n in (1, 3, 4, 6, 7, 9, 10)}
    assert [each.dropped for each in told] == [("a.jsonl:2",), ("a.jsonl:5", "a.jsonl:8"), ()]
