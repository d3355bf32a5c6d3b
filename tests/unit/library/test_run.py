"""What a run says of itself, read from its folder."""

import math
import typing

import pytest
from measured import Measured
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rallypoint.errors import RunFolderError
from rallypoint.extras import is_installed
from rallypoint.library.run import Best, Run, load_run


def run_with(folder, scores) -> Run:
    (folder / "config.yaml").write_text("base: digits\n")
    with Measured(folder / "journal.jsonl") as log:
        for step, name, score in scores:
            log.write(step, {name: score})
    return Run(folder)


def test_the_best_step_is_the_first_of_the_best_finite_scores(tmp_path):
    scores = [(0, math.nan), (3, -math.inf), (5, 0.2), (10, 0.7), (15, 0.7), (20, math.inf)]
    run = run_with(tmp_path, [(step, "validation/score", score) for step, score in scores])
    assert run.best == Best(10, 0.7, None)


def test_without_a_validation_that_has_a_score_the_mean_reward_counts(tmp_path):
    run = run_with(tmp_path, [(0, "validation/score", math.nan), (1, "reward/mean", math.nan), (2, "reward/mean", 0.3)])
    assert run.best == Best(2, 0.3, None)


def test_a_run_in_which_no_score_is_finite_has_no_best_step(tmp_path):
    with pytest.raises(RunFolderError, match="no step has a score yet"):
        _ = run_with(tmp_path, [(1, "reward/mean", math.nan)]).best


def test_a_type_checker_knows_what_is_loaded():
    names = {"PreTrainedModel": PreTrainedModel, "PreTrainedTokenizerBase": PreTrainedTokenizerBase}
    assert typing.get_type_hints(Run.load, localns=names)["return"] == tuple[PreTrainedModel, PreTrainedTokenizerBase]


def test_a_folder_that_is_not_there_is_told_from_one_that_is_of_no_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFolderError, match=rf"runs/mine: no such folder \(looked in {tmp_path}\)"):
        load_run("runs/mine")
    with pytest.raises(RunFolderError, match=r"is not the folder of a run: config\.yaml is missing"):
        load_run(tmp_path)


def test_numbers_become_a_dataframe_where_pandas_is_and_otherwise_say_how_to_get_it(tmp_path):
    metrics = run_with(tmp_path, [(1, "reward/mean", 0.1), (2, "validation/score", 0.2)]).metrics
    if is_installed("pandas"):
        frame = metrics.to_pandas()
        assert list(frame["step"]) == [1, 2]
        assert frame["reward/mean"].isna().tolist() == [False, True]
    else:
        with pytest.raises(RunFolderError, match=r"no DataFrame: it needs the package pandas.*\[pandas\]"):
            metrics.to_pandas()
