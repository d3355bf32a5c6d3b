"""What the config says of sampling reaches every token, and training still sees the model's own distribution."""

import pytest
from metrics_file import read_metrics
from tiny_runs import Runs

from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.ending import summarise
from rallypoint.run.rollouts import read_rollouts

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")
NARROW = (
    "rollout={top_k: 9, top_p: 0.95, min_p: 0.01, repetition_penalty: 1.1, min_response_tokens: 2}",
    "rollout.stop=['7', '3']",
    "trainer.num_steps=2",
    "validation.temperature=0",
)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """A run that samples from part of the distribution."""
    return Runs(tmp_path_factory.mktemp("narrow")).run("narrow", *INLINE, *NARROW)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A run that samples from all of it, and one response to each prompt of validation."""
    return Runs(tmp_path_factory.mktemp("wide")).run("wide", *INLINE, "trainer.num_steps=1")


def ends_where_it_must(text: str) -> bool:
    """A stop text ends a response, unless that has fewer than two tokens; at the latest five do."""
    place = min((place for digit in "73" if (place := text.find(digit)) >= 0), default=len(text))
    return len(text) >= 2 and (len(text) == 2 or place >= len(text) - 1 or "<" in text)


def test_rollouts_are_drawn_as_the_config_says_by_both_engines_alike(runs, narrow):
    plain = runs.run("plain", *INLINE, *NARROW, "rollout.engine=hf")
    rollouts = [
        [(row["prompt_ids"], row["response"], row["response_ids"], row["score"]) for row in read_rollouts(run.path, 1)]
        for run in (narrow, plain)
    ]
    assert rollouts[0] == rollouts[1]
    texts = [response for _, response, _, _ in rollouts[0]]
    assert len(texts) == 32
    assert all(map(ends_where_it_must, texts)), texts
    assert any(len(text) < 5 and text[-1] in "73" for text in texts), texts


def test_logprobs_stay_those_of_the_model_as_trained(narrow, wide):
    steps = [record for record in read_metrics(narrow.metrics) if "reward/mean" in record]
    assert all(record["rollout/logprob_gap_max"] < 1e-4 for record in steps)
    assert all(record["rollout/narrowing"] > 0.1 for record in steps)
    assert all(record["actor/ratio_error"] < 1e-4 for record in steps)
    worst = summarise(narrow, load_checked(str(narrow.path)).config).agreement
    assert worst is not None
    assert worst.largest == max(record["rollout/logprob_gap_max"] for record in steps)
    assert worst.text is not None
    assert worst.text in worst.worst
    assert f"{worst.text!r} (id {worst.token})" in (narrow.logs / "train.log").read_text()
    assert all("rollout/narrowing" not in record for record in read_metrics(wide.metrics))


def test_several_responses_to_each_validation_prompt_are_kept_measured_and_tracked(runs, wide, pictures):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track = "tracking={to: [tensorboard], names: verl}"
    run = runs.run("several", *INLINE, "trainer.num_steps=1", "validation.num_samples=4", track)
    (metrics,) = [one for one in read_metrics(run.metrics) if "validation/score" in one and one["step"] == 1]
    rows = read_rollouts(run.path, 1, "validation")
    groups = [[row["score"] for row in rows if row["prompt_index"] == prompt] for prompt in range(16)]
    assert [len(group) for group in groups] == [4] * 16
    source = rows[0]["data_source"]
    assert metrics[f"validation/best@4/{source}"] == pytest.approx(sum(map(max, groups)) / 16)
    assert metrics[f"validation/mean@4/{source}"] == pytest.approx(metrics["validation/score"])
    found = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert found.Scalars("critic/score/mean")[0].step == 1
    assert {f"val-core/{source}/reward/best@4/mean", "actor/pg_loss"} <= set(found.Tags()["scalars"])
    assert "rollouts/text_summary" in found.Tags()["tensors"]
    assert found.Tags()["images"] == ["curve"]
    assert run.curve.is_file()
    first = [row["response_ids"] for row in rows if row["sample_index"] == 0]
    assert [row["response_ids"] for row in read_rollouts(wide.path, 1, "validation")] == first, "one more changes none"
