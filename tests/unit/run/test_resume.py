"""What a run may go on with, and what would make it another one."""

import json
import os
from pathlib import Path

import pytest

from rallypoint.checkpoint import MANIFEST, checkpoint_name, digested, visible, writing
from rallypoint.config import RunConfig, load_config, values_of
from rallypoint.errors import CheckpointError, DataError, ResumeError
from rallypoint.journal import Journal, RunBegan, StepDone
from rallypoint.run.folder import RunFolder, anchored, create_run
from rallypoint.run.record import Record
from rallypoint.run.resume import _FREE, _ROUNDING, _SAME, Beginning

OWN = ("model.path=model", "data.train=[a.jsonl, b.jsonl]", "reward.function=rewards.py:f", "trainer.name=mine")


@pytest.fixture
def material(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("model/config.json", "model/model.safetensors", "a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "rewards.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 0.0\n")
    return tmp_path


def config_of(*overrides: str, recipe: str = "ppo") -> RunConfig:
    return anchored(load_config(recipe, [*OWN, *overrides]).config)


def saved(folder: RunFolder, step: int, config: RunConfig) -> None:
    with writing(folder.checkpoints, step) as path:
        (path / "training").mkdir()
        Record.of(config, folder).write(path)


@pytest.fixture
def run(material: Path) -> RunFolder:
    """A run with a checkpoint of step 20."""
    folder = create_run(load_config("ppo", OWN))
    saved(folder, 20, config_of())
    return folder


def resumed(run: RunFolder, *overrides: str, from_step: int | None = None) -> Beginning:
    return Beginning.resumed(run, config_of(*overrides), from_step)


def test_a_comparison_alone_refuses_what_a_resume_refuses_and_changes_nothing(run: RunFolder):
    saved(run, 30, config_of())
    (run.checkpoints / ".step_000040.replaced").mkdir()
    before = sorted(run.path.rglob("*"))
    assert Beginning.compared(run, config_of(), 20).first == 20
    with pytest.raises(ResumeError, match="the order of prompts and every draw follow from it"):
        Beginning.compared(run, config_of("seed=3"), None)
    assert sorted(run.path.rglob("*")) == before


def test_nothing_has_changed_and_nothing_is_said(run: RunFolder):
    found = resumed(run)
    assert (found.first, found.notes) == (20, ())
    assert found.record(run) == found.was


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (
            "[{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]",
            "[{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 1}]",
        ),
        ("{path: a.jsonl, stream_rows: 20}", "{path: a.jsonl, stream_rows: 40}"),
        ("a.jsonl", "{path: a.jsonl, stream_rows: 40}"),
        ("a.jsonl", "{path: a.jsonl, columns: {prompt: question}}"),
    ],
)
def test_other_weights_windows_or_columns_of_the_same_files_are_refused(material, then, now):
    run = create_run(load_config("ppo", [*OWN, f"data.train={then}"]))
    saved(run, 20, config_of(f"data.train={then}"))
    assert resumed(run, f"data.train={then}").notes == ()
    with pytest.raises(ResumeError, match=r"data\.train=.* which prompts come next follows from it"):
        resumed(run, f"data.train={now}")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1", r"seed=1 \(was 0\): the order of prompts and every draw follow from it"),
        ("rollout.num_prompts=32", r"rollout.num_prompts=32 \(was 64\): which prompts come next"),
        ("model.dtype=bfloat16", r"model.dtype='bfloat16' \(was 'float32'\): the weights so far"),
        ("model.lora={}", r"model.lora=\{rank: 32.* \(was null\): the weights so far"),
        ("data.shuffle=false", "data.shuffle=false"),
        ("data.train=[b.jsonl, a.jsonl]", "data.train: file 1, file 2 differ: which prompts come next"),
        ("data.train=a.jsonl", "data.train: file 2 differs"),
        ("trainer.num_steps=19", "trainer.num_steps=19: 20 steps are done already"),
    ],
)
def test_what_would_make_it_another_run_is_refused_with_the_reason_and_nothing_is_touched(run, override, said):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(ResumeError, match=said) as raised:
        resumed(run, override)
    assert "cannot go on from step 20" in str(raised.value)
    assert "take it back, or begin a new run with the weights of this one: model.path=" in str(raised.value)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_everything_that_is_refused_is_listed_at_once(run: RunFolder):
    with pytest.raises(ResumeError) as raised:
        resumed(run, "seed=1", "data.on_too_long=drop")
    assert len(raised.value.changes) == 2


def test_other_ranks_train_an_over_sampled_run_on_other_prompts_and_say_so(material):
    over_sampled = "rollout.over_sampling=80"
    run = create_run(load_config("ppo", [*OWN, over_sampled]))
    saved(run, 20, config_of(over_sampled))
    (note,) = resumed(run, over_sampled, "cluster.pools={main: [2]}").notes
    assert "the weights are others from here on: cluster.pools.main=[2] (was [1]), which may decide whose" in note


def test_a_run_that_samples_ahead_has_other_weights_after_any_resume_and_does_not_speak_of_rounding(material):
    ahead = ("rollout.max_staleness=1", "cluster.pools={main: [1], sampling: [1]}", "rollout.placement.pool=sampling")
    run = create_run(load_config("ppo", [*OWN, *ahead]))
    saved(run, 20, config_of(*ahead))
    (note,) = resumed(run, *ahead, "cluster.pools={main: [2], sampling: [1]}").notes
    assert note == (
        "changed since step 20, the weights are others from here on: cluster.pools.main=[2] (was [1]); as after any "
        "resume with rollout.max_staleness=1"
    )
    (note,) = resumed(run, *ahead, "checkpoint.keep=7").notes
    assert note == "changed since step 20: checkpoint.keep=7 (was 2)"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.num_steps=200", "changed since step 20: trainer.num_steps=200 (was 100)"),
        ("checkpoint.keep=7", "changed since step 20: checkpoint.keep=7 (was 2)"),
        ("cluster.runtime=inline", "changed since step 20: cluster.runtime='inline' (was 'ray')"),
        ("data.validation=c.jsonl", "changed since step 20: data.validation=["),
        ("cluster.pools={main: [2]}", "changed since step 20, equal up to rounding: cluster.pools.main=[2] (was [1])"),
        ("engine.activations=checkpoint", "changed since step 20, equal up to rounding: engine.activations"),
        (
            "actor.optimizer.lr=1e-5",
            "changed since step 20, the weights are others from here on: actor.optimizer.lr=1e-05 (was 1e-06)",
        ),
        ("kl=null", "changed since step 20, the weights are others from here on: kl=null (was {coef: 0.001"),
        (
            "reward.function=a.jsonl:f",
            "changed since step 20, the weights are others from here on: reward.function: a.jsonl:f, rewards.py:f",
        ),
    ],
)
def test_what_may_change_is_taken_and_said_with_what_it_means(run, override, said):
    (note,) = resumed(run, override).notes
    assert note.startswith(said)


def test_a_new_number_of_steps_is_said_to_move_the_learning_rate_where_that_follows_it(material: Path):
    schedule = "actor.optimizer.schedule=linear"
    folder = create_run(load_config("ppo", OWN))
    saved(folder, 20, config_of(schedule))
    (note,) = resumed(folder, schedule, "trainer.num_steps=200").notes
    assert note == (
        "changed since step 20, the weights are others from here on: trainer.num_steps=200 (was 100), which the "
        "learning rate follows"
    )


def test_an_edited_file_is_found_by_its_content(run: RunFolder, material: Path):
    (material / "rewards.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1.0\n")
    (note,) = resumed(run).notes
    assert note == "changed since step 20, the weights are others from here on: reward.function: rewards.py:f differs"
    (material / "b.jsonl").write_text("another row\n")
    (material / "model" / "model.safetensors").write_text("other weights\n")
    with pytest.raises(ResumeError) as raised:
        resumed(run)
    assert [change.partition(":")[0] for change in raised.value.changes] == ["data.train", "model.path"]
    (material / "b.jsonl").unlink()
    with pytest.raises(DataError, match=r"b\.jsonl does not exist \(no such file\)"):
        resumed(run)


def test_a_template_is_compared_by_its_content(material: Path):
    def changed(path: str, end: str = "<end>") -> str:
        return f"model.tokenizer={{chat_template: {path}, eos_token: {end}}}"

    (material / "chat.jinja").write_text("{{ messages }}")
    run = create_run(load_config("ppo", [*OWN, changed("chat.jinja")]))
    saved(run, 20, config_of(changed("chat.jinja")))
    (material / "chat.jinja").rename(material / "moved.jinja")
    assert not resumed(run, changed("moved.jinja")).notes
    with pytest.raises(ResumeError, match=r"eos_token='<other>' \(was '<end>'\): .* rows that were written with it"):
        resumed(run, changed("moved.jinja", "<other>"))
    (material / "moved.jinja").write_text("{{ messages }}.")
    with pytest.raises(ResumeError, match=r"chat_template: the template differs: .* rows that were written with it"):
        resumed(run, changed("moved.jinja"))


def test_what_was_moved_is_the_same(run: RunFolder, material: Path):
    (material / "a.jsonl").rename(material / "other.jsonl")
    (material / "model").rename(material / "moved")
    assert resumed(run, "data.train=[other.jsonl, b.jsonl]", "model.path=moved").notes == ()


def test_another_version_of_a_package_is_said(run: RunFolder, material: Path):
    saved(run, 30, config_of())
    with writing(run.checkpoints, 40) as path:
        (path / "training").mkdir()
        Record.of(config_of(), run).write(path)
        record = path / "training" / "run.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"software": {"torch": "1.0"}}))
    (note,) = resumed(run).notes
    assert note.startswith("changed since step 40, equal up to rounding: torch 2.")
    assert "(was 1.0)" in note


def test_a_config_that_was_edited_by_hand_in_the_run_folder_is_compared_too(run: RunFolder):
    run.config.write_text(run.config.read_text().replace("seed: 0", "seed: 5"))
    with pytest.raises(ResumeError, match=r"seed=5 \(was 0\)"):
        Beginning.resumed(run, anchored(load_config(str(run.path)).config), None)


def test_without_a_checkpoint_everything_may_change_and_the_beginning_is_said(material: Path):
    folder = create_run(load_config("ppo", OWN))
    found = resumed(folder, "seed=3")
    assert (found.first, found.was) == (0, None)
    assert found.notes == (
        "no checkpoint to go on from: the run begins at step 1, and steps done before are done again",
    )


def damage(folder: Path, how: str) -> None:
    if how == "empty":
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    else:
        os.truncate(folder / "training" / "run.json", 10)


@pytest.mark.parametrize("how", ["no manifest", "empty", "cut off"])
def test_a_damaged_newest_checkpoint_is_an_error_with_the_way_out_and_no_silent_restart(run, how):
    saved(run, 40, config_of())
    damage(run.checkpoints / "step_000040", how)
    with pytest.raises(CheckpointError, match=r"step_000040.* step 20 is whole: rally train .*--resume --from-step 20"):
        resumed(run)
    damage(run.checkpoints / "step_000020", how)
    with pytest.raises(CheckpointError, match=r"no other is whole, and 0 begins at step 1: .*--resume --from-step 0"):
        resumed(run)
    with pytest.raises(CheckpointError, match="step_000020"):
        resumed(run, from_step=20)
    assert visible(run.checkpoints) == [20, 40]
    found = resumed(run, from_step=0)
    assert found.first == 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000020.aside", "step_000040.aside"]
    assert found.notes[0] == "going on from step 0; set aside: step_000020.aside, step_000040.aside"


def test_an_older_checkpoint_is_taken_when_asked_for_and_compared_before_anything_is_set_aside(run: RunFolder):
    saved(run, 40, config_of("checkpoint.keep=3"))
    with pytest.raises(ResumeError):
        resumed(run, "seed=1", from_step=20)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 30; there are those of 20, 40"):
        resumed(run, from_step=30)
    assert visible(run.checkpoints) == [20, 40]
    found = resumed(run, from_step=20)
    assert (found.first, visible(run.checkpoints)) == (20, [20])


def test_a_checkpoint_without_a_record_is_named(run: RunFolder):
    with writing(run.checkpoints, 30):
        pass
    with pytest.raises(CheckpointError, match=rf"{checkpoint_name(30)}/training/run\.json: cannot be read"):
        resumed(run)


def test_every_entry_of_the_rule_is_a_key_or_a_section_and_stands_on_one_list():
    known = {key for config in configs_with_everything() for key, _ in values_of(config)}
    entries = [*_SAME, *_ROUNDING, *_FREE]
    assert len(entries) == len(set(entries))
    assert [entry for entry in entries if not any(f"{key}.".startswith(f"{entry}.") for key in known)] == []


def configs_with_everything() -> tuple[RunConfig, RunConfig]:
    taught = ["teacher={path: teacher}", "model.path=student", "data.train=prompts.jsonl"]
    return load_config("digits", ["model.lora={}"]).config, load_config("opd", taught, draft=True).config


def snapshot_of(run: RunFolder, step: int, *, done: int) -> None:
    """Leave what a run leaves that was killed after a step."""
    with Journal(run.journal) as journal:
        journal.append(RunBegan(first=20, config={}, software={}, machine=""))
        for each in range(21, done + 1):
            journal.append(StepDone(step=each, metrics={}, digests={}, seconds=1.0))
    with writing(run.snapshots, step, durable=False) as path:
        (path / "training").mkdir()
        Record.of(config_of(), run).write(path)
        (path / "model.safetensors").write_bytes(bytes(10))


def test_the_snapshot_of_a_run_that_was_killed_is_what_it_goes_on_from_and_a_comparison_alone_leaves_it(run: RunFolder):
    snapshot_of(run, 23, done=23)
    assert Beginning.compared(run, config_of(), None).first == 20
    assert visible(run.snapshots) == [23]
    found = resumed(run)
    assert found.first == found.adopted.step == 23
    assert found.adopted.weights == digested(run.checkpoints / "step_000023")
    assert (visible(run.checkpoints), visible(run.snapshots)) == ([20, 23], [])
    assert resumed(run).adopted is None


@pytest.mark.parametrize("how", ["its step is not in the journal", "damaged", "older", "another is asked for"])
def test_no_other_snapshot_is_taken(run: RunFolder, how: str):
    snapshot_of(run, 19 if how == "older" else 23, done=22 if how == "its step is not in the journal" else 23)
    if how == "damaged":
        (run.snapshots / "step_000023" / "model.safetensors").write_bytes(bytes(9))
    found = resumed(run, from_step=20 if how == "another is asked for" else None)
    assert (found.first, found.adopted, visible(run.checkpoints)) == (20, None, [20])
