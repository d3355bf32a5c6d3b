"""Conversations and pairs, as people have them: what is read, and what is refused."""

import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rallypoint.data import DataSet, Message, load_conversations
from rallypoint.data.conversations import Conversation
from rallypoint.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(path, kind: Any = "conversations"):
    with pytest.raises(DataError) as raised:
        load_conversations([path], kind)
    return str(raised.value)


def test_messages_and_a_prompt_with_a_completion_become_conversations(tmp_path):
    rows = {"messages": [ASKED, ANSWERED]}, {"prompt": "2+2", "completion": "4"}, {"prompt": [ASKED], "completion": "4"}
    found = load_conversations([write(tmp_path / "a.jsonl", *rows)], "conversations")
    messages = Message("user", "2+2"), Message("assistant", "4")
    assert found.names == ("a.jsonl:1", "a.jsonl:2", "a.jsonl:3")
    assert found.examples == ((Conversation(messages, 0),), (Conversation(messages, 1),), (Conversation(messages, 1),))


def test_parquet_has_the_same_rows_and_a_null_is_no_column(tmp_path):
    pq.write_table(pa.Table.from_pylist([{"messages": [ASKED, ANSWERED], "id": 7}] * 2), tmp_path / "a.parquet")
    found = load_conversations([tmp_path / "a.parquet"], "conversations", max_rows=1)
    assert found.names == ("a.parquet:0",)
    assert found.is_part
    mixed = {"messages": None, "prompt": "2+2", "completion": "4"}, {"messages": [ASKED, ANSWERED]}
    assert len(load_conversations([write(tmp_path / "b.jsonl", *mixed)], "conversations").names) == 2


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "chosen": "4", "rejected": "5"},
        {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG]},
        {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
        {"prompt": "2+2", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG]},
    ],
)
def test_every_way_to_write_a_pair_gives_the_same_pair(tmp_path, row):
    found = load_conversations([write(tmp_path / "a.jsonl", row)], "pairs")
    asked = Message("user", "2+2")
    ((chosen, rejected),) = found.examples
    assert chosen == Conversation((asked, Message("assistant", "4")), 1)
    assert rejected == Conversation((asked, Message("assistant", "5")), 1)


def test_what_two_whole_conversations_begin_with_is_context(tmp_path):
    again = {"role": "user", "content": "and 3+3"}
    row = {"chosen": [ASKED, ANSWERED, again, ANSWERED], "rejected": [ASKED, ANSWERED, again, WRONG]}
    ((chosen, rejected),) = load_conversations([write(tmp_path / "a.jsonl", row)], "pairs").examples
    assert chosen.first_trained == rejected.first_trained == 3


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("conversations", {"messages": [ASKED]}, "line 1, column messages: expected a turn of the assistant"),
        ("conversations", {"message": [ASKED]}, "column 'messages' is missing; did you mean 'message'?"),
        ("conversations", {"conversations": []}, "'conversations' may be it: set data.columns.messages=conversations"),
        (
            "conversations",
            {"prompt": "2+2", "response": "4"},
            "'response' may be it: set data.columns.completion=r",
        ),
        ("conversations", {"messages": "2+2"}, "column messages: expected a list of messages, found text"),
        ("conversations", {"messages": json.dumps([ASKED])}, "found the same written as"),
        ("conversations", {"prompt": "2+2", "completion": " "}, "column completion: expected text, found only blanks"),
        ("conversations", {"messages": [ASKED, {"role": "bot", "content": "4"}]}, "messages[1].role: expected one of"),
        ("conversations", {"messages": [ASKED, {"role": "assistant"}]}, "messages[1]: expected 'content', found"),
        ("conversations", {"prompt": "2+2", "completion": [ASKED]}, "ends with a turn of the assistant, found 'user'"),
        (
            "conversations",
            {"instruction": "Add.", "input": "2+2", "output": "4"},
            "'instruction' and 'output' may be them: set data.columns.prompt=instruction "
            "data.columns.completion=output; column 'input' is not read then: write what it says into 'instruction'",
        ),
        (
            "pairs",
            {"chosen": [ASKED, ANSWERED], "rejected": [{"role": "user", "content": "3+3"}, WRONG]},
            "expected the same messages as in 'chosen' up to an answer of the assistant, found another message 0",
        ),
        ("pairs", {"prompt": "2+2", "chosen": "4"}, "column 'rejected' is missing"),
        ("pairs", {"prompt": "2+2", "chosen": "4", "rejected": "4"}, "expected another answer than that in 'chosen'"),
        ("pairs", {"chosen": "4", "rejected": "5"}, "column chosen: expected messages that begin with the user's"),
        ("pairs", {"prompt": "2+2", "chosen": "4", "rejected": [ASKED, WRONG]}, "in both of 'chosen' and 'rejected'"),
        (
            "pairs",
            {"chosen": [ASKED, ANSWERED, ASKED, WRONG], "rejected": [ASKED, ANSWERED]},
            "found nothing after what both have in common",
        ),
        ("pairs", {"prompt": "2+2", "chosen": json.dumps([ANSWERED]), "rejected": "5"}, "found the same written as"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_with_its_column(tmp_path, kind, row, expected):
    assert expected in refusal(write(tmp_path / "a.jsonl", row), kind)


def test_all_bad_rows_of_all_files_are_reported_together(tmp_path):
    first = write(tmp_path / "a.jsonl", {"messages": []}, {"messages": [ASKED, ANSWERED]}, {"messages": 3})
    with pytest.raises(DataError, match="4 problems") as raised:
        load_conversations(
            [first, write(tmp_path / "b.jsonl", {"text": "x"}), tmp_path / "none.jsonl"], "conversations"
        )
    assert len(re.findall(r"^  - ", str(raised.value), re.M)) == 4


def test_rows_of_one_form_that_is_none_are_one_problem(tmp_path):
    path = write(tmp_path / "a.jsonl", {"text": "x"}, {"messages": [ASKED, ANSWERED]}, {"text": "y"}, {"text": "z"})
    with pytest.raises(DataError, match=r"^2 problems in the data:\n  - a\.jsonl, line 1: column 'messages'") as raised:
        load_conversations([path], "conversations")
    assert str(raised.value).endswith("a.jsonl: 2 more rows have 'text', too")


def test_rows_that_cannot_be_used_are_left_out_with_their_reasons_if_that_is_wanted(tmp_path):
    rows = {"prompt": "2+2", "completion": ""}, {"prompt": "2+2", "completion": "4"}, {"messages": [ASKED]}
    path = write(tmp_path / "a.jsonl", *rows)
    assert refusal(path).startswith("2 problems")
    found = load_conversations([DataSet(str(path), drops_bad_rows=True)], "conversations")
    assert (found.names, found.may_drop) == (("a.jsonl:2",), {"a.jsonl:2"})
    empty, unanswered = found.bad
    assert empty == "a.jsonl:1 (column completion: expected text, found empty text)"
    assert unanswered.startswith("a.jsonl:3 (column messages: expected a turn of the assistant")
    equal = write(tmp_path / "b.jsonl", {"prompt": "2+2", "chosen": "4", "rejected": "4"})
    with pytest.raises(
        DataError, match=r"no example is left: none of 1 can be used; the first is b\.jsonl:1 \(column rej"
    ):
        load_conversations([DataSet(str(equal), drops_bad_rows=True)], "pairs")
    other = write(tmp_path / "c.jsonl", {"text": "x"})
    with pytest.raises(DataError, match="column 'messages' is missing"):
        load_conversations([DataSet(str(other), drops_bad_rows=True)], "conversations")


def test_an_empty_message_of_the_system_is_one(tmp_path):
    system = {"role": "system", "content": ""}
    path = write(tmp_path / "a.jsonl", {"messages": [system, ASKED, ANSWERED]})
    ((talk,),) = load_conversations([path], "conversations").examples
    assert talk.messages[0] == Message("system", "")


def test_columns_may_have_other_names(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": "1+2?", "answer": "3", "worse": "4", "prompt": "not this"}) + "\n")
    named = DataSet(str(path), columns={"prompt": "question", "completion": "answer"})
    (example,) = load_conversations([named], "conversations").examples
    assert [message.content for message in example[0].messages] == ["1+2?", "3"]
    pairs = {"prompt": "question", "chosen": "answer", "rejected": "worse"}
    chosen, rejected = load_conversations([DataSet(str(path), columns=pairs)], "pairs").examples[0]
    assert (chosen.messages[-1].content, rejected.messages[-1].content) == ("3", "4")
    with pytest.raises(DataError, match=r"column 'wors', which data\.columns\.rejected names, is missing; did"):
        load_conversations([DataSet(str(path), columns={**pairs, "rejected": "wors"})], "pairs")
    path.write_text(json.dumps({"question": "1+2?", "answer": ""}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1, column answer: expected text, found empty text"):
        load_conversations([named], "conversations")
