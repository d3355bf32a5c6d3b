"""The journal loses no whole line, keeps what killed starts did, and shows where it was changed."""

import math
import threading
from pathlib import Path

import pytest

from rallypoint.errors import RunFolderError
from rallypoint.journal import Entry, Journal, RunBegan, RunEnded, Said, Shown, StepDone, fold, read_journal

BEGAN = RunBegan(first=0, config={"seed": 0}, software={"torch": "2"}, machine="here")


def write(path: Path, *events) -> None:
    with Journal(path, clock=lambda: 10.0) as journal:
        journal.append(*events)


def events(path: Path) -> list:
    return [entry.event for entry in read_journal(path)]


def test_events_come_back_as_they_were(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    metrics = {"a": 0.1 + 0.2, "b": math.inf, "c": -math.inf, "n": 2**60}
    step = StepDone(step=1, metrics=metrics, digests={"tokens": "5f"})
    write(path, BEGAN, Said(text="über\nzwei \ud83d"), step)
    assert events(path) == [BEGAN, Said(text="über\nzwei ?"), step]
    assert [(entry.number, entry.time_s) for entry in read_journal(path)] == [(1, 10.0), (2, 10.0), (3, 10.0)]
    assert list(read_journal(tmp_path / "none.jsonl")) == []


def test_a_line_is_in_the_file_as_soon_as_it_was_appended(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.append(BEGAN)
        assert events(path) == [BEGAN]


@pytest.mark.parametrize("length", [10, 300_000])
@pytest.mark.parametrize("num_whole", [0, 1, 2])
def test_a_torn_last_line_is_left_out_and_the_next_writer_goes_on_behind_the_last_whole_one(
    tmp_path, num_whole, length
):
    path, long = tmp_path / "journal.jsonl", Said(text="x" * length)
    whole = [BEGAN, long][:num_whole]
    write(path, *whole)
    with path.open("ab") as file:
        file.write(b'{"n": 3, "time": 1.0, "befo')
    assert events(path) == whole
    write(path, RunEnded(how="stopped"))
    write(path, BEGAN)
    assert events(path) == [*whole, RunEnded(how="stopped"), BEGAN]


def test_a_line_that_was_changed_or_removed_is_named(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    write(path, BEGAN, *(Said(text=word) for word in "abc"))
    lines = path.read_bytes().split(b"\n")
    for changed in ([*lines[:1], lines[1].replace(b'"a"', b'"z"'), *lines[2:]], [lines[0], *lines[2:]]):
        path.write_bytes(b"\n".join(changed))
        with pytest.raises(RunFolderError, match=r", line [23]: expected number .* was changed or removed"):
            events(path)
    path.write_bytes(b"\n".join([*lines[:2], b"{", *lines[3:]]))
    with pytest.raises(RunFolderError, match=r"journal.jsonl, line 3 is damaged \(JSONDecodeError"):
        events(path)
    path.write_bytes(b"no json\n")
    with pytest.raises(RunFolderError, match=r"last line is damaged .* restore the file"):
        Journal(path)


def test_an_event_of_another_version_is_named(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"n": 1, "time": 1.0, "before": "", "kind": "MoonRose", "phase": 3}\n')
    with pytest.raises(RunFolderError, match=r"found MoonRose with phase .*; read it with the version that wrote it"):
        events(path)


def test_events_of_several_threads_are_one_chain(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        threads = [
            threading.Thread(target=lambda: [journal.append(Said(text=str(n))) for n in range(50)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events(path)) == 200


def test_a_start_from_nothing_supersedes_everything_and_one_from_a_checkpoint_what_came_after_it():
    steps = [StepDone(step=step, metrics={}, digests={}) for step in (1, 2, 3)]
    again = RunBegan(first=2, config={}, software={}, machine="")
    assert list(state(BEGAN, *steps, again).steps) == [1, 2]
    assert list(state(BEGAN, *steps, BEGAN, steps[0]).steps) == [1]
    assert state(BEGAN, RunEnded(how="failed", why="x"), again).ended is None
    assert state().step == 0


def test_seconds_of_work_go_on_after_a_resume_and_how_each_start_ended_is_kept():
    one, two, three = (StepDone(step=step, metrics={"x": float(step)}, digests={}) for step in (1, 2, 3))
    failed, again = RunEnded(how="failed", why="x"), RunBegan(first=1, config={}, software={}, machine="")
    found = state(BEGAN, one, two, three, failed, again, two)  # at the seconds 0 to 6
    assert found.records == [{"step": 1, "time_s": 1.0, "x": 1.0}, {"step": 2, "time_s": 2.0, "x": 2.0}]
    assert [(start.step, start.began_s, start.until_s, start.ended) for start in found.attempts] == [
        (3, 0.0, 4.0, failed),
        (2, 5.0, 6.0, None),
    ]
    assert (found.heard_s, state().heard_s) == (6.0, 0.0)


def state(*events):
    """The state that events make, one a second."""
    return fold(Entry(number, float(number), event) for number, event in enumerate(events))


def test_readers_get_every_event_once_it_is_written_in_its_order_and_what_is_told_is_not_kept(tmp_path: Path):
    path, heard = tmp_path / "journal.jsonl", []

    def answer(entry) -> None:
        heard.append((entry.number, entry.event))
        assert not entry.number or entry.event in events(path)
        if isinstance(entry.event, StepDone):
            journal.say("a reader may say something", level="log")

    with Journal(path) as journal:
        journal.append(BEGAN)
        journal.subscribe(answer)
        done = StepDone(step=1, metrics={}, digests={})
        journal.append(done)
        journal.tell(Shown(step=2, rows=[{"prompt": "2+2"}]))
    journal.say("after the end")
    said = Said(text="a reader may say something", level="log")
    assert heard == [
        (2, done),
        (3, said),
        (0, Shown(step=2, rows=[{"prompt": "2+2"}])),
        (0, Said(text="after the end")),
    ]
    assert events(path) == [BEGAN, done, said]
