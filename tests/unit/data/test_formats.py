"""Data as people have it: formats, folders, other file systems, other names of columns; and twenty kinds of damage."""

import dataclasses
import gzip
import json
import lzma

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rallypoint.data import DataSet, Message, encode_prompts, load_dataset, make_digits_tokenizer
from rallypoint.data.locate import choose, files_of, is_hub_name
from rallypoint.errors import DataError

ROWS = [{"prompt": "1+2?", "ground_truth": "3"}, {"prompt": "2+2?", "ground_truth": "4"}]
GSM = {"prompt": "question", "ground_truth": "answer"}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def texts(dataset):
    return [(one.prompt[-1].content, one.ground_truth) for one in dataset]


def arrow(path, rows, kind=pa.ipc.new_stream):
    write_arrow(path, pa.Table.from_pylist(rows), kind)


def write_arrow(path, table, kind=pa.ipc.new_stream):
    with kind(str(path), table.schema) as writer:
        writer.write_table(table)


def test_every_format_gives_the_same_examples(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines(ROWS))
    (tmp_path / "a.csv").write_text("\ufeffprompt,ground_truth,more\n1+2?,3,\n\n2+2?,4,x\n")
    arrow(tmp_path / "a.arrow", ROWS)
    arrow(tmp_path / "b.arrow", ROWS, pa.ipc.new_file)
    for name in ("a.parquet", "a.jsonl", "a.csv", "a.arrow", "b.arrow"):
        assert texts(load_dataset([tmp_path / name])) == [("1+2?", "3"), ("2+2?", "4")], name
    assert [one.name for one in load_dataset([tmp_path / "a.csv"])] == ["a.csv:2", "a.csv:4"]


def test_columns_have_the_names_that_are_said(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(lines([{"question": "1+2?", "answer": "#### 3", "prompt": "not this"}]))
    example = load_dataset([DataSet(str(path), columns=GSM)])[0]
    assert (example.prompt, example.ground_truth) == ((Message("user", "1+2?"),), "#### 3")
    assert example.data_source == "gsm8k"
    pq.write_table(pa.table({"question": ["1+2?"], "answer": ["3"], "reward_model": ["x"]}), tmp_path / "a.parquet")
    assert texts(load_dataset([DataSet(str(tmp_path / "a.parquet"), columns=GSM, data_source="lab")])) == [
        ("1+2?", "3")
    ]


def test_a_conversation_may_hold_prompt_and_answer(tmp_path):
    turns = [("system", "Add."), ("user", "1+2?"), ("assistant", "3")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"messages": messages}, {"messages": messages[:2]}]))
    both = {"prompt": "messages", "ground_truth": "messages"}
    with pytest.raises(DataError, match=r"a\.jsonl, line 2, column messages: expected the right answer, found null"):
        load_dataset([DataSet(str(path), columns=both)])
    path.write_text(lines([{"messages": messages}]))
    example = load_dataset([DataSet(str(path), columns=both)])[0]
    assert example.prompt == (Message("system", "Add."), Message("user", "1+2?"))
    assert example.ground_truth == "3"


def test_a_folder_is_read_by_split_and_subset_as_the_hub_lays_it_out(tmp_path):
    for name in ("main/train-00001-of-00002", "main/train-00000-of-00002", "main/test-00000-of-00001", "other/train-0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        row = {"prompt": name, "ground_truth": "1"}
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match="has several subsets: main, other; choose one"):
        load_dataset([tmp_path])
    main = DataSet(str(tmp_path), subset="main")
    assert [one.prompt[0].content for one in load_dataset([main])] == [
        "main/train-00000-of-00002",
        "main/train-00001-of-00002",
    ]
    held_out = DataSet(str(tmp_path), subset="main", splits=("validation", "test"))
    assert [one.data_source for one in load_dataset([held_out])] == [tmp_path.name]
    with pytest.raises(DataError, match="has no subset 'mian'; it has main/test"):
        load_dataset([DataSet(str(tmp_path), subset="mian")])
    with pytest.raises(DataError, match="has no split validation; it has main/"):
        files_of(DataSet(str(tmp_path), subset="main", splits=("validation",)))


def test_a_folder_with_files_of_several_formats_is_refused_unless_they_are_the_same_files(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines(ROWS[:1]))
    (tmp_path / "train.parquet").write_bytes(b"unread")
    assert files_of(DataSet(str(tmp_path))) == [str(tmp_path / "train.parquet")]
    (tmp_path / "more_train.jsonl").write_text(lines(ROWS))
    said = r"several formats, of which only \.parquet would be read: train\.parquet, more_train\.jsonl; name the files"
    with pytest.raises(DataError, match=said):
        files_of(DataSet(str(tmp_path)))
    assert choose(["a/train.parquet", "b/train.csv"], DataSet("lab/sums")) == ["a/train.parquet"]


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        arrow(tmp_path / split / "data-00000-of-00001.arrow", ROWS[:1] if split == "train" else ROWS)
        arrow(tmp_path / split / "cache-1234.arrow", ROWS)
        (tmp_path / split / "state.json").write_text("{}")
    assert len(load_dataset([tmp_path])) == 1
    assert len(load_dataset([DataSet(str(tmp_path), splits=("test",))])) == 2
    assert choose(["data-00000-of-00001.arrow", "state.json"], DataSet("x")) == ["data-00000-of-00001.arrow"]


def test_files_of_another_file_system_are_read_through_fsspec():
    system = fsspec.filesystem("memory")
    with system.open("/lab/train.jsonl", "w") as file:
        file.write(lines(ROWS))
    assert texts(load_dataset(["memory://lab/train.jsonl"])) == texts(load_dataset(["memory://lab"]))
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read"):
        load_dataset(["memory://lab/none.jsonl"])


@pytest.mark.parametrize(
    ("path", "is_hub"),
    [("openai/gsm8k", True), ("gsm8k", False), ("./a/b", False), ("a/b.csv", False), ("s3://a/b", False)],
)
def test_a_name_on_the_hub_is_no_path(path, is_hub):
    assert is_hub_name(path) is is_hub


def row(**changes):
    return json.dumps({**ROWS[0], **changes}) + "\n"


GOOD, TABLE = row(), pa.Table.from_pylist(ROWS)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
DOUBLE = pa.Table.from_arrays([pa.array(["1"]), pa.array(["2"]), pa.array(["3"])], ["prompt", "prompt", "ground_truth"])
KEYS = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["n", "n"])
NESTED = pa.table({"prompt": ["1"], "ground_truth": ["2"], "extra_info": KEYS})
BROKEN = {
    "null for a prompt": ("a.jsonl", GOOD + row(prompt=None), "line 2, column prompt: expected a list of messages"),
    "null for an answer": ("a.jsonl", GOOD + row(ground_truth=None), "line 2, column ground_truth: expected the right"),
    "number for a prompt": ("a.jsonl", row(prompt=3), "line 1, column prompt: .* found number 3"),
    "mixed types": ("a.jsonl", GOOD + row(ground_truth=3), "line 2, column ground_truth: expected text as in line 1"),
    "an answer that is not a number": ("a.jsonl", row(ground_truth=float("nan")), "line 1: not valid JSON: NaN"),
    "cut off in a row": ("a.jsonl", GOOD + GOOD[:20], "line 2: not valid JSON"),
    "empty": ("a.jsonl", "", r"is empty \(0 bytes\)"),
    "blank lines alone": ("a.jsonl", "\n\n", "has no rows"),
    "names alone": ("a.csv", "prompt,ground_truth\n", "has no rows"),
    "a table without rows": ("a.parquet", TABLE.slice(0, 0), "has no rows"),
    "no UTF-8": ("a.jsonl", GOOD.encode() + b'{"prompt": "\xff"}\n', "line 2: not valid UTF-8"),
    "no UTF-8 in a table": ("a.csv", b"prompt,ground_truth\n\xff,1\n", "not valid UTF-8"),
    "UTF-16": ("a.jsonl", GOOD.encode("utf-16"), "is UTF-16: write it in UTF-8"),
    "gzip under another name": ("a.jsonl", gzip.compress(GOOD.encode()), "is compressed with gzip"),
    "xz under another name": ("a.jsonl", lzma.compress(GOOD.encode()), r"is compressed with xz: .* \(unxz\)"),
    "xz called parquet": ("a.parquet", lzma.compress(GOOD.encode()), "is compressed with xz"),
    "a pointer of Git LFS": ("a.jsonl", POINTER, "is a pointer of Git LFS in place of the data: .*`git lfs pull`"),
    "a pointer of Git LFS called parquet": ("a.parquet", POINTER, "is a pointer of Git LFS"),
    "gzip called parquet": ("a.parquet", gzip.compress(GOOD.encode()), "is compressed with gzip"),
    "lines called parquet": ("a.parquet", GOOD, "cannot be read as parquet"),
    "lines called arrow": ("a.arrow", GOOD, "cannot be read as arrow"),
    "parquet called lines": ("a.jsonl", TABLE, "is a parquet file: let its name end in"),
    "a list over several lines": ("a.jsonl", "[\n" + GOOD + "]\n", "line 1: not valid JSON.* one whole object a line"),
    "one list of all rows": ("a.jsonl", "[" + GOOD.strip() + "]\n", "line 1: expected a JSON object, found a list of"),
    "a field too few": ("a.csv", "prompt,ground_truth\n1,2\n1\n", "line 3: expected 2 fields, found 1"),
    "a quote without an end": ("a.csv", 'prompt,ground_truth\n"1,2\n', "line 2: not valid CSV"),
    "a name twice": ("a.csv", "prompt,prompt\n1,2\n", "the column 'prompt' is there 2 times"),
    "a column twice": ("a.parquet", DOUBLE, r"a\.parquet: the column 'prompt' is there 2 times"),
    "a column of arrow twice": ("a.arrow", DOUBLE, r"a\.arrow: the column 'prompt' is there 2 times"),
    "a key of an object twice": ("a.parquet", NESTED, "cannot be read as parquet, .*duplicate field names"),
    "a key twice": ("a.jsonl", '{"prompt": "1", "prompt": "2"}\n', "line 1: .* the key 'prompt' is there 2 times"),
    "no messages": ("a.jsonl", row(prompt=[]), "column prompt: expected a list of messages or text"),
    "a role of its own": (
        "a.jsonl",
        row(prompt=[{"role": "human", "content": "1"}]),
        r"prompt\[0\]\.role: expected one",
    ),
    "a column is missing": (
        "a.csv",
        "question,ground_truth\n1,2\n",
        "'question' may be it: set data.columns.prompt=qu",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_an_error_that_names_file_row_and_column(tmp_path, kind):
    name, content, problem = BROKEN[kind]
    path = tmp_path / name
    if isinstance(content, pa.Table) and name.endswith(".arrow"):
        write_arrow(path, content)
    elif isinstance(content, pa.Table):
        pq.write_table(content, path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=problem) as raised:
        load_dataset([path])
    assert name in str(raised.value)


def test_a_column_that_was_named_and_is_not_there_is_named_with_its_key(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([{"question": "1", "answers": "2"}]))
    problem = r"column 'answer', which data\.columns\.ground_truth names, is missing; did you mean 'answers'"
    with pytest.raises(DataError, match=problem):
        load_dataset([DataSet(str(path), columns=GSM)])


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_prompt_of_ten_megabytes_is_too_long_without_being_encoded(tmp_path, kind):
    huge = "1" * 10_000_000
    path = tmp_path / f"a.{kind}"
    text = lines([*ROWS, {"prompt": huge, "ground_truth": "1"}])
    path.write_text(text if kind == "jsonl" else f"prompt,ground_truth\n1+2,3\n2+2,4\n{huge},1\n")
    examples = load_dataset([path])
    name = f"a.{kind}:{3 if kind == 'jsonl' else 4}"
    numbers = [
        dataclasses.replace(one, prompt=(Message("user", one.prompt[0].content.strip("+2?")),)) for one in examples
    ]
    with pytest.raises(DataError, match=rf"{name}: the prompt has 10,000,000 characters, but max_prompt_tokens is 8"):
        encode_prompts(make_digits_tokenizer(), numbers, max_prompt_tokens=8)
    found = encode_prompts(make_digits_tokenizer(), numbers, max_prompt_tokens=8, on_too_long="drop")
    assert (found.dropped, len(found)) == ((name,), 2)
