"""metrics.jsonl, which each start writes anew from the journal."""

import contextlib
import json
import math

import pytest
from metrics_file import read_metrics

from rallypoint.journal import CheckpointSaved, Journal, RolesStarted, RunBegan, StepDone, Validated
from rallypoint.run import MetricsLog


@contextlib.contextmanager
def start(folder, first=0, now=lambda: 0.0):
    """The journal of a start of a run, with its metrics."""
    with (
        Journal(folder / "journal.jsonl", clock=now) as journal,
        contextlib.closing(MetricsLog(folder / "metrics.jsonl", folder / "journal.jsonl")) as log,
    ):
        journal.subscribe(log.take)
        journal.append(RunBegan(first=first, config={}, software={}, machine=""))
        yield journal


def done(step, metrics):
    return StepDone(step=step, metrics=metrics, digests={})


def test_a_line_is_in_the_file_as_soon_as_its_event_was_appended(tmp_path):
    now = [10.0]
    with start(tmp_path, now=lambda: now[0]) as journal:
        now[0] = 12.5
        journal.append(done(1, {"reward/mean": 0.25, "rollout/num_tokens": 7}))
        line = '{"step": 1, "time_s": 2.5, "reward/mean": 0.25, "rollout/num_tokens": 7}\n'
        assert (tmp_path / "metrics.jsonl").read_text() == line


def test_nan_and_infinity_are_valid_json_and_come_back_as_they_were(tmp_path):
    with start(tmp_path) as journal:
        journal.append(done(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5}))

    def refuse(constant):
        raise AssertionError(constant)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["a"] is None
    assert line["not_finite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"]) == (math.inf, -math.inf, 1.5)
    assert set(record) == {"step", "time_s", "a", "b", "c", "d"}


def test_numbers_come_back_exactly_also_from_the_journal(tmp_path):
    for first in (0, 1):
        with start(tmp_path, first) as journal:
            journal.append(*([] if first else [done(1, {"x": 0.1 + 0.2, "n": 2**60})]))
        (record,) = read_metrics(tmp_path / "metrics.jsonl")
        assert (record["x"], record["n"]) == (0.1 + 0.2, 2**60)


def test_a_run_that_begins_again_without_a_checkpoint_has_each_line_once(tmp_path):
    for _ in range(2):
        with start(tmp_path) as journal:
            journal.append(RolesStarted(step=0, metrics={"data/num_examples": 5}))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0]


def test_a_resumed_run_drops_what_came_later_and_its_time_goes_on(tmp_path):
    now = [0.0]
    with start(tmp_path, now=lambda: now[0]) as journal:
        for step in (1, 2, 3):
            now[0] += 10.0
            journal.append(done(step, {"reward/mean": step / 10}), Validated(step=step, metrics={"score": step / 10}))
    now[0] = 1000.0
    with start(tmp_path, 2, now=lambda: now[0]) as journal:
        now[0] += 5.0
        journal.append(done(3, {"reward/mean": 0.9}), CheckpointSaved(step=3, weights=""))
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 1, 2, 2, 3, 3]
    assert [record["time_s"] for record in records] == [10.0, 10.0, 20.0, 20.0, 25.0, 25.0]
    assert not (tmp_path / "metrics.jsonl.part").exists()


def test_a_further_start_in_the_same_process_gives_the_lines_that_the_journal_would(tmp_path, monkeypatch):
    now = [0.0]
    with start(tmp_path, now=lambda: now[0]) as journal:
        for step in (1, 2, 3):
            now[0] += 10.0
            journal.append(done(step, {"a": math.nan if step == 1 else 0.1 * step}))
        with monkeypatch.context() as patch:
            patch.setattr("rallypoint.run.metrics_log.read_journal", lambda path: pytest.fail("it takes ever longer"))
            journal.append(RunBegan(first=2, config={}, software={}, machine=""))
        now[0] += 5.0
        journal.append(done(3, {"a": 0.5}))
    lines = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line)["time_s"] for line in lines.splitlines()] == [10.0, 20.0, 25.0]
    with start(tmp_path, 3, now=lambda: now[0]):
        assert (tmp_path / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("damage", [b'{"step": 2, "time_s": 3.0, "rew', b'{"step": 2, "\xc3', b"\x00\x00\n{\n", None])
def test_a_file_that_is_torn_damaged_or_gone_is_whole_again_at_the_next_start(tmp_path, damage):
    with start(tmp_path) as journal:
        journal.append(done(1, {"reward/mean": 0.1}))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_text()
    path.unlink() if damage is None else path.write_bytes(whole.encode() + damage)
    with start(tmp_path, 1) as journal:
        assert path.read_text() == whole
        journal.append(done(2, {"reward/mean": 0.2}))
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


@pytest.mark.parametrize("name", ["step", "time_s", "not_finite"])
def test_a_metric_cannot_take_a_name_that_every_line_has(tmp_path, name):
    with start(tmp_path) as journal, pytest.raises(ValueError, match=name):
        journal.append(done(1, {name: 1.0}))


def test_lines_that_the_disk_does_not_take_at_a_start_are_written_with_the_next_ones(tmp_path):
    with start(tmp_path) as journal:
        journal.append(done(1, {"x": 1.0}))
    (tmp_path / "metrics.jsonl.part").mkdir()  # nothing can be written there
    with start(tmp_path, 1) as journal:
        journal.append(done(2, {"x": 2.0}))
        (tmp_path / "metrics.jsonl.part").rmdir()
        journal.append(done(3, {"x": 3.0}))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
