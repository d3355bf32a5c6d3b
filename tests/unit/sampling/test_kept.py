"""Groups of a run that samples ahead are read back as they were, after a kill."""

import os
from pathlib import Path

from rallypoint.environments.failures import RolloutFailure
from rallypoint.journal import Journal
from rallypoint.run.rollouts import RolloutFiles
from rallypoint.sampling import kept as module
from rallypoint.sampling.groups import PromptsDone
from rallypoint.sampling.kept import KeptGroups
from rallypoint.types import Trajectory, Turn

FIRST = Turn(prompt=(5, 6), response=(7, 8), logprobs=(-0.1, -1e-9), sampled_logprobs=(-0.2, -3.0), version=2,
             spans=((2, 1), (4, 1)), truncated=False, said=(("user", "über\ud800"),), state="s",
             experts=b"\x01\xff\x00\x7f", prompt_experts=b"\x00\x00\x80\x02")  # fmt: skip
LAST = Turn(prompt=(9,), response=(4,), logprobs=(-2.5,), sampled_logprobs=(-2.5,), version=4, truncated=True,
            limit="row", parent=-1)  # fmt: skip
WHOLE = Trajectory(turns=(FIRST, LAST), rewards=(0.5, 1.0), metrics={"tries": 2.0}, own_s=0.25, num_tool_calls=1)
FAILED = RolloutFailure(name="t:1", prompt=3, sample=1, num_turns=1, num_tokens=2, kind="timeout", reason="late")


def kept(folder, num_free=lambda folder: 2**40):
    files = RolloutFiles(folder, max_gib=1, first=0, journal=Journal(Path(os.devnull)), num_free=num_free)
    return KeptGroups(is_on=True, is_ahead=True, files=files), files


def test_what_was_sampled_ahead_is_read_back_after_a_kill_unless_its_file_is_damaged_or_a_saved_step_has_it(tmp_path):
    groups, files = kept(tmp_path)
    for index in range(2, 6):
        groups.put(index, [WHOLE, FAILED])
    groups.taken(1, [2])
    groups.saved(1)
    files.flush()
    assert [file.name for file in sorted((tmp_path / "rollouts" / "ahead").iterdir())] == [
        f"{index:08d}.json" for index in (3, 4, 5)
    ]
    (tmp_path / "rollouts" / "ahead" / "00000004.json").write_text("")
    again, files = kept(tmp_path)
    again.read()
    assert again.groups[3].rollouts == [WHOLE, FAILED]
    assert not {2, 4} & again.groups.keys()
    assert again.go_on(1, PromptsDone(2, 3, (5,))) == [3], "5 is done"
    again.only(())
    files.close()
    assert not (tmp_path / "rollouts" / "ahead").exists()


def test_a_group_without_room_on_the_disk_or_in_memory_is_sampled_again(tmp_path, monkeypatch):
    groups, files = kept(tmp_path, num_free=lambda folder: 2**20)
    groups.put(3, [WHOLE])
    assert files.kept() == {}
    monkeypatch.setattr(module, "_MOST_TOKENS", 8)
    for index in (4, 5, 6):
        groups.put(index, [WHOLE])
    assert [index in groups.groups for index in (3, 4, 5, 6)] == [False, False, True, True]
