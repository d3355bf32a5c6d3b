"""The mirror of a run on another file system: on one in this folder, which can be told to fail."""

import json

import pytest

from rallypoint import checkpoint
from rallypoint.config import load_config
from rallypoint.data.remote import Remote
from rallypoint.errors import CheckpointError, RunFolderError, UnusableCheckpointError
from rallypoint.journal import CheckpointSaved, Journal, Said, Validated
from rallypoint.run import copies, mirror
from rallypoint.run.copies import borrow, borrow_all, borrow_checkpoint, bring, refuse_taken
from rallypoint.run.folder import create_run
from rallypoint.run.mirror import Mirror, whole_steps
from rallypoint.run.reports import VALIDATION


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run in `runs`, whose mirror is `there`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "there").mkdir()
    return create_run(config_of(tmp_path))


def config_of(tmp_path, *more):
    return load_config("digits", [f"trainer.runs_dir=file://{tmp_path}/there", "trainer.name=a", *more])


def mirror_of(run, *more, say=lambda _: None):
    where = run.path.parents[1]
    return Mirror(run, f"file://{where}/there/a", config_of(where, *more).config, say)


def save(run, step, content="w"):
    with checkpoint.writing(run.checkpoints, step, durable=False) as folder:
        (folder / "training").mkdir()
        (folder / "model.safetensors").write_text(f"{content}{step}")
        (folder / "training" / "actor.safetensors").write_text(f"o{step}")
    tell(run, CheckpointSaved(step=step, weights=""))


def tell(run, *events):
    with Journal(run.journal) as journal:
        journal.append(*events)


def files_of(folder):
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path): (folder / path).read_bytes() for path in found if not path.name.startswith(".")}


def test_what_is_there_is_what_is_here_and_only_what_has_changed_is_sent_again(run, monkeypatch):
    (run.path / "rollouts").mkdir()
    (run.path / "rollouts" / "step_000001.parquet").write_text("r")
    (run.path / "endpoint.key").write_text("secret")
    (run.snapshots / "step_000001").mkdir(parents=True)
    (run.snapshots / "step_000001" / "x").write_text("x")
    save(run, 2)
    one, there, sent = mirror_of(run), run.path.parents[1] / "there" / "a", []
    one.send()
    assert files_of(there) == {
        name: content
        for name, content in files_of(run.path).items()
        if name != "endpoint.key" and not name.startswith("snapshots")
    }
    monkeypatch.setattr(Remote, "send", lambda _, path, name: sent.append(name))
    one.send()
    tell(run, Said(text="more"))
    one.send()
    mirror_of(run).send()
    assert sent == ["journal.jsonl"]


def test_a_checkpoint_whose_manifest_is_not_there_yet_does_not_count(run, monkeypatch):
    save(run, 2)
    mirror_of(run).send()
    save(run, 4)
    send = Remote.send

    def cut_off(self, path, name):
        if name == "checkpoints/step_000004/manifest.json":
            raise ConnectionError("cut")
        send(self, path, name)

    monkeypatch.setattr(Remote, "send", cut_off)
    monkeypatch.setattr("rallypoint.data.remote._WAITS_S", ())
    one = mirror_of(run)
    with pytest.raises(ConnectionError):
        one.send()
    assert whole_steps(one.remote) == [2]
    elsewhere = bring(one.remote.url, run.path.parent / "elsewhere")
    assert checkpoint.visible(elsewhere / "checkpoints") == [2]
    monkeypatch.undo()
    one.send()
    assert whole_steps(one.remote) == [2, 4]


@pytest.mark.parametrize(
    ("keys", "stay"),
    [((), [8, 10]), (("checkpoint.keep_every=6",), [6, 8, 10]), (("checkpoint.keep_best=true",), [4, 8, 10])],
)
def test_what_is_kept_there_is_what_is_kept_here_also_where_another_machine_goes_on(run, keys, stay, tmp_path):
    for step in (2, 4):
        tell(run, Validated(step=step, metrics={VALIDATION: step / 4}))
        save(run, step)
    one = mirror_of(run, *keys)
    one.send()
    elsewhere = copies.RunFolder(bring(one.remote.url, tmp_path / "elsewhere" / "runs"))
    for step in (6, 8, 10):
        tell(elsewhere, Validated(step=step, metrics={VALIDATION: 0.5}))
        save(elsewhere, step)
    Mirror(elsewhere, one.remote.url, config_of(tmp_path, *keys).config, lambda _: None).send()
    assert whole_steps(one.remote) == stay


def test_a_run_that_goes_back_sets_the_checkpoints_after_it_aside(run):
    for step in (2, 4):
        save(run, step)
    one = mirror_of(run)
    one.send()
    one.start(2)
    one.close()
    assert whole_steps(one.remote) == [2, 4], "sent again, as it is here"
    checkpoint.set_aside(run.checkpoints, 2)
    again = mirror_of(run)
    again.start(2)
    again.close()
    assert whole_steps(again.remote) == [2]
    assert bring(again.remote.url, run.path.parent / "elsewhere") is not None


def test_another_history_there_is_refused_and_nothing_is_overwritten(run, tmp_path):
    save(run, 2)
    one = mirror_of(run)
    one.send()
    other = copies.RunFolder(bring(one.remote.url, tmp_path / "elsewhere" / "runs"))
    tell(other, Said(text="of the other"))
    Mirror(other, one.remote.url, config_of(tmp_path).config, lambda _: None).send()
    tell(run, Said(text="of this one"))
    with pytest.raises(RunFolderError, match="the run was gone on with elsewhere"):
        one.send()
    with pytest.raises(RunFolderError, match=r"go on from there with: rally train file://.*there/a --resume"):
        mirror_of(run)
    with pytest.raises(RunFolderError, match="has another history than"):
        bring(one.remote.url, run.path.parent)
    assert "of the other" in one.remote.read("journal.jsonl").decode()


def test_the_run_ends_when_another_process_writes_to_the_same_place(run, tmp_path):
    one = mirror_of(run)
    one.send()
    there = tmp_path / "there" / "a" / "journal.jsonl"
    there.write_bytes(theirs := there.read_bytes() + b"of another process\n")
    one.start(0)
    assert one._done.wait(60), "there is nothing more to try"
    with Journal(run.journal) as journal:
        journal.subscribe(one.take)
        with pytest.raises(RunFolderError, match="the run was gone on with elsewhere"):
            journal.append(Said(text="more"))
    with pytest.raises(CheckpointError, match="the run was gone on with elsewhere"):
        one.close()
    assert there.read_bytes() == theirs


def test_a_folder_here_that_is_older_makes_room_and_one_that_is_newer_stays(run, tmp_path):
    save(run, 2)
    one = mirror_of(run)
    one.send()
    tell(run, Said(text="newer here"))
    assert bring(one.remote.url, run.path.parent) == run.path
    other = copies.RunFolder(bring(one.remote.url, tmp_path / "elsewhere" / "runs"))
    assert "newer here" not in other.journal.read_text()
    one.send()
    renewed = bring(one.remote.url, other.path.parent)
    assert "newer here" in (renewed / "journal.jsonl").read_text()
    assert sorted(path.name for path in other.path.parent.iterdir()) == ["a", "a.aside"]


def test_a_damaged_checkpoint_there_is_named_with_an_older_one(run, tmp_path):
    for step in (2, 4):
        save(run, step)
    one = mirror_of(run)
    one.send()
    (tmp_path / "there" / "a" / "checkpoints" / "step_000004" / "model.safetensors").write_text("v4")
    with pytest.raises(UnusableCheckpointError, match=r"content has changed.*there/a --resume --from-step 2"):
        bring(one.remote.url, tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())
    found = bring(one.remote.url, tmp_path / "elsewhere", 2)
    assert checkpoint.steps(found / "checkpoints") == [2]


def test_an_outage_is_said_and_what_was_missed_is_sent_when_it_is_over(run, monkeypatch):
    said, one = [], None
    one = mirror_of(run, say=said.append)
    send, healed = Remote.send, []

    def failing(self, path, name):
        if not healed:
            healed.append(name)
            raise ConnectionError("no route")
        send(self, path, name)

    monkeypatch.setattr(Remote, "send", failing)
    monkeypatch.setattr(mirror, "_AGAIN_S", 0.01)
    monkeypatch.setattr("rallypoint.data.remote._WAITS_S", ())
    one.start(0)
    one.close()
    assert "no route; training goes on" in said[0]
    assert said[1] == f"{one.remote.url} has all of the run again"
    assert one.remote.read("journal.jsonl") == run.journal.read_bytes()


def test_an_end_waits_for_a_place_that_takes_nothing_but_not_for_ever(run, monkeypatch):
    monkeypatch.setattr(mirror, "_LAST_S", 0.05)
    monkeypatch.setattr(mirror, "_AGAIN_S", 0.01)
    monkeypatch.setattr("rallypoint.data.remote._WAITS_S", ())
    one = mirror_of(run)
    monkeypatch.setattr(Remote, "send", lambda *_: (_ for _ in ()).throw(ConnectionError("no route")))
    one.start(0)
    with pytest.raises(CheckpointError, match=r"lacks what .*runs/a has: .*; send it with: rally train .*--resume"):
        one.close()


def test_a_checkpoint_that_is_removed_while_it_is_sent_is_sent_whole(run, monkeypatch):
    save(run, 2)
    one, send = mirror_of(run), Remote.send

    def pruned_meanwhile(self, path, name):
        if name.startswith("checkpoints") and run.checkpoints.exists():
            for other in run.checkpoints.rglob("*.safetensors"):
                other.unlink()
        send(self, path, name)

    monkeypatch.setattr(Remote, "send", pruned_meanwhile)
    one.send()
    assert one.remote.read("checkpoints/step_000002/model.safetensors") == b"w2"
    checkpoint.verify(run.path.parents[1] / "there" / "a" / "checkpoints" / "step_000002")


def test_copies_to_read_are_renewed_by_what_has_changed(run, monkeypatch):
    save(run, 2)
    one, fetched = mirror_of(run), []
    one.send()
    assert borrow_checkpoint(f"{one.remote.url}/nothing") is None
    folder = borrow_checkpoint(one.remote.url)
    assert files_of(folder).keys() == {"model.safetensors", "manifest.json"}, "without what only a resume needs"
    assert borrow(one.remote.url) == folder.parents[1] == borrow_all(f"file://{run.path.parents[1]}/there")[0]
    fetch = Remote.fetch
    monkeypatch.setattr(Remote, "fetch", lambda self, name, path: (fetched.append(name), fetch(self, name, path)))
    tell(run, Said(text="more"))
    one.send()
    borrow(one.remote.url)
    assert borrow_checkpoint(f"{one.remote.url}/checkpoints/step_000002") == folder
    assert fetched == ["journal.jsonl"]
    with pytest.raises(CheckpointError, match=r"no whole checkpoint is there; there are those of \[2\]"):
        borrow_checkpoint(f"{one.remote.url}/checkpoints/step_000003")


def test_a_name_that_is_taken_there_is_refused(run, tmp_path):
    refuse_taken(config_of(tmp_path).config)
    mirror_of(run).send()
    with pytest.raises(RunFolderError, match=r"there/a is there already; resume it with `rally train file://"):
        refuse_taken(config_of(tmp_path).config)
    with pytest.raises(RunFolderError, match="no run is there, as it has no"):
        bring(f"file://{tmp_path}/there/b", tmp_path)


def test_the_list_of_what_was_sent_may_be_lost(run):
    one = mirror_of(run)
    one.send()
    (run.path / ".sent.json").write_text("[")
    mirror_of(run).send()
    assert "journal.jsonl" in json.loads((run.path / ".sent.json").read_text())
