import json
import math
from pathlib import Path

import pytest

from rallypoint.errors import RunFolderError
from rallypoint.run import MetricsLog, read_metrics


def test_a_line_is_in_the_file_as_soon_as_it_was_written(tmp_path: Path) -> None:
    now = [10.0]
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, clock=lambda: now[0]) as log:
        now[0] = 12.5
        log.write(1, {"reward/mean": 0.25, "rollout/num_tokens": 7})
        assert path.read_text() == '{"step": 1, "time_s": 2.5, "reward/mean": 0.25, "rollout/num_tokens": 7}\n'


def test_nan_and_infinity_are_valid_json_and_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5})

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    line = json.loads(path.read_text(), parse_constant=refuse)
    assert line["a"] is None
    assert line["not_finite"] == {"a": "nan", "b": "inf", "c": "-inf"}
    record = read_metrics(path)[0]
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["d"]) == (math.inf, -math.inf, 1.5)
    assert set(record) == {"step", "time_s", "a", "b", "c", "d"}


def test_numbers_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(1, {"x": 0.1 + 0.2, "n": 2**60})
    assert (read_metrics(path)[0]["x"], read_metrics(path)[0]["n"]) == (0.1 + 0.2, 2**60)


def test_a_run_that_begins_again_without_a_checkpoint_has_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsLog(path) as log:
            log.truncate_after(0)
            log.write(0, {"validation/score": 0.5})
    assert [record["step"] for record in read_metrics(path)] == [0]


def test_a_resumed_run_drops_what_came_later_and_its_time_goes_on(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, clock=lambda: now[0]) as log:
        for step in (1, 2, 3):
            now[0] += 10.0
            log.write(step, {"reward/mean": step / 10})
            log.write(step, {"validation/score": step / 10})
    now[0] = 1000.0
    with MetricsLog(path, clock=lambda: now[0]) as log:
        log.truncate_after(2)
        now[0] += 5.0
        log.write(3, {"reward/mean": 0.9})
    records = read_metrics(path)
    assert [record["step"] for record in records] == [1, 1, 2, 2, 3]
    assert [record["time_s"] for record in records] == [10.0, 10.0, 20.0, 20.0, 25.0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_last_line_is_passed_over_by_readers_and_removed_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, clock=lambda: 0.0) as log:
        log.write(1, {"reward/mean": 0.1})
    whole = path.read_text()
    path.write_text(whole + '{"step": 2, "time_s": 3.0, "rew')
    assert [record["step"] for record in read_metrics(path)] == [1]
    with MetricsLog(path, clock=lambda: 0.0) as log:
        assert path.read_text() == whole
        log.write(2, {"reward/mean": 0.2})
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_a_line_torn_inside_a_character_is_passed_over_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "time_s": 0.0}\n{"step": 2, "\xc3')
    assert [record["step"] for record in read_metrics(path)] == [1]


@pytest.mark.parametrize("damage", ["{", "[1]", '{"time_s": 1}', '{"step": "x", "time_s": 1}', "", "\x00\x00"])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_s": 0.0}\n' + damage + '\n{"step": 3, "time_s": 0.0}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2 is damaged"):
        read_metrics(path)


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).close()
    assert read_metrics(path) == []


@pytest.mark.parametrize("name", ["step", "time_s", "not_finite"])
def test_a_metric_cannot_take_a_name_that_every_line_has(tmp_path: Path, name: str) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(ValueError, match=name):
        log.write(1, {name: 1.0})
