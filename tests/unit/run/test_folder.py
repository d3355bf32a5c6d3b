"""The folder of a run: made once, found again, used by one process at a time."""

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forks import run_forked
from recorded_syncs import recorded_syncs

from rallypoint.config import LoadedConfig, load_config
from rallypoint.errors import DiskError, RunFolderError
from rallypoint.run.folder import (
    anchored,
    create_run,
    launched,
    newest_run,
    open_run,
    write_config,
)


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    return load_config("digits", [f"trainer.runs_dir={tmp_path}/runs"])


def named(tmp_path: Path, name: str) -> LoadedConfig:
    return load_config("digits", [f"trainer.runs_dir={tmp_path}/runs", f"trainer.name={name}"])


def test_a_run_without_a_name_is_called_after_recipe_and_time_and_two_in_a_second_differ(loaded: LoadedConfig):
    paths = [create_run(loaded).path for _ in range(3)]
    assert len(set(paths)) == 3
    assert all(path.name.startswith(f"digits-{time.strftime('%Y')}") for path in paths)
    assert all((path / "config.yaml").is_file() for path in paths)
    assert all((path / "logs").is_dir() for path in paths)


def test_the_config_of_a_run_is_flushed_to_the_disk_before_its_folder_appears_and_then_the_folder(tmp_path: Path):
    with recorded_syncs() as flushed:
        run = create_run(named(tmp_path, "mine"))
    partial = flushed[-2]
    assert partial.parent == run.path.parent
    assert partial != run.path
    below = [partial / path.relative_to(run.path) for path in run.path.rglob("*")]
    assert partial / "config.yaml" in below
    assert {*flushed} >= {partial, *below}
    assert flushed[-1] == run.path.parent


def test_a_name_is_used_once(tmp_path: Path):
    first = create_run(named(tmp_path, "mine"))
    assert first.path == tmp_path / "runs" / "mine"
    with pytest.raises(RunFolderError, match=r"there already; resume it with `rally train .*runs/mine --resume`"):
        create_run(named(tmp_path, "mine"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunFolderError, match="runs/mine cannot be made"):
        create_run(named(tmp_path, "mine"))


def test_the_newest_run_of_a_recipe_is_found_among_those_of_others(loaded: LoadedConfig, tmp_path: Path):
    runs = [create_run(loaded).path for _ in range(2)]
    others = [
        create_run(named(tmp_path, name)).path for name in ("digits-long-20260101-000000", "digitsy", "digits-long")
    ]
    for age, path in enumerate([runs[1], runs[0], *others]):
        os.utime(path / "config.yaml", (1e9 + age, 1e9 + age))
    assert newest_run("digits", tmp_path / "runs") == runs[0]
    assert newest_run("digits-long", tmp_path / "runs") == others[2]
    (tmp_path / "runs" / "digits").mkdir()
    with pytest.raises(RunFolderError, match=r"no run of 'grpo' .* start one with `rally train grpo`"):
        newest_run("grpo", tmp_path / "runs")


def test_a_run_with_the_very_name_counts_too(tmp_path: Path):
    mine = create_run(named(tmp_path, "mine")).path
    assert newest_run("mine", tmp_path / "runs") == mine


HOLD = """
import sys, time
from pathlib import Path
from rallypoint.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_a_folder_belongs_to_one_process_until_that_ends_however_it_ends(tmp_path: Path):
    folder = create_run(named(tmp_path, "mine"))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        holds = (
            f"in use by process {holder.pid} on {re.escape(platform.node())}; .*trainer.name=.*If that process is gone"
        )
        with pytest.raises(RunFolderError, match=holds), folder.locked():
            pass
    finally:
        holder.kill()
        holder.communicate()
    with folder.locked():
        pass


def test_whoever_looks_sees_that_a_folder_is_in_use_and_leaves_its_lock_alone(tmp_path: Path):
    folder = create_run(named(tmp_path, "mine"))
    assert not folder.is_in_use()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (folder.path / ".lock").chmod(0o444)  # as if it were another user's
        assert folder.is_in_use()
        with pytest.raises(RunFolderError), folder.locked():
            pass
    finally:
        holder.kill()
        holder.communicate()
    assert not folder.is_in_use()


LOOK = """
import sys
from pathlib import Path
from rallypoint.run.folder import RunFolder
sys.exit(RunFolder(Path(sys.argv[1])).is_in_use())
"""


def test_a_process_that_asks_about_its_own_folder_keeps_its_lock(tmp_path: Path):
    folder = create_run(named(tmp_path, "mine"))
    with folder.locked():
        assert folder.is_in_use()
        assert run_forked("-c", LOOK, str(folder.path)).returncode == 1
    assert not folder.is_in_use()


def test_a_lock_that_cannot_be_read_is_no_error(tmp_path: Path):
    folder = create_run(named(tmp_path, "mine"))
    (folder.path / ".lock").mkdir()
    assert not folder.is_in_use()


LEAVE_A_CHILD = """
import os, subprocess, sys, time
from pathlib import Path
from rallypoint.run.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    child = os.fork()
    if child == 0:
        sys.stdin.readline()
        os._exit(0)
    print(child, flush=True)
    os._exit(0)
"""


def test_a_child_that_outlives_its_parent_does_not_keep_the_folder(tmp_path: Path):
    folder = create_run(named(tmp_path, "mine"))
    parent = subprocess.Popen(
        [sys.executable, "-c", LEAVE_A_CHILD, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert parent.wait() == 0
    os.kill(child, 0)  # it is there
    with folder.locked():
        pass
    parent.communicate("\n")


MAKE = """
import os, sys
from pathlib import Path
from rallypoint.config import load_config
from rallypoint.run.folder import create_run
calls, last = 0, int(sys.argv[2])
def count(event, arguments):
    global calls
    if event.startswith(("os.", "open", "shutil.")) and "/runs" in str(arguments):
        calls += 1
        if calls == last:
            os.kill(os.getpid(), 9)
loaded = load_config("digits", [f"trainer.runs_dir={sys.argv[1]}/runs", "trainer.name=mine"])
sys.addaudithook(count)
create_run(loaded)
"""


def test_a_kill_at_any_file_operation_leaves_a_folder_with_its_config_or_none(tmp_path: Path):
    """An audit hook of the interpreter sees every operation on a file before it is done."""
    last = 0
    for last in range(1, 100):
        where = tmp_path / str(last)
        done = run_forked("-c", MAKE, str(where), str(last))
        path = where / "runs" / "mine"
        if path.exists():
            assert load_config(str(path)).config.recipe == "ppo"
            assert (path / "journal.jsonl").is_file()
        else:
            assert done.returncode == -9
            create_run(load_config("digits", [f"trainer.runs_dir={where}/runs", "trainer.name=mine"]))
        if done.returncode == 0:
            break
    assert last > 10


def test_what_a_killed_start_left_is_removed_by_a_later_one(tmp_path: Path):
    old, young = (tmp_path / "runs" / f".{name}.1.partial" for name in ("old", "young"))
    for leftover in (old, young):
        (leftover / "logs").mkdir(parents=True)
    os.utime(old, (1e9, 1e9))
    create_run(named(tmp_path, "mine"))
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [young.name, "mine"]


def test_what_was_set_on_the_command_line_is_kept_with_paths_that_hold_and_the_last_word_counts(
    tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    given = ["model.path=model", "data={train: train.jsonl}", "reward.path=S/r", "seed=1", "trainer.name=mine"]
    folder = create_run(load_config("grpo", given))
    monkeypatch.chdir("/")
    start = folder.state().launched
    again = launched(load_config("grpo", [*start.overrides, "seed=2"]), start.overrides)
    config = load_config("grpo", again.overrides).config
    assert (config.model.path, config.data.train) == (f"{tmp_path}/model", (f"{tmp_path}/train.jsonl",))
    assert config.seed == 2
    assert sum(one.startswith("seed=") for one in again.overrides) == 1


def test_the_config_is_replaced_whole_and_says_what_it_is(loaded: LoadedConfig):
    folder = create_run(loaded)
    write_config(folder, loaded.config.model_copy(update={"seed": 7}))
    assert folder.config.read_text().startswith("# The resolved config")
    assert load_config(str(folder.path)).config.seed == 7
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "journal.jsonl", "logs"]


def test_paths_in_a_config_hold_from_any_working_directory_and_hub_names_stay(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    for name in ("train.jsonl", "rewards.py"):
        (tmp_path / name).write_text("")
    own = ["model.path=model", "critic.path=Some/Critic", "data.train=train.jsonl", "reward.function=rewards.py:f"]
    folder = create_run(load_config("ppo", [*own, "trainer.name=mine"]))
    monkeypatch.chdir("/")
    assert folder.path == tmp_path / "runs" / "mine"
    config = load_config(str(folder.path)).config
    assert config.model.path == f"{tmp_path}/model"
    assert config.critic.path == "Some/Critic"
    assert config.data.train == (f"{tmp_path}/train.jsonl",)
    assert config.reward.function == f"{tmp_path}/rewards.py:f"
    assert config.trainer.runs_dir == f"{tmp_path}/runs"


def test_paths_that_workers_get_hold_from_their_own_working_directory(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model", "critic", "adapter", "scorer"):
        (tmp_path / name).mkdir()
    own = ["data.train=x.jsonl", "reward.path=scorer", "model.lora={path: adapter}", "critic.path=critic"]
    (tmp_path / "chat.jinja").touch()
    own.append("model.tokenizer.chat_template=chat.jinja")
    config = anchored(load_config("ppo", [*own, "model.path=model"]).config)
    assert (config.model.path, config.critic.path) == (f"{tmp_path}/model", f"{tmp_path}/critic")
    assert (config.reward.path, config.reward.function) == (f"{tmp_path}/scorer", None)
    assert config.model.lora is not None
    assert config.model.lora.path == f"{tmp_path}/adapter"
    assert config.model.tokenizer is not None
    assert config.model.tokenizer.chat_template == f"{tmp_path}/chat.jinja"
    (tmp_path / "logs").mkdir()
    assert open_run(Path()).path == tmp_path


def test_the_log_is_appended_to(tmp_path: Path):
    folder = open_run(tmp_path)
    folder.log("one")
    folder.log("two")
    lines = (tmp_path / "logs" / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["one", "two"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_what_a_full_disk_does_not_take_is_named(loaded: LoadedConfig):
    run = create_run(loaded)
    (run.logs / "train.log").symlink_to("/dev/full")
    with pytest.raises(
        DiskError, match=r"logs/train\.log cannot be written: No space left on device \(.* free\); make"
    ):
        run.log("said")
    run.config.with_suffix(".partial").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"config\.yaml cannot be written: No space left on device \(.* free\); make"):
        write_config(run, loaded.config)
    assert run.config.read_text()
