import itertools
import random
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from rallypoint.data import load_dataset, make_digits
from rallypoint.data.digits import make_task, score_digits

TASKS = st.tuples(st.sampled_from(["sort", "sequence", "sum"]), st.integers(2, 12))
ANSWERS = st.text("0123456789", min_size=1, max_size=13)


def make(folder, **changes):
    arguments = {
        "task": "sort",
        "num_digits": 6,
        "num_train_prompts": 200,
        "num_validation_prompts": 50,
        "seed": 0,
    }
    return make_digits(folder, **{**arguments, **changes})


def prompts(path):
    return [row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()]


def test_the_files_are_in_the_common_schema(tmp_path):
    train, validation = make(tmp_path / "new" / "folder")
    assert (train.name, validation.name) == ("train.parquet", "validation.parquet")
    row = pq.read_table(validation).to_pylist()[3]
    content = row["prompt"][0]["content"]
    assert row == {
        "data_source": "rallypoint/digits-sort",
        "prompt": [{"role": "user", "content": content}],
        "ability": "digits",
        "reward_model": {"style": "rule", "ground_truth": "".join(sorted(content))},
        "extra_info": {"split": "validation", "index": 3, "num_digits": 6},
    }
    assert sorted(entry.name for entry in train.parent.iterdir()) == ["train.parquet", "validation.parquet"]


@pytest.mark.parametrize("task", ["sort", "sequence", "sum"])
def test_every_task_can_be_loaded_as_a_data_set(tmp_path, task):
    train, validation = make(tmp_path, task=task, num_digits=3)
    assert len(load_dataset([train])) == 200
    assert len(load_dataset([validation])) == 50


@pytest.mark.parametrize(
    ("task", "num_digits", "num_train"), [("sort", 6, 500), ("sum", 12, 500), ("sequence", 4, 550)]
)
def test_all_prompts_are_distinct_where_enough_exist(tmp_path, task, num_digits, num_train):
    train, validation = make(tmp_path, task=task, num_digits=num_digits, num_train_prompts=num_train)
    together = prompts(train) + prompts(validation)
    assert len(set(together)) == len(together) == num_train + 50


def test_training_prompts_repeat_equally_often_where_too_few_exist(tmp_path):
    train, validation = make(tmp_path, num_digits=2, num_train_prompts=130, num_validation_prompts=40)
    counts = {prompt: prompts(train).count(prompt) for prompt in set(prompts(train))}
    assert len(counts) == 60
    assert set(counts.values()) == {2, 3}
    assert len(set(prompts(validation))) == 40
    assert not set(prompts(validation)) & set(counts)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tmp_path):
    first, again, other = (prompts(make(tmp_path / str(index), seed=seed)[0]) for index, seed in enumerate([1, 1, 2]))
    assert first == again
    assert first != other


def test_the_rows_are_pinned_so_that_every_machine_makes_the_same(tmp_path):
    made = {}
    for task in ("sort", "sequence", "sum"):
        _, validation = make(tmp_path, task=task, num_digits=3)
        made[task] = prompts(validation)[:4]
    assert made == {
        "sort": ["967", "430", "908", "066"],
        "sequence": ["468", "03692581", "2840628", "048"],
        "sum": ["044+477", "233+765", "553+482", "703+592"],
    }


def test_more_validation_prompts_than_exist_is_an_error_that_says_how_many_exist(tmp_path):
    with pytest.raises(ValueError, match="found 100, but sort with num_digits=2 has only 100 distinct prompts"):
        make(tmp_path, num_digits=2, num_validation_prompts=100)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "multiply"}, "task: expected one of sort, sequence, sum, found 'multiply'"),
        ({"num_digits": 1}, "num_digits: expected 2 to 12, found 1"),
        ({"num_digits": 13}, "num_digits: expected 2 to 12, found 13"),
        ({"num_train_prompts": 0}, "num_train_prompts: expected at least 1, found 0"),
        ({"num_validation_prompts": 0}, "num_validation_prompts: expected at least 1, found 0"),
    ],
)
def test_arguments_out_of_range_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **changes)


@given(TASKS, st.randoms())
def test_every_numbered_prompt_is_another_one_and_its_answer_has_the_stated_length(task, rng):
    name, num_digits = task
    made = make_task(name, num_digits=num_digits)
    numbers = sorted({rng.randrange(made.num_prompts) for _ in range(50)})
    assert len({made.prompt(number) for number in numbers}) == len(numbers)
    for number in numbers:
        assert len(made.answer(made.prompt(number))) == num_digits + (name == "sum")


def test_all_numbered_sequences_are_distinct():
    made = make_task("sequence", num_digits=5)
    assert len({made.prompt(number) for number in range(made.num_prompts)}) == made.num_prompts == 600


@given(st.integers(0, 599))
def test_a_sequence_goes_on_with_the_same_difference(number):
    made = make_task("sequence", num_digits=5)
    whole = [int(digit) for digit in made.prompt(number) + made.answer(made.prompt(number))]
    assert len({(after - before) % 10 for before, after in itertools.pairwise(whole)}) == 1


@given(ANSWERS)
def test_the_right_answer_and_nothing_else_scores_one(answer):
    assert sum(score_digits("", answer, answer)) == pytest.approx(1.0)


@given(ANSWERS, ANSWERS)
def test_there_is_one_score_a_character_and_none_is_above_a_share(answer, response):
    scores = score_digits("", response, answer)
    assert len(scores) == len(response)
    assert all(abs(score) in (0.0, 1 / len(answer)) for score in scores)
    assert sum(scores) <= 1.0 + 1e-9


def test_a_right_digit_earns_a_share_a_wrong_one_nothing_and_one_too_many_costs_a_share():
    assert score_digits("", "0734", "0134") == [0.25, 0.0, 0.25, 0.25]
    assert score_digits("", "013", "0134") == [0.25] * 3
    assert score_digits("", "013499", "0134") == [0.25] * 4 + [-0.25] * 2
    assert score_digits("", "", "0134") == []


def test_a_random_answer_scores_a_tenth_on_average():
    rng = random.Random(0)
    texts = ["".join(rng.choices("0123456789", k=6)) for _ in range(4000)]
    assert sum(sum(score_digits("", text, "013459")) for text in texts) / 4000 == pytest.approx(0.1, abs=0.01)


def test_importing_data_imports_neither_torch_nor_transformers_nor_pyarrow():
    program = "import rallypoint.data, sys; print(sorted({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loading_a_data_set_does_not_import_torch(tmp_path):
    make(tmp_path)
    program = (
        "import sys; from rallypoint.data import load_dataset; "
        f"load_dataset([{str(tmp_path / 'train.parquet')!r}]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
