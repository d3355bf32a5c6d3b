import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from rallypoint.data import Example, Message, load_dataset
from rallypoint.data.files import Problems
from rallypoint.data.locate import check_dataset_path
from rallypoint.errors import DataError

GOOD = {
    "data_source": "lab/sums",
    "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 0},
}
MESSAGE = {"role": "user", "content": "1+2"}


def row(**changes):
    """Return the good row with columns changed; ... takes a column away."""
    return {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}


def write_jsonl(path, rows):
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows))
    return path


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def refusal(*paths, **options):
    with pytest.raises(DataError) as raised:
        load_dataset(paths, **options)
    return str(raised.value)


@pytest.mark.parametrize(("write", "ending", "first"), [(write_parquet, "parquet", 0), (write_jsonl, "jsonl", 1)])
def test_both_formats_give_the_same_examples_and_number_rows_as_other_tools_do(tmp_path, write, ending, first):
    dataset = load_dataset([write(tmp_path / f"train.{ending}", [row(), row(ability="logic")])])
    assert len(dataset) == 2
    assert dataset[1] == Example(
        name=f"train.{ending}:{first + 1}",
        data_source="lab/sums",
        prompt=(Message("system", "Add."), Message("user", "1+2")),
        ability="logic",
        ground_truth="3",
        extra_info={"split": "train", "index": 0},
    )
    assert [example.ability for example in dataset] == ["math", "logic"]
    assert dataset[:1] == (dataset[0],)


def test_several_files_follow_each_other_and_files_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "other").mkdir()
    first = write_jsonl(tmp_path / "a.jsonl", [row()])
    second = write_jsonl(tmp_path / "other" / "a.jsonl", [row()])
    third = write_parquet(tmp_path / "b.parquet", [row()])
    names = [example.name for example in load_dataset([first, str(second), third])]
    assert names == [f"{first}:1", f"{second}:1", "b.parquet:0"]


def test_a_prompt_of_text_is_one_message_of_the_user_and_other_columns_have_defaults(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "1+2", "reward_model": {"ground_truth": 3}}])
    assert load_dataset([path])[0] == Example("train.jsonl:1", "train", (Message("user", "1+2"),), "", 3, {})


def test_the_ground_truth_may_be_a_column_of_its_own_and_any_json_value(tmp_path):
    for value in ("3", 3, 2.5, False, [1, "a"], {"a": [None]}, ""):
        path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "1+2", "ground_truth": value}])
        assert load_dataset([path])[0].ground_truth == value


@pytest.mark.parametrize("changes", [{"reward_model": ...}, {"reward_model": {"style": "model", "ground_truth": None}}])
def test_the_ground_truth_may_be_absent_where_it_is_not_required(tmp_path, changes):
    path = write_jsonl(tmp_path / "train.jsonl", [row(**changes)])
    assert load_dataset([path], require_ground_truth=False)[0].ground_truth is None
    assert "column reward_model" in refusal(path) or "column 'reward_model' is missing" in refusal(path)


def test_blank_lines_and_absent_values_that_arrow_fills_in_are_no_problem(tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", [row(), "", row()])
    assert [example.name for example in load_dataset([lines])] == ["a.jsonl:1", "a.jsonl:3"]
    named = row(prompt=[{"role": "user", "content": "1", "name": None}], extra_info=None, ability=None)
    example = load_dataset([write_parquet(tmp_path / "a.parquet", [named])])[0]
    assert (example.prompt, example.extra_info, example.ability) == ((Message("user", "1"),), {}, "")


def test_the_rows_of_different_sources_may_have_different_kinds_of_ground_truth(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [row(), row(data_source="code", reward_model={"ground_truth": ["assert f(1) == 2"]})],
    )
    assert len(load_dataset([path])) == 2


BAD_CELLS = [
    ({"prompt": None}, "column prompt: expected a list of messages or text, found null"),
    ({"prompt": []}, "column prompt: expected a list of messages or text, found an empty list"),
    ({"prompt": 5}, "column prompt: expected a list of messages or text, found number 5"),
    (
        {"prompt": MESSAGE},
        "column prompt: expected a list of messages or text, found an object with 'role', 'content'",
    ),
    ({"prompt": ""}, "column prompt: expected text, found empty text"),
    ({"prompt": " \n"}, "column prompt: expected text, found only blanks"),
    (
        {"prompt": json.dumps([MESSAGE])},
        "column prompt: expected a list of messages, found the same written as text",
    ),
    ({"prompt": ["1+2"]}, "column prompt[0]: expected an object with 'role' and 'content', found text '1+2'"),
    ({"prompt": [MESSAGE, None]}, "column prompt[1]: expected an object with 'role' and 'content', found null"),
    ({"prompt": [{"content": "1"}]}, "column prompt[0]: expected 'role', found an object with 'content'"),
    ({"prompt": [{"role": "user", "contents": "1"}]}, "expected 'content'; did you mean 'contents'?"),
    ({"prompt": [{"role": 1, "content": "1"}]}, "column prompt[0].role: expected text, found number 1"),
    (
        {"prompt": [{"role": "User", "content": "1"}]},
        "column prompt[0].role: expected one of system, user, assistant, tool, found 'User'; did you mean 'user'?",
    ),
    ({"prompt": [{"role": "user", "content": None}]}, "column prompt[0].content: expected text, found null"),
    (
        {"prompt": [{"role": "user", "content": ["1"]}]},
        "column prompt[0].content: expected text, found a list of 1",
    ),
    ({"prompt": [{"role": "user", "content": ""}]}, "column prompt[0].content: expected text, found empty text"),
    (
        {"prompt": [{**MESSAGE, "tool_calls": [1]}]},
        "column prompt[0].tool_calls: expected calls of tools in messages of the assistant alone, found role 'user'",
    ),
    (
        {"prompt": [MESSAGE, {"role": "assistant", "content": "3"}]},
        "column prompt[1].role: expected the prompt to end before the answer, found 'assistant'",
    ),
    ({"data_source": None}, "column data_source: expected text, found null"),
    ({"data_source": 3}, "column data_source: expected text, found number 3"),
    ({"ability": ["math"]}, "column ability: expected text, found a list of 1"),
    ({"extra_info": "{}"}, "column extra_info: expected an object, found text '{}'"),
    ({"reward_model": None}, "column reward_model: expected an object with 'ground_truth', found null"),
    ({"reward_model": "3"}, "column reward_model: expected an object with 'ground_truth', found text '3'"),
    (
        {"reward_model": {"style": "rule", "answer": "3"}},
        "column reward_model: expected an object with 'ground_truth', found an object with 'style', 'answer'",
    ),
    (
        {"reward_model": {"ground_truth": None}},
        "column reward_model.ground_truth: expected the right answer, found null",
    ),
    (
        {"reward_model": {"ground_truth": 3}},
        "column reward_model.ground_truth: expected text as in line 1 of 'lab/sums', found number 3",
    ),
    ({"prompt": ..., "promt": "1"}, ": column 'prompt' is missing; did you mean 'promt'?"),
    (
        {"reward_model": ...},
        ": column 'reward_model' is missing; found 'data_source', 'prompt', 'ability', 'extra_info'",
    ),
    ({"data_source": ..., "datasource": "a"}, ": unknown column 'datasource'; did you mean 'data_source'?"),
]


@pytest.mark.parametrize(("changes", "problem"), BAD_CELLS)
def test_a_bad_row_is_named_by_file_line_and_column(tmp_path, changes, problem):
    message = refusal(write_jsonl(tmp_path / "train.jsonl", [row(), row(**changes), row()]))
    assert message.startswith("1 problem in the data:\n  - train.jsonl, line 2")
    assert problem in message


BAD_LINES = [
    ("{", "train.jsonl, line 2: not valid JSON: Expecting property name"),
    ("[1, 2]", "train.jsonl, line 2: expected a JSON object, found a list of 2"),
    ('{"prompt": "1", "ground_truth": NaN}', "train.jsonl, line 2: not valid JSON: NaN is not a JSON number"),
    ("{}", "train.jsonl, line 2: column 'prompt' is missing; found no column"),
    ("[" * 200_000, "train.jsonl, line 2: not valid JSON"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path, line, problem):
    assert problem in refusal(write_jsonl(tmp_path / "train.jsonl", [row(), line]))


def test_half_a_surrogate_pair_is_named_and_a_whole_one_is_a_character(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [row(prompt="\U0001f600")])
    assert len(load_dataset([path])) == 1
    path.write_text('{"prompt": "1\\ud83d", "ground_truth": "1"}\n')
    assert "train.jsonl, line 1: not valid JSON: '\\ud83d' is half a character" in refusal(path)


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [row()])
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff\xfe"}\n')
    assert "train.jsonl, line 2: not valid UTF-8" in refusal(path)


BAD_TABLES = [
    (
        {"prompt": [[], []]},
        "train.parquet, row 0, column prompt: expected a list of messages or text, found an empty",
    ),
    (
        {"prompt": [1, 2]},
        "train.parquet, row 0, column prompt: expected a list of messages or text, found number 1",
    ),
    (
        {"prompt": ["a", None]},
        "train.parquet, row 1, column prompt: expected a list of messages or text, found null",
    ),
    ({"prompt": ..., "prompts": ["a", "b"]}, "train.parquet: column 'prompt' is missing; did you mean 'prompts'?"),
    (
        {"reward_model": ..., "reward": [1, 2]},
        "train.parquet: column 'reward_model' is missing; did you mean 'reward'",
    ),
    (
        {"reward_model": [{"ground_truth": b"3"}] * 2},
        "row 0, column reward_model.ground_truth: expected text, a number",
    ),
    (
        {"reward_model": [1.5, 2.0]},
        "row 0, column reward_model: expected an object with 'ground_truth', found number",
    ),
    ({"extra_info": ["a", "b"]}, "train.parquet, row 0, column extra_info: expected an object, found text 'a'"),
    (
        {"extra_infos": [{"a": 1}, {"a": 2}]},
        "train.parquet: unknown column 'extra_infos'; did you mean 'extra_info'?",
    ),
]


@pytest.mark.parametrize(("changes", "problem"), BAD_TABLES)
def test_a_bad_parquet_file_is_named_by_row_and_column_or_by_its_columns(tmp_path, changes, problem):
    columns = {"prompt": ["a", "b"], "reward_model": [{"ground_truth": "1"}, {"ground_truth": "2"}], **changes}
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({name: cells for name, cells in columns.items() if cells is not ...}), path)
    assert problem in refusal(path)


@pytest.mark.parametrize("num_bytes", [1, 4, 100, 1000, -1, -8])
def test_a_parquet_file_that_is_cut_off_is_named(tmp_path, num_bytes):
    path = write_parquet(tmp_path / "train.parquet", [row()] * 100)
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert "train.parquet cannot be read as parquet, it may be damaged or incomplete" in refusal(path)


def test_a_parquet_file_with_damaged_pages_is_named(tmp_path):
    path = write_parquet(tmp_path / "train.parquet", [row(prompt=str(index)) for index in range(1000)])
    content = bytearray(path.read_bytes())
    content[4:1500] = bytes(1496)
    path.write_bytes(bytes(content))
    assert "train.parquet cannot be read as parquet" in refusal(path)


def test_files_that_are_no_data_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "train.tsv").write_text("prompt\n1")
    (tmp_path / "train.json").write_text("[]")
    (tmp_path / "train").write_text("x")
    (tmp_path / "train.jsonl.gz").write_text("x")
    (tmp_path / "zero.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    write_jsonl(tmp_path / "blank.jsonl", ["", ""])
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "norows.parquet")
    problems = {
        "none": "none is a folder that holds no .parquet, .arrow, .jsonl or .csv file",
        "train.tsv": "expected a file that ends in .parquet, .arrow, .jsonl or .csv, found .tsv",
        "train.json": "ends in .parquet, .arrow, .jsonl or .csv (write one JSON object per line), found .json",
        "train.jsonl.gz": "ends in .parquet, .arrow, .jsonl or .csv (decompress it first), found .gz",
        "train": "expected a file that ends in .parquet, .arrow, .jsonl or .csv, found no ending",
        "link.jsonl": "link.jsonl is a link to gone.jsonl, which does not exist",
        "zero.jsonl": "zero.jsonl is empty (0 bytes)",
        "blank.jsonl": "blank.jsonl has no rows",
        "norows.parquet": "norows.parquet has no rows",
        "tran.tsv": "tran.tsv does not exist (no such file); did you mean 'train.tsv'?",
        "nowhere/a.jsonl": f"does not exist (no such folder {tmp_path / 'nowhere'})",
    }
    for name, problem in problems.items():
        assert problem in refusal(tmp_path / name)
    together = refusal(*(tmp_path / name for name in problems))
    assert together.startswith("11 problems in the data:")
    assert all(problem in together for problem in problems.values())


def test_a_path_can_be_checked_without_reading_the_file(tmp_path):
    assert check_dataset_path(write_jsonl(tmp_path / "a.jsonl", [row()])) is None
    assert "does not exist" in str(check_dataset_path(tmp_path / "b.jsonl"))


def test_no_files_at_all_and_a_single_path_in_place_of_a_list_are_refused():
    assert "expected at least one" in refusal()
    with pytest.raises(TypeError, match=re.escape("write ['train.jsonl']")):
        load_dataset("train.jsonl")


def test_the_problems_of_all_files_are_reported_together_and_each_kind_once(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [row(prompt=[])] * 15)
    second = write_parquet(tmp_path / "b.parquet", [row(prompt="")] * 15)
    message = refusal(first, second)
    assert message.startswith("30 problems in the data:\n  - a.jsonl, line 1")
    assert message.count("\n  - ") == 2
    assert "and 14 more like it: a.jsonl, line 2; a.jsonl, line 3; a.jsonl, line 4 ..." in message
    assert "and 14 more like it: b.parquet, row 1; b.parquet, row 2; b.parquet, row 3 ..." in message


def test_of_many_kinds_of_problems_the_first_twenty_are_in_words():
    problems = Problems()
    for letter in "abcdefghijklmnopqrstuvwxy" * 2:
        problems.add(f"a.jsonl, line 1: column '{letter}' is missing")
    with pytest.raises(DataError, match=r"^50 problems in the data; the first 20 of 25 kinds:\n") as raised:
        problems.raise_any()
    assert str(raised.value).count("\n  - ") == 20


def test_every_bad_column_of_a_row_is_reported(tmp_path):
    message = refusal(write_jsonl(tmp_path / "a.jsonl", [row(prompt=None, data_source=1, ability=2, extra_info=3)]))
    assert message.startswith("4 problems")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", " ", "user", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "a"]), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "ground_truth", "promt"]), JSON_VALUES))
def test_any_json_object_is_either_an_example_or_a_data_error(tmp_path_factory, values):
    path = write_jsonl(tmp_path_factory.mktemp("any") / "a.jsonl", [values])
    try:
        (example,) = load_dataset([path])
    except DataError as error:
        outcome = str(error)
    else:
        outcome = example.name
        assert example.ground_truth is not None
        assert all(message.content.strip() for message in example.prompt)
    assert outcome == "a.jsonl:1" or "a.jsonl, line 1" in outcome


def test_columns_of_other_data_sets_are_named_once_with_what_they_are_called_here(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"question": f"{n} + 1?", "answer": f"So {n + 1}. #### {n + 1}"} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = refusal(path)
    assert "2 problems" in said
    first = "train.jsonl, line 1: column"
    assert f"{first} 'prompt' is missing; 'question' may be it: set data.columns.prompt=question" in said
    assert f"{first} 'reward_model' is missing; 'answer' may be it: set data.columns.ground_truth=answer" in said
    assert said.count("(and 2 lines more)") == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [1.0, float("nan")]], ids=["nan", "inf", "inside"])
def test_a_ground_truth_that_equals_nothing_is_named(tmp_path, value):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["1", "2"], "ground_truth": [value, value]}), path)
    assert "train.parquet, row 0, column ground_truth: expected the right answer, found " in refusal(path)
    infinite = tmp_path / "train.jsonl"
    infinite.write_text('{"prompt": "1", "ground_truth": 1e999}\n')
    assert "column ground_truth: expected the right answer, found number inf" in refusal(infinite)


@pytest.mark.parametrize(
    "row",
    ['"prompt": "1", "prompt": "2", "ground_truth": "3"', '"prompt": "1", "reward_model": {"prompt": 1, "prompt": 1}'],
    ids=["column", "inside"],
)
def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path, row):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"prompt": "1", "ground_truth": "1"}}\n{{{row}}}\n')
    assert "train.jsonl, line 2: not valid JSON: the key 'prompt' is there 2 times" in refusal(path)


@pytest.mark.parametrize(("max_rows", "num_read", "is_part"), [(None, 4, False), (5, 4, False), (3, 3, True)])
def test_only_the_first_rows_are_read_where_no_more_are_wanted(tmp_path, max_rows, num_read, is_part):
    files = [write_jsonl(tmp_path / name, [row(), row()]) for name in ("a.jsonl", "b.jsonl")]
    found = load_dataset(files, max_rows=max_rows)
    assert (len(found), found.is_part) == (num_read, is_part)


def test_a_file_after_the_rows_that_are_wanted_is_not_taken_for_an_empty_one(tmp_path):
    files = [write_jsonl(tmp_path / name, [row(), row()]) for name in ("a.jsonl", "b.jsonl")]
    assert load_dataset(files, max_rows=2).is_part
    assert not load_dataset(files[:1], max_rows=2).is_part
    empty = write_jsonl(tmp_path / "empty.jsonl", [])
    assert "empty.jsonl" in refusal(*files, empty, max_rows=2)
