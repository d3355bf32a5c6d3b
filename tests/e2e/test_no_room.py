"""Memory and disks that are too small for a run: one error that says what, where and what to do."""

import contextlib
import functools
import re
import subprocess
import sys
import time

import pytest
from metrics_file import read_metrics
from tiny_runs import Runs

from rallypoint.checkpoint import visible
from rallypoint.config import load_config
from rallypoint.display import Silent
from rallypoint.errors import WorkerError
from rallypoint.journal import CheckpointSaved, Said, StepDone, read_journal
from rallypoint.prepare.preflight import load_checked
from rallypoint.recipes.interruption import Observer
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
def test_files_that_are_made_of_the_journal_end_no_run_when_their_disk_is_full(runs):
    run = create_run(load_checked("digits", runs.overrides("full", *INLINE)))
    file = run.logs / "train.log"
    file.symlink_to("/dev/full")
    process = runs.start("train", str(run.path), "--resume")
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    words = (
        rf"{file} cannot be written: No space left on device \(.* are free\); make room on its disk; training goes on"
    )
    assert len(re.findall(words, said)) == 1, "a line a minute"
    assert run.state().step == 4


class Befalls(Observer):
    """Lets something happen after steps, when the checkpoint of step 2 is there, which is written beside them."""

    def __init__(self, run, what):
        super().__init__()
        self.run, self.what = run, what

    def after_step(self, step, metrics):
        if step in self.what:
            deadline = time.monotonic() + 30
            while step == min(self.what) and 2 not in visible(self.run.checkpoints) and time.monotonic() < deadline:
                time.sleep(0.02)
            self.what[step]()
        return False


STEPS = ("trainer.num_steps=9", "checkpoint={every_steps: 2, keep: 99}")


@pytest.fixture(scope="module")
def of_nine_steps(tmp_path_factory):
    """A run that nothing befell."""
    return Runs(tmp_path_factory.mktemp("nine")).run("whole", *STEPS, *INLINE)


def train_while(runs, name, what, *more):
    loaded = load_checked("digits", runs.overrides(name, *STEPS, *INLINE, *more))
    run = create_run(loaded)
    assert train(loaded, run, Silent(), resume=False, observer=Befalls(run, what(run)))
    return run


def assert_nothing_is_lost(run, whole, weights_of):
    """Weights are equal, the journal is whole and lacks nothing, and a line says what went on."""
    assert weights_of(run) == weights_of(whole)
    entries = list(read_journal(run.journal))
    assert [e.event.step for e in entries if isinstance(e.event, StepDone)] == list(range(1, 10))
    saved = [e.event.step for e in entries if isinstance(e.event, CheckpointSaved)]
    assert saved == visible(run.checkpoints)
    assert {record["step"] for record in read_metrics(run.metrics)} == set(range(10))
    lines = [e.event.text for e in entries if isinstance(e.event, Said) and "each step tries again" in e.event.text]
    assert len(lines) == 1, "a line a minute"
    return saved


def test_a_run_folder_that_vanishes_and_comes_back_costs_nothing(runs, weights_of, of_nine_steps):
    def what(run):
        away = runs.folder / "away"
        return {4: lambda: run.path.rename(away), 6: lambda: away.rename(run.path)}

    run = train_while(runs, "vanishing", what)
    assert assert_nothing_is_lost(run, of_nine_steps, weights_of) == [2, 6, 8, 9]


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_checkpoint_folder_that_becomes_read_only_is_tried_again_at_every_step(runs, weights_of, of_nine_steps):
    def what(run):
        unmount = functools.partial(subprocess.run, ["umount", "-l", str(run.checkpoints)], check=True)
        return {3: lambda: mount(run.checkpoints, "100k", "ro"), 5: unmount}

    run = train_while(runs, "read_only", what)
    assert assert_nothing_is_lost(run, of_nine_steps, weights_of) == [2, 5, 6, 8, 9]


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_disk_that_is_full_for_some_steps_costs_nothing(runs, weights_of, of_nine_steps):
    disk = runs.folder / "disk"
    mount(disk, "16m")

    def fill():
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    try:
        what = {3: fill, 7: (disk / "filler").unlink}
        run = train_while(runs, "full", lambda _: what, f"trainer.runs_dir={disk}")
        assert assert_nothing_is_lost(run, of_nine_steps, weights_of) == [2, 7, 8, 9]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def mount(path, size, *options):
    """Make a file system of a few hundred KiB, or change its size; only root may."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *options)), "tmpfs", str(path)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.strip()}")


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_a_checkpoint_that_finds_no_room_says_what_it_needs_and_the_run_goes_on_from_the_one_before(runs, weights_of):
    keys = (*INLINE, "trainer.num_steps=12", "checkpoint={every_steps: 1, keep: 99}")
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
        assert 0 < len(visible(run.checkpoints)) < 10
        assert train(load_checked(str(run.path)), run, Silent(), resume=True)
        assert weights_of(run) == weights_of(whole)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
