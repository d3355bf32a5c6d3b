"""The first difference of two runs is the earliest cause, not the largest effect."""

import math

from rallypoint.journal import (
    CheckpointSaved,
    Difference,
    Entry,
    InputsRead,
    RolesStarted,
    RunBegan,
    StepDone,
    Validated,
    WeightsLoaded,
    WeightsPublished,
    changes,
    first_difference,
    fold,
)


def run(
    *,
    config=(),
    software="2.0",
    file="ab",
    digests=(),
    metrics=(),
    score=0.5,
    weights="w",
    published="",
    loaded="",
    num_steps=3,
):
    began = RunBegan(first=0, config={"seed": 0, **dict(config)}, software={"torch": software}, machine="m")
    events = [
        began,
        InputsRead(files={"data.train": {"file 1": file}}),
        WeightsPublished(version=0, digest="v0"),
        WeightsLoaded(version=0, num_ranks=1, digest="v0"),
        RolesStarted(step=0, metrics={}),
        Validated(step=0, metrics={"validation/score": 0.1}),
    ]
    for step in range(1, num_steps + 1):
        parts = {"prompts": "p", "tokens": f"t{step}", "scores": "s"} | (dict(digests) if step == 2 else {})
        learned = {"actor/grad_norm": 1.0, "time/step": step * math.pi} | (dict(metrics) if step == 2 else {})
        sent = f"v{step}" + (published if step == 2 else "")
        events += [
            WeightsPublished(version=step, digest=sent),
            WeightsLoaded(version=step, num_ranks=1, digest=sent + (loaded if step == 2 else "")),
            StepDone(step=step, metrics=learned, digests=parts),
        ]
    events += [Validated(step=2, metrics={"validation/score": score}), CheckpointSaved(step=3, weights=weights)]
    return fold(Entry(number, float(number), event) for number, event in enumerate(events))


def test_equal_runs_have_none_and_a_longer_run_is_no_other_run():
    assert first_difference(run(), run()) is None
    assert first_difference(run(), run(num_steps=2)) is None
    assert changes(run(), run()) == ([], [], [])
    nan = {"actor/grad_norm": math.nan}
    assert first_difference(run(metrics=nan), run(metrics=nan)) is None
    assert first_difference(run(), run(metrics={"time/step": 1.0})) is None, "times are no part of it"


def test_the_cause_comes_before_its_effects():
    other = {"tokens": "x", "scores": "y"}
    assert first_difference(run(), run(digests=other, score=0.1)) == Difference(2, "tokens", "t2", "x")
    assert first_difference(run(), run(metrics={"actor/grad_norm": 1.5}, score=0.1, weights="v")) == Difference(
        2, "actor/grad_norm", 1.0, 1.5
    )
    published = Difference(2, "published weights", "v2", "v2'")
    assert first_difference(run(), run(published="'", score=0.1)) == published
    assert first_difference(run(), run(loaded="'", score=0.1)) == Difference(2, "loaded weights", "v2", "v2'")
    cut = {"actor.mesh.tp": 2}
    assert first_difference(run(), run(published="'", config=cut, weights="v")) == Difference(3, "weights", "w", "v")
    assert first_difference(run(), run(score=0.1, weights="v")) == Difference(2, "validation/score", 0.5, 0.1)
    assert first_difference(run(), run(weights="v")) == Difference(3, "weights", "w", "v")


def test_what_differs_around_the_steps_is_listed_by_key_file_and_package():
    config, files, around = changes(run(), run(config={"seed": 1, "kl": 2}, file="cd", software="2.1"))
    assert [(one.key, one.of_a, one.of_b) for one in config] == [("seed", 0, 1), ("kl", None, 2)]
    assert [(one.key, one.of_b) for one in files] == [("data.train, file 1", "cd")]
    assert [(one.key, one.of_b) for one in around] == [("torch", "2.1")]
