"""The loss and the advantage of docs/algorithms.md train, in one process and in many, and a run of them resumes."""

import shutil

import pytest
from docs_blocks import blocks
from metrics_file import read_metrics

pytestmark = pytest.mark.lasting_ray


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The files of the docs in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, language in (("mine.py", "python"), ("mine.yaml", "yaml")):
        (tmp_path / name).write_text(next(text for text in blocks("algorithms", language) if f"# {name}" in text))
    return tmp_path


@pytest.mark.timeout(120)
def test_the_functions_of_the_docs_train_in_one_process_and_in_many_to_the_same_bits(mine, runs, weights_of):
    short = ("recipe=grpo", "trainer.num_steps=2", "cluster.pools={main: [2]}", "loss.parameters.floor=0.1")
    inline = runs.run_with("mine.yaml", runs.overrides("inline", *short, "cluster.runtime=inline"))
    ray = runs.run_with("mine.yaml", runs.overrides("ray", *short, "cluster.runtime=ray"))
    assert weights_of(ray) == weights_of(inline)
    (first, *_) = [record for record in read_metrics(ray.metrics) if "actor/rare_fraction" in record]
    assert 0 < first["actor/rare_fraction"] < 1


def test_a_run_goes_on_with_its_functions_and_says_when_they_were_edited(mine, runs, weights_of):
    one_rank = ("recipe=grpo", "cluster.runtime=inline", "cluster.pools={main: [1]}", "checkpoint.every_steps=1")
    whole = runs.run_with("mine.yaml", runs.overrides("whole", *one_rank, "trainer.num_steps=2"))
    runs.run_with("mine.yaml", runs.overrides("part", *one_rank, "trainer.num_steps=1"))
    edited = shutil.copytree(runs.folder / "part", runs.folder / "edited")
    assert weights_of(runs.resume("part", "trainer.num_steps=2")) == weights_of(whole)
    (mine / "mine.py").write_text((mine / "mine.py").read_text().replace("max=3.0", "max=1.01"))
    resumed = runs.resume("edited", "trainer.num_steps=2")
    assert weights_of(resumed) != weights_of(whole)
    log = (edited / "logs" / "train.log").read_text()
    assert "the weights are others from here on" in log
    assert "loss.function: mine.py:my_loss differs" in log
