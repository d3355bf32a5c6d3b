import contextlib
import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from forks import run_forked
from full_disks import files_end_at
from recorded_syncs import recorded_syncs
from safetensors import SafetensorError

from rallypoint.checkpoint import (
    MANIFEST,
    checkpoint_name,
    newest_whole,
    prune,
    recover,
    set_aside,
    steps,
    verify,
    visible,
    writing,
)
from rallypoint.errors import CheckpointError

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(200)), "training/state.json": b"[1]", "empty": b""}


def write(folder, step, files=FILES):
    with writing(folder, step) as path:
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    return folder / checkpoint_name(step)


def write_and_fail(folder, error):
    with writing(folder, 1) as path:
        (path / "a").write_text("a")
        raise error


def contents(checkpoint):
    return {
        str(path.relative_to(checkpoint)): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_holds_what_was_written_and_verifies(tmp_path):
    checkpoint = write(tmp_path / "not_there_yet", 20)
    assert contents(checkpoint) == FILES
    verify(checkpoint)
    assert steps(checkpoint.parent) == [20]
    assert names(checkpoint.parent) == ["step_000020"]


def test_a_checkpoint_is_not_visible_before_it_is_complete(tmp_path):
    with writing(tmp_path, 1) as path:
        (path / "a").write_text("a")
        assert steps(tmp_path) == []
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, OSError, SystemExit])
def test_a_body_that_fails_leaves_nothing(tmp_path, kind):
    with pytest.raises(CheckpointError if kind is OSError else kind, match="no more"):
        write_and_fail(tmp_path, kind("no more"))
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", [ValueError, OSError])
def test_a_failing_rewrite_leaves_the_old_checkpoint(tmp_path, kind):
    checkpoint = write(tmp_path, 1)
    with pytest.raises((CheckpointError, ValueError)):
        write_and_fail(tmp_path, kind("no more"))
    verify(checkpoint)
    assert contents(checkpoint) == FILES
    assert names(tmp_path) == ["step_000001"]


def test_a_rewrite_replaces_the_old_checkpoint_as_a_whole(tmp_path):
    write(tmp_path, 1)
    checkpoint = write(tmp_path, 1, {"other": b"x"})
    verify(checkpoint)
    assert contents(checkpoint) == {"other": b"x"}
    assert names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("ending", ["partial", "replaced"])
def test_what_a_killed_save_left_behind_does_not_hinder_the_next(tmp_path, ending):
    write(tmp_path, 1)
    leftover = tmp_path / f".step_000001.{ending}"
    leftover.mkdir()
    (leftover / "old").write_text("old")
    checkpoint = write(tmp_path, 1, {"new": b"new"})
    verify(checkpoint)
    assert contents(checkpoint) == {"new": b"new"}
    assert names(tmp_path) == ["step_000001"]


def test_a_save_killed_between_its_two_renames_gives_the_old_checkpoint_back_when_the_next_one_fails(tmp_path):
    write(tmp_path, 1).rename(tmp_path / ".step_000001.replaced")
    with pytest.raises(CheckpointError):
        write_and_fail(tmp_path, OSError("no space"))
    verify(tmp_path / "step_000001")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(tmp_path, name):
    checkpoint = write(tmp_path, 1)
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}: missing"):
        verify(checkpoint)


@pytest.mark.parametrize("size", [0, 1, 199, 201])
def test_a_file_of_another_size_is_found(tmp_path, size):
    checkpoint = write(tmp_path, 1)
    os.truncate(checkpoint / "model.safetensors", size)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: expected 200 bytes, found {size}"):
        verify(checkpoint)


def test_every_flipped_bit_of_a_file_is_found(tmp_path):
    checkpoint = write(tmp_path, 1)
    path, content = checkpoint / "model.safetensors", FILES["model.safetensors"]
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: its content has changed"):
            verify(checkpoint)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_the_manifest_is_found(tmp_path, step):
    checkpoint = write(tmp_path, 1)
    path = checkpoint / MANIFEST
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), step):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            verify(checkpoint)
    path.write_bytes(content)
    verify(checkpoint)


@pytest.mark.parametrize(
    "manifest",
    ["", "null", "[]", "{", '{"format": 1}', '{"format": 1, "step": 1, "files": ["a"]}', "\x00", '{"files": {}}']
    + [json.dumps({"format": 1, "step": 1, "files": {"a": entry}}) for entry in (None, 3, {}, {"size": 1})],
)
def test_a_manifest_that_says_nothing_useful_is_an_error_and_not_a_crash(tmp_path, manifest):
    checkpoint = write(tmp_path, 1)
    (checkpoint / MANIFEST).write_text(manifest)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        verify(checkpoint)


def test_a_truncated_manifest_is_found_wherever_it_ends(tmp_path):
    checkpoint = write(tmp_path, 1)
    content = (checkpoint / MANIFEST).read_bytes()
    for size in range(len(content)):
        (checkpoint / MANIFEST).write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            verify(checkpoint)


def test_a_checkpoint_under_the_name_of_another_step_is_refused_and_a_copy_is_not(tmp_path):
    checkpoint = write(tmp_path, 1)
    verify(checkpoint.rename(tmp_path / "my copy"))
    with pytest.raises(CheckpointError, match="is that of step 1"):
        verify((tmp_path / "my copy").rename(tmp_path / "step_000002"))
    manifest = tmp_path / "step_000002" / MANIFEST
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": "2"'))
    with pytest.raises(CheckpointError, match="is that of step 2"):
        verify(manifest.parent)


def test_a_format_of_the_future_is_refused_by_its_number(tmp_path):
    checkpoint = write(tmp_path, 1)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "format": 3}))
    with pytest.raises(CheckpointError, match="expected format 2, found 3"):
        verify(checkpoint)


def test_a_checkpoint_of_the_first_format_which_had_one_digest_a_file_is_read(tmp_path):
    checkpoint = write(tmp_path, 1)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps({**manifest, "format": 1}))
    verify(checkpoint)


def test_parts_that_are_not_all_of_a_file_are_refused(tmp_path):
    checkpoint = write(tmp_path, 1)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"]["config.json"] = {"size": 2, "parts": [[0, 1, 0, 1, "0"]]}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read \(the parts of a file are not all of it"):
        verify(checkpoint)


def test_a_checkpoint_is_flushed_to_the_disk_before_it_has_its_name_and_then_its_name(tmp_path):
    with recorded_syncs() as flushed:
        checkpoint = write(tmp_path, 2)
    partial = tmp_path / ".step_000002.partial"
    assert {*flushed[:-1]} == {partial, *(partial / path.relative_to(checkpoint) for path in checkpoint.rglob("*"))}
    assert flushed[-1] == tmp_path


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"has no manifest\.json, so it is not whole"):
            verify(path)


def test_a_folder_that_is_named_as_a_checkpoint_and_is_none_is_not_passed_over(tmp_path):
    write(tmp_path, 2)
    damaged = write(tmp_path, 4)
    assert (newest_whole(tmp_path), newest_whole(tmp_path / "nothing")) == (4, 0)
    for name in (MANIFEST, *FILES):
        (damaged / name).unlink()
        assert visible(tmp_path) == [2, 4]
        with pytest.raises(CheckpointError, match=r"step_000004.*the checkpoint is damaged"):
            verify(tmp_path / checkpoint_name(visible(tmp_path)[-1]))
        assert newest_whole(tmp_path) == 2
    (damaged / "training").rmdir()
    with pytest.raises(CheckpointError, match="step_000004"):
        verify(tmp_path / checkpoint_name(visible(tmp_path)[-1]))


def test_checkpoints_after_a_step_are_set_aside_under_names_that_nobody_takes_for_checkpoints(tmp_path):
    for _ in range(2):
        for step in (2, 4, 6):
            write(tmp_path, step)
        set_aside(tmp_path, 2)
    assert (visible(tmp_path), steps(tmp_path)) == ([2], [2])
    aside = [f"step_00000{step}.aside{ending}" for step in (4, 6) for ending in ("", "-2")]
    assert sorted(names(tmp_path)) == sorted(["step_000002", *aside])
    prune(tmp_path, 1)
    assert len(names(tmp_path)) == 5


def test_a_checkpoint_that_was_about_to_be_replaced_when_its_save_was_killed_gets_its_name_back(tmp_path):
    write(tmp_path, 1).rename(tmp_path / ".step_000001.replaced")
    assert visible(tmp_path) == []
    recover(tmp_path)
    assert newest_whole(tmp_path) == 1
    write(tmp_path, 1, {"new": b"new"})
    (tmp_path / ".step_000001.replaced").mkdir()
    recover(tmp_path)
    assert contents(tmp_path / "step_000001") == {"new": b"new"}


def test_steps_are_listed_in_order_and_without_what_is_no_checkpoint(tmp_path):
    for step in (10, 2, 1_000_000, 30):
        write(tmp_path, step, {"a": b""})
    (tmp_path / "step_000040").mkdir()
    (tmp_path / "step_3").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert steps(tmp_path) == [2, 10, 30, 1_000_000]
    assert steps(tmp_path / "nothing") == []


@pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2, [4, 5]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5]), (0, [])])
def test_pruning_keeps_the_newest_and_clears_what_was_left_behind(tmp_path, keep, kept):
    for step in range(1, 6):
        write(tmp_path, step, {"a": b"", "b/c": b""})
    for leftover in (".step_000003.partial", ".step_000009.replaced"):
        (tmp_path / leftover / "training").mkdir(parents=True)
    prune(tmp_path, keep)
    assert names(tmp_path) == [checkpoint_name(step) for step in kept]
    for step in kept:
        verify(tmp_path / checkpoint_name(step))


@contextlib.contextmanager
def small_disk(path, size):
    """A file system of a few hundred KiB; only root may make one."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_full_disk_is_said_and_leaves_the_older_checkpoints_and_nothing_else(tmp_path):
    with small_disk(tmp_path / "disk", "200k") as disk:
        checkpoint = write(disk, 1)
        said = (
            r"step_000002 cannot be written: No space left on device \(it needs \d+ B, 1\d\d\.\d KiB are free\); make"
        )
        with pytest.raises(CheckpointError, match=said):
            write(disk, 2, {"model.safetensors": bytes(400_000)})
        with pytest.raises(CheckpointError, match="No space left"):
            write(disk, 1, {"model.safetensors": bytes(400_000)})
        assert names(disk) == ["step_000001"]
        verify(checkpoint)
        assert contents(checkpoint) == FILES


def test_safetensors_that_cannot_be_written_leave_nothing(tmp_path):
    with pytest.raises(SafetensorError, match="File too large"), files_end_at(50_000), writing(tmp_path, 1) as folder:
        safetensors.torch.save_file({"w": torch.zeros(100_000)}, folder / "model.safetensors")
    assert names(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from rallypoint.checkpoint import writing
with writing(Path(sys.argv[1]), 1) as folder:
    (folder / "model.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_while_it_saves_leaves_no_checkpoint_and_the_next_save_works(tmp_path):
    done = run_forked("-c", KILLED, str(tmp_path))
    assert done.returncode == -9
    assert steps(tmp_path) == []
    verify(write(tmp_path, 1))
    assert names(tmp_path) == ["step_000001"]
