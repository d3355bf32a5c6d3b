"""Data sets that reasoning-gym makes, by name."""

import pytest

from rallypoint.config import load_config
from rallypoint.data import DataSet, Generator, RowStream, load_dataset
from rallypoint.data.files import Problems
from rallypoint.environments.reward import load_reward
from rallypoint.errors import DataError
from rallypoint.run.data_sets import data_sets

CHAINS = "reasoning_gym:chain_sum"


def chains(seed=0, **parameters):
    return DataSet(CHAINS, generator=Generator(seed, parameters))


def test_a_generator_that_is_not_installed_or_not_there_is_named():
    with pytest.raises(DataError, match=r"needs the package reasoning_gym|reasoning-gym has no such data set; did you"):
        load_dataset(["reasoning_gym:chain_sums"])


def test_rows_follow_from_seed_parameters_and_index():
    pytest.importorskip("reasoning_gym")
    whole = load_dataset([chains(size=6, min_terms=2, max_terms=2)])
    assert [one.name for one in whole] == [f"{CHAINS}:{n}" for n in range(6)]
    assert all(one.prompt[0].content.count(" + ") + one.prompt[0].content.count(" - ") == 1 for one in whole)
    rows = RowStream.of_prompts([chains(size=6, min_terms=2, max_terms=2)])
    assert (rows.count(), list(rows.read(4, Problems()))) == (6, list(whole[4:]))
    assert load_dataset([chains(size=6, seed=9)]).examples == load_dataset([chains(9, size=6)]).examples
    with pytest.raises(DataError, match=r"chain_sum cannot be made with size=10000, seed=0, terms=3: .*terms"):
        load_dataset([chains(terms=3)])


def test_right_answers_score_1_with_the_scorer_that_the_row_names():
    pytest.importorskip("reasoning_gym")
    reward = load_reward("reasoning_gym", {})
    for name in ("chain_sum", "gcd", "countdown", "word_sorting"):
        dataset = DataSet(f"reasoning_gym:{name}", generator=Generator(parameters={"size": 2}), data_source="mixed")
        for one in load_dataset([dataset]):
            asked = {"data_source": one.data_source, "ground_truth": one.ground_truth, "extra_info": one.extra_info}
            assert reward(solution_str=f"<answer>{one.ground_truth}</answer>", **asked) == 1.0, name
            assert reward(solution_str="", **asked) != 1.0, name


def test_tasks_whose_answers_only_the_scorer_knows_have_rows():
    pytest.importorskip("reasoning_gym")
    assert load_dataset([DataSet("reasoning_gym:graph_color", generator=Generator(parameters={"size": 1}))])


def test_training_and_validation_have_seeds_of_their_own_and_columns_of_files_do_not_apply():
    keys = (
        "data.generate=null",
        f"data.train=['{CHAINS}', mine.jsonl]",
        f"data.validation={{path: '{CHAINS}', parameters: {{size: 8}}}}",
        "data.columns={prompt: question}",
        "reward.function=reasoning_gym",
        "seed=3",
    )
    config = load_config("digits-grpo", keys).config
    train, files, held_out = *data_sets(config, "data.train"), *data_sets(config, "data.validation")
    assert (train.generator.seed, held_out.generator.seed) == (3, 3 + 2**31)
    assert (held_out.generator.parameters, train.columns, files.columns) == ({"size": 8}, {}, {"prompt": "question"})
