"""Memory and disks that are too small for a run: one error that says what, where and what to do."""

import re
import subprocess
import sys

import pytest

from rallypoint.checkpoint import visible
from rallypoint.config import load_config
from rallypoint.display import Silent
from rallypoint.errors import WorkerError
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.loop import train
from rallypoint.run.folder import create_run, open_run

INLINE = ("cluster.runtime=inline", "cluster.pools={main: [1]}")


LARGE = "rollout.cache_tokens=1000000000000"
# A layer of one key and one value, 8 numbers of 4 bytes each.
SIZES = "the keys and values of 1,000,000,000,000 tokens take 61,035,156 MiB, but this machine has "


def test_a_cache_beyond_memory_is_one_error_with_both_sizes_and_the_key(runs):
    process = runs.start("train", "digits", *runs.overrides("large", *INLINE, LARGE))
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    assert f"rollout.cache_tokens=1000000000000: {SIZES}" in said
    assert not (runs.folder / "large").exists()


def test_a_cache_beyond_memory_that_is_found_in_a_run_is_the_same_error(runs):
    """Which memory nodes of a cluster have is not known before."""
    loaded = load_config("digits", runs.overrides("large", *INLINE, LARGE))
    with pytest.raises(WorkerError) as raised:
        train(loaded, create_run(loaded), Silent(), resume=False)
    assert SIZES in str(raised.value)
    assert "ask for fewer tokens with rollout.cache_tokens" in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_below_a_run_names_the_file_and_the_run_goes_on_when_there_is_room(runs):
    run = create_run(load_checked("digits", runs.overrides("full", *INLINE)))
    file = run.logs / "train.log"
    file.symlink_to("/dev/full")
    process = runs.start("train", str(run.path), "--resume")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    words = rf"error: {file} cannot be written: No space left on device \(.* are free\); make room on its disk"
    assert re.search(words, said)
    assert f"when it is mended: rally train {run.path} --resume" in said
    file.unlink()
    runs.resume("full")
    assert file.is_file()


def mount(path, size, *options):
    """Make a file system of a few hundred KiB, or change its size; only root may."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", str(path)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_checkpoint_that_finds_no_room_says_what_it_needs_and_the_run_goes_on_from_the_one_before(runs, weights_of):
    keys = (*INLINE, "trainer.num_steps=8", "checkpoint={every_steps: 1, keep: 99}")
    whole = runs.run("whole", *keys)
    disk = runs.folder / "disk"
    mount(disk, "800k")
    try:
        process = runs.start("train", "digits", *runs.overrides("small", *keys, f"trainer.runs_dir={disk}"))
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 1, said
        assert "Traceback" not in said
        assert re.search(
            r"error: .*/disk/small/.* cannot be written: No space left on device \(.* are free\); make", said
        )
        mount(disk, "8m", "remount")
        run = open_run(disk / "small")
        assert 0 < len(visible(run.checkpoints)) < 8
        assert train(load_checked(str(run.path)), run, Silent(), resume=True)
        assert weights_of(run) == weights_of(whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
